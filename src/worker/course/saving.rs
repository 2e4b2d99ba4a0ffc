//! What is written of a course: its cursor, its dead letters, and how it is doing.

use std::time::Duration;

use super::super::{entry::Entry, now};
use super::{Course, Target};
use crate::dispatch::{Health as State, Time};
use crate::envelope::write_cloudevent;
use crate::pg::error::Complaint;
use crate::pg::lock::{self, Use};
use crate::pg::spi::Spi;
use crate::pg::statement::log_as_error;
use crate::pg::transaction;
use crate::store::cursors::{self, Save, Stand};
use crate::store::dead_letters::{self, DeadLetter};
use crate::store::events;
use crate::store::health::{self, Health};
use crate::store::sinks::{self, Hold};

/// How long deliveries may go unsaved. After a crash they are delivered again; saving each by itself would cost a commit a batch.
const SAVE_WITHIN: Duration = Duration::from_millis(100);

fn after_a_while(time: Time) -> Time {
    Time(time.0 + u64::try_from(SAVE_WITHIN.as_millis()).unwrap_or(0))
}

/// What a save has written. It counts once the transaction has committed, and so it leaves that only with its result: see
/// [`Course::committed`].
#[must_use]
pub(crate) struct Written {
    to: Option<Stand>,
    health: Option<Health>,
}

#[derive(Default)]
pub(super) struct Unsaved {
    pub(super) since: Option<Time>,
    pub(super) delivered: u64,
    pub(super) dead: Vec<(Entry, String, u32)>,
}

impl Course {
    pub(super) fn touch(&mut self) {
        self.unsaved.since.get_or_insert_with(now);
    }

    pub(super) fn health(&self) -> Health {
        let parked = self.parking().trial();
        let waits_for_parked = self.parking().due().filter(|_| parked.is_some());
        let state = match self.engine.health() {
            State::Flowing if self.parking().is_empty() => "flowing",
            State::Flowing => "retrying",
            State::Bisecting | State::Retrying { .. } => "retrying",
            State::Down { .. } => "down",
        };
        let checkpoint = self.engine.checkpoint();
        let flowing = matches!(self.engine.health(), State::Flowing);
        let (attempts, last_error) = match parked.filter(|_| flowing) {
            Some(parked) => (parked.attempts, parked.error.as_deref()),
            None if flowing => (0, None),
            // A batch that has failed is no attempt at any one event, but one at all of them.
            None => (self.engine.attempts().max(1), self.engine.last_error()),
        };
        let next_attempt_at = match self.engine.next_attempt_at() {
            Some(engine) => Some(waits_for_parked.map_or(engine, |parked| parked.min(engine))),
            None => waits_for_parked,
        };
        Health {
            state: state.to_owned(),
            attempts,
            last_error: last_error.map(str::to_owned),
            next_attempt_at: next_attempt_at
                .map(|time| i64::try_from(time.0 * 1000).unwrap_or(i64::MAX)),
            checkpoint: checkpoint.and_then(|checkpoint| serde_json::to_string(&checkpoint).ok()),
        }
    }

    /// Troubles are told as soon as nothing is in flight; that all is well again, likewise. Once they are told, what goes on at once, a
    /// search or a test, is not worth a write.
    pub(super) fn health_to_save(&self) -> Option<Health> {
        let was_well = self.saved_health.is_well();
        let goes_on =
            matches!(self.target, Target::Network) && self.engine.next_attempt_at().is_none();
        let flowing = matches!(self.engine.health(), State::Flowing);
        if self.in_flight
            || (goes_on && !flowing && !was_well)
            || (flowing && self.tries_parked(now()))
        {
            return None;
        }
        let health = self.health();
        let remembers = health.checkpoint != self.saved_health.checkpoint;
        if self.saved_health.state == sinks::SET_ASIDE && health.is_well() && !self.gets_on {
            return None;
        }
        let is_well = health.is_well() && health.next_attempt_at.is_none();
        (health != self.saved_health && (remembers || !(was_well && is_well))).then_some(health)
    }

    /// When this course must be saved at the latest; none if there is nothing to save.
    pub(crate) fn save_due(&self) -> Option<Time> {
        let due = self.unpostponed_save_due()?;
        Some(due.max(self.postponed.unwrap_or(due)))
    }

    fn unpostponed_save_due(&self) -> Option<Time> {
        if !self.unsaved.dead.is_empty() || self.health_to_save().is_some() {
            return Some(Time(0));
        }
        let stream = self.unsaved.since.map(after_a_while);
        stream.into_iter().chain(self.redelivery.save_due()).min()
    }

    /// Holds the tables that a save is about to write to. False if somebody else holds one of them.
    fn hold_tables(&self) -> bool {
        let cursor = self.unsaved.since.is_some();
        let tables = [
            (true, c"sinks"),
            (cursor, c"cursors"),
            (cursor && !self.unsaved.dead.is_empty(), c"dead_letters"),
            (cursor && self.parking().has_news(), c"parked"),
            (self.health_to_save().is_some(), c"sink_health"),
        ];
        let written = tables.into_iter().filter(|(is_written, _)| *is_written);
        let written = written.map(|(_, table)| table).collect::<Vec<_>>();
        lock::hold_ours(&written, Use::Writing)
    }

    /// Writes cursor, dead letters and health. Nothing is written if that cannot be done now, or if the sink is somebody else's, or
    /// gone: see [`Course::is_lost`].
    pub(crate) fn save(&mut self, spi: &Spi) -> Option<Written> {
        let to = self.unsaved.since.map(|_| Stand {
            place: self.settled.clone(),
            ahead: self.through_ahead(),
        });
        let saved = if !lock::holds_lease(self.sink.number) {
            Save::Refused
        } else if !self.hold_tables() {
            Save::Postponed
        } else if let Some(to) = &to {
            let pair = cursors::pair_of(&to.place, Some(self.greatest));
            let delivered = self.unsaved.delivered;
            // A function's lease can be lost for a while: somebody else may have called it meanwhile.
            let from = matches!(self.target, Target::Function(_)).then_some(&self.saved);
            cursors::save(spi, &self.sink, from, to, pair, delivered)
        } else {
            match sinks::hold(spi, &self.sink) {
                Hold::Held => Save::Moved,
                Hold::Taken => Save::Postponed,
                Hold::Gone => Save::Refused,
            }
        };
        match saved {
            Save::Moved => self.postponed = None,
            Save::Postponed => {
                self.postpone();
                return None;
            }
            Save::Refused => {
                self.lost = true;
                return None;
            }
        }
        if to.is_some() {
            for (entry, error, attempts) in &self.unsaved.dead {
                self.bury(spi, entry, error, *attempts);
            }
            let ours = self.parking().save(spi, &self.sink.id);
            if !ours && matches!(self.target, Target::Function(_)) {
                self.lost = true;
                return None;
            }
        }
        let health = self.health_to_save();
        if let Some(health) = &health {
            health::save(spi, &self.sink.id, health);
        }
        self.redelivery.save(spi, &self.sink.id);
        Some(Written { to, health })
    }

    /// A transaction that is still open changes or drops the sink, or holds what is to be written: once that has ended, all goes on.
    pub(crate) fn postpone(&mut self) {
        self.postponed = Some(after_a_while(now()));
    }

    /// Whether nothing can be saved now.
    pub(super) fn is_postponed(&self, at: Time) -> bool {
        self.postponed.is_some_and(|time| time > at)
    }

    /// Whether a save was refused: the sink is somebody else's now, or gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// What was written has been committed.
    pub(crate) fn committed(&mut self, written: Written) {
        if let Some(to) = written.to {
            self.gets_on = true;
            self.saved = to;
            self.parking.saved();
            self.unsaved = Unsaved::default();
        }
        if let Some(health) = written.health {
            let before = std::mem::replace(&mut self.saved_health, health);
            let after = &self.saved_health;
            if let Some(message) = self.telling.changed(&self.sink.id, &before, after, now()) {
                pgrx::warning!("pg_outbox: {message}");
            }
        }
        self.redelivery.saved();
    }

    pub(super) fn bury(&self, spi: &Spi, entry: &Entry, error: &str, attempts: u32) {
        for (index, event) in entry.events.iter().enumerate() {
            // For a function the text of the payload was never made. For others the text is what was sent, and the record may tell more.
            let record = match self.target {
                Target::Function(_) => entry.records.get(index),
                Target::Network => None,
            };
            let whole =
                record.and_then(|record| events::from_record(spi, record, &self.reader.stream));
            let position = event.position;
            let mut json = Vec::new();
            write_cloudevent(whole.as_ref().unwrap_or(event), &mut json);
            let letter = |event: &[u8]| {
                let letter = DeadLetter {
                    sink: &self.sink.id,
                    position,
                    event: &String::from_utf8_lossy(event),
                    error,
                    attempts,
                };
                transaction::nested(|| dead_letters::write(spi, &letter))
            };
            let written = match letter(&json) {
                // The table holds what tells it apart.
                Err(error) if dead_letters::cannot_hold(&error) => {
                    letter(&dead_letters::stand_in(event, &json))
                }
                // Any other reason may pass, and the event is not to be lost for it.
                written => written,
            };
            if let Err(error) = written {
                Complaint::new(error.code, error.summary()).raise();
            }
            // Not the error: a function or a receiver may quote the event in it.
            log_as_error(&format!(
                "pg_outbox: sink \"{}\": event {position} dead-lettered after {attempts} attempts, see outbox.dead_letters",
                self.sink.id
            ));
        }
    }
}
