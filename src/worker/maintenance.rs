//! What a dispatcher does beside delivering: retention, and telling listeners that there are events.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use crate::dispatch::Floors;
use crate::pg::error::PgError;
use crate::pg::spi::{Arg, Spi, connected};
use crate::pg::{background, catalog, lock, transaction};
use crate::settings;
use crate::store::streams::{self, Horizon, Stream};
use crate::store::{rebase, retention};

/// At most one NOTIFY in this time: commits with a NOTIFY wait for each other.
const NOTIFY_GAP: Duration = Duration::from_millis(20);

pub(super) struct Maintenance {
    last_retention: Instant,
    /// What retention is at: one step at a time, so that deliveries go on.
    pruning: VecDeque<Pruning>,
    /// The next transaction id when it last began, and whether it has found anything since.
    began_at_xid: u64,
    found: bool,
    next_notify: Instant,
    /// Streams whose end is not yet what was last announced.
    to_announce: BTreeMap<u32, Stream>,
    /// By the oid of the stream's table.
    announced: BTreeMap<u32, Announced>,
}

struct Pruning {
    stream: Stream,
    behind: i64,
}

#[derive(Default)]
struct Announced {
    position: Option<String>,
    last_seq: i64,
}

impl Default for Maintenance {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            last_retention: now,
            pruning: VecDeque::new(),
            began_at_xid: 0,
            found: true,
            next_notify: now,
            to_announce: BTreeMap::new(),
            announced: BTreeMap::new(),
        }
    }
}

impl Maintenance {
    /// A look has found how far a stream has come.
    pub(super) fn saw(&mut self, stream: &Stream, horizon: &Horizon) {
        let announced = self
            .announced
            .entry(stream.oid)
            .or_insert_with(|| Announced {
                position: None,
                last_seq: horizon.last_seq,
            });
        if horizon.last_seq != announced.last_seq {
            self.to_announce.insert(stream.oid, stream.clone());
        }
    }

    /// When it wants to run.
    pub(super) fn due(&self) -> Duration {
        if !self.pruning.is_empty() {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let retention = self.next_retention().saturating_duration_since(now);
        if self.to_announce.is_empty() {
            retention
        } else {
            retention.min(self.next_notify.saturating_duration_since(now))
        }
    }

    fn next_retention(&self) -> Instant {
        self.last_retention + settings::retention_interval()
    }

    /// Runs what is due; in the dispatcher of the database, not in that of a single sink.
    pub(super) fn run(&mut self, floors: &mut BTreeMap<u32, Floors>) {
        let now = Instant::now();
        if !self.to_announce.is_empty() && now >= self.next_notify {
            self.next_notify = now + NOTIFY_GAP;
            self.announce();
        }
        if self.pruning.is_empty() && now >= self.next_retention() {
            self.last_retention = now;
            self.begin_retention();
        }
        if let Some(pruning) = self.pruning.pop_front() {
            self.prune(pruning, floors);
        }
    }

    fn announce(&mut self) {
        let streams = std::mem::take(&mut self.to_announce);
        if !settings::notify() {
            return;
        }
        let announced = in_transaction(|spi| {
            for (oid, stream) in &streams {
                let known = self.announced.entry(*oid).or_default();
                let Some((position, seq)) = end_of(spi, &stream.relation) else {
                    continue;
                };
                if known.position.as_ref() != Some(&position) {
                    spi.write(
                        "select pg_notify('outbox', $1)",
                        &[Arg::Text(Some(&format!("{} {position}", stream.name)))],
                    );
                    known.position = Some(position);
                }
                known.last_seq = seq;
            }
        });
        if let Err(error) = announced {
            transaction::log(
                PgLogLevel::WARNING,
                "listeners could not be notified",
                &error,
            );
        }
    }

    fn begin_retention(&mut self) {
        let xid = catalog::next_xid();
        if !std::mem::take(&mut self.found) && self.began_at_xid == xid {
            return;
        }
        self.began_at_xid = xid;
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
fn in_transaction<R>(body: impl FnOnce(&Spi) -> R) -> Result<Option<R>, PgError> {
    transaction::run(|| {
        let held = catalog::extension().is_some_and(lock::hold_extension);
        held.then(|| {
            background::relax_commit();
            connected(body)
        })
    })
}

/// The last position that outbox.read could return, and how far the stream is numbered up to there.
fn end_of(spi: &Spi, relation: &str) -> Option<(String, i64)> {
    let sql = format!(
        "select e.txid::text || ':' || e.seq::text, e.seq from {relation} e
          where e.txid < pg_snapshot_xmin(pg_current_snapshot()) order by e.txid desc, e.seq desc limit 1"
    );
    spi.read(&sql, &[])
        .first(|row| row.text(0).zip(row.i64(1)))
        .flatten()
}
