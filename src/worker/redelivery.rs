//! Dead letters that were queued again: delivered one by one beside the stream, while their sink is well.
//!
//! They have an engine of their own, so that a letter that fails again is told apart from an outage: it stays queued until another
//! letter, or an event of the stream, shows that the sink is up.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

use super::now;
use crate::dispatch::{Checkpoint, Engine, Failure, Fate, Item, Outcome, Settled, Step, Time};
use crate::envelope::{Event, Position, read_cloudevent};
use crate::pg::lock::{self, Use};
use crate::pg::spi::Spi;
use crate::settings;
use crate::sinks::Came;
use crate::store::dead_letters::{self, Queued};

/// How many queued letters are looked at: enough to choose a neighbour from.
const LOOK_AHEAD: i64 = 32;

const TABLE: &[&CStr] = &[c"dead_letters"];

/// While somebody else's open transaction holds letters, or their table.
const HELD_RETRY: Duration = Duration::from_millis(200);

fn after_a_while() -> Time {
    Time(now().0 + u64::try_from(HELD_RETRY.as_millis()).unwrap_or(0))
}

/// Serials of redeliveries, told apart from those of the stream.
const SERIALS: u64 = 1 << 63;

/// The redelivery lane of one sink.
pub(crate) struct Redelivery {
    engine: Engine<Letter>,
    /// The letters in the engine.
    known: BTreeSet<Position>,
    in_flight: Option<u64>,
    serial: u64,
    news: Vec<News>,
    /// Of the news, what the last save could not write, for others hold the letters.
    held: Vec<News>,
    /// Nothing is read or written before.
    rests_until: Time,
    /// Set when dead letters may have been queued, or discarded, that are not known here.
    look: bool,
}

struct Letter(Queued);

impl Item for Letter {
    type Key = Position;

    fn key(&self) -> &Position {
        &self.0.position
    }
}

/// What is to be written of a letter.
#[derive(Clone)]
enum News {
    Failed { position: Position, error: String },
    Through(Position),
    GivenUp(Position),
}

fn empty_engine() -> Engine<Letter> {
    Engine::restore(settings::policy(Some(1)), Checkpoint::default())
}

impl Redelivery {
    pub(crate) fn new() -> Self {
        Self {
            engine: empty_engine(),
            known: BTreeSet::new(),
            in_flight: None,
            serial: 0,
            news: Vec::new(),
            held: Vec::new(),
            rests_until: Time(0),
            look: true,
        }
    }

    /// Settings were read again.
    pub(crate) fn set_policy(&mut self) {
        self.engine.set_policy(settings::policy(Some(1)));
    }

    /// Somebody committed something: it may have been a redelivery.
    pub(crate) fn look_again(&mut self) {
        self.look = true;
    }

    /// Whether a read could find one.
    pub(crate) fn wants_to_look(&self) -> bool {
        self.wants_to_look_later() && self.rests_until <= now()
    }

    fn wants_to_look_later(&self) -> bool {
        self.look && self.in_flight.is_none() && self.news.is_empty()
    }

    /// Reads which letters are queued.
    pub(crate) fn fill(&mut self, spi: &Spi, sink: &str) {
        if !self.wants_to_look() {
            return;
        }
        if !lock::hold_ours(TABLE, Use::Reading) {
            self.rests_until = after_a_while();
            return;
        }
        self.look = false;
        let queued = dead_letters::queued(spi, sink, LOOK_AHEAD);
        let there = queued.iter().map(|letter| letter.position);
        if !self.known.is_subset(&there.collect()) {
            // One was discarded.
            self.engine = empty_engine();
            self.known.clear();
        }
        for letter in queued {
            if self.known.insert(letter.position) {
                self.engine.push(Letter(letter));
            }
        }
    }

    /// The event to deliver now, if there is one and its time has come.
    pub(crate) fn next(&mut self) -> Option<(u64, Arc<Event>)> {
        if self.in_flight.is_some() || !self.news.is_empty() {
            return None;
        }
        let Step::Deliver(range) = self.engine.next(now()) else {
            return None;
        };
        let Letter(letter) = self.engine.get(range.start)?;
        let Some(event) = read_cloudevent(&letter.event, letter.position) else {
            // Somebody has changed the row.
            self.outcome(&Outcome::Partial(vec![Failure {
                index: 0,
                error: "the dead letter holds no event".to_owned(),
                permanent: true,
            }]));
            return None;
        };
        self.serial += 1;
        let serial = SERIALS | self.serial;
        self.in_flight = Some(serial);
        Some((serial, Arc::new(event)))
    }

    /// Keeps the letters in view from being changed by anybody else until the transaction ends: for a delivery that must not be made if
    /// what it comes to cannot be written. False if somebody else holds one, or has discarded it.
    pub(crate) fn hold(&mut self, spi: &Spi, sink: &str) -> bool {
        let held = lock::hold_ours(TABLE, Use::Writing)
            && self
                .known
                .iter()
                .all(|position| dead_letters::hold(spi, sink, *position));
        if !held {
            self.look = true;
            self.rests_until = after_a_while();
        }
        held
    }

    pub(crate) fn awaits(&self, serial: u64) -> bool {
        self.in_flight == Some(serial)
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Takes what the redelivery in flight came to.
    pub(crate) fn came(&mut self, came: &Came) {
        match came {
            Came::To(outcome) => self.outcome(outcome),
            Came::CalledOff | Came::Asks(_) => {
                self.in_flight = None;
                self.engine.give_back();
            }
        }
    }

    /// Takes what the redelivery came to.
    pub(crate) fn outcome(&mut self, outcome: &Outcome) {
        self.in_flight = None;
        let tried = self
            .engine
            .in_flight()
            .and_then(|range| self.engine.get(range.start))
            .map(|Letter(letter)| letter.position);
        if let (Some(position), Some(error)) = (tried, outcome.error_alone()) {
            let error = error.to_owned();
            self.news.push(News::Failed { position, error });
        }
        for Settled { item, fate } in self.engine.outcome(now(), outcome) {
            let Letter(Queued { position, .. }) = item;
            self.known.remove(&position);
            self.news.push(match fate {
                Fate::Delivered => News::Through(position),
                Fate::Dead { .. } | Fate::Parked(_) => News::GivenUp(position),
            });
        }
    }

    /// An event of the stream has gone through.
    pub(crate) fn sink_is_up(&mut self) {
        self.engine.sink_is_up();
    }

    /// When something is to be written, if there is anything.
    pub(crate) fn save_due(&self) -> Option<Time> {
        (!self.news.is_empty()).then_some(self.rests_until)
    }

    /// Writes what is new, but for what others hold. It counts once the transaction has committed: [`Redelivery::saved`].
    pub(crate) fn save(&mut self, spi: &Spi, sink: &str) {
        self.held.clear();
        if self.news.is_empty() {
            return;
        }
        if self.rests_until > now() || !lock::hold_ours(TABLE, Use::Writing) {
            self.held.clone_from(&self.news);
            return;
        }
        for news in &self.news {
            let written = match news {
                News::Failed { position, error } => {
                    dead_letters::failed_again(spi, sink, *position, error)
                }
                News::Through(position) => dead_letters::redelivered(spi, sink, *position),
                News::GivenUp(position) => dead_letters::given_up(spi, sink, *position),
            };
            if !written {
                self.held.push(news.clone());
            }
        }
    }

    /// What was saved is committed.
    pub(crate) fn saved(&mut self) {
        self.look |= self.held.len() < self.news.len();
        self.news = std::mem::take(&mut self.held);
        if !self.news.is_empty() {
            self.rests_until = self.rests_until.max(after_a_while());
        }
    }

    /// When it wants the next look.
    pub(crate) fn due(&self) -> Option<Time> {
        if self.wants_to_look_later() {
            return Some(self.rests_until);
        }
        let waits = self.in_flight.is_none() && self.news.is_empty() && !self.engine.is_empty();
        waits.then(|| self.engine.next_attempt_at().unwrap_or(Time(0)))
    }
}
