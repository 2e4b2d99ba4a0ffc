//! The dispatcher's main thread: one process for all sinks of a database, or for a single function sink.
//!
//! It goes round: takes reports from the I/O thread, and in one short transaction looks at what changed, reads ahead for every
//! sink and saves what is due; then hands over what is ready, and waits. If that transaction fails, each sink gets its own, so
//! that the fault of one is told apart and stops no other.

mod functions;
mod round;
mod sinks;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::{PgLogLevel, pg_sys};

use self::sinks::open;
use super::course::{Course, Handover, Next, Target};
use super::helpers::Helpers;
use super::io::Io;
use super::maintenance::Maintenance;
use super::webhooks::Webhooks;
use super::{now, until};
use crate::dispatch::{Floors, Time};
use crate::pg::{background, catalog, latch, lock, shmem, transaction};
use crate::settings;
use crate::sinks::Defaults;
use crate::store::sinks::Version;
use crate::store::streams::{Horizon, Stream};

/// How often to see whether somebody waits for this database's sessions to leave; they wait for five seconds.
const WANTED_CHECK: Duration = Duration::from_secs(1);
/// How often to try for a lease that another process holds.
const LEASE_RETRY: Duration = Duration::from_secs(1);
/// Without shared memory no commit can wake us.
const UNWOKEN_POLL: Duration = Duration::from_millis(250);
/// The shortest time between two looks: where commits come faster than this, one look finds many, and writers get the processor.
const LOOK_GAP: Duration = Duration::from_micros(500);
const LONGEST_LOOK_GAP: Duration = Duration::from_millis(5);
/// How long the end of the process waits for deliveries in flight.
const LAST_REPORTS: Duration = Duration::from_millis(500);
/// How long a process whose slot others wait for waits itself for what is in flight.
const LONGEST_YIELD: Duration = Duration::from_secs(5);
/// While the extension is held by a DROP or ALTER EXTENSION.
const HELD_RETRY: Duration = Duration::from_millis(100);

/// Why a dispatcher ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Terminated,
    /// The extension is not in this database, or not any more.
    NoExtension,
    /// It was dropped and made again: what is known here is of the old one.
    OtherExtension,
    /// Somebody wants the database for himself.
    Wanted,
    /// Switched off, or another dispatcher is there, or the one sink is gone, paused or of another kind.
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
    database: String,
    extension: Option<pg_sys::Oid>,
    io: Option<Io>,
    courses: BTreeMap<String, Course>,
    waiting: BTreeMap<String, Waiting>,
    helpers: Helpers,
    maintenance: Maintenance,
    webhooks: Webhooks,
    /// By the oid of the stream's table.
    pub(super) floors: BTreeMap<u32, Floors>,
    streams: Vec<Stream>,
    seen: BTreeMap<String, Seen>,
    /// Something may have been committed since the last look.
    stale: bool,
    /// The next look is at everything, not only at how far the streams have come.
    thorough: bool,
    /// As counted at the last thorough look, and when the next one is due if nobody has counted.
    known_changes: Option<u32>,
    next_thorough: Instant,
    /// Sinks that the last transaction has taken. What it saw may be older than what their last holders had come to: they are read
    /// in the next one.
    just_taken: Vec<String>,
    /// The extension is being dropped or altered just now, or a dump is being restored.
    held: bool,
    /// Somebody waited for the extension when that was looked at last.
    extension_was_wanted: bool,
    /// The cursors may come from another cluster.
    check_cursors: bool,
    /// A changed sink has a delivery in flight: it is looked at again once that is over.
    changing: bool,
    last_look: Instant,
    look_gap: Duration,
    next_look: Instant,
    next_wanted_check: Instant,
    /// Other databases wait for this process' slot: nothing more is handed over.
    yields_since: Option<Instant>,
    /// The next transaction id at the last look: if it is the same, nothing has been committed but what was unfinished then.
    looked_at_xid: u64,
    unfinished: bool,
    defaults: Defaults,
    activity: &'static str,
}

/// The entry of a dispatcher process.
pub(crate) fn main(database: pg_sys::Oid, only: Option<String>) -> ! {
    background::begin_dispatcher(database, only.as_deref());
    let announced = shmem::announcements();
    // One dispatcher for a database; one for a function sink is kept single by the sink's lease.
    if only.is_none() && !take_dispatcher_lease() {
        background::end(0);
    }
    shmem::join(database, only.is_some());
    let mut dispatcher = Dispatcher::new(only);
    let end = dispatcher.run();
    latch::end_in_order();
    dispatcher.call_off();
    dispatcher.await_reports();
    dispatcher.save_all();
    // Left alone they would go on, but the next dispatcher would have to ask for their leases again and again.
    std::mem::take(&mut dispatcher.helpers).terminate();
    drop(dispatcher);
    if end == End::NoExtension {
        shmem::set_absent(database, announced);
    }
    background::end(0)
}

/// The one before may be about to end, or somebody may look for an instant whether there is one.
fn take_dispatcher_lease() -> bool {
    (0..10).any(|attempt| {
        if attempt > 0 {
            latch::rest(HELD_RETRY, None);
        }
        lock::take_lease(lock::DISPATCHER)
    })
}

impl Dispatcher {
    fn new(only: Option<String>) -> Self {
        let now = Instant::now();
        Self {
            only,
            database: transaction::run(catalog::current_database_name).unwrap_or_default(),
            extension: None,
            io: None,
            courses: BTreeMap::new(),
            waiting: BTreeMap::new(),
            helpers: Helpers::default(),
            maintenance: Maintenance::default(),
            webhooks: Webhooks::new(),
            floors: BTreeMap::new(),
            streams: Vec::new(),
            seen: BTreeMap::new(),
            stale: true,
            thorough: true,
            known_changes: None,
            next_thorough: now,
            just_taken: Vec::new(),
            held: false,
            extension_was_wanted: false,
            check_cursors: true,
            changing: false,
            last_look: now,
            look_gap: LOOK_GAP,
            next_look: now,
            next_wanted_check: now + WANTED_CHECK,
            yields_since: None,
            looked_at_xid: 0,
            unfinished: true,
            defaults: settings::sink_defaults(),
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
                // Cancelled in the middle.
                Err(_) if latch::terminated() => continue,
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
            if self.only.is_none() {
                self.leave_to_helpers();
            }
            let busy = self.run_functions();
            if self.only.is_none() {
                self.maintenance.run(&mut self.floors);
                self.serve_webhooks();
            }
            self.wait(busy);
        }
    }

    fn serve_signals(&mut self) -> Option<End> {
        if latch::terminated() {
            return Some(End::Terminated);
        }
        if latch::reload_if_asked() {
            self.take_settings();
        }
        let database = catalog::current_database();
        if !settings::enabled()
            || !settings::serves(&self.database)
            || shmem::is_stopped(database)
            // A function may have released it: pg_advisory_unlock_all().
            || (self.only.is_none() && !lock::take_lease(lock::DISPATCHER))
            // The next dispatcher starts one of its own.
            || (self.only.is_some() && !background::starter_lives())
        {
            return Some(End::NotNeeded);
        }
        if self.makes_way() {
            return Some(End::NotNeeded);
        }
        if Instant::now() >= self.next_wanted_check {
            self.next_wanted_check = Instant::now() + WANTED_CHECK;
            if lock::database_is_wanted(database) {
                return Some(End::Wanted);
            }
            self.make_way_for_drop();
        }
        None
    }

    /// Whether to give the slot to a database that has none: once what is in flight is through, or after a while.
    fn makes_way(&mut self) -> bool {
        let asked = match self.only {
            Some(_) => shmem::any_short(),
            None => shmem::is_asked_to_yield(),
        };
        if !asked {
            self.yields_since = None;
            return false;
        }
        let since = *self.yields_since.get_or_insert_with(Instant::now);
        !self.is_in_flight() || since.elapsed() > LONGEST_YIELD
    }

    fn is_in_flight(&self) -> bool {
        self.courses.values().any(Course::is_in_flight) || self.webhooks.is_in_flight()
    }

    /// Whoever drops the extension waits for transactions that hold it. Ours are short, but for a function's.
    fn make_way_for_drop(&mut self) {
        let is_wanted = self.extension.is_some_and(lock::extension_is_wanted);
        if is_wanted && self.extension_was_wanted {
            self.helpers.end_functions();
        }
        self.extension_was_wanted = is_wanted;
    }

    /// What is known of sinks may not hold any longer.
    fn look_at_all(&mut self) {
        self.stale = true;
        self.thorough = true;
    }

    /// The process is about to end: nothing more is sent.
    fn call_off(&mut self) {
        self.courses.values_mut().for_each(Course::call_off);
    }

    /// What is in flight when the process is about to end is most likely accepted in a moment; what is not waited for is delivered
    /// again.
    fn await_reports(&mut self) {
        let end = Instant::now() + LAST_REPORTS;
        while self.is_in_flight() && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            latch::rest(left, self.io.as_ref().map(Io::readable));
            self.take_reports();
        }
    }

    fn take_settings(&mut self) {
        for course in self.courses.values_mut() {
            course.set_policy();
        }
        let defaults = settings::sink_defaults();
        if defaults != self.defaults {
            self.defaults = defaults;
            let networks = self.courses.values();
            let networks = networks.filter(|course| matches!(course.target, Target::Network));
            if let Some(io) = &self.io {
                networks.for_each(|course| open(io, course));
            }
        }
        self.look_at_all();
    }

    fn take_reports(&mut self) {
        let Some(io) = &self.io else { return };
        let reports = io.reports();
        self.webhooks.take(io.attempted());
        if !reports.is_empty() && std::mem::take(&mut self.changing) {
            self.look_at_all();
        }
        for report in reports {
            let Some(course) = self.courses.get_mut(&report.sink) else {
                continue;
            };
            if course.redelivery.awaits(report.serial) {
                course.redelivery.came(&report.came);
            } else if course.awaits_parked(report.serial) {
                course.parked_came(report.came);
            } else if course.awaits(report.serial) {
                course.came(report.came);
            }
        }
        self.courses.values_mut().for_each(Course::take_progress);
    }

    fn serve_webhooks(&mut self) {
        if self.webhooks.need_io() {
            self.start_io();
        }
        self.webhooks.run(&mut self.floors, self.io.as_ref());
    }

    fn hand_over(&mut self) {
        if self.yields_since.is_some() {
            return;
        }
        let Some(io) = &self.io else { return };
        let at = now();
        for (id, course) in self
            .courses
            .iter_mut()
            .filter(|(_, course)| matches!(course.target, Target::Network) && !course.is_leaving())
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
            if let Some(Handover::Network { serial, batch }) = course.next_parked() {
                io.deliver(id, serial, batch);
            }
            if let Some((serial, event)) = course.next_redelivery() {
                io.deliver(id, serial, course.batch_of(vec![event]));
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
        if self.only.is_none() {
            timeout = soonest(timeout, self.maintenance.due());
            if let Some(due) = self.webhooks.due() {
                timeout = soonest(timeout, due);
            }
        }
        for due in self.courses.values().filter_map(|course| course.due(at)) {
            timeout = soonest(timeout, due);
        }
        for waiting in self.waiting.values() {
            timeout = soonest(timeout, until(waiting.again, at).max(HELD_RETRY));
        }
        if let Some(due) = self.helpers.due() {
            timeout = soonest(timeout, due.saturating_duration_since(Instant::now()));
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
        let readable = self.io.as_ref().map(Io::readable);
        let pause = self.pause().min(timeout);
        if !pause.is_zero() {
            if pause > LOOK_GAP || self.courses.values().any(Course::is_in_flight) {
                self.stale |= latch::rest(pause, readable);
            } else {
                // Too short for a wait that counts in milliseconds.
                std::thread::sleep(pause);
            }
            // A report may have come before: commits go on being of no interest.
            if self.pause().is_zero() {
                self.stale |= shmem::unmute();
            }
            return;
        }
        let missed = shmem::unmute();
        if missed && !self.held {
            timeout = Duration::ZERO;
        }
        self.stale |= missed | latch::rest(timeout, readable);
    }

    /// How long commits are of no interest.
    fn pause(&self) -> Duration {
        let listeners = self.maintenance.announcements.not_before();
        let end = match listeners {
            // There is nothing to deliver to, and those who listen have just been told.
            Some(told) if self.only.is_none() && self.courses.is_empty() => told,
            _ => self.last_look + self.look_gap,
        };
        end.saturating_duration_since(Instant::now())
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
}
