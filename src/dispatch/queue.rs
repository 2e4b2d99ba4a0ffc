//! The pending events in delivery order, and what is known of each. It keeps marks and lets go of
//! what is settled; when anything is tried, and what a failure means, is decided elsewhere.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;

use super::backoff::Time;

/// An event, as far as the engine looks at it.
pub trait Item {
    /// What two events share when they are about the same thing: source and subject.
    type Key: Ord + Clone + fmt::Debug;
    /// This event's.
    fn key(&self) -> &Self::Key;

    /// How many events it stands for; a batch holds no more than its size of them, unless a single
    /// item does.
    fn weight(&self) -> usize {
        1
    }
}

/// An event that has left the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled<T> {
    /// The event.
    pub item: T,
    /// What became of it.
    pub fate: Fate,
}

/// What became of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The sink took it.
    Delivered,
    /// The sink takes others, but never this one.
    Dead {
        /// Its latest failure, for people to read.
        error: String,
        /// How often it failed by itself, or was named in a partial outcome, before it was given
        /// up; at least 1.
        attempts: u32,
    },
    /// It waits beside the stream, behind earlier events of its key, if there are any. With its
    /// failures so far.
    Parked(Trial),
}

/// The failures of one event so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    /// How often it failed by itself, or was named in a partial outcome.
    pub attempts: u32,
    /// How many of them may be the fault of an outage.
    pub excused: u32,
    /// Not to be tried as the head before.
    pub due: Option<Time>,
    /// The latest of them.
    pub error: Option<String>,
}

impl Trial {
    /// Counts a failure.
    pub(super) fn failed(&mut self, error: &str) {
        self.attempts = self.attempts.saturating_add(1);
        self.error = Some(error.to_owned());
    }

    /// An outage has just ended, or what looked like one. It excuses once: to an event that goes on
    /// failing, others that fail beside it are no help.
    pub(super) fn excuse(&mut self) {
        if self.excused == 0 {
            self.excused = self.attempts;
        }
    }

    /// How many failures speak against the event.
    pub(super) fn evidence(&self) -> u32 {
        self.attempts - self.excused
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Mark {
    Pending,
    Through,
    Condemned,
    Parked,
}

#[derive(Debug)]
pub(super) struct Entry<T> {
    item: T,
    mark: Mark,
    pub(super) trial: Trial,
    /// Its failure was named by a sink that took others of the same batch.
    pub(super) named: bool,
}

impl<T> Entry<T> {
    pub(super) fn item(&self) -> &T {
        &self.item
    }

    pub(super) fn is_pending(&self) -> bool {
        self.mark == Mark::Pending
    }

    /// Pending, and has never failed by itself: may go into a batch.
    pub(super) fn is_untried(&self) -> bool {
        self.is_pending() && self.trial.attempts == 0
    }

    pub(super) fn went_through(&mut self) {
        self.mark = Mark::Through;
    }

    /// It will be dead when it comes to the head.
    pub(super) fn condemn(&mut self, error: &str) {
        self.mark = Mark::Condemned;
        self.trial.error = Some(error.to_owned());
    }

    fn settle(self) -> Settled<T> {
        let fate = match self.mark {
            Mark::Parked => Fate::Parked(self.trial),
            Mark::Condemned => Fate::Dead {
                error: self.trial.error.unwrap_or_default(),
                attempts: self.trial.attempts,
            },
            Mark::Pending | Mark::Through => Fate::Delivered,
        };
        Settled {
            item: self.item,
            fate,
        }
    }
}

/// Invariant: the head, if there is one, is pending; what decides on it is followed by `settle`.
#[derive(Debug)]
pub(super) struct Queue<T: Item> {
    entries: VecDeque<Entry<T>>,
    /// Events of these keys are parked, now and until further notice.
    held: BTreeSet<T::Key>,
    /// What is known of the head before it is pushed: after a restart.
    awaited: Trial,
}

impl<T: Item> Queue<T> {
    /// Empty; `awaited` belongs to the first event that will be pushed.
    pub(super) fn new(awaited: Trial) -> Self {
        Queue {
            entries: VecDeque::new(),
            held: BTreeSet::new(),
            awaited,
        }
    }

    /// How many events the entries stand for.
    pub(super) fn events(&self) -> usize {
        self.items().map(Item::weight).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// To be followed by [`settle`](Self::settle): an event of a key that is held may be at the head.
    pub(super) fn push(&mut self, item: T) {
        let trial = if self.is_empty() {
            std::mem::take(&mut self.awaited)
        } else {
            Trial::default()
        };
        let mark = if self.held.contains(item.key()) {
            Mark::Parked
        } else {
            Mark::Pending
        };
        self.entries.push_back(Entry {
            item,
            mark,
            trial,
            named: false,
        });
    }

    /// To be followed by [`settle`](Self::settle): it may be at the head.
    pub(super) fn push_through(&mut self, item: T) {
        self.push(item);
        if let Some(last) = self.entries.back_mut() {
            last.went_through();
        }
    }

    /// All of them, in order.
    pub(super) fn items(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(Entry::item)
    }

    /// The events that went through ahead of the head.
    pub(super) fn through(&self) -> impl Iterator<Item = &T> {
        self.entries
            .iter()
            .filter(|entry| entry.mark == Mark::Through)
            .map(Entry::item)
    }

    pub(super) fn get(&self, offset: usize) -> Option<&Entry<T>> {
        self.entries.get(offset)
    }

    pub(super) fn get_mut(&mut self, offset: usize) -> Option<&mut Entry<T>> {
        self.entries.get_mut(offset)
    }

    pub(super) fn range_mut(&mut self, range: Range<usize>) -> impl Iterator<Item = &mut Entry<T>> {
        self.entries.range_mut(range)
    }

    /// The failures of the head, or of the event that is to become it.
    pub(super) fn head_trial(&self) -> &Trial {
        self.entries
            .front()
            .map_or(&self.awaited, |head| &head.trial)
    }

    pub(super) fn head_trial_mut(&mut self) -> &mut Trial {
        match self.entries.front_mut() {
            Some(head) => &mut head.trial,
            None => &mut self.awaited,
        }
    }

    /// Whether an event before the one at `offset` is pending that has the same key.
    pub(super) fn overtakes(&self, offset: usize) -> bool {
        self.entries.get(offset).is_some_and(|entry| {
            let mut before = self.entries.iter().take(offset);
            before.any(|other| other.is_pending() && other.item.key() == entry.item.key())
        })
    }

    /// From now on events of this key are parked; what is pending of it, too.
    pub(super) fn hold(&mut self, key: &T::Key) {
        self.held.insert(key.clone());
        for entry in &mut self.entries {
            if entry.is_pending() && entry.item.key() == key {
                entry.mark = Mark::Parked;
            }
        }
    }

    /// Events of this key are not parked any more. False, and nothing changes, while one is among
    /// these.
    pub(super) fn release(&mut self, key: &T::Key) -> bool {
        let is_parked = |entry: &Entry<T>| entry.mark == Mark::Parked && entry.item.key() == key;
        if self.entries.iter().any(is_parked) {
            return false;
        }
        self.held.remove(key);
        true
    }

    /// The pending events of a stretch.
    pub(super) fn pending(&self, range: Range<usize>) -> impl Iterator<Item = &Entry<T>> {
        let end = range.end.min(self.entries.len());
        let entries = self.entries.range(range.start.min(end)..end);
        entries.filter(|entry| entry.is_pending())
    }

    /// The same, to be changed: it may come to stand for fewer events.
    pub(super) fn pending_mut(&mut self, range: Range<usize>) -> impl Iterator<Item = &mut T> {
        let end = range.end.min(self.entries.len());
        let entries = self.entries.range_mut(range.start.min(end)..end);
        let pending = entries.filter(|entry| entry.is_pending());
        pending.map(|entry| &mut entry.item)
    }

    /// The first pending event of each key but the head's, with their offsets.
    pub(super) fn first_of_their_keys(&self) -> impl Iterator<Item = (usize, &Entry<T>)> {
        let mut seen = BTreeSet::new();
        seen.extend(self.entries.front().map(|head| head.item.key()));
        self.behind_head()
            .filter(move |(_, entry)| seen.insert(entry.item.key()))
    }

    /// The pending events behind the head, with their offsets.
    pub(super) fn behind_head(&self) -> impl Iterator<Item = (usize, &Entry<T>)> {
        self.entries
            .iter()
            .enumerate()
            .skip(1)
            .filter(|(_, entry)| entry.is_pending())
    }

    /// How many of the first `end` events may still go into a batch.
    pub(super) fn untried_before(&self, end: usize) -> usize {
        self.entries
            .iter()
            .take(end)
            .filter(|entry| entry.is_untried())
            .count()
    }

    /// What can be handed over from the head on, in one piece: untried entries only, at most
    /// `limit` of them, and no more than `room` events unless the first stands for more; or a head
    /// that has failed before, alone. What is parked or decided in between is not meant.
    pub(super) fn first_batch(&self, limit: usize, room: usize) -> Range<usize> {
        let (mut untried, mut events) = (0usize, 0usize);
        let mut end = 1;
        for (offset, entry) in self.entries.iter().enumerate() {
            if !entry.is_pending() {
                continue;
            }
            events = events.saturating_add(entry.item.weight());
            if !entry.is_untried() || events > room || untried == limit {
                break;
            }
            untried += 1;
            end = offset + 1;
        }
        0..end
    }

    /// No event waits for its due time any more.
    pub(super) fn forget_due(&mut self) {
        self.awaited.due = None;
        for entry in &mut self.entries {
            entry.trial.due = None;
        }
    }

    /// Lets go of what is decided at the head.
    pub(super) fn settle(&mut self) -> Vec<Settled<T>> {
        let decided = self
            .entries
            .iter()
            .take_while(|entry| !entry.is_pending())
            .count();
        self.entries.drain(..decided).map(Entry::settle).collect()
    }
}
