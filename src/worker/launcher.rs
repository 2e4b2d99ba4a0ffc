//! The launcher: one process for the cluster, connected to no database, that keeps a dispatcher in each one that has the extension.
//!
//! It compares what is wanted with what runs, again and again, and does not act on events: whatever was missed, the next round puts
//! right. In which databases the extension is, only a dispatcher can see: a database that is new here gets one, which ends if it
//! finds none, and says so in shared memory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;
use pgrx::bgworkers::{BackgroundWorkerStatus, DynamicBackgroundWorker};
use pgrx::pg_sys;

use crate::pg::catalog::{self, Database};
use crate::pg::shmem::{self, Asked};
use crate::pg::{background, latch, lock, transaction};
use crate::settings;

/// The wait before a dispatcher that ended is started again; it doubles while they keep ending early.
const RESTART: Duration = Duration::from_secs(1);
const RESTART_LONGEST: Duration = Duration::from_secs(60);
/// One that ran as long as this did not end early.
const RAN_WELL: Duration = Duration::from_secs(30);
/// So often it may end early before the wait grows: it may have made way for a DROP DATABASE, or a RENAME.
const PATIENCE: u32 = 3;
/// How long a dispatcher keeps its slot at the least while other databases have none.
const SLICE: Duration = Duration::from_secs(2);
/// How often to try for a slot.
const NO_SLOT: Duration = Duration::from_millis(500);
/// How often to look for what nobody has announced, such as a copy made by CREATE DATABASE … TEMPLATE.
const LOOK: Duration = Duration::from_secs(5);

/// A database that has, or is to have, a dispatcher.
#[derive(Default)]
struct Served {
    worker: Option<(DynamicBackgroundWorker, Instant)>,
    /// It has one that an earlier launcher has started.
    adopted: bool,
    not_before: Option<Instant>,
    early_ends: u32,
    /// It has none, and is to have one, since then: whoever has waited longest comes first.
    waits_since: Option<Instant>,
    /// The server has had no slot for it, which was said; and it is to give its slot to others.
    short: bool,
    yields: bool,
}

#[derive(Default)]
struct Launcher {
    served: BTreeMap<u32, Served>,
    databases: Vec<Database>,
    /// The next transaction id at the last listing, if nothing was unfinished then: databases come and go with transactions.
    listed_at_xid: Option<u64>,
    /// When to try again, if the server had no worker slot left.
    no_slot_until: Option<Instant>,
    told: Option<usize>,
}

/// The entry of the launcher's process.
pub(crate) fn main() -> ! {
    background::begin_launcher();
    shmem::launcher_is_me();
    let mut launcher = Launcher::default();
    while !latch::terminated() {
        latch::reload_if_asked();
        launcher.take_asked();
        launcher.list_databases();
        let due = launcher.reconcile();
        launcher.tell();
        latch::rest(due, None);
    }
    // Unless the server is going down, the postmaster starts it again.
    background::end(1)
}

impl Launcher {
    fn take_asked(&mut self) {
        match shmem::take_asked() {
            Asked::All => shmem::forget_absent(None),
            Asked::Some(named) => {
                for database in named {
                    shmem::forget_absent(Some(database));
                    self.served.entry(database.to_u32()).or_default().not_before = None;
                    self.listed_at_xid = None;
                }
            }
        }
    }

    fn list_databases(&mut self) {
        let xid = catalog::next_xid();
        if self.listed_at_xid == Some(xid) {
            return;
        }
        match transaction::run(|| (catalog::databases(), catalog::nothing_unfinished_below(xid))) {
            Ok((found, quiet)) => {
                self.databases = found;
                self.listed_at_xid = quiet.then_some(xid);
                shmem::keep_only(|oid| self.databases.iter().any(|database| database.oid == oid));
            }
            Err(error) => transaction::log(
                PgLogLevel::WARNING,
                "the databases could not be listed",
                &error,
            ),
        }
    }

    /// Starts and stops what is needed. Returns when the next look is due.
    fn reconcile(&mut self) -> Duration {
        let Self {
            served, databases, ..
        } = self;
        served.retain(|oid, served| {
            served.worker.is_some()
                || databases
                    .iter()
                    .any(|database| database.oid.to_u32() == *oid)
        });
        let now = Instant::now();
        for (oid, entry) in served.iter_mut() {
            let wanted = is_wanted(databases, *oid);
            match entry.worker.take() {
                Some((worker, since)) if has_ended(&worker) => {
                    // Its slot may be what somebody else waits for.
                    self.no_slot_until = None;
                    if std::mem::take(&mut entry.yields) {
                        entry.not_before = None;
                        continue;
                    }
                    let early = wanted && now.duration_since(since) < RAN_WELL;
                    entry.early_ends = if early { entry.early_ends + 1 } else { 0 };
                    let doublings = entry.early_ends.saturating_sub(PATIENCE);
                    entry.not_before = Some(now + doubled(RESTART, doublings));
                }
                Some((worker, _)) if !wanted => {
                    let _ = worker.terminate();
                    entry.not_before = Some(now + RESTART);
                }
                running => entry.worker = running,
            }
        }
        self.start_wanted(now)
    }

    fn start_wanted(&mut self, now: Instant) -> Duration {
        let mut due = settings::poll_interval().min(LOOK);
        let mut wanting = Vec::new();
        for database in &self.databases {
            let oid = database.oid.to_u32();
            let entry = self.served.entry(oid).or_default();
            if entry.worker.is_none() && is_wanted(&self.databases, oid) {
                entry.waits_since.get_or_insert(now);
                wanting.push(database.clone());
            }
        }
        wanting.sort_by_key(|database| self.served[&database.oid.to_u32()].waits_since);
        let mut short = Vec::new();
        for database in wanting {
            let entry = self.served.entry(database.oid.to_u32()).or_default();
            entry.adopted = false;
            let left = |time: Option<Instant>| {
                time.map_or(Duration::ZERO, |time| time.saturating_duration_since(now))
            };
            let wait = left(entry.not_before);
            let no_slot = left(self.no_slot_until);
            if !wait.is_zero() {
                due = due.min(wait.max(RESTART / 2));
            } else if lock::database_is_wanted(database.oid) {
                due = due.min(RESTART / 2);
            } else if lock::dispatcher_runs_in(database.oid) {
                // Its end wakes us.
                entry.adopted = true;
            } else if no_slot.is_zero()
                && let Some(worker) = background::start_dispatcher(database.oid, None)
            {
                entry.worker = Some((worker, now));
                entry.waits_since = None;
            } else {
                if !std::mem::replace(&mut entry.short, true) {
                    pgrx::warning!(
                        "pg_outbox: no worker slot for the dispatcher of database \"{}\": raise max_worker_processes",
                        database.name
                    );
                }
                if no_slot.is_zero() {
                    self.no_slot_until = Some(now + NO_SLOT);
                }
                due = due.min(no_slot.max(NO_SLOT));
                short.push(database.oid);
            }
        }
        shmem::set_short(&short);
        if short.is_empty() {
            self.no_slot_until = None;
            self.served
                .values_mut()
                .for_each(|entry| entry.short = false);
        } else {
            self.ask_to_yield(now, short.len());
        }
        due
    }

    /// So many databases have no dispatcher: as many others that have had theirs for long enough are asked for it.
    fn ask_to_yield(&mut self, now: Instant, short: usize) {
        let yielding = self.served.values().filter(|entry| entry.yields).count();
        let mut running = self
            .served
            .iter_mut()
            .filter_map(|(oid, entry)| Some((entry.worker.as_ref()?.1, *oid, entry)))
            .filter(|(since, _, entry)| !entry.yields && now.duration_since(*since) >= SLICE)
            .collect::<Vec<_>>();
        running.sort_by_key(|(since, ..)| *since);
        for (_, oid, entry) in running.into_iter().take(short.saturating_sub(yielding)) {
            entry.yields = true;
            shmem::ask_to_yield(pg_sys::Oid::from(oid));
        }
    }

    /// What it does, in pg_stat_activity.
    fn tell(&mut self) {
        let served = self.served.values();
        let count = served
            .filter(|entry| entry.adopted || entry.worker.is_some())
            .count();
        if self.told != Some(count) {
            self.told = Some(count);
            let plural = if count == 1 { "" } else { "s" };
            background::report_rest(&format!("keeping dispatchers in {count} database{plural}"));
        }
    }
}

fn doubled(wait: Duration, times: u32) -> Duration {
    wait.saturating_mul(1 << times.min(10)).min(RESTART_LONGEST)
}

fn has_ended(worker: &DynamicBackgroundWorker) -> bool {
    !matches!(
        worker.pid(),
        Ok(_) | Err(BackgroundWorkerStatus::NotYetStarted)
    )
}

fn is_wanted(databases: &[Database], oid: u32) -> bool {
    let id = pg_sys::Oid::from(oid);
    settings::enabled()
        && !shmem::is_stopped(id)
        && !shmem::is_absent(id)
        && databases
            .iter()
            .any(|database| database.oid == id && settings::serves(&database.name))
}
