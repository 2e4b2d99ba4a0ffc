//! Which transactions of a window come next.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::{last_of, rows_of, txid_at};
use crate::dispatch::{Mark, Place, Window};
use crate::pg::spi::{Arg, Spi};
use crate::store::events::{Want, is_for};
use crate::store::streams::Stream;

/// The most rows that are walked over at once to find out which transaction is next.
const LONGEST_LOOK: usize = 2_000;

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
pub(super) struct Met {
    pub(super) txid: u64,
    /// Its events up to this seq are read.
    pub(super) behind: i64,
    /// How many rows it has, as far as they were looked at; or more than fit into a page.
    rows: usize,
    /// How many of its events are for this sink, and are read already.
    pub(super) shown: u32,
    pub(super) done: u32,
}

impl Lookout {
    /// For a reader that stands there.
    pub(super) fn turn_to(&mut self, stream: &Stream, place: &Place) {
        if !self.is_of(place) {
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

    /// Looks on until a next transaction is known, but no further than a stretch. Returns how many rows that were. The next ones are
    /// to be read by so many rows.
    pub(super) fn look(
        &mut self,
        spi: &Spi,
        stream: &Stream,
        window: &Window,
        limit: usize,
        want: &Want,
    ) -> usize {
        // Where parts are not told, it is enough to know that a transaction does not fit.
        let counted = if want.text {
            i64::MAX
        } else {
            i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1)
        };
        if !self.late {
            self.look_at_late(spi, stream, window, counted, want);
        }
        if self.through || self.next().is_some() {
            return 0;
        }
        let longest = LONGEST_LOOK.max(limit.min(10 * LONGEST_LOOK));
        self.stretch = (2 * self.stretch).clamp(limit.min(longest), longest);
        self.look_on(spi, stream, window, counted, want)
    }

    /// Looks at the transactions that were running when the window before was opened.
    fn look_at_late(
        &mut self,
        spi: &Spi,
        stream: &Stream,
        window: &Window,
        limit: i64,
        want: &Want,
    ) {
        self.late = true;
        let late = window.late();
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
            Arg::I64(Some(self.of.as_ref().map_or(0, |of| of.mark.group))),
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

    /// The transaction that a mark lies within, which comes next; none if nothing of it is there any more.
    pub(super) fn resume(
        &mut self,
        spi: &Spi,
        stream: &Stream,
        mark: Mark,
        want: &Want,
    ) -> Option<Met> {
        if let Some(met) = self.met.get(&mark.group) {
            return Some(met.clone());
        }
        let txid = txid_at(spi, stream, mark)?;
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
        self.met.insert(mark.group, met.clone());
        Some(met)
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

impl Lookout {
    /// The last seq and the id of the next transaction, if a reader that stands there can get only a part of it at a time.
    pub(crate) fn larger_than(&self, place: &Place, limit: usize) -> Option<(i64, u64)> {
        let (last, met) = self.next().filter(|_| self.is_of(place))?;
        (met.rows > limit).then_some((last, met.txid))
    }

    fn is_of(&self, place: &Place) -> bool {
        let fits = |of: &Place| Arc::ptr_eq(&of.window, &place.window) && of.mark == place.mark;
        self.of.as_ref().is_some_and(fits)
    }

    /// The transactions that come next and fit into a page of so many rows together, or the one that does not by itself, with their last
    /// seqs.
    pub(super) fn firsts(&self, limit: usize) -> Vec<(i64, Met)> {
        let mut rows = 0;
        let mut firsts = Vec::new();
        for (&last, met) in &self.met {
            rows += met.rows;
            if !(self.through || last <= self.upto) || (!firsts.is_empty() && rows > limit) {
                break;
            }
            firsts.push((last, met.clone()));
        }
        firsts
    }

    /// Whether nothing is left of the window.
    pub(super) fn is_empty(&self) -> bool {
        self.through && self.met.is_empty()
    }

    /// A transaction was read to its end.
    pub(super) fn has_read(&mut self, last: i64) {
        self.met.remove(&last);
    }

    /// A transaction was read in part.
    pub(super) fn has_read_in_part(&mut self, last: i64, met: Met) {
        self.met.insert(last, met);
    }

    /// The reader stands there now.
    pub(super) fn has_come_to(&mut self, place: &Place, mark: Mark) {
        let place = place.clone();
        self.of = Some(Place { mark, ..place });
    }
}
