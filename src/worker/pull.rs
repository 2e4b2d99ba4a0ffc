//! Pull sinks: a consumer takes batches in commit order and acknowledges them, from any session.
//!
//! A batch that is handed out is written into the cursor, so that it can be acknowledged later, and by another session if need be.
//! The lease keeps a second consumer away as long as the first has not acknowledged, or its session has not ended.

use super::reader::Reader;
use crate::dispatch::{Floors, Mark, Place};
use crate::envelope::Position;
use crate::pg::call::TupleStore;
use crate::pg::error::Complaint;
use crate::pg::spi::{Arg, Spi};
use crate::pg::{lock, xact};
use crate::store::cursors::{self, Handed};
use crate::store::sinks::SinkRow;
use crate::store::streams::{self, Stream};
use crate::store::{events, transactions};

/// Takes the next batch of a sink for this session and puts it into `store`.
pub(crate) fn poll(
    spi: &Spi,
    sink: &SinkRow,
    max_events: usize,
    store: &TupleStore,
) -> Result<(), Complaint> {
    let had_lease = lock::holds_lease(sink.number);
    if !sink.enabled || !lock::take_lease(sink.number) {
        return Ok(());
    }
    if !had_lease {
        // A consumer whose transaction fails holds nothing.
        xact::give_back_at_abort(sink.number);
    }
    let stream = streams::named(spi, &sink.stream).ok_or_else(|| streams::unknown(&sink.stream))?;
    let Some(cursor) = cursors::load(spi, &sink.id, false) else {
        return Ok(());
    };
    let mut floors = Floors::default();
    if let Some((seq, next_xid)) = cursor.sample {
        floors.sample(seq, next_xid);
    }
    let horizon = stream.look(spi, &mut floors);
    let mut reader = Reader::new(
        sink,
        stream.clone(),
        cursor.place.clone(),
        false,
        max_events,
    )
    .map_err(|problem| {
        Complaint::bad_argument(format!("sink \"{}\" cannot run: {problem}", sink.id))
    })?;
    let mut skipped = false;
    loop {
        if reader.place.mark == Mark::END {
            match horizon.window_after(&reader.place.window, &mut floors) {
                Some(window) => reader.place = Place::at_start_of(window),
                None => break,
            }
        }
        let before = reader.place.clone();
        let handed = if reader.takes_all() {
            copy_window(spi, &stream, &mut reader.place, max_events, store)
        } else {
            let Some((shaped, looked_at)) = reader.read_on(spi, &horizon, &mut floors, max_events)
            else {
                break;
            };
            skipped |= looked_at > 0;
            if let Some((_, Some(problem))) = shaped.iter().find(|(_, problem)| problem.is_some()) {
                return Err(Complaint::bad_argument(format!(
                    "sink \"{}\": {problem}",
                    sink.id
                )));
            }
            let last = shaped.last().map(|(found, _)| found.event.position);
            let count = shaped.len();
            let records = shaped
                .into_iter()
                .filter_map(|(found, _)| found.record)
                .collect::<Vec<_>>();
            copy_records(spi, &records, store);
            last.map(|last| Handed {
                end: reader.place.mark,
                last,
                events: i64::try_from(count).unwrap_or(0),
            })
        };
        if let Some(handed) = handed {
            cursors::hand_out(
                spi,
                &sink.id,
                &before,
                &handed,
                floors.pending(before.window.upto.xmax()),
            );
            return Ok(());
        }
    }
    if skipped {
        let pair = cursors::pair_of(&reader.place, Some(cursor.pair));
        cursors::save(spi, sink, &reader.place, pair, 0);
    }
    lock::give_lease_back_at_commit(sink.number);
    Ok(())
}

/// Columns of outbox.poll, which are those of outbox.read.
const POSITION: &str = "e.txid::text || ':' || e.seq::text as position";

/// The short way, for a sink that takes every event as it is: rows go from the table into the result.
fn copy_window(
    spi: &Spi,
    stream: &Stream,
    place: &mut Place,
    limit: usize,
    store: &TupleStore,
) -> Option<Handed> {
    let columns = format!("{}, {POSITION}", events::COLUMNS);
    let handed = events::with_window_args(stream, place, limit, |late, args| {
        let rows = spi.read(&events::window_sql(stream, late, &columns), args);
        rows.store(store);
        let last = rows.last(|row| Position {
            txid: row.xid(0).unwrap_or(0),
            seq: row.i64(1).unwrap_or(0),
        })?;
        let through = rows.count() < limit as u64;
        let end = if through {
            Mark::END
        } else {
            Mark {
                group: last.seq,
                seq: last.seq,
            }
        };
        Some(Handed {
            end,
            last,
            events: i64::try_from(rows.count()).unwrap_or(0),
        })
    });
    if handed.is_none() {
        place.mark = Mark::END;
    }
    handed
}

fn copy_records(spi: &Spi, records: &[crate::pg::spi::Record], store: &TupleStore) {
    if !records.is_empty() {
        let sql = format!(
            r#"select e.txid, e.seq, e.id, e.topic, e.source, e.subject, e.tenant, e."time", e.payload, e.headers, {POSITION}
                 from unnest($1) with ordinality as e (txid, seq, id, topic, source, subject, tenant, "time", payload, headers, n)
                order by e.n"#
        );
        spi.read(&sql, &[Arg::Records(records, events::event_type())])
            .store(store);
    }
}

/// Acknowledges the batch that was handed out, up to and including a position, or all of it. True if the cursor moved.
pub(crate) fn ack(
    spi: &Spi,
    sink: &SinkRow,
    position: Option<Position>,
) -> Result<bool, Complaint> {
    if !lock::take_lease(sink.number) {
        return Ok(false);
    }
    let Some(cursor) = cursors::load(spi, &sink.id, true) else {
        return Ok(false);
    };
    let Some(handed) = cursor.handed else {
        lock::give_lease_back_at_commit(sink.number);
        return Ok(false);
    };
    let (end, events) = match position {
        None => (handed.end, handed.events),
        Some(position) if position == handed.last => (handed.end, handed.events),
        Some(position) => {
            let stream =
                streams::named(spi, &sink.stream).ok_or_else(|| streams::unknown(&sink.stream))?;
            let mark = transactions::mark_of(spi, &stream, sink.grouping, position);
            let window = &cursor.place.window;
            if window.done.sees(position.txid)
                || (window.upto.sees(position.txid) && mark <= cursor.place.mark)
            {
                return Ok(false);
            }
            if !window.holds(position.txid) || mark > handed.end {
                return Err(Complaint::bad_argument(format!(
                    "position {position} is not in the batch that sink \"{}\" handed out",
                    sink.id
                ))
                .hint("Acknowledge a position that outbox.poll returned."));
            }
            (mark, count_between(spi, &stream, &cursor.place, mark))
        }
    };
    let last = position.unwrap_or(handed.last);
    let place = Place {
        mark: end,
        ..cursor.place
    };
    let pair = cursors::pair_of(&place, Some(last.max(cursor.pair)));
    let moved =
        cursors::save(spi, sink, &place, pair, events.cast_unsigned()) == cursors::Save::Moved;
    lock::give_lease_back_at_commit(sink.number);
    Ok(moved)
}

/// How many events lie between where a cursor stands and a mark in the same window.
fn count_between(spi: &Spi, stream: &Stream, place: &Place, mark: Mark) -> i64 {
    let sql = format!(
        "select count(*) from {} e where e.seq > $1 and e.seq <= $2 and pg_visible_in_snapshot(e.txid, $3)
            and not pg_visible_in_snapshot(e.txid, $4)",
        stream.relation
    );
    let args = [
        Arg::I64(Some(place.mark.seq)),
        Arg::I64(Some(mark.seq)),
        Arg::Snapshot(Some(&place.window.upto.to_string())),
        Arg::Snapshot(Some(&place.window.done.to_string())),
    ];
    spi.read(&sql, &args)
        .first(|row| row.i64(0))
        .flatten()
        .unwrap_or(0)
}
