//! The short transaction of each round: look at what changed, read ahead, save what is due.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use super::super::course::{Course, Target, Written};
use super::super::now;
use super::super::webhooks::Webhooks;
use super::{Dispatcher, End, LONGEST_LOOK_GAP, LOOK_GAP, Seen, UNWOKEN_POLL};
use crate::dispatch::{Floors, Time};
use crate::pg::error::PgError;
use crate::pg::lock::{self, Use};
use crate::pg::spi::{Spi, connected};
use crate::pg::{background, catalog, shmem, transaction};
use crate::settings;
use crate::store::streams::{self, Stream};
use crate::store::{rebase, sinks};

/// What a look reads.
const LOOKED_AT: &[&CStr] = &[c"clusters", c"streams", c"sinks", c"secrets", c"cursors"];

impl Dispatcher {
    /// Whether a look can find anything that the last one did not.
    pub(super) fn look_is_due(&mut self) -> bool {
        let at = now();
        if self.stale || self.waiting.values().any(|waiting| waiting.again <= at) {
            return true;
        }
        if Instant::now() < self.next_look {
            return false;
        }
        self.next_look = Instant::now() + self.poll_interval();
        // What was unfinished may have ended without a wake-up and without a new id: COMMIT PREPARED does.
        self.unfinished || catalog::next_xid() != self.looked_at_xid
    }

    pub(super) fn poll_interval(&self) -> Duration {
        let set = settings::poll_interval();
        if shmem::is_there() {
            set
        } else {
            set.min(UNWOKEN_POLL)
        }
    }

    /// One short transaction: look, read ahead, save.
    pub(super) fn round(&mut self) -> Result<Option<End>, PgError> {
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
        if look {
            shmem::mute();
        }
        // Read before anything is looked at: what is committed from here on is found by the next look.
        let xid = catalog::next_xid();
        let changes = shmem::changes();
        let thorough = self.thorough
            || changes.is_none()
            || changes != self.known_changes
            || Instant::now() >= self.next_thorough
            || self.waiting.values().any(|waiting| waiting.again <= at);
        self.just_taken.clear();
        let (end, saved) = transaction::run(|| {
            let nothing = Vec::new;
            let Some(extension) = catalog::extension() else {
                return (Some(End::NoExtension), nothing());
            };
            self.held = !lock::hold_extension(extension);
            if self.held {
                return (None, nothing());
            }
            if *self.extension.get_or_insert(extension) != extension {
                return (Some(End::OtherExtension), nothing());
            }
            if lock::restore_goes_on() {
                self.let_all_go();
                self.look_at_all();
                self.check_cursors = true;
                self.held = true;
                return (None, nothing());
            }
            // Nothing can be seen as long as an administrator holds what says what is to be delivered where.
            self.held = look && !lock::hold_ours(LOOKED_AT, Use::Reading);
            if self.held {
                self.stale = true;
                return (None, nothing());
            }
            background::relax_commit();
            let saved = connected(|spi| {
                if look {
                    if thorough {
                        // A restore may have come and gone between two looks; it leaves changes behind.
                        let changed = changes.is_none() || changes != self.known_changes;
                        let check = std::mem::take(&mut self.check_cursors) || changed;
                        let rebased = rebase::if_moved(spi, check);
                        if self.look_for_rebased(spi) || rebased {
                            // This transaction does not see what it has just made of the events.
                            self.let_all_go();
                            self.look_at_all();
                            return nothing();
                        }
                        self.look_at_sinks(spi);
                        if self.thorough || changed {
                            self.webhooks.look_again();
                        }
                        self.known_changes = changes;
                        self.next_thorough = Instant::now() + self.poll_interval();
                    }
                    let renumbered = self.look_at_streams(spi, xid);
                    self.looked_at_xid = xid;
                    self.thorough = renumbered;
                    self.stale = renumbered || !self.just_taken.is_empty();
                    self.last_look = Instant::now();
                    self.next_look = self.last_look + self.poll_interval();
                }
                let (seen, floors) = (&self.seen, &mut self.floors);
                let mut found = 0;
                let mut saved = Vec::new();
                for (id, course) in &mut self.courses {
                    let done = work(spi, course, seen, floors, at);
                    found = done.passed.max(found);
                    saved.extend(done.written.map(|written| (id.clone(), written)));
                }
                if look {
                    self.look_gap = look_gap(found);
                }
                saved
            });
            let end = (self.only.is_some() && self.courses.is_empty() && self.waiting.is_empty())
                .then_some(End::NotNeeded);
            (end, saved)
        })?;
        for (id, written) in saved {
            self.committed(&id, written);
        }
        self.end_lost();
        Ok(end)
    }

    /// After a failed round: every course in a transaction of its own. The one at fault is set aside for a while. What the round has
    /// seen, or has put right, may be rolled back.
    pub(super) fn one_by_one(&mut self) {
        self.look_at_all();
        self.check_cursors = true;
        self.known_changes = None;
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
                held.then(|| connected(|spi| work(spi, &mut course, seen, floors, at)))
            });
            match worked {
                Ok(done) => {
                    if let Some(written) = done.and_then(|done| done.written) {
                        course.committed(written);
                    }
                    self.courses.insert(id, course);
                }
                Err(error) => {
                    failed = true;
                    self.fail(course, &error);
                }
            }
        }
        self.end_lost();
        if !failed {
            // The look itself failed: again, but not at full speed.
            self.held = true;
        }
    }

    /// What was saved in a transaction that has committed is off a course's mind.
    fn committed(&mut self, id: &str, written: Written) {
        if let Some(course) = self.courses.get_mut(id) {
            course.committed(written);
        }
    }

    /// Sinks that are another process' are let go, and those that cannot run any longer set aside.
    pub(super) fn end_lost(&mut self) {
        let ended = self
            .courses
            .iter()
            .filter(|(_, course)| course.is_lost() || course.unfit().is_some())
            .map(|(id, _)| id.clone())
            .collect::<Vec<_>>();
        for id in ended {
            let Some(course) = self.courses.remove(&id) else {
                continue;
            };
            match course.unfit().map(str::to_owned) {
                Some(problem) => self.drop_course(course, &problem),
                None => {
                    self.let_go(&course);
                    self.look_at_all();
                }
            }
        }
    }

    /// Sees which streams there are. True if one has been re-based by another process since: its numbers had begun again.
    fn look_for_rebased(&mut self, spi: &Spi) -> bool {
        let before = std::mem::replace(&mut self.streams, streams::all(spi));
        let known = |stream: &&Stream| before.iter().find(|known| known.oid == stream.oid);
        let differs = |stream: &&Stream| {
            known(stream).is_some_and(|known| known.numbering != stream.numbering)
        };
        self.streams.iter().any(|stream| differs(&stream))
    }

    /// Sees which sinks there are, and how they changed.
    fn look_at_sinks(&mut self, spi: &Spi) {
        let mut versions = sinks::versions(spi);
        if let Some(only) = &self.only {
            versions.retain(|version| version.id == *only);
        }
        self.reconcile(spi, &versions);
        self.maintenance.recording.look_again();
        self.maintenance.backfilling.look_again();
        for course in self.courses.values_mut() {
            course.redelivery.look_again();
        }
    }

    /// Sees how far each stream has come. `next_xid` was read before. True if the numbers of one have begun again: that one is left
    /// alone.
    fn look_at_streams(&mut self, spi: &Spi, next_xid: u64) -> bool {
        let mut renumbered = false;
        self.seen.clear();
        self.unfinished = false;
        for stream in &self.streams {
            if !lock::hold_table(stream.oid) {
                self.unfinished = true;
                continue;
            }
            let horizon = stream.look(spi, self.floors.entry(stream.oid).or_default());
            if horizon.is_renumbered {
                renumbered = true;
                continue;
            }
            let snapshot = &horizon.snapshot;
            self.unfinished |= snapshot.xmax() < next_xid || !snapshot.running().is_empty();
            if self.only.is_none() {
                self.maintenance.announcements.saw(stream, &horizon);
                self.maintenance.sealing.saw(stream, &horizon);
                self.webhooks.saw(stream, &horizon);
            }
            let seen = Seen {
                stream: stream.clone(),
                horizon,
            };
            self.seen.insert(stream.name.clone(), seen);
        }
        for (id, course) in &mut self.courses {
            course.has_more |= !self.just_taken.contains(id);
        }
        renumbered
    }

    /// Nothing that is known here holds any longer.
    fn let_all_go(&mut self) {
        for course in std::mem::take(&mut self.courses).into_values() {
            self.let_go(&course);
        }
        self.floors.clear();
        self.webhooks = Webhooks::new();
    }

    /// Before the process ends: what was delivered is not to be delivered again.
    pub(super) fn save_all(&mut self) {
        self.courses.values_mut().for_each(Course::give_up);
        self.save(|_| true);
        if self.only.is_none() {
            self.webhooks.save();
        }
    }

    /// Saves where these stand, before they are let go.
    pub(super) fn save(&mut self, these: impl Fn(&Course) -> bool) {
        if !self.courses.values().any(&these) {
            return;
        }
        let saved = transaction::run(|| {
            if !catalog::extension().is_some_and(lock::hold_extension) {
                return Vec::new();
            }
            let courses = self.courses.iter_mut();
            let courses = courses.filter(|(_, course)| these(course));
            connected(|spi| {
                let saved = courses.map(|(id, course)| Some((id.clone(), course.save(spi)?)));
                saved.flatten().collect::<Vec<_>>()
            })
        });
        match saved {
            Ok(saved) => {
                for (id, written) in saved {
                    self.committed(&id, written);
                }
            }
            Err(error) => transaction::log(
                PgLogLevel::WARNING,
                "what was delivered last could not be saved",
                &error,
            ),
        }
        self.end_lost();
    }
}

fn needs_transaction(course: &Course, at: Time) -> bool {
    (matches!(course.target, Target::Network)
        && (course.wants_to_read() || course.wants_to_read_parked(at)))
        || course.save_due().is_some_and(|due| due <= at)
        || course.wants_to_verify()
        || course.wants_to_look_for_redeliveries()
}

/// The time until the next look, after one that found so many events: where they come one by one each is told at once, where they
/// come by the thousand they are fetched by the dozen, and writers get the processor.
fn look_gap(found: usize) -> Duration {
    let found = u32::try_from(found).unwrap_or(u32::MAX);
    (LOOK_GAP / 2)
        .saturating_mul(found)
        .clamp(LOOK_GAP, LONGEST_LOOK_GAP)
}

/// What a course has done within a transaction.
struct Done {
    /// How many rows of the stream it has passed.
    passed: usize,
    written: Option<Written>,
}

/// What a course does within a transaction: reads ahead, and saves what is due.
fn work(
    spi: &Spi,
    course: &mut Course,
    seen: &BTreeMap<String, Seen>,
    floors: &mut BTreeMap<u32, Floors>,
    at: Time,
) -> Done {
    course.begin();
    course.verify(spi);
    let (mut passed, mut written) = (0, None);
    let parked = course.wants_to_read_parked(at);
    if matches!(course.target, Target::Network) && (course.wants_to_read() || parked) {
        if let Some(seen) = seen.get(&course.sink.stream)
            && lock::hold_table(seen.stream.oid)
        {
            course.reader.stream.clone_from(&seen.stream);
            if course.wants_to_read() {
                let floors = floors.entry(seen.stream.oid).or_default();
                passed = course.fill(spi, &seen.horizon, floors);
            }
            if parked {
                course.fill_parked(spi);
            }
        } else if parked {
            course.let_parked_wait();
        }
    }
    course.fill_redelivery(spi);
    if course.unfit().is_some() || course.save_due().is_some_and(|due| due <= at) {
        written = course.save(spi);
    }
    Done { passed, written }
}
