//! Carries backfills on, chunk by chunk, each in a transaction of its own, while sinks keep up.

use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use super::maintenance::in_transaction;
use crate::capture::backfill::{self, Taken};
use crate::pg::error::PgError;
use crate::pg::transaction;
use crate::store::backfills;

/// How long it waits for sinks to catch up, and after an error: a row that somebody has locked is not waited for.
const PAUSE: Duration = Duration::from_millis(200);
const AFTER_ERROR: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct Backfilling {
    next: Option<Instant>,
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

    pub(super) fn run(&mut self, now: Instant) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        self.next = None;
        let running = in_transaction(backfills::running);
        let waits = match running {
            Ok(running) => running.into_iter().flatten().filter_map(one).min(),
            Err(error) => {
                transaction::log(PgLogLevel::WARNING, "backfills could not be read", &error);
                Some(AFTER_ERROR)
            }
        };
        self.next = waits.map(|wait| Instant::now() + wait);
    }
}

/// Takes a chunk of one. How long to wait for the next, if there is one.
fn one(id: i64) -> Option<Duration> {
    let taken = in_transaction(|spi| {
        spi.write("set local lock_timeout = '500ms'", &[]);
        backfill::chunk(id)
    });
    match taken {
        Ok(Some(Taken::Chunk)) => Some(Duration::ZERO),
        Ok(Some(Taken::Waiting)) => Some(PAUSE),
        Ok(Some(Taken::Last | Taken::Nothing) | None) => None,
        Err(error) => {
            tell(id, &error);
            Some(AFTER_ERROR)
        }
    }
}

fn tell(id: i64, error: &PgError) {
    let told = in_transaction(|spi| backfills::fail(spi, id, &error.summary()));
    if told.is_err() {
        transaction::log(
            PgLogLevel::WARNING,
            "a chunk could not be backfilled",
            error,
        );
    }
}
