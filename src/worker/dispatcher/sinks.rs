//! Which sinks a dispatcher serves: takes those that are new or changed, lets go of those that are not its own any more, and sets
//! aside those that cannot run.

use std::ffi::CStr;
use std::time::Duration;

use pgrx::{PgLogLevel, PgSqlErrorCode};

use super::super::course::{Course, Taken, Target};
use super::super::io::Io;
use super::super::now;
use super::super::shaping::Patience;
use super::{Dispatcher, LEASE_RETRY, Waiting};
use crate::dispatch::Time;
use crate::pg::culprits::{self, Culprit};
use crate::pg::error::PgError;
use crate::pg::lock::{self, Use};
use crate::pg::spi::{Spi, connected};
use crate::pg::{catalog, transaction};
use crate::settings;
use crate::store::health::{self, Health};
use crate::store::sinks::{self, Version};

/// Why a sink rests whose code has ended the process that ran it.
const STUBBORN: &str = "its filter, transform or function took too long and did not end when it was cancelled, so its process was ended";

/// What tells where a sink stands.
const TAKEN_FROM: &[&CStr] = &[c"cursors", c"sink_health", c"parked"];

impl Dispatcher {
    pub(super) fn reconcile(&mut self, spi: &Spi, versions: &[Version]) {
        let is_current = |id: &str| versions.iter().find(|version| version.id == id);
        // What is in flight to a sink that goes on is waited for, or it would be delivered twice for a mere change of settings.
        let mut changed = Vec::new();
        for (id, course) in &mut self.courses {
            match is_current(id) {
                Some(version) if course.is_version(version) => {}
                Some(_) if course.is_in_flight() => {
                    course.call_off();
                    self.changing = true;
                }
                _ => changed.push(id.clone()),
            }
        }
        for id in &changed {
            if let Some(mut course) = self.courses.remove(id) {
                // What it delivered is not to be delivered again by its successor.
                if is_current(id).is_some() {
                    // It ends here. If this transaction fails, its successor goes by what is stored.
                    let _ = course.save(spi);
                }
                self.let_go(&course);
            }
        }
        self.waiting.retain(|id, _| is_current(id).is_some());
        self.hear_of_stubborn();
        self.helpers.end_changed(versions);
        self.helpers.keep_only(versions);
        let at = now();
        for version in versions {
            if let Some(times) = self.helpers.stubborn_news(version) {
                self.wait_for(version, Duration::ZERO, times - 1);
                self.set_aside(spi, version, STUBBORN);
            }
            let waits = self
                .waiting
                .get(&version.id)
                .is_some_and(|waiting| waiting.version == *version && waiting.again > at);
            let with_helper = self.only.is_none() && self.helpers.serves(version);
            if self.courses.contains_key(&version.id) || waits || with_helper {
                continue;
            }
            if let Some(wait) = self.helpers.no_slot_for()
                && self.helpers.is_stubborn(version)
            {
                self.wait_for(version, wait, 0);
                continue;
            }
            self.take(spi, version, changed.contains(&version.id));
        }
    }

    /// Takes note of those whose code has ended a process: the dispatcher before this one, or one that it has started.
    fn hear_of_stubborn(&mut self) {
        if self.only.is_some() {
            return;
        }
        for culprit in culprits::take(catalog::current_database()) {
            match culprit {
                Culprit::Sink(number) => self.helpers.note_stubborn(number),
                Culprit::Backfill(id) => self.maintenance.backfilling.note_stubborn(id),
                Culprit::Recorder => self.maintenance.recording.stay_away(),
            }
        }
    }

    pub(super) fn take(&mut self, spi: &Spi, version: &Version, changed: bool) {
        if !lock::hold_ours(TAKEN_FROM, Use::Reading) {
            self.wait_for(version, LEASE_RETRY, 0);
            return;
        }
        match Course::take(spi, version, lock::take_lease) {
            Taken::Course(mut course) => {
                if self.waiting.remove(&version.id).is_some() || changed {
                    course.retry_now();
                }
                if matches!(course.target, Target::Network) {
                    self.open(&course);
                }
                let alone = self.only.is_some() || self.helpers.is_slow(version);
                course.set_patience(match course.target {
                    Target::Network if !alone => Patience::Shared,
                    Target::Network | Target::Function(_) => Patience::Own,
                });
                course.has_more = false;
                if self.only.is_none() && self.helpers.is_stubborn(version) {
                    course.leave();
                }
                self.just_taken.push(version.id.clone());
                self.courses.insert(version.id.clone(), *course);
            }
            Taken::Leased => {
                if self.only.is_none() {
                    // One that the dispatcher before this one has started, and which calls what may never end.
                    sinks::end_orphan(spi, version.number);
                }
                self.wait_for(version, LEASE_RETRY, 0);
            }
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

    pub(super) fn wait_for(&mut self, version: &Version, wait: Duration, failures: u32) {
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
    pub(super) fn set_aside(&mut self, spi: &Spi, version: &Version, problem: &str) {
        let id = version.id.as_str();
        let before = health::load(spi, id).unwrap_or_default();
        // One that was set aside and taken again, by whichever process, has not got on since.
        let in_a_row = match before.state.as_str() {
            sinks::SET_ASIDE => before.attempts,
            _ => 0,
        };
        let waiting = self.waiting.get(id).map_or(0, |waiting| waiting.failures);
        let failures = waiting.max(in_a_row).saturating_add(1);
        let wait = settings::retry_min()
            .saturating_mul(1 << failures.min(20))
            .min(settings::retry_max());
        self.wait_for(version, wait, failures);
        if !lock::hold_ours(&[c"sinks", c"sink_health"], Use::Writing) {
            return;
        }
        if before.last_error.as_deref() != Some(problem) {
            pgrx::warning!("pg_outbox: sink \"{id}\" cannot run: {problem}");
        }
        let next =
            i64::try_from((now().0 + u64::try_from(wait.as_millis()).unwrap_or(0)) * 1000).ok();
        let state = sinks::SET_ASIDE.to_owned();
        health::save(
            spi,
            id,
            &Health {
                state,
                attempts: failures,
                last_error: Some(problem.to_owned()),
                next_attempt_at: next,
                checkpoint: before.checkpoint,
            },
        );
    }

    /// After an error in the course's own transaction. A cancel request is no fault of the sink's, nor is a lock that somebody else holds.
    pub(super) fn fail(&mut self, mut course: Course, error: &PgError) {
        if error.code == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE {
            match course.target {
                Target::Network => {
                    course.postpone();
                    self.courses.insert(course.sink.id.clone(), course);
                }
                // What was called is undone, and what it came to must be forgotten.
                Target::Function(_) => {
                    self.let_go(&course);
                    self.wait_for(&course.version().clone(), LEASE_RETRY, 0);
                }
            }
        } else if error.code == PgSqlErrorCode::ERRCODE_QUERY_CANCELED {
            self.let_go(&course);
            self.look_at_all();
        } else {
            self.drop_course(course, &error.summary());
        }
    }

    pub(super) fn drop_course(&mut self, course: Course, problem: &str) {
        let version = course.version().clone();
        self.let_go(&course);
        let aside = transaction::run(|| {
            connected(|spi| self.set_aside(spi, &version, problem));
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
    pub(super) fn let_go(&self, course: &Course) {
        if let (Target::Network, Some(io)) = (&course.target, &self.io) {
            io.close(&course.sink.id);
        }
        lock::give_lease_back(course.sink.number);
    }

    pub(super) fn start_io(&mut self) {
        if self.io.is_none() {
            match Io::start() {
                Ok(io) => self.io = Some(io),
                Err(error) => {
                    pgrx::warning!("pg_outbox: the I/O thread could not be started: {error}")
                }
            }
        }
    }

    pub(super) fn open(&mut self, course: &Course) {
        self.start_io();
        if let Some(io) = &self.io {
            open(io, course);
        }
    }
}

/// From now on deliveries go by this course's config and by the settings in force.
pub(super) fn open(io: &Io, course: &Course) {
    io.open(&course.sink.id, &course.config, settings::sink_defaults());
}
