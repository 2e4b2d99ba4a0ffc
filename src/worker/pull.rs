//! Pull sinks: a consumer takes batches in commit order and acknowledges them, from any session.
//!
//! A batch that is handed out is written into the cursor, so that it can be acknowledged later, and by another session if need be.
//! The lease keeps a second consumer away as long as the first has not acknowledged, or its session has not ended.

use super::reader::{ROWS_A_PASS, Reader};
use crate::dispatch::{Floors, Grouping, Mark, Place};
use crate::envelope::Position;
use crate::pg::call::TupleStore;
use crate::pg::error::Complaint;
use crate::pg::spi::{Arg, Spi};
use crate::pg::{lock, transaction, xact};
use crate::store::cursors::{self, Handed, Stand};
use crate::store::events::{self, Found};
use crate::store::sinks::SinkRow;
use crate::store::streams::{self, Horizon, Stream};
use crate::store::transactions;

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
    transaction::under_new_snapshot(|| poll_leased(spi, sink, max_events, store))
}

fn poll_leased(
    spi: &Spi,
    sink: &SinkRow,
    max_events: usize,
    store: &TupleStore,
) -> Result<(), Complaint> {
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
        cursor.stand.place.clone(),
        false,
        max_events,
    )
    .map_err(|problem| {
        Complaint::bad_argument(format!("sink \"{}\" cannot run: {problem}", sink.id))
    })?;
    let mut skipped = false;
    loop {
        if reader.place.mark == Mark::END {
            match horizon.window_after(&reader.place.window, sink.grouping, &mut floors) {
                Some(window) => reader.place = Place::at_start_of(window),
                None => break,
            }
        }
        let before = reader.place.clone();
        let handed = if reader.takes_all() {
            let window = reader.place.window.clone();
            let copied = copy_window(spi, sink, &stream, &mut reader.place, max_events, store);
            if copied.is_none()
                && let Some(last) = events::last_of_window(spi, &stream, &window)
            {
                // What is for another sink alone need not be looked at again.
                skipped = true;
                reader.greatest = reader.greatest.max(last);
            }
            copied
        } else {
            skipped = true;
            let chosen = choose(spi, sink, &mut reader, &horizon, &mut floors, max_events)?;
            let handed = chosen.handed();
            copy_records(spi, chosen.events, store);
            handed
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
        let greatest = cursor.pair.max(reader.greatest);
        let pair = cursors::pair_of(&reader.place, Some(greatest));
        let to = Stand::at(reader.place);
        cursors::save(spi, sink, None, &to, pair, 0);
    }
    lock::give_lease_back_at_commit(sink.number);
    Ok(())
}

/// Columns of outbox.poll, which are those of outbox.read.
const POSITION: &str = "outbox.format_position(e.txid, e.seq) as position";

/// The short way, for a sink that takes every event as it is: rows go from the table into the result.
fn copy_window(
    spi: &Spi,
    sink: &SinkRow,
    stream: &Stream,
    place: &mut Place,
    limit: usize,
    store: &TupleStore,
) -> Option<Handed> {
    let columns = format!("{}, {POSITION}", events::columns(stream));
    let handed = events::with_window_args(stream, place, limit, |late, args| {
        let is_for = events::is_for(stream, Some(sink.number));
        let sql = events::window_sql(stream, late, &columns, &is_for);
        let stored = spi.read_into(store, &sql, args);
        let (txid, seq) = stored.last?;
        let last = Position { txid, seq };
        let through = stored.count < limit as u64;
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
            events: i64::try_from(stored.count).unwrap_or(i64::MAX),
        })
    });
    if handed.is_none() {
        place.mark = Mark::END;
    }
    handed
}

/// Events of one window that a sink wants, made ready.
struct Chosen {
    events: Vec<Found>,
    /// Everything up to here was looked at.
    end: Mark,
}

impl Chosen {
    fn handed(&self) -> Option<Handed> {
        self.events.last().map(|last| Handed {
            end: self.end,
            last: last.event.position,
            events: i64::try_from(self.events.len()).unwrap_or(i64::MAX),
        })
    }
}

/// The other way, for a sink that chooses: reads on in the window at hand until the batch is full. An event that cannot be made ready
/// ends the batch before it, and is an error once it is the first.
fn choose(
    spi: &Spi,
    sink: &SinkRow,
    reader: &mut Reader,
    horizon: &Horizon,
    floors: &mut Floors,
    limit: usize,
) -> Result<Chosen, Complaint> {
    let mut events = Vec::<Found>::new();
    let mut rows = 0;
    // The window is not through yet, so none is opened here.
    let by_transaction = reader.grouping() == Grouping::Transaction;
    while let Some(read) = reader.read_on(spi, horizon, floors, limit - events.len()) {
        rows += read.passed;
        for (found, problem) in read.shaped {
            let Some(problem) = problem else {
                events.push(found);
                continue;
            };
            let position = found.event.position;
            if by_transaction {
                events.retain(|event| event.event.position.txid != position.txid);
            }
            return match events.last().map(|last| last.mark) {
                Some(end) => Ok(Chosen { events, end }),
                None => Err(Complaint::bad_argument(format!(
                    "sink \"{}\" cannot take event {position}: {problem}",
                    sink.id
                ))
                .hint("Mend its filter or transform with outbox.alter_sink; nothing is lost.")),
            };
        }
        let is_full = events.len() >= limit || reader.place.mark == Mark::END;
        let is_whole = by_transaction && !reader.place.mark.is_within();
        if is_full || ((rows >= ROWS_A_PASS || is_whole) && !events.is_empty()) {
            break;
        }
    }
    let mut end = reader.place.mark;
    if events.len() > limit {
        // The rest of a transaction was followed by others: they come next time.
        let txid = |index: usize| events[index].event.position.txid;
        let boundary = (1..=limit).rev().find(|&n| txid(n - 1) != txid(n));
        events.truncate(boundary.unwrap_or(limit));
        end = events.last().map_or(end, |last| last.mark);
    }
    Ok(Chosen { events, end })
}

fn copy_records(spi: &Spi, events: Vec<Found>, store: &TupleStore) {
    let records = events
        .into_iter()
        .filter_map(|found| found.record)
        .collect::<Vec<_>>();
    if !records.is_empty() {
        let sql = format!(
            r#"select e.txid, e.seq, e.id, e.topic, e.source, e.subject, e.tenant, e."time", e.payload, e.headers, {POSITION}
                 from unnest($1) with ordinality as e (txid, seq, id, topic, source, subject, tenant, "time", payload, headers, n)
                order by e.n"#
        );
        spi.read(&sql, &[Arg::Records(&records, events::event_type())])
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
            let window = &cursor.stand.place.window;
            let mark = transactions::mark_of(spi, &stream, window.grouping, position);
            if window.done.sees(position.txid)
                || (window.upto.sees(position.txid) && mark <= cursor.stand.place.mark)
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
            (
                mark,
                count_upto(spi, sink, stream, &cursor.stand.place, mark, handed.events),
            )
        }
    };
    let last = position.unwrap_or(handed.last);
    let place = Place {
        mark: end,
        ..cursor.stand.place
    };
    let pair = cursors::pair_of(&place, Some(last.max(cursor.pair)));
    let to = Stand::at(place);
    let moved =
        cursors::save(spi, sink, None, &to, pair, events.cast_unsigned()) == cursors::Save::Moved;
    lock::give_lease_back_at_commit(sink.number);
    Ok(moved)
}

/// How many events of the batch at hand lie up to a mark.
fn count_upto(
    spi: &Spi,
    sink: &SinkRow,
    stream: Stream,
    place: &Place,
    mark: Mark,
    handed: i64,
) -> i64 {
    let limit = usize::try_from(handed).unwrap_or(usize::MAX);
    let reader = Reader::new(sink, stream.clone(), place.clone(), false, limit);
    let Ok(mut reader) = reader else {
        return handed;
    };
    if reader.takes_all() {
        return count_between(spi, sink, &stream, place, mark);
    }
    // What was chosen is not kept, but is chosen likewise again.
    let mut floors = Floors::default();
    let horizon = stream.look(spi, &mut floors);
    let Ok(chosen) = choose(spi, sink, &mut reader, &horizon, &mut floors, limit) else {
        return handed;
    };
    let upto = chosen.events.iter().filter(|event| event.mark <= mark);
    i64::try_from(upto.count()).unwrap_or(handed)
}

/// How many events lie between where a cursor stands and a mark in the same window.
fn count_between(spi: &Spi, sink: &SinkRow, stream: &Stream, place: &Place, mark: Mark) -> i64 {
    let sql = format!(
        "select count(*) from {} e where e.seq > $1 and e.seq <= $2 and pg_visible_in_snapshot(e.txid, $3)
            and not pg_visible_in_snapshot(e.txid, $4) and {}",
        stream.relation,
        events::is_for(stream, Some(sink.number))
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
