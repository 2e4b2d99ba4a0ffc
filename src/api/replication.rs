//! What outbox.take_replicated, the trigger on rows that logical replication brings, leaves to us.

use std::cell::RefCell;
use std::collections::BTreeSet;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::call::Arguments;
use crate::pg::xact;

thread_local! {
    /// Tables of which this process has said so.
    static TOLD: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

#[pg_extern(sql = false)]
fn wake_at_commit() {
    xact::wake_at_commit();
}

#[pg_extern(sql = false)]
fn tell_left_out(call: pg_sys::FunctionCallInfo) {
    let table = Arguments::of(call).text(0).unwrap_or_default();
    if TOLD.with_borrow_mut(|told| told.insert(table.clone())) {
        pgrx::warning!(
            "pg_outbox: what logical replication brings for table {table} is left out: it tells how things stand in another database"
        );
    }
}
