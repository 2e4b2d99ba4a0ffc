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

#[derive(Default)]
struct Served {
    worker: Option<(DynamicBackgroundWorker, Instant)>,
    not_before: Option<Instant>,
    early_ends: u32,
}

/// The entry of the launcher's process.
pub(crate) fn main() -> ! {
    background::begin_launcher();
    shmem::launcher_is_me();
    let mut served: BTreeMap<u32, Served> = BTreeMap::new();
    let mut databases: Vec<Database> = Vec::new();
    let mut listed_at_xid = None;
    while !latch::terminated() {
        latch::reload_if_asked();
        let asked = shmem::take_asked();
        match asked {
            Asked::All => shmem::forget_absent(None),
            Asked::Some(named) => {
                for database in named {
                    shmem::forget_absent(Some(database));
                    served.entry(database.to_u32()).or_default().not_before = None;
                    listed_at_xid = None;
                }
            }
        }
        // Databases come and go with transactions.
        let xid = catalog::next_xid();
        if listed_at_xid != Some(xid) {
            match transaction::run(catalog::databases) {
                Ok(found) => {
                    databases = found;
                    listed_at_xid = Some(xid);
                }
                Err(error) => transaction::log(
                    PgLogLevel::WARNING,
                    "the databases could not be listed",
                    &error,
                ),
            }
        }
        let soonest = reconcile(&mut served, &databases);
        let timeout = soonest.map_or(settings::poll_interval(), |soonest| {
            soonest.min(settings::poll_interval())
        });
        latch::wait(Some(timeout), None);
    }
    // The server is going down, and its workers with it.
    background::end(0)
}

/// Starts and stops what is needed. Returns when the next start is due.
fn reconcile(served: &mut BTreeMap<u32, Served>, databases: &[Database]) -> Option<Duration> {
    served.retain(|oid, served| {
        served.worker.is_some()
            || databases
                .iter()
                .any(|database| database.oid.to_u32() == *oid)
    });
    let mut soonest: Option<Duration> = None;
    for (oid, entry) in served.iter_mut() {
        if let Some((worker, since)) = &entry.worker
            && has_ended(worker)
        {
            let ran_well = since.elapsed() >= RAN_WELL;
            entry.early_ends = if ran_well {
                0
            } else {
                entry.early_ends.saturating_add(1)
            };
            let wait = RESTART
                .saturating_mul(1 << entry.early_ends.saturating_sub(1).min(10))
                .min(RESTART_LONGEST);
            entry.not_before = Some(Instant::now() + wait);
            entry.worker = None;
        } else if entry.worker.is_some() && !is_wanted(databases, *oid) {
            if let Some((worker, _)) = entry.worker.take() {
                let _ = worker.terminate();
            }
            entry.not_before = Some(Instant::now() + RESTART);
        }
    }
    for database in databases {
        if !is_wanted(databases, database.oid.to_u32()) {
            continue;
        }
        let entry = served.entry(database.oid.to_u32()).or_default();
        if entry.worker.is_some() {
            continue;
        }
        let wait = entry.not_before.map_or(Duration::ZERO, |time| {
            time.saturating_duration_since(Instant::now())
        });
        if wait.is_zero() && !lock::database_is_wanted(database.oid) {
            match background::start_dispatcher(database.oid, None) {
                Some(worker) => entry.worker = Some((worker, Instant::now())),
                None => {
                    if entry.early_ends == 0 {
                        pgrx::warning!(
                            "pg_outbox: no worker slot for the dispatcher of database \"{}\": raise max_worker_processes",
                            database.name
                        );
                    }
                    entry.early_ends = entry.early_ends.saturating_add(1);
                    entry.not_before = Some(Instant::now() + RESTART_LONGEST);
                }
            }
        }
        if entry.worker.is_none() {
            let wait = wait.max(RESTART / 2);
            soonest = Some(soonest.map_or(wait, |soonest| soonest.min(wait)));
        }
    }
    soonest
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
