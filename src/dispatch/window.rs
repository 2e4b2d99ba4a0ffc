//! The commit order: a stream read window by window.
//!
//! A sink's cursor holds a snapshot `done`: everything visible in it is delivered. A window is what
//! is visible in a newer snapshot `upto` and not in `done`; it is delivered in order of `seq`, and
//! then `done` becomes `upto`. If a change B of a row follows a change A, then B's transaction saw
//! A's commit, or is A's own: no snapshot shows B without A, and B's `seq`, drawn under the row's
//! lock, is the greater one. So the changes of a row arrive in the order in which they were made,
//! and a transaction that is still open holds back nothing but its own events.
//!
//! Reading a window costs what is read, not what the window holds or the table: what lies in it is
//! (a) everything with `txid >= done.xmax` that `upto` sees, found by `seq` between two bounds, and
//! (b) the few transactions that were running in `done` and are finished in `upto`, found by their
//! exact ids.
//!
//! The lower bound is the delicate one. `done.xmax` is the last *finished* transaction plus one,
//! not the next one: transactions above it may have been running, with events already numbered,
//! when `done` was taken. So the sequence's value at that moment is no bound. But a transaction has
//! its id before it draws its first number. Whoever reads the sequence's value v and *afterwards*
//! the next transaction id n knows that every transaction from n on draws numbers above v. That v
//! bounds any window with `done.xmax >= n` from below: see [`Floors`].

use std::sync::Arc;

use super::snapshot::Snapshot;

/// In which order a window is delivered, and what of it is put together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Grouping {
    /// Event by event, in order of seq.
    #[default]
    Event,
    /// By whole transactions, in order of each one's last seq.
    Transaction,
}

impl Grouping {
    /// As a sink is told.
    pub fn name(self) -> &'static str {
        match self {
            Grouping::Event => "event",
            Grouping::Transaction => "transaction",
        }
    }

    /// What is told so, if anything is.
    pub fn named(name: &str) -> Option<Self> {
        [Grouping::Event, Grouping::Transaction]
            .into_iter()
            .find(|grouping| grouping.name() == name)
    }
}

/// A place within a window. Events are ordered by `(group, seq)`; in whole-transaction order the
/// group is the last seq of the event's transaction, otherwise its own seq. So it means something
/// only together with the order in which its window is read: [`Window::grouping`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Mark {
    pub group: i64,
    pub seq: i64,
}

impl Mark {
    /// Behind everything in a window.
    pub const END: Mark = Mark {
        group: i64::MAX,
        seq: i64::MAX,
    };

    /// Whether it lies within a transaction.
    pub fn is_within(self) -> bool {
        self.seq < self.group
    }
}

/// What is read between two snapshots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    /// Counts the windows of a sink.
    pub number: i64,
    /// In which order it is read, from its beginning to its end: a sink that is to be read otherwise
    /// is so from its next window on.
    pub grouping: Grouping,
    pub done: Snapshot,
    pub upto: Snapshot,
    /// No event of part (a) has a seq at or below.
    pub floor: i64,
    /// No event of the window has a seq above.
    pub ceiling: i64,
    /// The floor of the window that follows.
    pub next_floor: i64,
}

impl Window {
    /// A window with nothing in it, after everything that `done` sees.
    pub fn empty(done: Snapshot, floor: i64) -> Self {
        Self {
            number: 0,
            grouping: Grouping::default(),
            upto: done.clone(),
            done,
            floor,
            ceiling: floor,
            next_floor: floor,
        }
    }

    /// The window after this one, up to a newer snapshot, to be read in this order. `ceiling` is the
    /// sequence's value read after that snapshot was taken.
    pub fn next(
        &self,
        grouping: Grouping,
        upto: Snapshot,
        ceiling: i64,
        next_floor: Option<i64>,
    ) -> Self {
        Self {
            number: self.number + 1,
            grouping,
            done: self.upto.clone(),
            floor: self.next_floor,
            // A floor of an older snapshot holds for a newer one too.
            next_floor: next_floor.unwrap_or(self.next_floor).max(self.next_floor),
            upto,
            ceiling,
        }
    }

    /// Transactions of part (b).
    pub fn late(&self) -> Vec<u64> {
        self.done.finished_by(&self.upto)
    }

    /// Whether an event of this transaction belongs to the window.
    pub fn holds(&self, txid: u64) -> bool {
        self.upto.sees(txid) && !self.done.sees(txid)
    }
}

/// Where a reader of a stream stands: everything before the window and everything in it up to the
/// mark is done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    pub window: Arc<Window>,
    pub mark: Mark,
}

impl Place {
    pub fn at_start_of(window: Window) -> Self {
        Self {
            window: Arc::new(window),
            mark: Mark::default(),
        }
    }

    /// The same, with all of the window done.
    pub fn at_end(self) -> Self {
        Self {
            mark: Mark::END,
            ..self
        }
    }
}

/// Samples of a stream's sequence, taken to bound windows from below.
#[derive(Debug, Default)]
pub struct Floors {
    samples: Vec<Sample>,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    next_xid: u64,
    seq: i64,
}

/// Enough for the time that it takes a transaction id to finish; more would be older than needed.
const SAMPLES: usize = 64;

impl Floors {
    /// Remembers that the sequence stood at `seq` and that, read afterwards, the next transaction
    /// id was `next_xid`.
    pub fn sample(&mut self, seq: i64, next_xid: u64) {
        // Of two samples for the same id the later one says more; when there are too many, the old
        // ones come true sooner.
        if self
            .samples
            .last()
            .is_some_and(|last| last.next_xid == next_xid)
            || self.samples.len() == SAMPLES
        {
            self.samples.pop();
        }
        self.samples.push(Sample { next_xid, seq });
    }

    /// The sample that is the next to come true for snapshots after one with this `xmax`, as (seq, next id): worth keeping by a
    /// reader that keeps no others.
    pub fn pending(&self, xmax: u64) -> Option<(i64, u64)> {
        let pending = self
            .samples
            .iter()
            .find(|sample| sample.next_xid > xmax)
            .or(self.samples.last())?;
        Some((pending.seq, pending.next_xid))
    }

    /// The highest floor known for windows that follow a snapshot with this `xmax`. Forgets what it
    /// supersedes.
    pub fn below(&mut self, xmax: u64) -> Option<i64> {
        let best = self
            .samples
            .iter()
            .rposition(|sample| sample.next_xid <= xmax)?;
        self.samples.drain(..best);
        Some(self.samples[0].seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(text: &str) -> Snapshot {
        text.parse().unwrap()
    }

    #[test]
    fn a_window_holds_what_became_visible() {
        let first = Window::empty(snapshot("10:20:10,14"), 5);
        let window = first.next(Grouping::Event, snapshot("14:30:14,25"), 90, None);
        assert_eq!(window.late(), vec![10]);
        for (xid, inside) in [
            (9, false),
            (10, true),
            (12, false),
            (14, false),
            (20, true),
            (25, false),
            (29, true),
            (30, false),
        ] {
            assert_eq!(window.holds(xid), inside, "{xid}");
        }
        assert_eq!(
            (
                window.number,
                window.floor,
                window.next_floor,
                window.ceiling
            ),
            (1, 5, 5, 90)
        );
    }

    #[test]
    fn a_floor_holds_only_for_snapshots_that_have_finished_what_ran_when_it_was_sampled() {
        let mut floors = Floors::default();
        floors.sample(100, 50);
        floors.sample(200, 60);
        assert_eq!(floors.below(49), None);
        assert_eq!(floors.below(55), Some(100));
        assert_eq!(floors.below(60), Some(200));
        assert_eq!(floors.below(60), Some(200));
    }

    #[test]
    fn samples_do_not_pile_up_and_the_oldest_stays() {
        let mut floors = Floors::default();
        for n in 0..1000 {
            floors.sample(n, 50 + n.cast_unsigned());
        }
        assert!(floors.samples.len() <= SAMPLES);
        assert_eq!(floors.below(50), Some(0));
    }

    #[test]
    fn a_floor_never_goes_back() {
        let window = Window::empty(Snapshot::empty(), 0)
            .next(Grouping::Transaction, snapshot("9:9:"), 10, Some(7))
            .next(Grouping::Event, snapshot("12:12:"), 20, None);
        assert_eq!((window.floor, window.next_floor), (7, 7));
    }
}
