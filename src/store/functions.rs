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
    spi.write(
        "update outbox.sinks
            set transform_oid = outbox.function_of(transform, transform_oid, home),
                function_oid = outbox.function_of(function, function_oid, home), home = $1
          where home <> $1",
        &[Arg::Text(Some(&home))],
    );
    spi.write(
        "update outbox.usage_recorder set function_oid = outbox.function_of(function, function_oid, home), home = $1 where home <> $1",
        &[Arg::Text(Some(&home))],
    );
}
