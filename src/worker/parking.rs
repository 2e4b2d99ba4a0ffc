//! The parked events of a sink isolated by key: delivered beside the stream, each key by itself.
//!
//! What is tried when is for the pure [`Lanes`] to say; here they meet the tables. Only positions are kept in mind. The events of a
//! delivery are read when it is their turn, and shaped as the sink says then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::entry::{Entry, key_of};
use super::reader::Reader;
use crate::dispatch::{Failure, Fate, Item, Lanes, Outcome, Policy, Time, Trial};
use crate::envelope::Event;
use crate::pg::spi::Spi;
use crate::store::parked;

/// How many events may be parked for a sink. With more, it reads on only when some are settled.
const ROOM: usize = 100_000;

/// Serials of these deliveries, told apart from those of the stream and of redeliveries.
const SERIALS: u64 = 1 << 62;

/// The lanes of one sink.
pub(crate) struct Parking {
    lanes: Lanes<Parked>,
    /// What the lanes have in flight, in order, as it is handed over.
    ready: Vec<Entry>,
    /// Of the delivery under way.
    handed_over: Option<u64>,
    serial: u64,
    news: Vec<News>,
    /// A filter or transform has failed on something that was read.
    misshapen: bool,
}

#[derive(Debug, Clone, Copy)]
struct Parked {
    seq: i64,
    key: u64,
}

impl Item for Parked {
    type Key = u64;

    fn key(&self) -> &u64 {
        &self.key
    }
}

/// What is to be written.
enum News {
    Added(Arc<Event>, Trial),
    Failed(i64, Trial),
    Gone(i64),
}

impl Parking {
    /// As it was left.
    pub(crate) fn load(spi: &Spi, sink: &str, policy: Policy, at: Time) -> Self {
        let mut lanes = Lanes::new(policy);
        for one in parked::of(spi, sink) {
            let key = key_of(one.source.as_deref(), one.subject.as_deref(), one.seq);
            lanes.park(at, Parked { seq: one.seq, key }, one.trial);
        }
        Self {
            lanes,
            ready: Vec::new(),
            handed_over: None,
            serial: 0,
            news: Vec::new(),
            misshapen: false,
        }
    }

    /// The keys of which whatever comes is to be parked.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &u64> {
        self.lanes.keys()
    }

    /// Whether more may be parked.
    pub(crate) fn has_room(&self) -> bool {
        self.events() < ROOM
    }

    pub(crate) fn events(&self) -> usize {
        self.lanes.events()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events() == 0
    }

    pub(crate) fn set_policy(&mut self, policy: Policy) {
        self.lanes.set_policy(policy);
    }

    pub(crate) fn retry_now(&mut self, at: Time) {
        self.lanes.retry_now(at);
    }

    /// An event of the stream has gone through.
    pub(crate) fn sink_is_up(&mut self, at: Time, after_outage: bool) {
        self.lanes.sink_is_up(at, after_outage);
    }

    /// The sink asked to be left alone.
    pub(crate) fn leave_alone(&mut self, at: Time, wait: Duration) {
        self.lanes.leave_alone(at, wait);
    }

    /// Takes in an event that the stream goes on without.
    pub(crate) fn park(&mut self, at: Time, entry: &Entry, trial: &Trial) {
        for event in &entry.events {
            let seq = event.position.seq;
            let parked = Parked {
                seq,
                key: *entry.key(),
            };
            self.lanes.park(at, parked, trial.clone());
            self.news
                .push(News::Added(Arc::clone(event), trial.clone()));
        }
    }

    /// Takes lanes away that are empty, if the stream can do without.
    pub(crate) fn remove_drained(&mut self, mut release: impl FnMut(&u64) -> bool) {
        for key in self.lanes.drained() {
            if release(&key) {
                self.lanes.remove(&key);
            }
        }
    }

    /// Whether something is to be read for the next delivery.
    pub(crate) fn wants_to_read(&self, at: Time) -> bool {
        self.lanes.is_due(at)
    }

    /// Reads what is to be delivered next, if its time has come. Returns what is settled without a delivery.
    pub(crate) fn fill(&mut self, spi: &Spi, reader: &Reader, at: Time) -> Vec<(Entry, Fate)> {
        while self.wants_to_read(at) {
            let picked: Vec<i64> = self.lanes.next(at).iter().map(|one| one.seq).collect();
            if picked.is_empty() {
                break;
            }
            let shaped = reader.read_these(spi, &picked);
            if reader.is_too_slow() {
                break;
            }
            if shaped.len() < picked.len() {
                let there = |one: &Parked| {
                    let mut seqs = shaped.iter().map(|(found, _)| found.event.position.seq);
                    seqs.any(|seq| seq == one.seq)
                };
                // Deleted by hand, or not wanted any more.
                let gone = self.lanes.forget(at, there);
                self.news
                    .extend(gone.into_iter().map(|one| News::Gone(one.seq)));
                continue;
            }
            let window = &reader.place.window;
            let entries = shaped.into_iter();
            let entries = entries.map(|(found, problem)| Entry::new(found, window, problem));
            self.ready = entries.collect();
            let mut ready = self.ready.iter().enumerate();
            let problem = ready.find_map(|(index, entry)| Some((index, entry.problem.clone()?)));
            let Some((index, error)) = problem else {
                break;
            };
            self.misshapen = true;
            let failure = Failure {
                index,
                error,
                permanent: false,
            };
            let outcome = Outcome::Cut {
                failures: vec![failure],
                untried: (0..picked.len()).filter(|other| *other != index).collect(),
                retry_after: None,
            };
            return self.outcome(at, &outcome);
        }
        Vec::new()
    }

    /// Whether a filter or transform has failed since this was asked last.
    pub(crate) fn take_misshapen(&mut self) -> bool {
        std::mem::take(&mut self.misshapen)
    }

    /// What is to be handed over now, with a serial, if anything is.
    pub(crate) fn next(&mut self) -> Option<(u64, &[Entry])> {
        if self.ready.is_empty() || self.handed_over.is_some() {
            return None;
        }
        self.serial += 1;
        let serial = SERIALS | self.serial;
        self.handed_over = Some(serial);
        Some((serial, &self.ready))
    }

    pub(crate) fn awaits(&self, serial: u64) -> bool {
        self.handed_over == Some(serial)
    }

    /// Whether a delivery is ready to be handed over.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty() && self.handed_over.is_none()
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.handed_over.is_some()
    }

    /// How many entries are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        match self.handed_over {
            Some(_) => self.ready.len(),
            None => 0,
        }
    }

    /// The delivery was called off before anything of it was sent.
    pub(crate) fn give_back(&mut self) {
        self.handed_over = None;
    }

    /// Takes what the delivery came to. Returns what is settled.
    pub(crate) fn outcome(&mut self, at: Time, outcome: &Outcome) -> Vec<(Entry, Fate)> {
        self.handed_over = None;
        let entries = std::mem::take(&mut self.ready).into_iter();
        let mut entries: BTreeMap<i64, Entry> =
            entries.map(|entry| (entry.first_seq(), entry)).collect();
        let mut settled = Vec::new();
        for one in self.lanes.outcome(at, outcome) {
            self.news.push(News::Gone(one.item.seq));
            if let Some(entry) = entries.remove(&one.item.seq) {
                settled.push((entry, one.fate));
            }
        }
        let failed = self.lanes.take_failed().into_iter();
        let failed = failed.map(|(one, trial)| News::Failed(one.seq, trial.clone()));
        self.news.extend(failed);
        settled
    }

    /// When the next delivery is due.
    pub(crate) fn due(&self) -> Option<Time> {
        self.lanes.due()
    }

    /// Of the event that is tried next.
    pub(crate) fn trial(&self) -> Option<&Trial> {
        self.lanes.next_trial()
    }

    pub(crate) fn has_news(&self) -> bool {
        !self.news.is_empty()
    }

    /// Writes what has changed. False if somebody else has settled something of it.
    pub(crate) fn save(&self, spi: &Spi, sink: &str) -> bool {
        let mut ours = true;
        for news in &self.news {
            match news {
                News::Added(event, trial) => parked::add(spi, sink, event, trial),
                News::Failed(seq, trial) => parked::failed(spi, sink, *seq, trial),
                News::Gone(seq) => ours &= parked::remove(spi, sink, *seq),
            }
        }
        ours
    }

    /// What was saved is committed.
    pub(crate) fn saved(&mut self) {
        self.news.clear();
    }
}
