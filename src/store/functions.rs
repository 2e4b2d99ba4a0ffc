//! The functions that rows of outbox.sinks and outbox.usage_recorder name: why by name and by number, sql/sinks.sql says.

use crate::pg::catalog;
use crate::pg::spi::{Arg, Spi};

/// This database, as outbox.home() calls it.
pub(crate) fn home() -> String {
    let (cluster, database) = (catalog::system_identifier(), catalog::current_database());
    format!("{cluster}.{}", database.to_u32())
}

/// Looks up the names that come from elsewhere, once and for all: what takes such a name later is another function. One that is not found
/// counts as dropped.
pub(crate) fn settle(spi: &Spi) {
    let home = home();
    // A row that a session is about to change has its turn later; until then it is read by its name.
    spi.write(
        "update outbox.sinks s
            set transform_oid = outbox.function_of(s.transform, s.transform_oid, s.home),
                function_oid = outbox.function_of(s.function, s.function_oid, s.home), home = $1
           from (select k.id from outbox.sinks k where k.home <> $1 for update skip locked) free
          where s.id = free.id",
        &[Arg::Text(Some(&home))],
    );
    spi.write(
        "update outbox.usage_recorder r set function_oid = outbox.function_of(r.function, r.function_oid, r.home), home = $1
           from (select k.single from outbox.usage_recorder k where k.home <> $1 for update skip locked) free
          where r.single = free.single",
        &[Arg::Text(Some(&home))],
    );
}
