//! Reading ahead for a course: what the engine wants more of.

use std::collections::BTreeSet;

use super::super::{entry::Entry, now, shaping::Patience};
use super::{Course, policy};
use crate::dispatch::{Engine, Floors};
use crate::pg::spi::Spi;
use crate::store::streams::Horizon;

impl Course {
    /// Reads ahead, as much as the engine wants. Returns how many rows it has passed.
    pub(crate) fn fill(&mut self, spi: &Spi, horizon: &Horizon, floors: &mut Floors) -> usize {
        self.goes_on = false;
        if self.is_to_be_shaped_anew() {
            self.begin_anew();
        }
        let before = self.reader.shapes().then(|| self.reader.clone());
        let wanted = self.engine.wants();
        if wanted == 0 || !self.may_read_on() {
            self.has_more = true;
            return 0;
        }
        let reading = self.reader.read(spi, horizon, floors, wanted);
        if self.reader.is_too_slow() {
            if let Some(before) = before {
                self.reader = before;
            }
            self.leave();
            return 0;
        }
        if reading.entries.iter().any(|entry| entry.problem.is_some()) {
            self.unfit = self.reader.unfit();
            if self.unfit.is_some() {
                return 0;
            }
        }
        self.has_more = reading.more;
        self.gets_on |= !reading.more && reading.entries.is_empty();
        self.goes_on = reading.more && reading.passed == 0;
        for entry in reading.entries {
            self.push(entry);
        }
        if reading.passed > 0 {
            self.touch();
        }
        self.settle_behind_reader();
        reading.passed
    }

    /// Puts an entry in line. Events of it that went through ahead may have done so in other company: entries are put together by the
    /// settings of the day.
    fn push(&mut self, mut entry: Entry) {
        let through = entry.seqs().filter(|seq| self.ahead.contains(seq));
        let through = through.collect::<BTreeSet<_>>();
        let settled = if through.len() == entry.events.len() {
            self.engine.push_through(entry)
        } else {
            if !through.is_empty() {
                entry.leave_out(|seq| through.contains(&seq));
                self.unsaved.delivered += through.len() as u64;
            }
            self.engine.push(entry)
        };
        self.ahead.retain(|seq| !through.contains(seq));
        self.take_settled(settled);
    }

    /// What has gone through ahead is written like what is settled.
    pub(super) fn note_ahead(&mut self) {
        if self.through_ahead() != self.saved.ahead {
            self.touch();
        }
    }

    /// The seqs of all events that went through ahead of what is settled.
    pub(super) fn through_ahead(&self) -> BTreeSet<i64> {
        let mut ahead = self.ahead.clone();
        ahead.extend(self.engine.through_ahead().flat_map(Entry::seqs));
        ahead.extend(self.engine.items().flat_map(Entry::taken));
        ahead
    }

    /// A transaction begins, in which it may read.
    pub(crate) fn begin(&mut self) {
        self.goes_on = false;
    }

    /// Whether the last read was not enough to find out what comes next, and a further one may be.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Whether a read now could bring something.
    pub(crate) fn wants_to_read(&self) -> bool {
        let may_read = self.may_read_on() && self.engine.wants() > 0;
        (self.has_more && may_read) || self.is_to_be_shaped_anew()
    }

    /// Whether a filter or transform has failed, and the wait for the next try is over: its code, or what it looks up, may have
    /// changed meanwhile.
    fn is_to_be_shaped_anew(&self) -> bool {
        let due = self.engine.next_attempt_at();
        self.misshapen && !self.in_flight && due.is_some_and(|due| due <= now())
    }

    /// Forgets what was read, and reads it again as after a restart.
    fn begin_anew(&mut self) {
        self.ahead = self.through_ahead();
        let checkpoint = self.engine.checkpoint().unwrap_or_default();
        self.engine = Engine::restore(policy(&self.sink), checkpoint);
        self.hold_parked_keys();
        self.reader.place = self.settled.clone();
        self.misshapen = false;
    }

    /// From now on a filter or transform may take so long.
    pub(crate) fn set_patience(&mut self, patience: Patience) {
        self.leaving = false;
        self.has_more = true;
        self.reader.set_patience(patience);
    }

    /// It takes longer than other sinks can wait: reads nothing more until it has a process of its own.
    pub(crate) fn leave(&mut self) {
        self.leaving = true;
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// With nothing pending, and nothing read that is still to be put in line, all that was read is settled.
    pub(super) fn settle_behind_reader(&mut self) {
        if self.engine.is_empty() {
            self.settled = self.reader.place.clone();
            self.greatest = self.greatest.max(self.reader.greatest);
            if !self.has_more {
                self.ahead.clear();
            }
        }
    }
}
