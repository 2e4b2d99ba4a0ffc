//! Statements that hold what a user supplied.

use std::cell::RefCell;
use std::fmt;

use pgrx::pg_sys;

use super::{Arg, Kept};

/// A statement whose plan is its own and goes with it: a plan may hold what was worked out with the rights of the role that it was
/// made for, and must not be run for another role that happens to supply the same text.
pub(crate) struct UserStatement {
    sql: String,
    kept: RefCell<Option<Kept>>,
}

impl UserStatement {
    pub(crate) fn new(sql: String) -> Self {
        Self {
            sql,
            kept: RefCell::new(None),
        }
    }

    pub(super) fn plan(&self, args: &[Arg]) -> pg_sys::SPIPlanPtr {
        if let Some(kept) = self.kept.borrow().as_ref().filter(|kept| kept.fits(args)) {
            return kept.plan;
        }
        let kept = Kept::new(&self.sql, args);
        let plan = kept.plan;
        if let Some(replaced) = self.kept.replace(Some(kept)) {
            replaced.free();
        }
        plan
    }
}

impl Drop for UserStatement {
    fn drop(&mut self) {
        // While an error goes up, something may be running it still.
        if let Some(kept) = self.kept.take().filter(|_| !std::thread::panicking()) {
            kept.free();
        }
    }
}

impl fmt::Debug for UserStatement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UserStatement").field(&self.sql).finish()
    }
}
