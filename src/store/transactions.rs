//! The tables of events, read by whole transactions: a window in order of each transaction's last event, so that transactions that
//! depend on each other stay in order and none is interleaved with another.

use std::ops::ControlFlow;

use super::events::{Found, Page, Want, columns_and_sink, is_for, take};
use super::sinks::Grouping;
use super::streams::Stream;
use crate::dispatch::{Mark, Place};
use crate::envelope::{Part, Position};
use crate::pg::spi::{Arg, RecordType, Spi};

/// Bytes after which even a transaction is cut into parts.
const PART_BYTES: usize = 16 << 20;

/// Rows in one stretch of a walk.
const STRETCH: usize = 1_000;

/// A transaction of a window.
struct Transaction {
    txid: u64,
    last: i64,
}

/// Transactions behind a mark, in order. A row is its transaction's last if the index knows no later one, so finding them costs
/// what is read.
fn transactions(spi: &Spi, stream: &Stream, place: &Place, limit: usize) -> Vec<Transaction> {
    let relation = &stream.relation;
    let window = &place.window;
    let late = window.late();
    // A transaction that was left in the middle comes first again.
    let behind = if place.mark.seq < place.mark.group {
        place.mark.group - 1
    } else {
        place.mark.group
    };
    let sql = format!(
        "select f.txid, f.last from (
             (select e.txid, e.seq as last from {relation} e
               where e.seq > greatest($1, $2) and e.seq <= $3 and e.txid >= $4 and pg_visible_in_snapshot(e.txid, $5)
                 and e.seq = (select max(n.seq) from {relation} n where n.txid = e.txid)
               order by e.seq limit $6)
             union all
             (select l.txid, l.last from (select x.txid, (select max(n.seq) from {relation} n where n.txid = x.txid) as last
                                            from unnest($7) as x (txid)) l
               where l.last > $1)
         ) f order by f.last limit $6"
    );
    let args = [
        Arg::I64(Some(behind)),
        Arg::I64(Some(window.floor.max(stream.pruned_seq))),
        Arg::I64(Some(window.ceiling)),
        Arg::Xid(window.done.xmax()),
        Arg::Snapshot(Some(&window.upto.to_string())),
        Arg::I64(Some(i64::try_from(limit).unwrap_or(i64::MAX))),
        Arg::Xids(&late),
    ];
    spi.read(&sql, &args).map(|row| Transaction {
        txid: row.xid(0).unwrap_or(0),
        last: row.i64(1).unwrap_or(0),
    })
}

/// Where in a window an event lies.
pub(crate) fn mark_of(spi: &Spi, stream: &Stream, grouping: Grouping, position: Position) -> Mark {
    let sql = format!(
        "select max(e.seq) from {} e where e.txid = $1",
        stream.relation
    );
    let group = match grouping {
        Grouping::Event => None,
        Grouping::Transaction => spi
            .read(&sql, &[Arg::Xid(position.txid)])
            .first(|row| row.i64(0))
            .flatten(),
    };
    Mark {
        group: group.unwrap_or(0).max(position.seq),
        seq: position.seq,
    }
}

/// Events of a transaction.
#[derive(Default)]
struct Count {
    all: u32,
    /// But for those that are for another sink alone.
    shown: u32,
}

fn count(spi: &Spi, stream: &Stream, txid: u64, upto: i64, want: &Want) -> Count {
    let sql = format!(
        "select count(*), count(*) filter (where {}) from {} e where e.txid = $1 and e.seq <= $2",
        is_for(stream, want.sink),
        stream.relation
    );
    let number = |counted: Option<i64>| u32::try_from(counted.unwrap_or(0)).unwrap_or(u32::MAX);
    spi.read(&sql, &[Arg::Xid(txid), Arg::I64(Some(upto))])
        .first(|row| Count {
            all: number(row.i64(0)),
            shown: number(row.i64(1)),
        })
        .unwrap_or_default()
}

/// Reads whole transactions behind a place, up to `limit` rows. Only one that is larger than that by itself is cut.
pub(crate) fn read(spi: &Spi, stream: &Stream, place: &Place, limit: usize, want: &Want) -> Page {
    let mut page = Page::empty(place.mark);
    if place.mark == Mark::END {
        return page;
    }
    let next = transactions(spi, stream, place, limit);
    let through = next.len() < limit;
    let mut bytes = 0usize;
    for transaction in next {
        let resumed = place.mark.group == transaction.last && place.mark.seq < transaction.last;
        let behind = if resumed { place.mark.seq } else { 0 };
        let size = count(spi, stream, transaction.txid, i64::MAX, want);
        let done = if resumed {
            count(spi, stream, transaction.txid, behind, want)
        } else {
            Count::default()
        };
        let left = usize::try_from(size.all - done.all).unwrap_or(usize::MAX);
        if page.looked_at > 0 && (page.looked_at + left > limit || bytes > PART_BYTES) {
            return page;
        }
        let mut part = rows(spi, stream, &transaction, behind, limit, want);
        // Where a sink chooses, its reader numbers what it has chosen.
        for (found, index) in part.page.found.iter_mut().zip(done.shown + 1..) {
            let count = size.shown;
            found.event.part = Some(Part { index, count });
        }
        bytes += part.bytes;
        let whole = part.page.looked_at == left;
        page.looked_at += part.page.looked_at;
        page.found.append(&mut part.page.found);
        page.end = part.page.end;
        page.greatest = page.greatest.max(part.page.greatest);
        if !whole {
            return page;
        }
    }
    if through {
        page.end = Mark::END;
    }
    page
}

/// Events of one transaction.
struct Rows {
    page: Page,
    bytes: usize,
}

/// Reads on in a transaction, up to `limit` rows.
fn rows(
    spi: &Spi,
    stream: &Stream,
    transaction: &Transaction,
    behind: i64,
    limit: usize,
    want: &Want,
) -> Rows {
    let sql = format!(
        "select {} from {} e where e.txid = $2 and e.seq > $3 order by e.txid, e.seq limit $4",
        columns_and_sink(stream),
        stream.relation
    );
    let args = [
        Arg::Text(Some(&stream.name)),
        Arg::Xid(transaction.txid),
        Arg::I64(Some(behind)),
        Arg::I64(Some(i64::try_from(limit).unwrap_or(i64::MAX))),
    ];
    let mark = |seq| Mark {
        group: transaction.last,
        seq,
    };
    let record = want.record.then(RecordType::event);
    let mut read = Rows {
        page: Page::empty(mark(behind)),
        bytes: 0,
    };
    spi.read(&sql, &args).each(|row| {
        if read.bytes > PART_BYTES {
            return ControlFlow::Break(());
        }
        let mark = mark(row.i64(1).unwrap_or(0));
        if let Some(found) = take(row, mark, want, record.as_ref()) {
            read.bytes += row.raw_json_size(8) + row.raw_json_size(9);
            read.page.found.push(found);
        }
        read.page.pass(row, mark);
        ControlFlow::Continue(())
    });
    read
}

/// Walks over the wanted events of one transaction up to a seq, a stretch at a time.
pub(crate) fn walk(
    spi: &Spi,
    stream: &Stream,
    txid: u64,
    upto: i64,
    want: &Want,
    mut visit: impl FnMut(Vec<Found>),
) {
    let transaction = Transaction { txid, last: upto };
    let mut behind = 0;
    loop {
        let mut page = rows(spi, stream, &transaction, behind, STRETCH, want).page;
        let looked_at = page.looked_at;
        behind = page.end.seq;
        page.found.retain(|found| found.mark.seq <= upto);
        visit(page.found);
        if looked_at == 0 || behind >= upto {
            return;
        }
    }
}
