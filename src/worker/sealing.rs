//! Sealing the audit trail: links committed records to the chain of hashes, behind the backs of those who write them, so that they
//! never wait for each other.

use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use super::maintenance::in_transaction;
use crate::dispatch::Snapshot;
use crate::pg::transaction;
use crate::store::audit;
use crate::store::streams::{Horizon, Shape, Stream};

/// At most one look in this time.
const GAP: Duration = Duration::from_millis(500);

const AFTER_ERROR: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct Sealing {
    sealed: Option<Snapshot>,
    /// What there is to seal.
    seen: Option<Snapshot>,
    next: Option<Instant>,
}

impl Sealing {
    /// A look has found how far a stream has come.
    pub(super) fn saw(&mut self, stream: &Stream, horizon: &Horizon) {
        let written = stream.shape == Shape::Audit && horizon.last_seq > 0;
        if written && self.sealed.as_ref() != Some(&horizon.snapshot) {
            self.seen = Some(horizon.snapshot.clone());
        }
    }

    /// When there is something to seal.
    pub(super) fn due(&self) -> Option<Instant> {
        let next = self.next.unwrap_or_else(Instant::now);
        self.seen.is_some().then_some(next)
    }

    pub(super) fn run(&mut self, now: Instant) {
        if self.seen.is_none() || self.next.is_some_and(|next| now < next) {
            return;
        }
        self.next = Some(now + GAP);
        match in_transaction(audit::seal) {
            Ok(Some(true)) => self.next = Some(now),
            Ok(Some(false)) => self.sealed = self.seen.take(),
            Ok(None) => {}
            Err(error) => {
                self.next = Some(now + AFTER_ERROR);
                let what = "the audit trail could not be sealed";
                transaction::log(PgLogLevel::WARNING, what, &error);
            }
        }
    }
}
