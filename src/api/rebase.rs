//! outbox.rebase_if_moved, for the reading functions that are written in SQL.

use pgrx::prelude::*;

use crate::pg::catalog;
use crate::pg::security::as_extension;
use crate::pg::spi::connected;
use crate::store::rebase;

#[pg_extern(sql = false)]
fn rebase_if_moved() {
    // A standby has its primary's identifier, and can write nothing anyway.
    if !catalog::in_recovery() {
        as_extension(|| connected(rebase::if_moved));
    }
}
