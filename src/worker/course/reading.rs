//! Reading ahead for a course: what the engine wants more of.

use super::super::entry::Entry;
use super::Course;
use crate::dispatch::Floors;
use crate::pg::spi::Spi;
use crate::store::streams::Horizon;

impl Course {
    /// Reads ahead, as much as the engine wants.
    pub(crate) fn fill(&mut self, spi: &Spi, horizon: &Horizon, floors: &mut Floors) {
        let wanted = self.engine.wants();
        if wanted == 0 {
            self.has_more = true;
            return;
        }
        let reading = self.reader.read(spi, horizon, floors, wanted);
        self.has_more = reading.more;
        for entry in reading.entries {
            self.push(entry);
        }
        if reading.moved {
            self.touch();
        }
        self.settle_behind_reader();
    }

    pub(super) fn push(&mut self, entry: Entry) {
        if !self.ahead.remove(&entry.first_seq()) {
            self.engine.push(entry);
        } else if !self.engine.is_empty() {
            self.engine.push_through(entry);
        }
        // One that went through and has nothing left in front of it is passed like one that is not wanted.
    }

    /// Whether a read now could bring something.
    pub(crate) fn wants_to_read(&self) -> bool {
        self.has_more && self.engine.wants() > 0
    }

    /// With nothing pending, all that was read is settled.
    pub(super) fn settle_behind_reader(&mut self) {
        if self.engine.is_empty() {
            self.settled = self.reader.place.clone();
            if !self.has_more {
                self.ahead.clear();
            }
        }
    }
}
