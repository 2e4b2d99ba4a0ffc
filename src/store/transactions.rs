//! The tables of events, read by whole transactions: a window in order of each transaction's last event, so that transactions that
//! depend on each other stay in order and none is interleaved with another.
//!
//! A transaction's turn comes when every row of the window up to its last one was looked at, for then none that is not known yet
//! can come before it. So the rows are walked over once, ahead of what is read: see [`Lookout`].

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::events::{Found, Page, Want, columns_and_sink, is_for, take};
use super::streams::Stream;
use crate::dispatch::{Grouping, Mark, Place, Window};
use crate::envelope::{Part, Position};
use crate::pg::spi::{Arg, RecordType, Spi};

/// Bytes after which even a transaction is cut into parts.
const PART_BYTES: usize = 16 << 20;

/// Rows in one stretch of a walk over a transaction's events.
const STRETCH: usize = 1_000;

/// The most rows that are walked over at once to find out which transaction is next.
const LONGEST_LOOK: usize = 2_000;

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

/// What is known of the transactions of a window behind a mark. It spares the walk over what was walked over before, and is made
/// anew from the mark where it is of another one: nothing hangs on it but time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lookout {
    of: Option<Place>,
    /// Rows of part (a) up to this seq were looked at.
    upto: i64,
    /// There are no more behind.
    through: bool,
    /// Part (b) was looked at.
    late: bool,
    /// How many rows to look at next.
    stretch: usize,
    /// Transactions that are not read yet, by their last seq.
    met: BTreeMap<i64, Met>,
}

/// A transaction that was come upon.
#[derive(Clone, Debug)]
struct Met {
    txid: u64,
    /// Its events up to this seq are read.
    behind: i64,
    /// How many rows it has, as far as they were looked at; or more than fit into a page.
    rows: usize,
    /// How many of its events are for this sink, and are read already.
    shown: u32,
    done: u32,
}

impl Lookout {
    /// For a reader that stands there.
    fn turn_to(&mut self, stream: &Stream, place: &Place) {
        let fits = |of: &Place| Arc::ptr_eq(&of.window, &place.window) && of.mark == place.mark;
        if !self.of.as_ref().is_some_and(fits) {
            // What is not read yet has its last event behind the mark.
            let floor = place.window.floor.max(stream.pruned_seq);
            *self = Self {
                of: Some(place.clone()),
                upto: place.mark.group.max(floor),
                ..Self::default()
            };
        }
    }

    /// The next transaction, if it is known which one that is.
    fn next(&self) -> Option<(i64, &Met)> {
        let (&last, met) = self.met.first_key_value()?;
        (self.through || last <= self.upto).then_some((last, met))
    }

    /// Looks at the transactions that were running when the window before was opened.
    fn look_at_late(&mut self, spi: &Spi, stream: &Stream, place: &Place, limit: i64, want: &Want) {
        self.late = true;
        let late = place.window.late();
        if late.is_empty() {
            return;
        }
        let sql = format!(
            "select x.txid, x.last, c.rows, c.shown
               from (select l.txid, {last} as last from unnest($1) as l (txid)) x, lateral {counts} c where x.last > $2",
            last = last_of(stream, "l.txid"),
            counts = counts(stream, want, "x.txid", "x.last", "$3"),
        );
        let args = [
            Arg::Xids(&late),
            Arg::I64(Some(place.mark.group)),
            Arg::I64(Some(limit)),
        ];
        for (last, met) in spi.read(&sql, &args).map(|row| {
            let met = Met {
                txid: row.xid(0).unwrap_or(0),
                behind: 0,
                rows: size(row.i64(2)),
                shown: number(row.i64(3)),
                done: 0,
            };
            (row.i64(1).unwrap_or(0), met)
        }) {
            self.met.insert(last, met);
        }
    }

    /// Looks at the next rows of the window. Returns how many there were.
    fn look_on(
        &mut self,
        spi: &Spi,
        stream: &Stream,
        window: &Window,
        limit: i64,
        want: &Want,
    ) -> usize {
        let shown = is_for(stream, want.sink);
        let sql = format!(
            "with stretch as materialized (
                 select e.txid, e.seq, {shown} as shown from {relation} e
                  where e.seq > $1 and e.seq <= $2 and e.txid >= $3 and pg_visible_in_snapshot(e.txid, $4) order by e.seq limit $5
             )
             select s.txid, s.rows, s.shown, s.upto, {last}, c.rows, c.shown
               from (select t.txid, count(*) as rows, count(*) filter (where t.shown) as shown, max(t.seq) as upto
                       from stretch t group by t.txid) s
               cross join lateral {before} c",
            relation = stream.relation,
            last = last_of(stream, "s.txid"),
            // Of those that were met before, these are counted already.
            before = counts(
                stream,
                want,
                "s.txid",
                "case when s.txid = any ($6) then 0 else $1 end",
                "$7"
            ),
        );
        let known = self.met.iter().map(|(last, met)| (met.txid, *last));
        let known = known.collect::<HashMap<_, _>>();
        let xids = known.keys().copied().collect::<Vec<_>>();
        let upto = window.upto.to_string();
        let stretch = self.stretch;
        let args = [
            Arg::I64(Some(self.upto)),
            Arg::I64(Some(window.ceiling)),
            Arg::Xid(window.done.xmax()),
            Arg::Snapshot(Some(&upto)),
            Arg::I64(Some(i64::try_from(stretch).unwrap_or(i64::MAX))),
            Arg::Xids(&xids),
            Arg::I64(Some(limit)),
        ];
        let mut looked_at = 0;
        let mut reached = self.upto;
        spi.read(&sql, &args).each(|row| {
            let rows = size(row.i64(1));
            looked_at += rows;
            reached = reached.max(row.i64(3).unwrap_or(0));
            let txid = row.xid(0).unwrap_or(0);
            let last = known.get(&txid).copied().or_else(|| row.i64(4));
            let met = self
                .met
                .entry(last.unwrap_or(reached))
                .or_insert_with(|| Met {
                    txid,
                    behind: 0,
                    rows: size(row.i64(5)),
                    shown: number(row.i64(6)),
                    done: 0,
                });
            met.rows += rows;
            met.shown = met.shown.saturating_add(number(row.i64(2)));
            ControlFlow::Continue(())
        });
        self.upto = reached;
        self.through = looked_at < stretch;
        looked_at
    }

    /// The transaction that a mark lies within; none if nothing of it is there any more.
    fn resume(&mut self, spi: &Spi, stream: &Stream, mark: Mark, want: &Want) -> bool {
        if self.met.contains_key(&mark.group) {
            return true;
        }
        let sql = format!(
            "select e.txid from {} e where e.seq in ($1, $2) order by e.seq desc limit 1",
            stream.relation
        );
        let args = [Arg::I64(Some(mark.group)), Arg::I64(Some(mark.seq))];
        let txid = spi.read(&sql, &args).first(|row| row.xid(0)).flatten();
        let Some(txid) = txid else {
            return false;
        };
        let count = |upto| {
            let sql = format!(
                "select c.shown from {} c",
                counts(stream, want, "$1", "$2", "null")
            );
            let args = [Arg::Xid(txid), Arg::I64(Some(upto))];
            let shown = spi.read(&sql, &args).first(|row| row.i64(0)).flatten();
            number(shown)
        };
        let (shown, done) = if want.parts {
            (count(mark.group), count(mark.seq))
        } else {
            (0, 0)
        };
        let met = Met {
            txid,
            behind: mark.seq,
            rows: 0,
            shown,
            done,
        };
        self.met.insert(mark.group, met);
        true
    }
}

fn size(counted: Option<i64>) -> usize {
    counted
        .and_then(|counted| usize::try_from(counted).ok())
        .unwrap_or(0)
}

fn number(counted: Option<i64>) -> u32 {
    u32::try_from(counted.unwrap_or(0)).unwrap_or(u32::MAX)
}

/// A subquery that counts the rows of a transaction up to a seq, and those of them that are for a sink; each no further than a limit.
fn counts(stream: &Stream, want: &Want, txid: &str, upto: &str, limit: &str) -> String {
    format!(
        "(select count(*) as rows, count(*) filter (where n.shown) as shown
            from (select {shown} as shown from {relation} e where {rows} order by e.txid, e.seq limit {limit}) n)",
        shown = is_for(stream, want.sink),
        relation = stream.relation,
        rows = rows_of("e", txid, "0", upto),
    )
}

/// Reads whole transactions behind a place, up to `limit` rows. Only one that is larger than that by itself is cut. If it is not known
/// yet which is next, the page is empty, and its end is where it began.
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
        if lookout.resume(spi, stream, place.mark, want) {
            read_first(spi, stream, lookout, 1, limit, want, &mut page);
        } else {
            page.end.seq = page.end.group;
        }
    } else {
        // Where parts are not numbered, it is enough to know that a transaction does not fit.
        let counted = if want.parts {
            i64::MAX
        } else {
            i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1)
        };
        if !lookout.late {
            lookout.look_at_late(spi, stream, place, counted, want);
        }
        if lookout.next().is_none() && !lookout.through {
            let longest = LONGEST_LOOK.max(limit.min(10 * LONGEST_LOOK));
            lookout.stretch = (2 * lookout.stretch).clamp(limit.min(longest), longest);
            page.walked = lookout.look_on(spi, stream, &place.window, counted, want);
        }
        let fitting = lookout.fitting(limit);
        read_first(spi, stream, lookout, fitting, limit, want, &mut page);
    }
    if lookout.through && lookout.met.is_empty() && !page.end.is_within() {
        page.end = Mark::END;
    }
    lookout.of = Some(Place {
        mark: page.end,
        ..place.clone()
    });
    page
}

impl Lookout {
    /// How many transactions come next that fit into a page together, or the one that does not fit by itself.
    fn fitting(&self, limit: usize) -> usize {
        let mut rows = 0;
        let mut count = 0;
        for (last, met) in &self.met {
            rows += met.rows;
            if !(self.through || *last <= self.upto) || (count > 0 && rows > limit) {
                break;
            }
            count += 1;
        }
        count
    }
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

/// Reads the first transactions that were met, each up to `limit` rows.
fn read_first(
    spi: &Spi,
    stream: &Stream,
    lookout: &mut Lookout,
    count: usize,
    limit: usize,
    want: &Want,
    page: &mut Page,
) {
    let firsts = lookout.met.iter().take(count);
    let mut next = firsts
        .map(|(last, met)| (*last, met.clone()))
        .collect::<Vec<_>>();
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
            lookout.met.insert(last, met);
            break;
        }
        lookout.met.remove(&last);
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

/// Walks over the wanted events of one transaction up to a seq, a stretch at a time.
pub(crate) fn walk(
    spi: &Spi,
    stream: &Stream,
    txid: u64,
    upto: i64,
    want: &Want,
    mut visit: impl FnMut(Vec<Found>),
) {
    let record = want.record.then(RecordType::event);
    let mut behind = 0;
    loop {
        let mut found = Vec::new();
        let mut rows = 0;
        each_row(spi, stream, &[(txid, behind, upto)], STRETCH, |_, row| {
            rows += 1;
            behind = row.i64(1).unwrap_or(0);
            let mark = Mark {
                group: upto,
                seq: behind,
            };
            found.extend(take(row, mark, want, record.as_ref()));
            ControlFlow::Continue(())
        });
        visit(found);
        if rows < STRETCH {
            return;
        }
    }
}
