//! Running what a user supplied: with the rights of the role that supplied it, in a context out of which it can do no more than
//! that, so that an error undoes what it did and leases outlast it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use pgrx::{PgSqlErrorCode, pg_sys};

use crate::pg::error::PgError;
use crate::pg::security::{self, Path};
use crate::pg::spi::{Spi, UserStatement, connected};
use crate::pg::timeout::{self, Limit};
use crate::pg::{catalog, latch, lock, transaction};

/// Why something did not come to its end.
pub(super) enum Stopped {
    /// It took longer than its limit.
    Expired(Duration),
    /// It failed, in words fit for a sink's state.
    Failed(String),
}

/// Runs `body`, whose statements are `owner`'s, and cancels it if it takes longer than `limit`.
///
/// # Errors
/// What went wrong.
pub(super) fn run<R>(
    limit: Option<Limit>,
    owner: pg_sys::Oid,
    path: Path,
    body: impl FnOnce(&Spi) -> R,
) -> Result<R, Stopped> {
    check_owner(owner).map_err(Stopped::Failed)?;
    let ran = attempt_within(limit, owner, path, body);
    let expired = timeout::take_expired();
    ran.map_err(|error| match limit {
        Some(limit) if expired && error.code == PgSqlErrorCode::ERRCODE_QUERY_CANCELED => {
            Stopped::Expired(limit.time)
        }
        _ => Stopped::Failed(error.summary()),
    })
}

/// The same, for whoever needs to know which error it was. The owner has been checked; [`timeout::take_expired`] is to be asked afterwards.
pub(super) fn attempt_within<R>(
    limit: Option<Limit>,
    owner: pg_sys::Oid,
    path: Path,
    body: impl FnOnce(&Spi) -> R,
) -> Result<R, PgError> {
    lock::keeping_leases(|| {
        transaction::nested(|| {
            timeout::within(limit, || {
                latch::interruptible(|| security::as_role(owner, path, || connected(body)))
            })
        })
    })
}

/// Whether there is anybody to run it as.
pub(super) fn check_owner(owner: pg_sys::Oid) -> Result<(), String> {
    if catalog::role_exists(owner) {
        Ok(())
    } else {
        Err("the role that owns the sink does not exist any more".to_owned())
    }
}

/// A statement that calls a function, which is known by its oid: if it is renamed its new name is called, and never another one
/// that has come to bear the old name.
#[derive(Debug, Clone)]
pub(super) struct FunctionStatement {
    function: pg_sys::Oid,
    /// The statement, given the function's name.
    sql: fn(&str) -> String,
    /// Shared by all copies.
    made: Rc<RefCell<Option<Made>>>,
}

/// The statement, and the name that the function had when it was made.
#[derive(Debug)]
struct Made {
    name: String,
    statement: Rc<UserStatement>,
}

impl FunctionStatement {
    pub(super) fn new(function: pg_sys::Oid, sql: fn(&str) -> String) -> Self {
        Self {
            function,
            sql,
            made: Rc::default(),
        }
    }

    /// The statement as it must be run now; none if the function is gone.
    pub(super) fn now(&self) -> Option<Rc<UserStatement>> {
        let name = catalog::function_name(self.function)?;
        let mut made = self.made.borrow_mut();
        if let Some(made) = made.as_ref().filter(|made| made.name == name) {
            return Some(Rc::clone(&made.statement));
        }
        let statement = Rc::new(UserStatement::new((self.sql)(&name)));
        *made = Some(Made {
            name,
            statement: Rc::clone(&statement),
        });
        Some(statement)
    }
}
