//! Isolation by key: what a course lets its stream go on without, and takes care of beside it.

use std::sync::Arc;
use std::time::Duration;

use super::super::{entry::Entry, now, parking::Parking};
use super::{Course, Handover, Target};
use crate::dispatch::{Fate, Grouping, Health, Isolation, Mark, Outcome, Time};
use crate::pg::spi::Spi;
use crate::sinks::Came;

/// While somebody else holds the stream's table.
const TABLE_RETRY: Duration = Duration::from_millis(100);

impl Course {
    /// Whatever comes of a key that has something parked is parked, too, also if the sink is not isolated by key any more.
    pub(super) fn hold_parked_keys(&mut self) {
        for key in self.parking.keys() {
            self.engine.hold(key);
        }
    }

    /// To be called before the engine decides on something.
    pub(super) fn isolate(&mut self) {
        // What is left of a window that is read by transactions is not parted into keys.
        let in_transactions =
            self.settled.window.grouping == Grouping::Transaction && self.settled.mark != Mark::END;
        let by_key = self.sink.isolation == "key" && !in_transactions && self.parking.has_room();
        self.engine.set_isolation(if by_key {
            Isolation::Key
        } else {
            Isolation::Batch
        });
    }

    /// Whether what is parked leaves room for more of the stream. Whole transactions, of which each may be about many keys, are not
    /// told apart by them: those wait until nothing is parked any more.
    pub(super) fn may_read_on(&self) -> bool {
        let room = match self.reader.grouping() {
            Grouping::Event => self.parking.has_room(),
            Grouping::Transaction => self.parking.is_empty(),
        };
        room && !self.is_leaving() && !self.called_off
    }

    /// Whether a read could bring a parked event whose time has come.
    pub(crate) fn wants_to_read_parked(&self, at: Time) -> bool {
        !self.is_leaving()
            && !self.called_off
            && !self.is_held_up(at)
            && self.parking.wants_to_read(at)
    }

    /// Reads the parked events whose time has come.
    pub(crate) fn fill_parked(&mut self, spi: &Spi) {
        let settled = self.parking.fill(spi, &self.reader, now());
        if self.reader.is_too_slow() {
            self.leave();
            return;
        }
        if self.parking.take_misshapen() {
            self.unfit = self.reader.unfit();
        }
        self.settle_parked(settled);
    }

    /// The stream's table cannot be read just now.
    pub(crate) fn let_parked_wait(&mut self) {
        self.parking.leave_alone(now(), TABLE_RETRY);
    }

    /// How many events of how many keys are parked.
    pub(crate) fn parked(&self) -> (usize, usize) {
        (self.parking.events(), self.parking.keys().count())
    }

    /// Parked events to deliver now, beside the stream.
    pub(crate) fn next_parked(&mut self) -> Option<Handover> {
        if self.called_off {
            return None;
        }
        let (serial, entries) = self.parking.next()?;
        let events = entries.iter().flat_map(|entry| &entry.events);
        let events = events.map(Arc::clone).collect::<Vec<_>>();
        let records = entries
            .iter()
            .flat_map(|entry| entry.records.iter().cloned())
            .collect();
        Some(match self.target {
            Target::Network => {
                let batch = self.batch_of(events);
                self.parked_watch = Some(Arc::clone(&batch.watch));
                Handover::Network { serial, batch }
            }
            Target::Function(_) => Handover::Function {
                seqs: events.iter().map(|event| event.position.seq).collect(),
                records,
            },
        })
    }

    /// Whether a report belongs to the parked events in flight.
    pub(crate) fn awaits_parked(&self, serial: u64) -> bool {
        self.parking.awaits(serial)
    }

    /// Takes what the parked events in flight came to.
    pub(crate) fn parked_came(&mut self, came: Came) {
        self.parked_watch = None;
        match came {
            Came::To(outcome) => self.parked_outcome(&outcome),
            Came::CalledOff | Came::Asks(_) => self.parking.give_back(),
        }
    }

    /// The same of a function's.
    pub(super) fn parked_outcome(&mut self, outcome: &Outcome) {
        let settled = self.parking.outcome(now(), outcome);
        self.settle_parked(settled);
    }

    /// Whether parked events are on their way, or about to be: then how they are doing is not worth a write yet.
    pub(super) fn tries_parked(&self, at: Time) -> bool {
        self.parking.is_ready() || self.parking.is_in_flight() || self.parking.wants_to_read(at)
    }

    /// What an outcome of the stream's says about the sink, before the engine has taken it.
    pub(super) fn tell_parked(&mut self, outcome: &Outcome) {
        let at = now();
        if let Some(wait) = outcome.retry_after() {
            self.parking.leave_alone(at, wait);
        }
        if outcome.proves_up(self.engine.handed_over()) {
            self.is_up();
        }
    }

    /// The sink has taken an event of the stream.
    pub(super) fn is_up(&mut self) {
        let after_outage = matches!(self.engine.health(), Health::Down { .. });
        self.parking.sink_is_up(now(), after_outage);
    }

    fn settle_parked(&mut self, settled: Vec<(Entry, Fate)>) {
        let mut up = false;
        for (entry, fate) in settled {
            match fate {
                Fate::Delivered => {
                    self.unsaved.delivered += entry.events.len() as u64;
                    up = true;
                }
                Fate::Dead { error, attempts } => self.unsaved.dead.push((entry, error, attempts)),
                // What is parked leaves its lane only for good.
                Fate::Parked(_) => {}
            }
        }
        if self.parking.has_news() {
            self.touch();
        }
        if up {
            self.isolate();
            let settled = self.engine.sink_is_up();
            self.settle(settled);
        }
        self.release_keys();
    }

    /// Keys of which nothing is parked any more take part in the stream again.
    pub(super) fn release_keys(&mut self) {
        let Self {
            engine, parking, ..
        } = self;
        parking.remove_drained(|key| engine.release(key));
    }

    /// What is parked, for those who ask how the sink is doing.
    pub(super) fn parking(&self) -> &Parking {
        &self.parking
    }
}
