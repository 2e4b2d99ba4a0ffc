//! The guard of the audit trail.

use pgrx::prelude::*;

use crate::pg::error::Complaint;
use crate::store::audit;

#[pg_trigger(sql = false)]
fn append_only<'a>(
    trigger: &'a pgrx::PgTrigger<'a>,
) -> Result<Option<PgHeapTuple<'a, impl WhoAllocated>>, pgrx::spi::Error> {
    if !audit::is_unguarded() {
        let table = trigger.table_name().unwrap_or_default();
        Complaint::denied(format!("outbox.{table} is append-only"))
            .detail("What is written stays as it is, for its owner too; only retention removes what is old and delivered.")
            .raise();
    }
    Ok(None::<PgHeapTuple<'a, AllocatedByRust>>)
}
