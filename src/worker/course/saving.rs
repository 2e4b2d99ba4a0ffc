//! What is written of a course: its cursor, its dead letters, and how it is doing.

use std::time::Duration;

use super::super::{entry::Entry, memory::Memory, now};
use super::{Course, Target};
use crate::dispatch::{Health as State, Time};
use crate::envelope::write_cloudevent;
use crate::pg::lock::{self, Use};
use crate::pg::spi::Spi;
use crate::store::cursors::{self, Save};
use crate::store::dead_letters::{self, DeadLetter};
use crate::store::events;
use crate::store::health::{self, Health};
use crate::store::sinks::{self, Hold};

/// How long deliveries may go unsaved. After a crash they are delivered again; saving each by itself would cost a commit a batch.
const SAVE_WITHIN: Duration = Duration::from_millis(100);

fn after_a_while(time: Time) -> Time {
    Time(time.0 + u64::try_from(SAVE_WITHIN.as_millis()).unwrap_or(0))
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
        let memory = Memory::of(&self.engine, &self.ahead);
        let flowing = matches!(self.engine.health(), State::Flowing);
        let (attempts, last_error) = match parked.filter(|_| flowing) {
            Some(parked) => (parked.attempts, parked.error.as_deref()),
            None if flowing => (0, None),
            None => (self.engine.attempts(), self.engine.last_error()),
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
            checkpoint: memory.and_then(|memory| memory.to_json()),
        }
    }

    /// Troubles are told as soon as nothing is in flight; that all is well again, likewise. What goes on at once, a search or a test,
    /// is not worth a write.
    pub(super) fn health_to_save(&self) -> Option<Health> {
        // A function's effects stand with the transaction, and so must what is remembered of them.
        let goes_on =
            matches!(self.target, Target::Network) && self.engine.next_attempt_at().is_none();
        let flowing = matches!(self.engine.health(), State::Flowing);
        if self.in_flight || (goes_on && !flowing) || (flowing && self.tries_parked(now())) {
            return None;
        }
        let health = self.health();
        let was_well = matches!(self.saved_health.state.as_str(), "" | "flowing");
        let is_well = health.state == "flowing" && health.next_attempt_at.is_none();
        let remembers = health.checkpoint != self.saved_health.checkpoint;
        (health != self.saved_health && (remembers || !(was_well && is_well))).then_some(health)
    }

    /// What has gone through ahead in a delivery that goes on: worth a write where the cursor is written.
    fn progress_to_save(&self) -> Option<Health> {
        let delivery = self.delivery.as_ref()?;
        if !self.in_flight || !delivery.has_told() {
            return None;
        }
        let checkpoint = Memory::of(&self.engine, &self.ahead).and_then(|memory| memory.to_json());
        let state = match self.saved_health.state.as_str() {
            "" => "flowing".to_owned(),
            state => state.to_owned(),
        };
        (checkpoint != self.saved_health.checkpoint).then(|| Health {
            checkpoint,
            state,
            ..self.saved_health.clone()
        })
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

    /// Writes cursor, dead letters and health. Refused if the sink is somebody else's now, or gone. What is written counts once
    /// the transaction has committed: [`Course::committed`].
    pub(crate) fn save(&mut self, spi: &Spi) -> Save {
        let saved = if !lock::holds_lease(self.sink.number) {
            Save::Refused
        } else if !self.hold_tables() {
            Save::Postponed
        } else if self.unsaved.since.is_some() {
            let pair = cursors::pair_of(&self.settled, Some(self.greatest));
            let delivered = self.unsaved.delivered;
            // A function's lease can be lost for a while: somebody else may have called it meanwhile.
            let from = matches!(self.target, Target::Function(_)).then_some(&self.saved);
            cursors::save(spi, &self.sink, from, &self.settled, pair, delivered)
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
                return saved;
            }
            Save::Refused => {
                self.lost = true;
                return saved;
            }
        }
        if self.unsaved.since.is_some() {
            for (entry, error, attempts) in &self.unsaved.dead {
                self.bury(spi, entry, error, *attempts);
            }
            let ours = self.parking().save(spi, &self.sink.id);
            if !ours && matches!(self.target, Target::Function(_)) {
                self.lost = true;
                return Save::Refused;
            }
        }
        let progress = self.unsaved.since.and_then(|_| self.progress_to_save());
        if let Some(health) = self.health_to_save().or(progress) {
            health::save(spi, &self.sink.id, &health);
            self.saved_health = health;
        }
        self.redelivery.save(spi, &self.sink.id);
        self.saving = true;
        Save::Moved
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

    /// A transaction begins: nothing has been written in it yet.
    pub(crate) fn begin(&mut self) {
        self.saving = false;
        self.goes_on = false;
    }

    /// The transaction has committed. True if the course has lost its sink.
    pub(crate) fn committed(&mut self) -> bool {
        if std::mem::take(&mut self.saving) {
            if self.unsaved.since.is_some() {
                self.saved = self.settled.clone();
                self.parking.saved();
            }
            self.unsaved = Unsaved::default();
            self.redelivery.saved();
        }
        self.lost
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
            let mut json = Vec::new();
            write_cloudevent(whole.as_ref().unwrap_or(event), &mut json);
            let json = String::from_utf8_lossy(&json);
            let position = event.position;
            dead_letters::write(
                spi,
                &DeadLetter {
                    sink: &self.sink.id,
                    position,
                    event: &json,
                    error,
                    attempts,
                },
            );
            // Not the error: a function or a receiver may quote the event in it.
            pgrx::warning!(
                "pg_outbox: sink \"{}\": event {position} dead-lettered after {attempts} attempts, see outbox.dead_letters",
                self.sink.id
            );
        }
    }
}
