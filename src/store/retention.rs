//! Retention: removes what every cursor of a stream has passed and what is old enough, in small steps.
//!
//! A stream without a cursor is never pruned, nor is an event that is parked for a sink. Each step looks at a stretch of the oldest events, by seq, from where the last one
//! left off, so that it costs what it removes, and neither walks over rows that are dead and not yet vacuumed.

use std::time::Duration;

use super::audit;
use super::streams::{Shape, Stream};
use super::transactions;
use crate::dispatch::Floors;
use crate::pg::lock;
use crate::pg::spi::{Arg, Spi};

/// Events looked at in one step, which is one short transaction.
const STEP: i64 = 2_000;

/// What a step came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) removed: u64,
    /// The last seq looked at; the next step goes on behind it.
    pub(crate) upto: i64,
    /// Up to here nothing is left, and nothing will come: reads begin behind it.
    pub(crate) pruned_seq: i64,
    /// Whether it is worth going on.
    pub(crate) more: bool,
}

/// Runs one step behind `behind` (the first one: `stream.pruned_seq`, which the caller keeps up with what the last step says).
pub(crate) fn step(
    spi: &Spi,
    stream: &Stream,
    behind: i64,
    min_age: Duration,
    floors: &mut Floors,
) -> Step {
    let nothing = Step {
        removed: 0,
        upto: behind,
        pruned_seq: stream.pruned_seq,
        more: false,
    };
    if !lock::hold_table(stream.oid) {
        return nothing;
    }
    // Before anything is removed, and before this transaction gets an id: events that are still to be committed have numbers above the
    // floor of what is unfinished now.
    let horizon = stream.look(spi, floors);
    if horizon.is_renumbered {
        return nothing;
    }
    let safe = floors.below(horizon.snapshot.oldest_unseen());
    // First the stream, then its events, as outbox.drop_stream does; who holds it drops it, or prunes already.
    let held = spi.write(
        "select from outbox.streams where name = $1 for no key update skip locked",
        &[Arg::Text(Some(&stream.name))],
    );
    if held.count() == 0 {
        return nothing;
    }
    if stream.shape == Shape::Audit {
        let pruned = audit::prune(spi, stream, STEP, min_age);
        return Step {
            removed: pruned.cast_unsigned(),
            upto: behind + pruned,
            more: pruned == STEP,
            ..nothing
        };
    }
    let sql = format!(
        "with head as materialized (
             select e.txid, e.seq, e.time from {relation} e where e.seq > $2 order by e.seq limit $3
         ), parked as materialized (
             -- Whoever has passed them has not had them.
             select p.seq from outbox.sinks s join outbox.parked p on p.sink = s.id where s.stream = $1
         ), passed as materialized (
             select h.seq from head h
              where h.time < clock_timestamp() - $4 * interval '1 microsecond'
                and exists (select from outbox.cursors c where c.stream = $1)
                and h.seq not in (select p.seq from parked p)
                and not exists (
                    select from outbox.cursors c
                     where c.stream = $1
                       and not {passed})
         ), free as materialized (
             -- What somebody else is about to change or to remove himself is left for later.
             select d.seq from passed p join {relation} d on d.seq = p.seq for update of d skip locked
         ), gone as (
             delete from {relation} d using free f where d.seq = f.seq returning d.txid, d.seq
         ), remembered as (
             update outbox.streams s set gone_txid = l.txid, gone_seq = l.seq
               from (select g.txid, g.seq from gone g order by g.txid desc, g.seq desc limit 1) l
              where s.name = $1 and (s.gone_txid, s.gone_seq) < (l.txid, l.seq)
         )
         select (select count(*) from gone), (select max(h.seq) from head h), (select count(*) from head h),
                (select min(h.seq) from head h where not exists (select from gone g where g.seq = h.seq))",
        relation = stream.relation,
        passed = passed(stream),
    );
    let args = [
        Arg::Text(Some(&stream.name)),
        Arg::I64(Some(behind)),
        Arg::I64(Some(STEP)),
        Arg::I64(Some(i64::try_from(min_age.as_micros()).unwrap_or(i64::MAX))),
    ];
    let Some((removed, Some(upto), looked_at, first_left)) = spi.write(&sql, &args).first(|row| {
        (
            row.i64(0).unwrap_or(0),
            row.i64(1),
            row.i64(2).unwrap_or(0),
            row.i64(3),
        )
    }) else {
        return nothing;
    };
    let mut pruned_seq = stream.pruned_seq;
    if behind == pruned_seq {
        // All that was looked at is gone, or all before the first that is left.
        let empty_upto = first_left.map_or(upto, |first| first - 1);
        pruned_seq = pruned_seq.max(safe.map_or(0, |safe| safe.min(empty_upto)));
        if pruned_seq > stream.pruned_seq {
            remember(spi, stream, pruned_seq);
        }
    }
    Step {
        removed: removed.cast_unsigned(),
        upto,
        pruned_seq,
        more: looked_at == STEP && removed * 2 >= looked_at,
    }
}

/// Whether a cursor `c` has passed the row `h` of a stream.
pub(super) fn passed(stream: &Stream) -> String {
    format!(
        "case
             when c.window_no is null then (h.txid, h.seq) <= (c.txid, c.seq)
             when pg_visible_in_snapshot(h.txid, c.done) then true
             when not pg_visible_in_snapshot(h.txid, c.upto) then false
             when c.at_grouping = 'transaction' then ({last}, h.seq) <= (c.at_group, c.at_seq)
             else h.seq <= c.at_seq
         end",
        last = transactions::last_of(stream, "h.txid"),
    )
}

/// Reads may begin behind `seq` from now on.
fn remember(spi: &Spi, stream: &Stream, seq: i64) {
    spi.write(
        "update outbox.streams set pruned_seq = $2 where name = $1 and pruned_seq < $2",
        &[Arg::Text(Some(&stream.name)), Arg::I64(Some(seq))],
    );
}
