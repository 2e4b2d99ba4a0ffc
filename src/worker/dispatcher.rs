//! The dispatcher's main thread: one process for all sinks of a database, or for a single function sink.
//!
//! It goes round: takes reports from the I/O thread, and in one short transaction looks at what changed, reads ahead for every
//! sink and saves what is due; then hands over what is ready, and waits. If that transaction fails, each sink gets its own, so
//! that the fault of one is told apart and stops no other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::{PgLogLevel, pg_sys};

use super::course::{Course, Handover, Next, Taken, Target};
use super::helpers::Helpers;
use super::io::Io;
use super::maintenance::Maintenance;
use super::{now, until};
use crate::dispatch::{Floors, Time};
use crate::pg::error::PgError;
use crate::pg::spi::{Spi, connected};
use crate::pg::{background, catalog, latch, lock, security, shmem, transaction};
use crate::settings;
use crate::sinks::{Batch, Defaults};
use crate::store::health::{self, Health};
use crate::store::rebase;
use crate::store::sinks::{self, Version};
use crate::store::streams::{self, Horizon, Stream};

/// How often to see whether somebody waits for this database's sessions to leave; they wait for five seconds.
const WANTED_CHECK: Duration = Duration::from_secs(1);
/// How often to try for a lease that another process holds.
const LEASE_RETRY: Duration = Duration::from_secs(1);
/// Without shared memory no commit can wake us.
const UNWOKEN_POLL: Duration = Duration::from_millis(250);
/// While the extension is held by a DROP or ALTER EXTENSION.
const HELD_RETRY: Duration = Duration::from_millis(100);

/// Why a dispatcher ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Terminated,
    /// The extension is not in this database, or not any more.
    NoExtension,
    /// Somebody wants the database for himself.
    Wanted,
    /// Switched off, or the one sink is gone, paused or of another kind.
    NotNeeded,
}

/// A sink that cannot run now.
struct Waiting {
    version: Version,
    again: Time,
    failures: u32,
}

struct Seen {
    stream: Stream,
    horizon: Horizon,
}

pub(super) struct Dispatcher {
    only: Option<String>,
    io: Option<Io>,
    courses: BTreeMap<String, Course>,
    waiting: BTreeMap<String, Waiting>,
    helpers: Helpers,
    maintenance: Maintenance,
    /// By the oid of the stream's table.
    pub(super) floors: BTreeMap<u32, Floors>,
    seen: BTreeMap<String, Seen>,
    /// Something may have been committed since the last look.
    stale: bool,
    /// The extension is being dropped or altered just now.
    held: bool,
    /// A changed sink has a delivery in flight: it is looked at again once that is over.
    changing: bool,
    next_look: Instant,
    next_wanted_check: Instant,
    /// The next transaction id at the last look: if it is the same, nothing has been committed but what was running then.
    looked_at_xid: u64,
    activity: &'static str,
}

/// The entry of a dispatcher process.
pub(crate) fn main(database: pg_sys::Oid, only: Option<String>) -> ! {
    background::begin_dispatcher(database);
    let announced = shmem::announcements();
    // One dispatcher for a database; one for a function sink is kept single by the sink's lease.
    if only.is_none() && !lock::take_lease(0) {
        background::end(0);
    }
    shmem::join(database);
    let mut dispatcher = Dispatcher::new(only);
    let end = dispatcher.run();
    dispatcher.save_all();
    drop(dispatcher);
    if end == End::NoExtension {
        shmem::set_absent(database, announced);
    }
    background::end(0)
}

impl Dispatcher {
    fn new(only: Option<String>) -> Self {
        let now = Instant::now();
        Self {
            only,
            io: None,
            courses: BTreeMap::new(),
            waiting: BTreeMap::new(),
            helpers: Helpers::default(),
            maintenance: Maintenance::default(),
            floors: BTreeMap::new(),
            seen: BTreeMap::new(),
            stale: true,
            held: false,
            changing: false,
            next_look: now,
            next_wanted_check: now + WANTED_CHECK,
            looked_at_xid: 0,
            activity: "",
        }
    }

    fn run(&mut self) -> End {
        loop {
            if let Some(end) = self.serve_signals() {
                return end;
            }
            self.take_reports();
            match self.round() {
                Ok(None) => {}
                Ok(Some(end)) => return end,
                Err(error) => {
                    transaction::log(
                        PgLogLevel::WARNING,
                        "a pass failed, each sink is tried by itself",
                        &error,
                    );
                    self.one_by_one();
                }
            }
            self.hand_over();
            let busy = self.run_functions();
            self.maintenance.run(self.only.is_none(), &mut self.floors);
            if self.only.is_none() {
                self.helpers.reconcile(
                    self.courses
                        .values()
                        .filter(|course| matches!(course.target, Target::Function(_))),
                );
                self.leave_to_helpers();
            }
            self.wait(busy);
        }
    }

    fn serve_signals(&mut self) -> Option<End> {
        if latch::terminated() {
            return Some(End::Terminated);
        }
        if latch::reload_if_asked() {
            for course in self.courses.values_mut() {
                course.set_policy();
            }
            self.stale = true;
        }
        if !settings::enabled() {
            return Some(End::NotNeeded);
        }
        if Instant::now() >= self.next_wanted_check {
            self.next_wanted_check = Instant::now() + WANTED_CHECK;
            if lock::database_is_wanted(catalog::current_database()) {
                return Some(End::Wanted);
            }
        }
        None
    }

    fn take_reports(&mut self) {
        let Some(io) = &self.io else { return };
        let reports = io.reports();
        if !reports.is_empty() && std::mem::take(&mut self.changing) {
            self.stale = true;
        }
        for report in reports {
            let Some(course) = self.courses.get_mut(&report.sink) else {
                continue;
            };
            if course.redelivery.awaits(report.serial) {
                course.redelivery.outcome(&report.outcome);
            } else if course.awaits(report.serial) {
                course.outcome(&report.outcome);
            }
        }
    }

    /// Whether a look can find anything that the last one did not.
    fn look_is_due(&mut self) -> bool {
        let at = now();
        if self.stale || self.waiting.values().any(|waiting| waiting.again <= at) {
            return true;
        }
        if Instant::now() < self.next_look {
            return false;
        }
        self.next_look = Instant::now() + self.poll_interval();
        catalog::next_xid() != self.looked_at_xid
            || self.courses.values().any(Course::awaits_transactions)
    }

    fn poll_interval(&self) -> Duration {
        let set = settings::poll_interval();
        if shmem::is_there() {
            set
        } else {
            set.min(UNWOKEN_POLL)
        }
    }

    /// One short transaction: look, read ahead, save.
    fn round(&mut self) -> Result<Option<End>, PgError> {
        let look = self.look_is_due();
        let at = now();
        let due = self
            .courses
            .values()
            .any(|course| needs_transaction(course, at));
        if !look && !due {
            return Ok(None);
        }
        self.report("dispatching");
        // Read before anything is looked at: what is committed from here on is found by the next look.
        let xid = catalog::next_xid();
        let end = transaction::run(|| {
            let Some(extension) = catalog::extension() else {
                return Some(End::NoExtension);
            };
            self.held = !lock::hold_extension(extension);
            if self.held {
                return None;
            }
            background::relax_commit();
            security::as_extension(|| {
                connected(|spi| {
                    if look {
                        self.look(spi);
                        self.looked_at_xid = xid;
                        self.stale = false;
                        self.next_look = Instant::now() + self.poll_interval();
                    }
                    let (seen, floors) = (&self.seen, &mut self.floors);
                    for course in self.courses.values_mut() {
                        work(spi, course, seen, floors, at);
                    }
                });
            });
            (self.only.is_some() && self.courses.is_empty() && self.waiting.is_empty())
                .then_some(End::NotNeeded)
        })?;
        self.committed();
        Ok(end)
    }

    /// After a failed round: every course in a transaction of its own. The one at fault is set aside for a while.
    fn one_by_one(&mut self) {
        let ids = self.courses.keys().cloned().collect::<Vec<_>>();
        let at = now();
        let mut failed = false;
        for id in ids {
            let Some(mut course) = self.courses.remove(&id) else {
                continue;
            };
            let (seen, floors) = (&self.seen, &mut self.floors);
            let worked = transaction::run(|| {
                let held = catalog::extension().is_some_and(lock::hold_extension);
                if held {
                    security::as_extension(|| {
                        connected(|spi| work(spi, &mut course, seen, floors, at))
                    });
                }
            });
            match worked {
                Ok(()) => {
                    self.courses.insert(id, course);
                }
                Err(error) => {
                    failed = true;
                    self.drop_course(course, &error.summary());
                }
            }
        }
        self.committed();
        if !failed {
            // The look itself failed: again, but not at full speed.
            self.stale = true;
            self.held = true;
        }
    }

    /// What was saved in a transaction that has committed is off the courses' minds; sinks that are somebody else's are let go.
    fn committed(&mut self) {
        let lost = self
            .courses
            .iter_mut()
            .filter_map(|(id, course)| course.committed().then(|| id.clone()))
            .collect::<Vec<_>>();
        for id in lost {
            if let Some(course) = self.courses.remove(&id) {
                self.let_go(&course);
                self.stale = true;
            }
        }
    }

    /// Sees which sinks there are and how they changed, and how far each stream has come.
    fn look(&mut self, spi: &Spi) {
        if rebase::if_moved(spi) {
            for course in std::mem::take(&mut self.courses).into_values() {
                self.let_go(&course);
            }
            self.floors.clear();
        }
        let mut versions = sinks::versions(spi);
        if let Some(only) = &self.only {
            versions.retain(|version| version.id == *only);
        }
        self.reconcile(spi, &versions);
        self.seen.clear();
        for stream in streams::all(spi) {
            let horizon = stream.look(spi, self.floors.entry(stream.oid).or_default());
            if self.only.is_none() {
                self.maintenance.saw(&stream, &horizon);
            }
            self.seen
                .insert(stream.name.clone(), Seen { stream, horizon });
        }
        for course in self.courses.values_mut() {
            course.has_more = true;
            course.redelivery.look_again();
        }
    }

    fn reconcile(&mut self, spi: &Spi, versions: &[Version]) {
        let is_current = |id: &str| versions.iter().find(|version| version.id == id);
        // What is in flight to a sink that goes on is waited for, or it would be delivered twice for a mere change of settings.
        let mut changed = Vec::new();
        for (id, course) in &self.courses {
            match is_current(id) {
                Some(version) if course.is_version(version) => {}
                Some(_) if course.is_in_flight() => self.changing = true,
                _ => changed.push(id.clone()),
            }
        }
        for id in &changed {
            if let Some(mut course) = self.courses.remove(id) {
                // What it delivered is not to be delivered again by its successor.
                if is_current(id).is_some() {
                    course.save(spi);
                }
                self.let_go(&course);
            }
        }
        self.waiting.retain(|id, _| is_current(id).is_some());
        let at = now();
        for version in versions {
            let waits = self
                .waiting
                .get(&version.id)
                .is_some_and(|waiting| waiting.version == *version && waiting.again > at);
            let with_helper = self.only.is_none() && self.helpers.serves(&version.id);
            if self.courses.contains_key(&version.id) || waits || with_helper {
                continue;
            }
            self.take(spi, version, changed.contains(&version.id));
        }
    }

    fn take(&mut self, spi: &Spi, version: &Version, changed: bool) {
        match Course::take(spi, version) {
            Taken::Course(mut course) => {
                if self.waiting.remove(&version.id).is_some() || changed {
                    course.retry_now();
                }
                if matches!(course.target, Target::Network) {
                    self.open(&course);
                }
                self.courses.insert(version.id.clone(), *course);
            }
            Taken::Leased => self.wait_for(version, LEASE_RETRY, 0),
            Taken::Unfit(problem) => self.set_aside(spi, version, &problem),
            // Nothing to do until it changes; the process of a single sink ends.
            Taken::Paused | Taken::Pull if self.only.is_none() => {
                self.wait_for(version, Duration::MAX, 0);
            }
            Taken::Paused | Taken::Pull | Taken::Gone => {
                self.waiting.remove(&version.id);
            }
        }
    }

    fn wait_for(&mut self, version: &Version, wait: Duration, failures: u32) {
        let wait = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let again = Time(now().0.saturating_add(wait));
        self.waiting.insert(
            version.id.clone(),
            Waiting {
                version: version.clone(),
                again,
                failures,
            },
        );
    }

    /// A sink that cannot run as it is: says so, and is tried again when it changes, or after a while.
    fn set_aside(&mut self, spi: &Spi, version: &Version, problem: &str) {
        let id = version.id.as_str();
        let failures = self
            .waiting
            .get(id)
            .map_or(0, |waiting| waiting.failures)
            .saturating_add(1);
        let wait = settings::retry_min()
            .saturating_mul(1 << failures.min(20))
            .min(settings::retry_max());
        self.wait_for(version, wait, failures);
        if health::load(spi, id).is_none_or(|health| health.last_error.as_deref() != Some(problem))
        {
            pgrx::warning!("pg_outbox: sink \"{id}\" cannot run: {problem}");
        }
        let next =
            i64::try_from((now().0 + u64::try_from(wait.as_millis()).unwrap_or(0)) * 1000).ok();
        let state = "error".to_owned();
        health::save(
            spi,
            id,
            &Health {
                state,
                attempts: failures,
                last_error: Some(problem.to_owned()),
                next_attempt_at: next,
                checkpoint: None,
            },
        );
    }

    fn drop_course(&mut self, course: Course, problem: &str) {
        let version = course.version().clone();
        self.let_go(&course);
        let aside = transaction::run(|| {
            security::as_extension(|| connected(|spi| self.set_aside(spi, &version, problem)));
        });
        if let Err(error) = aside {
            transaction::log(
                PgLogLevel::WARNING,
                "the state of a sink could not be written",
                &error,
            );
        }
    }

    /// Gives up what is in flight, and the lease.
    fn let_go(&self, course: &Course) {
        if let (Target::Network, Some(io)) = (&course.target, &self.io) {
            io.close(&course.sink.id);
        }
        lock::give_lease_back(course.sink.number);
    }

    fn open(&mut self, course: &Course) {
        if self.io.is_none() {
            match Io::start() {
                Ok(io) => self.io = Some(io),
                Err(error) => {
                    pgrx::warning!("pg_outbox: the I/O thread could not be started: {error}")
                }
            }
        }
        if let Some(io) = &self.io {
            io.open(
                &course.sink.id,
                &course.config,
                Defaults {
                    http_timeout: settings::http_timeout(),
                },
            );
        }
    }

    fn hand_over(&mut self) {
        let Some(io) = &self.io else { return };
        let at = now();
        for (id, course) in self
            .courses
            .iter_mut()
            .filter(|(_, course)| matches!(course.target, Target::Network))
        {
            loop {
                match course.next(at) {
                    Next::Deliver(Handover::Network { serial, batch }) => {
                        io.deliver(id, serial, batch)
                    }
                    Next::Again => continue,
                    Next::Deliver(Handover::Function { .. }) | Next::Idle => {}
                }
                break;
            }
            if let Some((serial, event)) = course.next_redelivery() {
                io.deliver(
                    id,
                    serial,
                    Batch {
                        events: vec![event],
                        secrets: course.secrets(),
                    },
                );
            }
        }
    }

    /// One delivery to each function sink that is served here, each in a transaction with the save of its cursor. True if one of
    /// them may go on at once.
    fn run_functions(&mut self) -> bool {
        let mut busy = false;
        let ids = self
            .courses
            .iter()
            .filter(|(_, course)| matches!(course.target, Target::Function(_)))
            .map(|(id, _)| id.clone())
            .collect::<Vec<_>>();
        for id in ids {
            let Some(mut course) = self.courses.remove(&id) else {
                continue;
            };
            if !course.function_is_due(now()) {
                self.courses.insert(id, course);
                continue;
            }
            self.report("calling functions");
            let (seen, floors) = (&self.seen, &mut self.floors);
            let passed = transaction::run(|| {
                if !catalog::extension().is_some_and(lock::hold_extension) {
                    return Ok(false);
                }
                security::as_extension(|| {
                    connected(|spi| {
                        let Some(seen) = seen.get(&course.sink.stream) else {
                            return Ok(false);
                        };
                        let floors = floors.entry(seen.stream.oid).or_default();
                        course.function_pass(spi, &seen.horizon, floors)
                    })
                })
            });
            match passed {
                Ok(Ok(goes_on)) => {
                    busy |= goes_on;
                    if course.committed() {
                        self.let_go(&course);
                        self.stale = true;
                    } else {
                        self.courses.insert(id, course);
                    }
                }
                Ok(Err(lost)) => self.drop_course(course, &lost),
                Err(error) => self.drop_course(course, &error.summary()),
            }
        }
        busy
    }

    /// A function may take its time, and must not take that of others: where a process of its own can be had, it runs there.
    fn leave_to_helpers(&mut self) {
        let left = self
            .courses
            .keys()
            .filter(|id| self.helpers.serves(id))
            .cloned()
            .collect::<Vec<_>>();
        for id in left {
            if let Some(course) = self.courses.remove(&id) {
                self.let_go(&course);
                self.helpers.start(&id);
            }
        }
    }

    fn wait(&mut self, busy: bool) {
        let at = now();
        let soonest = |a: Duration, b: Duration| a.min(b);
        let mut timeout = WANTED_CHECK;
        timeout = soonest(
            timeout,
            self.next_look.saturating_duration_since(Instant::now()),
        );
        timeout = soonest(timeout, self.maintenance.due());
        for due in self.courses.values().filter_map(|course| course.due(at)) {
            timeout = soonest(timeout, due);
        }
        for waiting in self.waiting.values() {
            timeout = soonest(timeout, until(waiting.again, at).max(HELD_RETRY));
        }
        if busy || self.stale {
            timeout = Duration::ZERO;
        }
        if self.held {
            timeout = HELD_RETRY;
        }
        if !busy {
            self.report("");
        }
        let woken = latch::wait(Some(timeout), self.io.as_ref().map(Io::readable));
        self.stale |= woken;
    }

    fn report(&mut self, activity: &'static str) {
        if self.activity != activity {
            self.activity = activity;
            if activity.is_empty() {
                background::report_statistics();
                background::report_activity(None);
            } else {
                background::report_activity(Some(activity));
            }
        }
    }

    /// Before the process ends: what was delivered is not to be delivered again.
    fn save_all(&mut self) {
        let saved = transaction::run(|| {
            if !catalog::extension().is_some_and(lock::hold_extension) {
                return;
            }
            security::as_extension(|| {
                connected(|spi| {
                    for course in self.courses.values_mut() {
                        course.begin();
                        course.save(spi);
                    }
                });
            });
        });
        if let Err(error) = saved {
            transaction::log(
                PgLogLevel::WARNING,
                "what was delivered last could not be saved",
                &error,
            );
        }
        self.committed();
    }
}

fn needs_transaction(course: &Course, at: Time) -> bool {
    (matches!(course.target, Target::Network) && course.wants_to_read())
        || course.save_due().is_some_and(|due| due <= at)
        || course.wants_to_look_for_redeliveries()
}

/// What a course does within a transaction: reads ahead, and saves what is due.
fn work(
    spi: &Spi,
    course: &mut Course,
    seen: &BTreeMap<String, Seen>,
    floors: &mut BTreeMap<u32, Floors>,
    at: Time,
) {
    course.begin();
    if matches!(course.target, Target::Network)
        && course.wants_to_read()
        && let Some(seen) = seen.get(&course.sink.stream)
    {
        course.reader.stream.clone_from(&seen.stream);
        course.fill(
            spi,
            &seen.horizon,
            floors.entry(seen.stream.oid).or_default(),
        );
    }
    course.fill_redelivery(spi);
    if course.save_due().is_some_and(|due| due <= at) {
        course.save(spi);
    }
}
