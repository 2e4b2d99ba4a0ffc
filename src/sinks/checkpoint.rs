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
//!   event, in whichever window it is read again. It is small enough for a receiver that keeps but one text. It is handed out only
//!   with deliveries before which nothing is outstanding. Kind `http` does this.
//!
//! Places are transaction ids and numbers, and a copy of the database gives them out again: an older copy that was put back, a clone
//! beside the original, a standby that was promoted before it had everything. What one of these delivers must not pass for delivered
//! in another. Identifier and timeline of the cluster do not tell them apart, and nothing that is written when a sink is taken over
//! does, for what is copied later holds it, too. So a place names a [`Witness`]: of the events that were handed over, the one with the
//! greatest number. Numbers are drawn before their event is written, so a copy that holds this very event gives out greater ones only,
//! and what it has with smaller ones is what the original has. There the place counts, for events up to that number. Where the
//! witness is not found it counts for nothing: better again than never. It may have been removed by retention, but then everything up
//! to there has been passed by the cursor.
//!
//! Its own places a process knows by the word with which it has taken the sink over, and need not look.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::batch::Origin;
use crate::dispatch::{Grouping, Mark, Place, Snapshot};
use crate::envelope::{Event, Position};

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

/// An event, by which a history is known: no other one has its number, its transaction, its id and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Witness {
    pub(crate) seq: i64,
    mark: String,
}

impl Witness {
    pub(crate) fn new(event: &Event) -> Self {
        let mut hash = Sha256::new();
        hash.update(event.position.txid.to_be_bytes());
        hash.update(event.position.seq.to_be_bytes());
        hash.update(event.time.to_be_bytes());
        hash.update(&event.id);
        let digest = hash.finalize();
        let digits = digest[..MARK / 2].iter();
        Self {
            seq: event.position.seq,
            mark: digits.map(|byte| format!("{byte:02x}")).collect(),
        }
    }

    /// The one of them with the greatest number.
    pub(super) fn among(events: &[Arc<Event>]) -> Option<Self> {
        let last = events.iter().max_by_key(|event| event.position.seq)?;
        Some(Self::new(last))
    }
}

/// Hexadecimal digits of a mark.
const MARK: usize = 16;

/// A place that a destination has come to, as one line of visible ASCII.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reached {
    life: String,
    cluster: String,
    takeover: String,
    done: Snapshot,
    upto: Snapshot,
    /// Of the window between the two, everything up to this seq.
    seq: i64,
    witness: Witness,
}

/// Before every event.
const NOTHING: i64 = i64::MIN;

/// What a place says to a sink.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Counts,
    /// It is another sink's, or another history's.
    Foreign,
    /// It depends on whether this database holds its witness.
    Depends(Witness),
}

impl Reached {
    pub(super) fn new(origin: &Origin, place: &Place, witness: Witness) -> Self {
        let window = &place.window;
        let (done, seq) = match place.mark {
            Mark::END => (&window.upto, NOTHING),
            // A later transaction may have smaller numbers: a seq does not say what is behind it.
            _ if window.grouping == Grouping::Transaction => (&window.done, NOTHING),
            Mark { seq, .. } => (&window.done, seq),
        };
        Self {
            life: origin.life.clone(),
            cluster: origin.cluster.clone(),
            takeover: origin.takeover.clone(),
            done: done.clone(),
            upto: window.upto.clone(),
            seq,
            witness,
        }
    }

    pub(super) fn witness(&self) -> &Witness {
        &self.witness
    }

    pub(super) fn standing(&self, origin: &Origin) -> Standing {
        if self.life != origin.life || self.cluster != origin.cluster {
            return Standing::Foreign;
        }
        if self.takeover == origin.takeover {
            return Standing::Counts;
        }
        match &origin.verified {
            Some((witness, true)) if *witness == self.witness => Standing::Counts,
            Some((witness, false)) if *witness == self.witness => Standing::Foreign,
            _ => Standing::Depends(self.witness.clone()),
        }
    }

    /// Whether an event lies behind it, where it [counts](Standing::Counts).
    pub(super) fn covers(&self, event: &Event) -> bool {
        let Position { txid, seq } = event.position;
        let is_behind = self.done.sees(txid) || (self.upto.sees(txid) && seq <= self.seq);
        is_behind && seq <= self.witness.seq
    }
}

const FORM: &str = "2";

impl fmt::Display for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            life,
            cluster,
            takeover,
            done,
            upto,
            seq,
            witness,
        } = self;
        write!(
            f,
            "{FORM}/{life}/{cluster}/{takeover}/{done}/{upto}/{seq}/{}/{}",
            witness.seq, witness.mark
        )
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
            cluster: next()?.to_owned(),
            takeover: next()?.to_owned(),
            done: next()?.parse().map_err(|_| NotReached)?,
            upto: next()?.parse().map_err(|_| NotReached)?,
            seq: next()?.parse().map_err(|_| NotReached)?,
            witness: Witness {
                seq: next()?.parse().map_err(|_| NotReached)?,
                mark: next()?.to_owned(),
            },
        };
        match parts.next() {
            None if reached.witness.mark.len() == MARK => Ok(reached),
            _ => Err(NotReached),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::Window;
    use crate::sinks::http::tests::event;

    fn origin() -> Origin {
        Origin {
            sink: "s".into(),
            life: "5f3c".into(),
            cluster: "7".into(),
            takeover: "b1".into(),
            verified: None,
        }
    }

    fn place(mark: Mark) -> Place {
        place_in(Grouping::Event, mark)
    }

    fn place_in(grouping: Grouping, mark: Mark) -> Place {
        let snapshot = |text: &str| text.parse::<Snapshot>().unwrap();
        let first = Window::empty(snapshot("10:20:10,14"), 0);
        Place {
            window: Arc::new(first.next(grouping, snapshot("14:30:14,25"), 90, None)),
            mark,
        }
    }

    /// Of all events that were handed over.
    fn last() -> Witness {
        Witness::new(&at(12, 99))
    }

    fn at(txid: u64, seq: i64) -> Event {
        Event {
            position: Position { txid, seq },
            ..event(1)
        }
    }

    #[test]
    fn a_place_covers_what_is_behind_it_and_not_what_is_numbered_below_it() {
        let reached = Reached::new(&origin(), &place(Mark { group: 50, seq: 50 }), last());
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
        let through = Reached::new(&origin(), &place(Mark::END), last());
        assert!(through.covers(&at(22, 51)) && !through.covers(&at(25, 51)));
        for mark in [Mark { group: 60, seq: 50 }, Mark { group: 50, seq: 50 }] {
            let place = place_in(Grouping::Transaction, mark);
            let by_transaction = Reached::new(&origin(), &place, last());
            assert!(by_transaction.covers(&at(12, 50)) && !by_transaction.covers(&at(22, 50)));
        }
    }

    #[test]
    fn a_place_is_told_and_read_again() {
        for mark in [Mark { group: 50, seq: 50 }, Mark::END, Mark::default()] {
            let reached = Reached::new(&origin(), &place(mark), last());
            let text = reached.to_string();
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic()));
            assert_eq!(text.parse(), Ok(reached));
        }
        for text in [
            "",
            "731:12",
            "1/a/b/3:3:/3:3:/5",
            "2/a/b/t/c/d/5/9/0123456789abcdef",
            "2/a/b/t/3:3:/3:3:/5",
            "2/a/b/t/3:3:/3:3:/5/9/0123456789abcde",
            "2/a/b/t/3:3:/3:3:/5/9/0123456789abcdef/6",
        ] {
            assert_eq!(text.parse::<Reached>(), Err(NotReached), "{text}");
        }
    }

    #[test]
    fn what_is_numbered_above_the_witness_is_not_covered() {
        let witness = Witness::new(&at(12, 40));
        let reached = Reached::new(&origin(), &place(Mark::END), witness);
        assert!(reached.covers(&at(9, 40)) && !reached.covers(&at(9, 41)));
    }

    #[test]
    fn a_place_counts_where_its_history_is_known() {
        let reached = Reached::new(&origin(), &place(Mark::END), last());
        let standing = |change: fn(&mut Origin)| {
            let mut origin = origin();
            change(&mut origin);
            reached.standing(&origin)
        };
        assert_eq!(standing(|_| {}), Standing::Counts);
        assert_eq!(
            standing(|origin| origin.life = "9".into()),
            Standing::Foreign
        );
        assert_eq!(
            standing(|origin| origin.cluster = "8".into()),
            Standing::Foreign
        );
        let after = |origin: &mut Origin| origin.takeover = "b2".into();
        let depends = Standing::Depends(last());
        let mut other = origin();
        after(&mut other);
        assert_eq!(reached.standing(&other), depends);
        for (verified, expected) in [
            ((last(), true), Standing::Counts),
            ((last(), false), Standing::Foreign),
            ((Witness::new(&at(12, 98)), true), Standing::Depends(last())),
        ] {
            other.verified = Some(verified);
            assert_eq!(reached.standing(&other), expected);
        }
    }

    #[test]
    fn no_other_event_is_the_witness() {
        let one = at(700, 1);
        let others = [
            at(701, 1),
            at(700, 2),
            Event {
                id: "evt_2".into(),
                ..at(700, 1)
            },
            Event {
                time: 1,
                ..at(700, 1)
            },
        ];
        for other in others {
            assert_ne!(Witness::new(&one), Witness::new(&other));
        }
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
