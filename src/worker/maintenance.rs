//! What a dispatcher does beside delivering, each in its own short transactions: retention, telling listeners, sealing
//! the audit trail, recording usage, backfilling.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use super::announcements::Announcements;
use super::backfilling::Backfilling;
use super::sealing::Sealing;
use super::usage::Recording;
use crate::dispatch::Floors;
use crate::pg::error::PgError;
use crate::pg::spi::{Spi, connected};
use crate::pg::{background, catalog, lock, transaction};
use crate::settings;
use crate::store::streams::{self, Stream};
use crate::store::{publications, rebase, retention};

pub(super) struct Maintenance {
    last_retention: Instant,
    /// What retention is at: one step at a time, so that deliveries go on.
    pruning: VecDeque<Pruning>,
    /// The next transaction id when it last began, and whether it has found anything since.
    began_at_xid: u64,
    found: bool,
    /// Publications that hand secrets out, as the log has been told.
    exposing: Vec<(String, String)>,
    pub(super) announcements: Announcements,
    pub(super) sealing: Sealing,
    pub(super) recording: Recording,
    pub(super) backfilling: Backfilling,
}

struct Pruning {
    stream: Stream,
    behind: i64,
}

impl Default for Maintenance {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            last_retention: now,
            pruning: VecDeque::new(),
            began_at_xid: 0,
            found: true,
            exposing: Vec::new(),
            announcements: Announcements::default(),
            sealing: Sealing::default(),
            recording: Recording::new(),
            backfilling: Backfilling::default(),
        }
    }
}

impl Maintenance {
    /// When it wants to run.
    pub(super) fn due(&self) -> Duration {
        if !self.pruning.is_empty() {
            return Duration::ZERO;
        }
        let others = [
            self.announcements.due(),
            self.sealing.due(),
            self.recording.due(),
            self.backfilling.due(),
        ];
        let next = others.into_iter().flatten().min();
        let retention = self.next_retention();
        next.map_or(retention, |next| next.min(retention))
            .saturating_duration_since(Instant::now())
    }

    fn next_retention(&self) -> Instant {
        self.last_retention + settings::retention_interval()
    }

    /// Runs what is due; in the dispatcher of the database, not in that of a single sink.
    pub(super) fn run(&mut self, floors: &mut BTreeMap<u32, Floors>) {
        let now = Instant::now();
        self.announcements.run(now, floors);
        self.sealing.run(now);
        self.recording.run(now);
        self.backfilling.run(now);
        if self.pruning.is_empty() && now >= self.next_retention() {
            self.last_retention = now;
            self.begin_retention();
        }
        if let Some(pruning) = self.pruning.pop_front() {
            self.prune(pruning, floors);
        }
    }

    fn begin_retention(&mut self) {
        let xid = catalog::next_xid();
        if !std::mem::take(&mut self.found) && self.began_at_xid == xid {
            return;
        }
        self.began_at_xid = xid;
        self.look_at_publications();
        match in_transaction(|spi| (!rebase::is_due(spi)).then(|| streams::all(spi))) {
            Ok(streams) => {
                let streams = streams.flatten().unwrap_or_default().into_iter();
                let begin = |stream: Stream| Pruning {
                    behind: stream.pruned_seq,
                    stream,
                };
                self.pruning = streams.map(begin).collect();
            }
            Err(error) => failed(&error),
        }
    }

    fn look_at_publications(&mut self) {
        match in_transaction(publications::exposing) {
            Ok(found) => {
                let found = found.unwrap_or_default();
                for one in &found {
                    if !self.exposing.contains(one) {
                        let (name, what) = one;
                        pgrx::warning!(
                            "pg_outbox: publication \"{name}\" hands secrets to its subscribers in clear: it publishes {what}"
                        );
                    }
                }
                self.exposing = found;
            }
            Err(error) => {
                transaction::log(
                    PgLogLevel::WARNING,
                    "looking at publications failed",
                    &error,
                );
            }
        }
    }

    fn prune(&mut self, mut pruning: Pruning, floors: &mut BTreeMap<u32, Floors>) {
        let Pruning { stream, behind } = &mut pruning;
        let floors = floors.entry(stream.oid).or_default();
        let step = in_transaction(|spi| {
            retention::step(spi, stream, *behind, settings::retention_min_age(), floors)
        });
        match step {
            Ok(Some(step)) => {
                self.found |= step.upto > *behind;
                *behind = step.upto;
                stream.pruned_seq = step.pruned_seq;
                if step.more {
                    self.pruning.push_front(pruning);
                }
            }
            Ok(None) => {}
            Err(error) => failed(&error),
        }
    }
}

fn failed(error: &PgError) {
    transaction::log(PgLogLevel::WARNING, "retention failed", error);
}

/// None if the extension is being dropped or is gone. What a crash undoes is done again.
pub(super) fn in_transaction<R>(body: impl FnOnce(&Spi) -> R) -> Result<Option<R>, PgError> {
    durably(|spi| {
        background::relax_commit();
        body(spi)
    })
}

/// The same for what writes events: they go out as soon as they are committed, and a crash must not undo that.
pub(super) fn durably<R>(body: impl FnOnce(&Spi) -> R) -> Result<Option<R>, PgError> {
    transaction::run(|| {
        let held = catalog::extension().is_some_and(lock::hold_extension);
        held.then(|| connected(body))
    })
}
