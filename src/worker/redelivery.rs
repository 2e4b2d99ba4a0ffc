//! Dead letters that were queued again: delivered one by one beside the stream, while their sink is well.

use std::sync::Arc;
use std::time::Duration;

use super::now;
use crate::dispatch::{Outcome, Time};
use crate::envelope::{Event, Position, read_cloudevent};
use crate::pg::spi::Spi;
use crate::settings;
use crate::store::dead_letters::{self, Queued};

/// The redelivery lane of one sink.
pub(crate) struct Redelivery {
    queued: Option<Queued>,
    attempts: u32,
    not_before: Option<Time>,
    in_flight: Option<u64>,
    serial: u64,
    news: Option<News>,
    /// Set when dead letters may have been queued that are not known here.
    look: bool,
}

enum News {
    Through(Position),
    FailedAgain {
        position: Position,
        error: String,
        attempts: u32,
    },
}

/// Serials of redeliveries, told apart from those of the stream.
const SERIALS: u64 = 1 << 63;

impl Redelivery {
    pub(crate) fn new(spi: &Spi, sink: &str) -> Self {
        let queued = dead_letters::first_queued(spi, sink);
        Self {
            queued,
            attempts: 0,
            not_before: None,
            in_flight: None,
            serial: 0,
            news: None,
            look: false,
        }
    }

    /// Somebody committed something: it may have been a redelivery.
    pub(crate) fn look_again(&mut self) {
        self.look = true;
    }

    /// Whether a read could find one.
    pub(crate) fn wants_to_look(&self) -> bool {
        self.look && self.queued.is_none() && self.news.is_none()
    }

    /// Reads the next queued letter if none is at hand.
    pub(crate) fn fill(&mut self, spi: &Spi, sink: &str) {
        if self.wants_to_look() {
            self.queued = dead_letters::first_queued(spi, sink);
            self.look = false;
        }
    }

    /// The event to deliver now, if there is one and its time has come.
    pub(crate) fn next(&mut self) -> Option<(u64, Arc<Event>)> {
        let due = self.not_before.is_none_or(|time| time <= now());
        if self.in_flight.is_some() || self.news.is_some() || !due {
            return None;
        }
        let queued = self.queued.as_ref()?;
        self.serial += 1;
        let serial = SERIALS | self.serial;
        let event = read_cloudevent(&queued.event, queued.position);
        self.in_flight = Some(serial);
        Some((serial, Arc::new(event)))
    }

    pub(crate) fn awaits(&self, serial: u64) -> bool {
        self.in_flight == Some(serial)
    }

    /// Takes what the redelivery came to. One that fails is tried again, with growing waits, as often as a lone event is; then it
    /// stays a dead letter, no longer queued.
    pub(crate) fn outcome(&mut self, outcome: &Outcome) {
        self.in_flight = None;
        let Some(queued) = &self.queued else { return };
        let position = queued.position;
        let (error, permanent) = match outcome {
            Outcome::Failed(refusal) => (refusal.error.clone(), false),
            Outcome::Partial(failures) if !failures.is_empty() => {
                (failures[0].error.clone(), failures[0].permanent)
            }
            Outcome::Delivered | Outcome::Partial(_) => {
                self.finish(News::Through(position));
                return;
            }
        };
        self.attempts += 1;
        let policy = settings::policy(None);
        if permanent || self.attempts >= policy.poison_attempts {
            let attempts = self.attempts;
            self.finish(News::FailedAgain {
                position,
                error,
                attempts,
            });
        } else {
            let wait = policy
                .retry_min
                .saturating_mul(1 << (self.attempts - 1).min(20))
                .min(policy.retry_max);
            self.not_before = Some(after(now(), wait));
        }
    }

    fn finish(&mut self, news: News) {
        self.news = Some(news);
        self.attempts = 0;
        self.not_before = None;
    }

    pub(crate) fn has_news(&self) -> bool {
        self.news.is_some()
    }

    pub(crate) fn save(&self, spi: &Spi, sink: &str) {
        match &self.news {
            None => {}
            Some(News::Through(position)) => dead_letters::redelivered(spi, sink, *position),
            Some(News::FailedAgain {
                position,
                error,
                attempts,
            }) => {
                dead_letters::failed_again(spi, sink, *position, error, *attempts);
            }
        }
    }

    /// What was saved is committed: on to the next one.
    pub(crate) fn saved(&mut self) {
        if self.news.take().is_some() {
            self.queued = None;
            self.look = true;
        }
    }

    /// When it wants the next look.
    pub(crate) fn due(&self) -> Option<Time> {
        if self.wants_to_look() {
            return Some(Time(0));
        }
        (self.queued.is_some() && self.in_flight.is_none())
            .then(|| self.not_before.unwrap_or(Time(0)))
    }
}

fn after(time: Time, wait: Duration) -> Time {
    Time(time.0 + u64::try_from(wait.as_millis()).unwrap_or(0))
}
