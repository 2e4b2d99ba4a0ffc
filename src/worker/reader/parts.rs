//! The parts of transactions that do not fit into one entry: of such a transaction each event says the how manieth it is, and of how
//! many.

use super::super::shaping::Shaped;
use super::Reader;
use crate::dispatch::{Grouping, Mark};
use crate::envelope::Part;
use crate::pg::spi::Spi;
use crate::store::transactions;

/// How far the events of a transaction that is larger than one entry have been numbered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbered {
    upto: Mark,
    index: u32,
    count: u32,
}

/// How many events of a transaction, of which it can get only a part at a time, a sink gets that chooses. Counted a stretch a pass, for
/// the transaction may be as large as can be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counting {
    txid: u64,
    last: i64,
    /// Where the reader stood in it when the pass began.
    at: i64,
    /// Counted up to this seq; none when all is counted.
    behind: Option<i64>,
    count: u32,
    /// How many of them it had passed by then.
    before: u32,
}

impl Counting {
    fn new(txid: u64, last: i64, at: i64) -> Self {
        Self {
            txid,
            last,
            at,
            behind: Some(0),
            count: 0,
            before: 0,
        }
    }

    fn is_for(&self, group: &Group) -> bool {
        self.last == group.last && self.at == group.behind
    }
}

/// Events of one transaction that go into one entry, as far as they have been read.
pub(super) struct Group {
    pub(super) events: Vec<Shaped>,
    /// The last seq of the transaction; of none, 0.
    pub(super) last: i64,
    /// Events up to this seq are not in this pass.
    behind: i64,
    /// How many events of it, and of those that the sink gets, come before this group; as far as that is known.
    index: Option<u32>,
    /// How many of it the sink gets, if that is known.
    count: Option<u32>,
}

impl Group {
    /// What goes on behind a mark.
    pub(super) fn after(mark: Mark, numbered: Option<Numbered>) -> Self {
        let numbered = numbered.filter(|numbered| numbered.upto == mark);
        Self {
            events: Vec::new(),
            last: if mark.is_within() { mark.group } else { 0 },
            behind: mark.seq,
            index: numbered.map(|numbered| numbered.index),
            count: numbered.map(|numbered| numbered.count),
        }
    }

    /// The next transaction.
    pub(super) fn begin(&mut self, last: i64) {
        self.last = last;
        self.behind = 0;
        self.index = Some(0);
        self.count = None;
    }

    /// What the next pass needs to know if it goes on at this mark.
    fn numbered(&self, upto: Mark) -> Option<Numbered> {
        (self.last == upto.group).then_some(Numbered {
            upto,
            index: self.index?,
            count: self.count?,
        })
    }
}

impl Reader {
    /// Whether it numbers the parts of transactions: where it chooses, the store cannot.
    pub(super) fn numbers(&self) -> bool {
        self.want.text && self.chooses()
    }

    /// Whether all is counted that has to be before the next part of a transaction can be numbered. Goes on with that, if not.
    pub(super) fn has_counted(&mut self, spi: &Spi, group: &Group, wanted: usize) -> bool {
        if !self.numbers() || self.grouping() == Grouping::Event {
            return true;
        }
        let mark = self.place.mark;
        let begun = mark.is_within() && group.last == mark.group;
        let large = if !mark.is_within() {
            self.lookout
                .larger_than(&self.place, wanted.max(self.batch_size))
        } else if begun && group.index.is_some() && group.count.is_some() {
            None
        } else {
            let txid = transactions::txid_at(spi, &self.stream, mark);
            txid.map(|txid| (mark.group, txid))
        };
        let Some((last, txid)) = large else {
            return true;
        };
        let at = if begun { group.behind } else { 0 };
        let mut counting = self
            .counting
            .filter(|of| of.last == last && of.at == at)
            .unwrap_or(Counting::new(txid, last, at));
        self.count_on(spi, &mut counting);
        self.counting = Some(counting);
        counting.behind.is_none()
    }

    fn count_on(&self, spi: &Spi, counting: &mut Counting) {
        let Some(behind) = counting.behind else {
            return;
        };
        let is_before = behind < counting.at;
        let upto = if is_before {
            counting.at
        } else {
            counting.last
        };
        let stretch =
            transactions::stretch(spi, &self.stream, counting.txid, behind, upto, &self.want);
        let count = match &self.shaping {
            Some(shaping) => shaping.apply(stretch.found).len(),
            None => stretch.found.len(),
        };
        counting.count = counting
            .count
            .saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
        if is_before {
            counting.before = counting.count;
        }
        counting.behind = stretch.next.or(is_before.then_some(counting.at));
    }

    /// What the store has numbered is the transaction as it was written; where a sink gets a part of that, its own events count.
    pub(super) fn number(&self, spi: &Spi, group: &mut Group, complete: bool) {
        let Some((first, _)) = group.events.first() else {
            return;
        };
        // One that is larger than one read was counted before; of any other one all is at hand.
        let counted = || {
            let txid = first.event.position.txid;
            let counting = self.counting.filter(|of| of.is_for(group));
            let mut counting = counting.unwrap_or(Counting::new(txid, group.last, group.behind));
            while counting.behind.is_some() {
                self.count_on(spi, &mut counting);
            }
            counting
        };
        let before = group.index.unwrap_or_else(|| counted().before);
        let upto = before.saturating_add(u32::try_from(group.events.len()).unwrap_or(u32::MAX));
        let whole = if complete {
            upto
        } else {
            group.count.unwrap_or_else(|| counted().count)
        };
        for ((found, _), index) in group.events.iter_mut().zip(before + 1..) {
            found.event.part = Some(Part {
                index,
                count: whole,
            });
        }
        group.index = Some(upto);
        group.count = Some(whole);
    }

    /// What the next pass needs to know of the transaction that this one ends within.
    pub(super) fn numbered_by(&self, group: &mut Group) -> Option<Numbered> {
        if self.place.mark.is_within() {
            if group.last != self.place.mark.group {
                group.begin(self.place.mark.group);
            }
            let counted = self.counting.filter(|of| of.is_for(group));
            if let Some(counted) = counted.filter(|of| of.behind.is_none()) {
                group.index.get_or_insert(counted.before);
                group.count.get_or_insert(counted.count);
            }
        }
        group.numbered(self.place.mark)
    }
}
