//! Carries backfills on, chunk by chunk, each in a transaction of its own, while sinks keep up.
//!
//! A condition is a user's code, and while a chunk is taken all sinks of the dispatcher wait, and so does whoever changes its rows. So a
//! chunk has a time limit; one that comes to it is taken in smaller pieces, and a backfill of which a single row takes too long ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use super::maintenance::{durably, in_transaction};
use crate::capture::backfill::{self, Taken};
use crate::pg::culprits::Culprit;
use crate::pg::error::PgError;
use crate::pg::timeout::{self, Limit};
use crate::pg::transaction;
use crate::store::backfills;

/// How long it waits for sinks to catch up, and after an error: a row that somebody has locked is not waited for.
const PAUSE: Duration = Duration::from_millis(200);
const AFTER_ERROR: Duration = Duration::from_secs(2);

/// How long a chunk may take.
const LIMIT: Duration = Duration::from_secs(5);
/// What is left of a chunk's size when it was too slow; and how often in a row a single row may be.
const SMALLER: i32 = 8;
const TRIES: u32 = 3;

const STUBBORN: &str = "its condition took too long and did not end when it was cancelled, so the process that ran it was ended";

/// A backfill that was too slow.
struct Slow {
    /// Rows that are taken at a time.
    most: i32,
    /// How often in a row it has come to the limit.
    times: u32,
    /// The same with a single row.
    times_alone: u32,
    /// It rests until then, so that sinks get their turn.
    until: Instant,
}

#[derive(Default)]
pub(super) struct Backfilling {
    next: Option<Instant>,
    slow: BTreeMap<i64, Slow>,
    /// Those whose condition has ended a dispatcher.
    stubborn: Vec<i64>,
}

impl Backfilling {
    /// When there is something to do, if so.
    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    /// What there is to do may have changed.
    pub(super) fn look_again(&mut self) {
        self.next.get_or_insert_with(Instant::now);
    }

    /// The condition of this one has ended a dispatcher.
    pub(super) fn note_stubborn(&mut self, id: i64) {
        self.stubborn.push(id);
        self.look_again();
    }

    pub(super) fn run(&mut self, now: Instant) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        self.next = None;
        let stubborn = std::mem::take(&mut self.stubborn);
        let running = in_transaction(|spi| {
            for &id in &stubborn {
                backfills::stop(spi, id, STUBBORN);
            }
            backfills::running(spi)
        });
        let waits = match running {
            Ok(running) => {
                let running = running.unwrap_or_default();
                self.slow
                    .retain(|slow, _| running.iter().any(|(id, _)| id == slow));
                let waits = running
                    .into_iter()
                    .filter_map(|(id, size)| self.one(id, size));
                waits.min()
            }
            Err(error) => {
                transaction::log(PgLogLevel::WARNING, "backfills could not be read", &error);
                self.stubborn = stubborn;
                Some(AFTER_ERROR)
            }
        };
        self.next = waits.map(|wait| Instant::now() + wait);
    }

    /// Takes a chunk of one. How long to wait for the next, if there is one.
    fn one(&mut self, id: i64, size: i32) -> Option<Duration> {
        let mut most = size;
        if let Some(slow) = self.slow.get(&id) {
            let rest = slow.until.saturating_duration_since(Instant::now());
            if !rest.is_zero() {
                return Some(rest);
            }
            most = slow.most;
        }
        let limit = Limit {
            time: LIMIT,
            culprit: Culprit::Backfill(id),
        };
        let taken = durably(|_| timeout::within(Some(limit), || backfill::chunk(id, most)));
        let expired = timeout::take_expired();
        match taken {
            Ok(Some(Taken::Chunk)) => {
                self.was_quick(id, size);
                Some(Duration::ZERO)
            }
            Ok(Some(Taken::Waiting(sink))) => {
                let why =
                    format!("it waits until sink \"{sink}\" has taken more of what is undelivered");
                tell(id, &why);
                Some(PAUSE)
            }
            Ok(Some(Taken::Last | Taken::Nothing) | None) => None,
            Err(_) if expired => self.was_slow(id, most),
            Err(error) => {
                tell(id, &error.summary());
                Some(AFTER_ERROR)
            }
        }
    }

    /// A chunk has gone through: the next may be greater again.
    fn was_quick(&mut self, id: i64, size: i32) {
        let Some(slow) = self.slow.get_mut(&id) else {
            return;
        };
        slow.most = slow.most.saturating_mul(2);
        slow.times = 0;
        slow.times_alone = 0;
        if slow.most >= size {
            self.slow.remove(&id);
        }
    }

    /// A chunk of `most` rows has come to the limit. How long to wait for the next, if there is one.
    fn was_slow(&mut self, id: i64, most: i32) -> Option<Duration> {
        let now = Instant::now();
        let slow = self.slow.entry(id).or_insert(Slow {
            most,
            times: 0,
            times_alone: 0,
            until: now,
        });
        slow.times += 1;
        slow.times_alone += u32::from(most == 1);
        slow.most = (most / SMALLER).max(1);
        if slow.times_alone >= TRIES {
            let why = format!("a single row took longer than {LIMIT:?}, {TRIES} times");
            written(in_transaction(|spi| backfills::stop(spi, id, &why)));
            self.slow.remove(&id);
            return None;
        }
        let rest = AFTER_ERROR.saturating_mul(1 << (slow.times - 1).min(5));
        slow.until = now + rest;
        let rows = if most == 1 { "row" } else { "rows" };
        tell(
            id,
            &format!("a chunk of {most} {rows} took longer than {LIMIT:?}"),
        );
        Some(rest)
    }
}

/// Says why the last chunk was not taken.
fn tell(id: i64, why: &str) {
    written(in_transaction(|spi| backfills::fail(spi, id, why)));
}

fn written(told: Result<Option<()>, PgError>) {
    if let Err(error) = told {
        let context = "how a backfill is doing could not be written";
        transaction::log(PgLogLevel::WARNING, context, &error);
    }
}
