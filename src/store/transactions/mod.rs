//! The tables of events, read by whole transactions: a window in order of each transaction's last event, so that transactions that
//! depend on each other stay in order and none is interleaved with another.
//!
//! A transaction's turn comes when every row of the window up to its last one was looked at, for then none that is not known yet
//! can come before it. So the rows are walked over once, ahead of what is read: see [`Lookout`].

mod lookout;

use std::ops::ControlFlow;

pub(crate) use self::lookout::Lookout;
use self::lookout::Met;
use super::events::{Found, Page, Want, columns_and_sink, take};
use super::streams::Stream;
use crate::dispatch::{Grouping, Mark, Place};
use crate::envelope::{Part, Position};
use crate::pg::spi::{Arg, RecordType, Spi};

/// Bytes after which even a transaction is cut into parts.
const PART_BYTES: usize = 16 << 20;

/// Rows in one stretch of a walk over a transaction's events.
const STRETCH: usize = 1_000;

/// The rows of a transaction, by comparisons that only the index on (txid, seq) serves: with `txid = …` the planner may take that on
/// seq instead, and walk over everything.
fn rows_of(alias: &str, txid: &str, behind: &str, upto: &str) -> String {
    format!(
        "({alias}.txid, {alias}.seq) > ({txid}, {behind}) and ({alias}.txid, {alias}.seq) <= ({txid}, {upto})"
    )
}

/// Above every seq.
const TOP: &str = "9223372036854775807";

/// An expression for the last seq of the transaction that another one names; null if there is none of it.
pub(crate) fn last_of(stream: &Stream, txid: &str) -> String {
    format!(
        "(select last_of.seq from {} last_of where {} order by last_of.txid desc, last_of.seq desc limit 1)",
        stream.relation,
        rows_of("last_of", txid, "0", TOP)
    )
}

/// Where in a window an event lies.
pub(crate) fn mark_of(spi: &Spi, stream: &Stream, grouping: Grouping, position: Position) -> Mark {
    let group = match grouping {
        Grouping::Event => None,
        Grouping::Transaction => spi
            .read(
                &format!("select {}", last_of(stream, "$1")),
                &[Arg::Xid(position.txid)],
            )
            .first(|row| row.i64(0))
            .flatten(),
    };
    Mark {
        group: group.unwrap_or(0).max(position.seq),
        seq: position.seq,
    }
}

/// The transaction that a mark lies within; none if nothing of it is there any more.
pub(crate) fn txid_at(spi: &Spi, stream: &Stream, mark: Mark) -> Option<u64> {
    let sql = format!(
        "select coalesce((select e.txid from {relation} e where e.seq = $1), (select e.txid from {relation} e where e.seq = $2))",
        relation = stream.relation
    );
    let args = [Arg::I64(Some(mark.group)), Arg::I64(Some(mark.seq))];
    spi.read(&sql, &args).first(|row| row.xid(0)).flatten()
}

/// Reads whole transactions behind a place, up to `limit` rows. Only one that is larger than that by itself is cut. If it is not known
/// yet which is next, or if it has just been found to be so large, the page is empty, and its end is where it began.
pub(crate) fn read(
    spi: &Spi,
    stream: &Stream,
    place: &Place,
    lookout: &mut Lookout,
    limit: usize,
    want: &Want,
) -> Page {
    let mut page = Page::empty(place.mark);
    if place.mark == Mark::END {
        return page;
    }
    lookout.turn_to(stream, place);
    if place.mark.is_within() {
        match lookout.resume(spi, stream, place.mark, want) {
            Some(met) => {
                let first = vec![(place.mark.group, met)];
                read_firsts(spi, stream, lookout, first, limit, want, &mut page);
            }
            None => page.end.seq = page.end.group,
        }
    } else {
        page.walked = lookout.look(spi, stream, &place.window, limit, want);
        // A reader may have to count first what it gets of one that does not fit.
        let is_large = lookout.larger_than(place, limit).is_some();
        if !(is_large && page.walked > 0) {
            let firsts = lookout.firsts(limit);
            read_firsts(spi, stream, lookout, firsts, limit, want, &mut page);
        }
    }
    if lookout.is_empty() && !page.end.is_within() {
        page.end = Mark::END;
    }
    lookout.has_come_to(place, page.end);
    page
}

/// How far a transaction was read.
#[derive(Clone, Copy, Default)]
struct Progress {
    rows: usize,
    bytes: usize,
    seq: i64,
    /// No more of it is to be read now.
    stopped: bool,
}

/// Reads the transactions that come next, each up to `limit` rows.
fn read_firsts(
    spi: &Spi,
    stream: &Stream,
    lookout: &mut Lookout,
    mut next: Vec<(i64, Met)>,
    limit: usize,
    want: &Want,
    page: &mut Page,
) {
    let mut progress = vec![Progress::default(); next.len()];
    let mut at = 0;
    let mut bytes = 0;
    let record = want.record.then(RecordType::event);
    let places = next
        .iter()
        .map(|(last, met)| (met.txid, met.behind, *last))
        .collect::<Vec<_>>();
    each_row(spi, stream, &places, limit, |txid, row| {
        while next[at].1.txid != txid {
            at += 1;
        }
        let now = &mut progress[at];
        if now.bytes > PART_BYTES || (now.rows == 0 && bytes > PART_BYTES) {
            now.stopped = true;
            return ControlFlow::Break(());
        }
        let (last, met) = &mut next[at];
        let seq = row.i64(1).unwrap_or(0);
        let mark = Mark { group: *last, seq };
        if let Some(mut found) = take(row, mark, want, record.as_ref()) {
            met.done += 1;
            // Where a sink chooses, its reader numbers what it has chosen.
            found.event.part = want.parts.then_some(Part {
                index: met.done,
                count: met.shown,
            });
            let size = row.raw_json_size(8) + row.raw_json_size(9);
            now.bytes += size;
            bytes += size;
            page.found.push(found);
        }
        now.rows += 1;
        now.seq = seq;
        page.pass(row, mark);
        ControlFlow::Continue(())
    });
    for ((last, mut met), read) in next.into_iter().zip(progress) {
        if read.stopped && read.rows == 0 {
            break;
        }
        page.end = Mark {
            group: last,
            seq: last,
        };
        if read.stopped || (read.rows == limit && read.seq < last) {
            page.end.seq = read.seq;
            met.behind = read.seq;
            lookout.has_read_in_part(last, met);
            break;
        }
        lookout.has_read(last);
    }
}

/// Reads transactions one after the other, each given by its id and the seqs behind which and up to which it is wanted.
fn each_row(
    spi: &Spi,
    stream: &Stream,
    places: &[(u64, i64, i64)],
    limit: usize,
    mut visit: impl FnMut(u64, &crate::pg::spi::Row) -> ControlFlow<()>,
) {
    if places.is_empty() {
        return;
    }
    let sql = format!(
        "select x.* from unnest($2, $3::bigint[], $4::bigint[]) as t (txid, behind, last), lateral
            (select {columns} from {relation} e where {rows} order by e.txid, e.seq limit $5) x",
        columns = columns_and_sink(stream),
        relation = stream.relation,
        rows = rows_of("e", "t.txid", "t.behind", "t.last"),
    );
    let list = |of: fn(&(u64, i64, i64)) -> i64| {
        let list = places
            .iter()
            .map(|place| of(place).to_string())
            .collect::<Vec<_>>();
        format!("{{{}}}", list.join(","))
    };
    let xids = places.iter().map(|place| place.0).collect::<Vec<_>>();
    let args = [
        Arg::Text(Some(&stream.name)),
        Arg::Xids(&xids),
        Arg::Text(Some(&list(|place| place.1))),
        Arg::Text(Some(&list(|place| place.2))),
        Arg::I64(Some(i64::try_from(limit).unwrap_or(i64::MAX))),
    ];
    spi.read(&sql, &args)
        .each(|row| visit(row.xid(0).unwrap_or(0), row));
}

/// A stretch of one transaction.
pub(crate) struct Stretch {
    /// The wanted events.
    pub(crate) found: Vec<Found>,
    /// The seq behind which it goes on; none if there is no more.
    pub(crate) next: Option<i64>,
}

/// Reads a stretch of one transaction behind a seq and up to another one.
pub(crate) fn stretch(
    spi: &Spi,
    stream: &Stream,
    txid: u64,
    behind: i64,
    upto: i64,
    want: &Want,
) -> Stretch {
    let record = want.record.then(RecordType::event);
    let mut found = Vec::new();
    let mut rows = 0;
    let mut seq = behind;
    each_row(spi, stream, &[(txid, behind, upto)], STRETCH, |_, row| {
        rows += 1;
        seq = row.i64(1).unwrap_or(0);
        let mark = Mark { group: upto, seq };
        found.extend(take(row, mark, want, record.as_ref()));
        ControlFlow::Continue(())
    });
    Stretch {
        found,
        next: (rows == STRETCH).then_some(seq),
    }
}
