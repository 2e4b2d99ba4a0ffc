//! Processes of their own for sinks whose code may take its time, which must not be that of other sinks: function sinks, and those
//! whose filter or transform has turned out to be slow.
//!
//! They take no more than half of the server's worker slots, in all databases together: dispatchers of other databases need some, and so
//! do others. As long as a database has no dispatcher for want of a slot, they give theirs back. Where there is no slot left, the dispatcher serves them itself. A process that ends early is not replaced at
//! once, nor its function called here: what has ended it would end the dispatcher of all sinks. For the same reason a sink whose code
//! has already ended a process, for it would not let itself be cancelled, is never served here.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::bgworkers::{BackgroundWorkerStatus, DynamicBackgroundWorker};

use crate::pg::{background, catalog, shmem};
use crate::store::sinks::Version;

/// The same, as long as databases wait for a slot.
const SHORT: Duration = Duration::from_secs(1);
/// How long sinks are served here after there was no slot.
const NO_SLOT: Duration = Duration::from_secs(10);
/// The rest of a sink whose process has ended early; it doubles while they keep doing so.
const REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(60);
/// One that ran as long as this did not end early.
const RAN_WELL: Duration = Duration::from_secs(30);

struct Running {
    worker: DynamicBackgroundWorker,
    since: Instant,
    /// Of the sink, when it was started.
    version: Version,
    /// It calls a function. What that does is undone when the process ends.
    calls_function: bool,
    /// It was asked to end.
    ending: bool,
}

impl Running {
    fn end(&mut self) {
        // One that has not started yet will see the sink as it is now.
        if let Ok(pid) = self.worker.pid() {
            background::terminate(pid);
            self.ending = true;
        }
    }
}

struct Resting {
    until: Instant,
    over: bool,
    early_ends: u32,
    /// Of the sink, when it was first asked for after the end: if it is changed, there is no reason to wait.
    version: Option<Version>,
}

/// A sink whose code has ended processes.
struct Stubborn {
    /// How often.
    times: u32,
    /// The last of them has not been told yet.
    news: bool,
}

#[derive(Default)]
pub(super) struct Helpers {
    running: BTreeMap<String, Running>,
    resting: BTreeMap<String, Resting>,
    /// Sinks whose filter or transform was slow, as they were then.
    slow: BTreeMap<String, Version>,
    /// Sinks whose code would not be cancelled.
    stubborn: BTreeMap<i32, Stubborn>,
    no_slot_until: Option<Instant>,
}

impl Helpers {
    /// Whether a sink is, or is soon to be, served by a process of its own.
    pub(super) fn serves(&mut self, version: &Version) -> bool {
        if self.running.contains_key(&version.id) {
            return true;
        }
        let Some(resting) = self.resting.get_mut(&version.id) else {
            return false;
        };
        let unchanged = resting.version.get_or_insert_with(|| version.clone()) == version;
        unchanged && !resting.over
    }

    /// Notices which processes have ended, and which sinks have rested. True if there are sinks that wait to be taken.
    pub(super) fn have_changed(&mut self) -> bool {
        let now = Instant::now();
        let mut changed = false;
        let ended = self
            .running
            .iter()
            .filter(|(_, running)| has_ended(&running.worker))
            .map(|(sink, _)| sink.clone())
            .collect::<Vec<_>>();
        for sink in ended {
            let Some(running) = self.running.remove(&sink) else {
                continue;
            };
            changed = true;
            let early_ends = match self.resting.remove(&sink) {
                _ if running.ending
                    || shmem::any_short()
                    || now.duration_since(running.since) >= RAN_WELL =>
                {
                    continue;
                }
                Some(resting) => resting.early_ends + 1,
                None => 1,
            };
            let rest = REST.saturating_mul(1 << (early_ends - 1).min(10));
            let resting = Resting {
                until: now + rest.min(LONGEST_REST),
                over: false,
                early_ends,
                version: None,
            };
            self.resting.insert(sink, resting);
        }
        for resting in self.resting.values_mut() {
            if !resting.over && resting.until <= now {
                resting.over = true;
                changed = true;
            }
        }
        changed
    }

    /// When the first of the sinks that rest has rested.
    pub(super) fn due(&self) -> Option<Instant> {
        let resting = self.resting.values().filter(|resting| !resting.over);
        resting.map(|resting| resting.until).min()
    }

    /// Whether the server may have a worker slot for us.
    pub(super) fn may_start(&self) -> bool {
        self.no_slot_for().is_none()
    }

    /// When there may be a worker slot again, if there is none.
    pub(super) fn no_slot_for(&self) -> Option<Duration> {
        // Each database gets a dispatcher before one gets more than that.
        if shmem::any_short() {
            return Some(SHORT);
        }
        let elsewhere = shmem::alone_elsewhere(catalog::current_database());
        if self.running.len() + elsewhere >= background::slots() / 2 {
            return Some(NO_SLOT);
        }
        let until = self.no_slot_until?;
        let wait = until.saturating_duration_since(Instant::now());
        (!wait.is_zero()).then_some(wait)
    }

    /// Starts the process of a sink whose lease this one has just given back. False if there is no slot.
    pub(super) fn start(&mut self, version: &Version, calls_function: bool) -> bool {
        let database = catalog::current_database();
        match background::start_dispatcher(database, Some(&version.id)) {
            Some(worker) => {
                let running = Running {
                    worker,
                    since: Instant::now(),
                    version: version.clone(),
                    calls_function,
                    ending: false,
                };
                self.running.insert(version.id.clone(), running);
                true
            }
            None => {
                self.no_slot_until = Some(Instant::now() + NO_SLOT);
                false
            }
        }
    }

    /// Ends those that call functions of sinks that are gone, paused or changed: the call may never end.
    pub(super) fn end_changed(&mut self, versions: &[Version]) {
        let running = self.running.values_mut().filter(|running| {
            running.calls_function && !running.ending && !versions.contains(&running.version)
        });
        running.for_each(Running::end);
    }

    /// Ends all that call functions: somebody waits for what they hold.
    pub(super) fn end_functions(&mut self) {
        let running = self.running.values_mut();
        let calling = running.filter(|running| running.calls_function && !running.ending);
        calling.for_each(Running::end);
    }

    /// The sink's filter or transform is too slow for a process that others share.
    pub(super) fn note_slow(&mut self, version: &Version) {
        self.slow.insert(version.id.clone(), version.clone());
    }

    /// Whether the sink is to have a process of its own for that.
    pub(super) fn is_slow(&self, version: &Version) -> bool {
        self.is_stubborn(version) || self.slow.get(&version.id) == Some(version)
    }

    /// The code of the sink with this number has ended a process.
    pub(super) fn note_stubborn(&mut self, number: i32) {
        let stubborn = self.stubborn.entry(number).or_insert(Stubborn {
            times: 0,
            news: false,
        });
        stubborn.times = stubborn.times.saturating_add(1);
        stubborn.news = true;
    }

    /// How often the sink's code has ended a process, if it did so since this was asked last.
    pub(super) fn stubborn_news(&mut self, version: &Version) -> Option<u32> {
        let stubborn = self.stubborn.get_mut(&version.number)?;
        std::mem::take(&mut stubborn.news).then_some(stubborn.times)
    }

    /// Whether the sink's code has ended a process. It stays away from other sinks, even if it was changed: that may not have helped.
    pub(super) fn is_stubborn(&self, version: &Version) -> bool {
        self.stubborn.contains_key(&version.number)
    }

    /// Forgets sinks that are gone, and what was said of those that have changed.
    pub(super) fn keep_only(&mut self, versions: &[Version]) {
        let exists = |sink: &String| versions.iter().any(|version| version.id == *sink);
        self.resting.retain(|sink, _| exists(sink));
        self.slow.retain(|_, version| versions.contains(version));
        self.stubborn
            .retain(|number, _| versions.iter().any(|version| version.number == *number));
    }

    /// Ends all of them, whatever they do, and waits until they are gone.
    pub(super) fn terminate(self) {
        let running = self.running.into_values();
        let ending = running.map(|running| running.worker.terminate());
        for worker in ending.collect::<Vec<_>>() {
            let _ = worker.wait_for_shutdown();
        }
    }
}

pub(super) fn has_ended(worker: &DynamicBackgroundWorker) -> bool {
    !matches!(
        worker.pid(),
        Ok(_) | Err(BackgroundWorkerStatus::NotYetStarted)
    )
}
