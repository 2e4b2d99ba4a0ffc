//! outbox.audit_events: who may change what is written, retention from the beginning of the chain on, and sealing.
//!
//! Rows are only ever added. A trigger refuses everything else, to the table's owner too, unless it is done in here: retention removes
//! from the beginning, re-basing gives rows the transaction ids of another cluster, which are no part of what is sealed.

use std::cell::Cell;
use std::time::Duration;

use super::retention;
use super::streams::Stream;
use crate::pg::spi::{Arg, Spi};

thread_local! {
    static UNGUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Puts the guard back, also after an error.
struct Guard(bool);

impl Drop for Guard {
    fn drop(&mut self) {
        UNGUARDED.set(self.0);
    }
}

/// Runs `body`, which may change rows of the audit trail. It must run no code of a user's.
pub(crate) fn unguarded<R>(body: impl FnOnce() -> R) -> R {
    let _guard = Guard(UNGUARDED.replace(true));
    body()
}

pub(crate) fn is_unguarded() -> bool {
    UNGUARDED.get()
}

/// Removes up to `limit` records from the beginning of the chain that every cursor has passed and that are old enough. The last one's
/// link stays: the chain begins there from now on. A record that is missing is never passed over. Returns how many went.
pub(crate) fn prune(spi: &Spi, stream: &Stream, limit: i64, min_age: Duration) -> i64 {
    let sql = format!(
        "with head as materialized (
             select k.n, k.seq, e.txid, e.\"time\" from outbox.audit_chain k left join outbox.audit_events e on e.seq = k.seq
              where k.seq is not null order by k.n limit $2
         ), stuck as materialized (
             select min(h.n) as n from head h
              where h.txid is null or h.\"time\" >= clock_timestamp() - $3 * interval '1 microsecond'
                 or not exists (select from outbox.cursors c where c.stream = $1)
                 or exists (select from outbox.cursors c
                             where c.stream = $1 and not {})
         ), gone as (
             delete from outbox.audit_events d using head h
              where d.seq = h.seq and h.n < coalesce((select n from stuck), 9223372036854775807) returning h.n
         )
         select count(*), max(n) from gone",
        retention::passed(stream)
    );
    let args = [
        Arg::Text(Some(&stream.name)),
        Arg::I64(Some(limit)),
        Arg::I64(Some(i64::try_from(min_age.as_micros()).unwrap_or(i64::MAX))),
    ];
    unguarded(|| {
        let gone = spi
            .write(&sql, &args)
            .first(|row| (row.i64(0).unwrap_or(0), row.i64(1)));
        let Some((removed, Some(last))) = gone else {
            return 0;
        };
        let last = [Arg::I64(Some(last))];
        spi.write("delete from outbox.audit_chain where n < $1", &last);
        spi.write(
            "update outbox.audit_chain set seq = null where n = $1",
            &last,
        );
        removed
    })
}

/// Links records that are committed and not yet sealed to the chain, as many as are worth one transaction. True if there are more.
pub(crate) fn seal(spi: &Spi) -> bool {
    const AT_ONCE: i64 = 1_000;
    spi.write(
        "select outbox.seal_audit($1::int)",
        &[Arg::I64(Some(AT_ONCE))],
    );
    let more = spi.write(
        "select from outbox.audit_seal where target is not null",
        &[],
    );
    more.count() > 0
}

/// Transaction ids mean something else now: sealing finds what is not sealed by looking at all.
pub(crate) fn look_at_all_again(spi: &Spi) {
    spi.write(
        "update outbox.audit_seal set upto = '3:3:', target = null",
        &[],
    );
}
