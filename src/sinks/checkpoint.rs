//! A destination's own checkpoint: what it says that it has, whatever the cursor says.
//!
//! The cursor is saved after a delivery, so it may be behind what was taken: after a crash in between, or when it was lost or comes
//! from an old dump. A destination that remembers what it took, in the very transaction in which it took it, is asked when the sink
//! is taken over, and what it has counts as delivered without being sent again.
//!
//! What must be remembered? Not a position: events are delivered in commit order, window by window (`dispatch/window.rs`), and one
//! that comes later may have a smaller `(txid, seq)`. To skip by "not above the last one" would lose it. Two things are safe:
//!
//! - *The events themselves* ([`mark_of`]): a destination that can keep as much as a mark per event knows exactly what it has, in
//!   whatever order it came: also a single event that was tried ahead of others, also a dead letter that was delivered later. The
//!   mark is made of the event's `seq` and its id. Both survive dump and restore, and no two events share them: the events that
//!   draw the numbers of lost ones, after an old dump was restored, have ids of their own. Kind `postgres` does this.
//! - *A place* ([`Reached`]): a window's two snapshots and how far it is through. Whether an event is behind it can be said of any
//!   event, in whichever window it is read again. It is small enough for a receiver that keeps but one text. It means something only
//!   where transaction ids are those of the same history, so it names the sink's life, the cluster and the timeline, and one of
//!   another history counts for nothing: better again than never. It is handed out only with deliveries before which nothing is
//!   outstanding. Kind `http` does this.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::batch::Origin;
use crate::dispatch::{Mark, Place, Snapshot};
use crate::envelope::Event;

/// Eight bytes that stand for one event of a sink.
///
/// They are compared with those of events whose numbers lie nearby alone, so that two different events are taken for one less than
/// once in 2^50 redelivered batches.
pub(super) fn mark_of(event: &Event) -> [u8; 8] {
    let mut hash = Sha256::new();
    hash.update(event.position.seq.to_be_bytes());
    hash.update(&event.id);
    let mut mark = [0; 8];
    mark.copy_from_slice(&hash.finalize()[..8]);
    mark
}

/// A place that a destination has come to, as one line of visible ASCII.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reached {
    life: String,
    history: String,
    done: Snapshot,
    upto: Snapshot,
    /// Of the window between the two, everything up to this seq.
    seq: i64,
}

/// Before every event.
const NOTHING: i64 = i64::MIN;

impl Reached {
    pub(super) fn new(origin: &Origin, place: &Place) -> Self {
        let window = &place.window;
        let (done, seq) = match place.mark {
            Mark::END => (&window.upto, NOTHING),
            // Within a transaction: a seq alone does not say what is behind it.
            Mark { group, seq } if group != seq => (&window.done, NOTHING),
            Mark { seq, .. } => (&window.done, seq),
        };
        Self {
            life: origin.life.clone(),
            history: origin.history.clone(),
            done: done.clone(),
            upto: window.upto.clone(),
            seq,
        }
    }

    /// Whether it speaks of the same sink and the same history.
    pub(super) fn is_of(&self, origin: &Origin) -> bool {
        self.life == origin.life && self.history == origin.history
    }

    /// Whether an event lies behind it.
    pub(super) fn covers(&self, event: &Event) -> bool {
        let txid = event.position.txid;
        self.done.sees(txid) || (self.upto.sees(txid) && event.position.seq <= self.seq)
    }
}

const FORM: &str = "1";

impl fmt::Display for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            life,
            history,
            done,
            upto,
            seq,
        } = self;
        write!(f, "{FORM}/{life}/{history}/{done}/{upto}/{seq}")
    }
}

/// A text that no sink has written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotReached;

impl FromStr for Reached {
    type Err = NotReached;

    fn from_str(text: &str) -> Result<Self, NotReached> {
        let mut parts = text.split('/');
        let mut next = || parts.next().ok_or(NotReached);
        if next()? != FORM {
            return Err(NotReached);
        }
        let reached = Self {
            life: next()?.to_owned(),
            history: next()?.to_owned(),
            done: next()?.parse().map_err(|_| NotReached)?,
            upto: next()?.parse().map_err(|_| NotReached)?,
            seq: next()?.parse().map_err(|_| NotReached)?,
        };
        match parts.next() {
            None => Ok(reached),
            Some(_) => Err(NotReached),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::dispatch::Window;
    use crate::envelope::Position;
    use crate::sinks::http::tests::event;

    fn origin() -> Origin {
        Origin {
            sink: "s".into(),
            life: "5f3c".into(),
            history: "7.1".into(),
        }
    }

    fn place(mark: Mark) -> Place {
        let snapshot = |text: &str| text.parse::<Snapshot>().unwrap();
        let first = Window::empty(snapshot("10:20:10,14"), 0);
        Place {
            window: Arc::new(first.next(snapshot("14:30:14,25"), 90, None)),
            mark,
        }
    }

    fn at(txid: u64, seq: i64) -> Event {
        Event {
            position: Position { txid, seq },
            ..event(1)
        }
    }

    #[test]
    fn a_place_covers_what_is_behind_it_and_not_what_is_numbered_below_it() {
        let reached = Reached::new(&origin(), &place(Mark { group: 50, seq: 50 }));
        for (txid, seq, covered) in [
            (9, 7, true),
            (12, 99, true),
            // Finished late, and behind the mark or not.
            (10, 49, true),
            (10, 51, false),
            (22, 50, true),
            (22, 51, false),
            // Still running in the newer snapshot, although its number and its id are smaller.
            (14, 3, false),
            (25, 40, false),
            (31, 1, false),
        ] {
            assert_eq!(reached.covers(&at(txid, seq)), covered, "{txid}:{seq}");
        }
        let through = Reached::new(&origin(), &place(Mark::END));
        assert!(through.covers(&at(22, 51)) && !through.covers(&at(25, 51)));
        let by_transaction = Reached::new(&origin(), &place(Mark { group: 60, seq: 50 }));
        assert!(by_transaction.covers(&at(12, 50)) && !by_transaction.covers(&at(22, 50)));
    }

    #[test]
    fn a_place_is_told_and_read_again() {
        for mark in [Mark { group: 50, seq: 50 }, Mark::END, Mark::default()] {
            let reached = Reached::new(&origin(), &place(mark));
            let text = reached.to_string();
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic()));
            assert_eq!(text.parse(), Ok(reached));
        }
        for text in [
            "",
            "731:12",
            "1/a/b/c/d/5",
            "2/a/b/3:3:/3:3:/5",
            "1/a/b/3:3:/3:3:/5/6",
        ] {
            assert_eq!(text.parse::<Reached>(), Err(NotReached), "{text}");
        }
    }

    #[test]
    fn another_life_or_history_counts_for_nothing() {
        let reached = Reached::new(&origin(), &place(Mark::END));
        assert!(reached.is_of(&origin()));
        let another_life = Origin {
            life: "9".into(),
            ..origin()
        };
        let another_history = Origin {
            history: "7.2".into(),
            ..origin()
        };
        assert!(!reached.is_of(&another_life) && !reached.is_of(&another_history));
    }

    #[test]
    fn events_that_share_a_number_or_an_id_have_marks_of_their_own() {
        let one = at(700, 1);
        let other_id = Event {
            id: "evt_2".into(),
            ..at(700, 1)
        };
        assert_ne!(mark_of(&one), mark_of(&other_id));
        assert_ne!(mark_of(&one), mark_of(&at(700, 2)));
        // A restored event has another transaction id.
        assert_eq!(mark_of(&one), mark_of(&at(900, 1)));
    }
}
