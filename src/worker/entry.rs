//! What an engine queues: an event ready to be handed over, or a whole transaction of them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::dispatch::{Item, Mark, Place, Window};
use crate::envelope::Event;
use crate::pg::spi::Record;
use crate::store::events::Found;

/// Events that are delivered, retried and given up together.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) events: Vec<Arc<Event>>,
    /// The same as values of type outbox.event, for a function.
    pub(crate) records: Vec<Record>,
    /// Why they could not be made ready; then they are not handed over, and fail with this.
    pub(crate) problem: Option<String>,
    /// The seqs of its other events, which went through before it was put together so.
    taken: Vec<i64>,
    window: Arc<Window>,
    mark: Mark,
    key: u64,
}

/// What order is kept for, as a hash of (source, subject): two keys that share it by chance are only taken for relatives. An event
/// that has no subject is about nothing that another one is about: it is a key of its own.
pub(crate) fn key_of(source: Option<&str>, subject: Option<&str>, seq: i64) -> u64 {
    let mut hasher = DefaultHasher::new();
    match subject {
        Some(subject) => (source, subject).hash(&mut hasher),
        None => (source, seq).hash(&mut hasher),
    }
    hasher.finish()
}

impl Entry {
    pub(crate) fn new(found: Found, window: &Arc<Window>, problem: Option<String>) -> Self {
        let event = &found.event;
        let (source, subject) = event.key();
        let key = key_of(source, subject, event.position.seq);
        Self {
            records: found.record.into_iter().collect(),
            problem,
            taken: Vec::new(),
            window: Arc::clone(window),
            mark: found.mark,
            key,
            events: vec![Arc::new(found.event)],
        }
    }

    /// Whether it lies in that window.
    pub(crate) fn is_of(&self, window: &Arc<Window>) -> bool {
        Arc::ptr_eq(&self.window, window)
    }

    /// Takes in a later event of the same window.
    pub(crate) fn add(&mut self, found: Found, problem: Option<String>) {
        self.records.extend(found.record);
        self.mark = found.mark;
        self.problem = self.problem.take().or(problem);
        self.events.push(Arc::new(found.event));
    }

    /// The seqs of its events, of all that it was put together of.
    pub(crate) fn seqs(&self) -> impl Iterator<Item = i64> {
        let events = self.events.iter().map(|event| event.position.seq);
        events.chain(self.taken.iter().copied())
    }

    /// Leaves out events that are through already. At least one of them must not be.
    pub(crate) fn leave_out(&mut self, is_through: impl Fn(i64) -> bool) {
        let through = self
            .events
            .iter()
            .map(|event| is_through(event.position.seq));
        let through = through.collect::<Vec<_>>();
        let mut gone = through.iter();
        // A sink that takes no records has none.
        self.records.retain(|_| gone.next() != Some(&true));
        let events = std::mem::take(&mut self.events).into_iter().zip(through);
        for (event, is_through) in events {
            if is_through {
                self.taken.push(event.position.seq);
            } else {
                self.events.push(event);
            }
        }
    }

    /// The seqs of those that were left out.
    pub(crate) fn taken(&self) -> impl Iterator<Item = i64> {
        self.taken.iter().copied()
    }

    pub(crate) fn first_seq(&self) -> i64 {
        self.events.first().map_or(0, |event| event.position.seq)
    }

    /// Where a cursor stands that has passed this.
    pub(crate) fn place(&self) -> Place {
        Place {
            window: Arc::clone(&self.window),
            mark: self.mark,
        }
    }
}

impl Item for Entry {
    type Key = u64;

    fn key(&self) -> &u64 {
        &self.key
    }

    fn weight(&self) -> usize {
        self.events.len()
    }
}
