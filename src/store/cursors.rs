//! outbox.cursors, as far as sinks are concerned: where each stands. Saves move forward only.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::dispatch::{Grouping, Mark, Place, Snapshot, Window};
use crate::envelope::Position;
use crate::pg::spi::{Arg, Row, Spi};
use crate::store::sinks::{self, Hold, SinkRow};

/// A sink's cursor as it was saved.
#[derive(Debug, Clone)]
pub(crate) struct Saved {
    pub(crate) stand: Stand,
    pub(crate) pair: Position,
    /// Pull sinks: the batch handed out and not yet acknowledged.
    pub(crate) handed: Option<Handed>,
    /// Pull sinks: a sample of the sequence and the transaction id read after it (see [`crate::dispatch::Floors`]).
    pub(crate) sample: Option<(i64, u64)>,
}

/// What a sink is through with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stand {
    /// Everything up to here.
    pub(crate) place: Place,
    /// And the events behind it with these seqs, which went through ahead.
    pub(crate) ahead: BTreeSet<i64>,
}

impl Stand {
    /// Everything up to a place, and nothing behind it.
    pub(crate) fn at(place: Place) -> Self {
        Self {
            place,
            ahead: BTreeSet::new(),
        }
    }
}

/// A batch that a pull sink's consumer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handed {
    /// Where the cursor stands once all of it is acknowledged.
    pub(crate) end: Mark,
    /// Its last event.
    pub(crate) last: Position,
    pub(crate) events: i64,
}

/// A cursor's name for a sink.
pub(crate) fn name_of(sink: &str) -> String {
    format!("sink:{sink}")
}

fn saved(row: &Row) -> Option<Saved> {
    let snapshot = |column| {
        row.text(column)
            .and_then(|text| text.parse::<Snapshot>().ok())
    };
    let window = Window {
        number: row.i64(0)?,
        grouping: row
            .text(17)
            .as_deref()
            .and_then(Grouping::named)
            .unwrap_or_default(),
        done: snapshot(1)?,
        upto: snapshot(2)?,
        floor: row.i64(5)?,
        ceiling: row.i64(6)?,
        next_floor: row.i64(7)?,
    };
    Some(Saved {
        stand: Stand {
            place: Place {
                window: Arc::new(window),
                mark: Mark {
                    group: row.i64(3)?,
                    seq: row.i64(4)?,
                },
            },
            ahead: row.text(18).map(|text| seqs(&text)).unwrap_or_default(),
        },
        pair: Position {
            txid: row.xid(8)?,
            seq: row.i64(9)?,
        },
        handed: handed(row),
        sample: row.i64(15).zip(row.xid(16)),
    })
}

/// The numbers in the text of a bigint[].
fn seqs(text: &str) -> BTreeSet<i64> {
    let numbers = text.trim_matches(['{', '}']).split(',');
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// The text of a bigint[]; none for an empty one.
fn array(seqs: &BTreeSet<i64>) -> Option<String> {
    let numbers = seqs.iter().map(i64::to_string).collect::<Vec<_>>();
    (!numbers.is_empty()).then(|| format!("{{{}}}", numbers.join(",")))
}

fn handed(row: &Row) -> Option<Handed> {
    Some(Handed {
        end: Mark {
            group: row.i64(10)?,
            seq: row.i64(11)?,
        },
        last: Position {
            txid: row.xid(12)?,
            seq: row.i64(13)?,
        },
        events: row.i64(14)?,
    })
}

/// The saved cursor of a sink; `lock` keeps other savers out until the transaction ends.
pub(crate) fn load(spi: &Spi, sink: &str, lock: bool) -> Option<Saved> {
    load_named(spi, &name_of(sink), lock)
}

/// The same of a cursor of any name.
pub(crate) fn load_named(spi: &Spi, name: &str, lock: bool) -> Option<Saved> {
    let sql = format!(
        "select window_no, done::text, upto::text, at_group, at_seq, floor, ceiling, next_floor, txid, seq,
                handed_group, handed_seq, handed_last_txid, handed_last_seq, handed_events,
                sample_seq, sample_xid, at_grouping, ahead::text
           from outbox.cursors where name = $1{}",
        if lock { " for update" } else { "" }
    );
    // Not under the snapshot at hand: the lease was taken after it, and its last holder may have saved in between.
    spi.write(&sql, &[Arg::Text(Some(name))])
        .first(saved)
        .flatten()
}

/// Makes the cursor of a new sink.
pub(crate) fn create(spi: &Spi, sink: &str, stream: &str, place: &Place, pair: Position) {
    create_named(spi, &name_of(sink), stream, place, pair);
}

/// Makes a cursor of that name, if there is none.
pub(crate) fn create_named(spi: &Spi, name: &str, stream: &str, place: &Place, pair: Position) {
    let window = &place.window;
    spi.write(
        "insert into outbox.cursors (name, stream, txid, seq, window_no, done, upto, at_group, at_seq, floor, ceiling, next_floor,
                                      at_grouping)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) on conflict (name) do nothing",
        &[
            Arg::Text(Some(name)),
            Arg::Text(Some(stream)),
            Arg::Xid(pair.txid),
            Arg::I64(Some(pair.seq)),
            Arg::I64(Some(window.number)),
            Arg::Snapshot(Some(&window.done.to_string())),
            Arg::Snapshot(Some(&window.upto.to_string())),
            Arg::I64(Some(place.mark.group)),
            Arg::I64(Some(place.mark.seq)),
            Arg::I64(Some(window.floor)),
            Arg::I64(Some(window.ceiling)),
            Arg::I64(Some(window.next_floor)),
            Arg::Text(Some(window.grouping.name())),
        ],
    );
}

/// How a save went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Save {
    Moved,
    /// The cursor stands further on already, or is gone: somebody else holds the sink now, or it was dropped.
    Refused,
    /// Not now: a transaction that is still open changes or drops the sink, or its cursor.
    Postponed,
}

/// Moves the cursor of a sink to a stand, if that is not behind its own, and adds to its count of deliveries. With `from`, only
/// if it stands there: nobody has delivered in between. A sink that was dropped and made again is another one, whatever its id.
pub(crate) fn save(
    spi: &Spi,
    sink: &SinkRow,
    from: Option<&Stand>,
    to: &Stand,
    pair: Position,
    delivered: u64,
) -> Save {
    match sinks::hold(spi, sink) {
        Hold::Held => {}
        Hold::Taken => return Save::Postponed,
        Hold::Gone => return Save::Refused,
    }
    let name = name_of(&sink.id);
    if advance(spi, &name, from, to, pair, delivered) {
        Save::Moved
    } else {
        Save::Refused
    }
}

/// The same for a cursor of any name. False if it stands further on already, or is gone.
pub(crate) fn advance(
    spi: &Spi,
    name: &str,
    from: Option<&Stand>,
    to: &Stand,
    pair: Position,
    delivered: u64,
) -> bool {
    let place = &to.place;
    let window = &place.window;
    let before = from.map(|from| &from.place);
    let (ahead_before, ahead) = (from.and_then(|from| array(&from.ahead)), array(&to.ahead));
    let rows = spi.write(
        "update outbox.cursors c
            set txid = case when (c.txid, c.seq) < ($2, $3) then $2 else c.txid end,
                seq = case when (c.txid, c.seq) < ($2, $3) then $3 else c.seq end,
                window_no = $4, done = $5, upto = $6, at_group = $7, at_seq = $8, floor = $9, ceiling = $10, next_floor = $11,
                at_grouping = $16, ahead = $17::bigint[],
                handed_group = null, handed_seq = null, handed_last_txid = null, handed_last_seq = null, handed_events = null,
                updated_at = clock_timestamp(),
                delivered = c.delivered + $12,
                delivered_at = case when $12 > 0 then clock_timestamp() else c.delivered_at end
          where c.name = $1 and (c.window_no, c.at_group, c.at_seq) <= ($4, $7, $8)
            and ($13 is null or (c.window_no, c.at_group, c.at_seq) = ($13, $14, $15) and c.ahead is not distinct from $18::bigint[])",
        &[
            Arg::Text(Some(name)),
            Arg::Xid(pair.txid),
            Arg::I64(Some(pair.seq)),
            Arg::I64(Some(window.number)),
            Arg::Snapshot(Some(&window.done.to_string())),
            Arg::Snapshot(Some(&window.upto.to_string())),
            Arg::I64(Some(place.mark.group)),
            Arg::I64(Some(place.mark.seq)),
            Arg::I64(Some(window.floor)),
            Arg::I64(Some(window.ceiling)),
            Arg::I64(Some(window.next_floor)),
            Arg::I64(Some(delivered.cast_signed())),
            Arg::I64(before.map(|from| from.window.number)),
            Arg::I64(before.map(|from| from.mark.group)),
            Arg::I64(before.map(|from| from.mark.seq)),
            Arg::Text(Some(window.grouping.name())),
            Arg::Text(ahead.as_deref()),
            Arg::Text(ahead_before.as_deref()),
        ],
    );
    rows.count() == 1
}

/// Remembers the batch that a pull sink's consumer was handed, the window it lies in, and a sample for the windows to come.
pub(crate) fn hand_out(
    spi: &Spi,
    sink: &str,
    place: &Place,
    handed: &Handed,
    sample: Option<(i64, u64)>,
) {
    let window = &place.window;
    spi.write(
        "update outbox.cursors c
            set window_no = $2, done = $3, upto = $4, at_group = $5, at_seq = $6, floor = $7, ceiling = $8, next_floor = $9,
                handed_group = $10, handed_seq = $11, handed_last_txid = $12, handed_last_seq = $13, handed_events = $14,
                sample_seq = $15, sample_xid = $16, at_grouping = $17, updated_at = clock_timestamp()
          where c.name = $1",
        &[
            Arg::Text(Some(&name_of(sink))),
            Arg::I64(Some(window.number)),
            Arg::Snapshot(Some(&window.done.to_string())),
            Arg::Snapshot(Some(&window.upto.to_string())),
            Arg::I64(Some(place.mark.group)),
            Arg::I64(Some(place.mark.seq)),
            Arg::I64(Some(window.floor)),
            Arg::I64(Some(window.ceiling)),
            Arg::I64(Some(window.next_floor)),
            Arg::I64(Some(handed.end.group)),
            Arg::I64(Some(handed.end.seq)),
            Arg::Xid(handed.last.txid),
            Arg::I64(Some(handed.last.seq)),
            Arg::I64(Some(handed.events)),
            Arg::I64(sample.map(|(seq, _)| seq)),
            Arg::Xid(sample.map_or(0, |(_, next_xid)| next_xid)),
            Arg::Text(Some(window.grouping.name())),
        ],
    );
}

/// The pair that stands for a place: no greater than anything undelivered. It is the greatest delivered position where that is
/// true of it, so that a cursor that has seen everything stands at the last event.
pub(crate) fn pair_of(place: &Place, greatest_delivered: Option<Position>) -> Position {
    let window = &place.window;
    let lowest = if place.mark == Mark::END {
        window.upto.oldest_unseen()
    } else {
        window.done.oldest_unseen()
    };
    match greatest_delivered {
        Some(greatest) if greatest.txid < lowest => greatest,
        _ => Position {
            txid: lowest,
            seq: 0,
        },
    }
}
