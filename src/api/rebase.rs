//! outbox.rebase_if_moved and outbox.next_xid, for the reading functions that are written in SQL, and the mark of a session that
//! restores a dump.

use pgrx::prelude::*;

use crate::pg::error::OrRaise;
use crate::pg::security::as_extension;
use crate::pg::spi::connected;
use crate::pg::{catalog, lock};
use crate::store::rebase;

#[pg_extern(sql = false)]
fn rebase_if_moved() {
    // A standby has its primary's identifier, and can write nothing anyway.
    if !catalog::in_recovery() {
        as_extension(|| connected(|spi| rebase::settle(spi).or_raise()));
    }
}

/// Declared as returning xid8.
#[pg_extern(sql = false)]
fn next_xid() -> i64 {
    catalog::next_xid().cast_signed()
}

#[pg_trigger(sql = false)]
fn mark_restore<'a>(
    _trigger: &'a pgrx::PgTrigger<'a>,
) -> Result<Option<PgHeapTuple<'a, impl WhoAllocated>>, pgrx::spi::Error> {
    lock::mark_restore();
    Ok(None::<PgHeapTuple<'a, AllocatedByRust>>)
}
