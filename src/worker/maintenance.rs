//! What a dispatcher does beside delivering: retention, and telling listeners that there are events.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use crate::dispatch::Floors;
use crate::pg::spi::{Arg, Spi, connected};
use crate::pg::{catalog, lock, security, transaction};
use crate::settings;
use crate::store::retention;
use crate::store::streams::{self, Horizon, Stream};

/// At most one NOTIFY in this time: commits with a NOTIFY wait for each other.
const NOTIFY_GAP: Duration = Duration::from_millis(10);

pub(super) struct Maintenance {
    next_retention: Instant,
    /// The next transaction id when retention last had nothing to do.
    idle_at_xid: Option<u64>,
    next_notify: Instant,
    /// Streams whose end is not yet what was last announced.
    to_announce: BTreeMap<u32, Stream>,
    /// By the oid of the stream's table.
    announced: BTreeMap<u32, Announced>,
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
            next_retention: now + settings::retention_interval(),
            idle_at_xid: None,
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
        let now = Instant::now();
        let retention = self.next_retention.saturating_duration_since(now);
        if self.to_announce.is_empty() {
            retention
        } else {
            retention.min(self.next_notify.saturating_duration_since(now))
        }
    }

    /// Runs what is due; `all` in the dispatcher of the database, not in that of a single sink.
    pub(super) fn run(&mut self, all: bool, floors: &mut BTreeMap<u32, Floors>) {
        let now = Instant::now();
        if !all {
            self.next_retention = now + Duration::from_secs(3600);
            return;
        }
        if !self.to_announce.is_empty() && now >= self.next_notify {
            self.next_notify = now + NOTIFY_GAP;
            self.announce();
        }
        if now >= self.next_retention {
            self.next_retention = now + settings::retention_interval();
            self.retain(floors);
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

    fn retain(&mut self, floors: &mut BTreeMap<u32, Floors>) {
        let xid = catalog::next_xid();
        if self.idle_at_xid == Some(xid) {
            return;
        }
        match in_transaction(streams::all) {
            Ok(Some(streams)) => {
                let mut left = false;
                for stream in streams {
                    match prune(&stream, floors.entry(stream.oid).or_default()) {
                        Ok((removed, looked)) => left |= looked || removed > 0,
                        Err(error) => {
                            transaction::log(PgLogLevel::WARNING, "retention failed", &error)
                        }
                    }
                }
                self.idle_at_xid = (!left).then_some(xid);
            }
            Ok(None) => {}
            Err(error) => transaction::log(PgLogLevel::WARNING, "retention failed", &error),
        }
    }
}

/// Runs retention over a stream, step by step, each in a transaction of its own. Returns how many events it removed and whether
/// any are left that were looked at.
fn prune(stream: &Stream, floors: &mut Floors) -> Result<(u64, bool), crate::pg::error::PgError> {
    let (mut removed, mut looked) = (0, false);
    let mut behind = stream.pruned_seq;
    loop {
        let step = in_transaction(|spi| {
            retention::step(spi, stream, behind, settings::retention_min_age(), floors)
        })?;
        let Some(step) = step else {
            return Ok((removed, true));
        };
        removed += step.removed;
        looked |= step.upto > behind;
        behind = step.upto;
        if !step.more {
            return Ok((removed, looked));
        }
        crate::pg::latch::check_for_interrupts();
        if crate::pg::latch::terminated() {
            return Ok((removed, true));
        }
    }
}

/// None if the extension is being dropped or is gone.
fn in_transaction<R>(body: impl FnOnce(&Spi) -> R) -> Result<Option<R>, crate::pg::error::PgError> {
    transaction::run(|| {
        catalog::extension()
            .is_some_and(lock::hold_extension)
            .then(|| security::as_extension(|| connected(body)))
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
