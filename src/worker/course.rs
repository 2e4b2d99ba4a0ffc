//! The course of one sink: what has been read for it, what is in flight, what is delivered and not yet saved.
//!
//! Here the pure engine meets the tables. A course is held under the sink's lease, by one process at a time; whoever takes the
//! lease loads it from the tables. Nothing here waits.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::entry::Entry;
use super::function::Call;
use super::memory::Memory;
use super::reader::Reader;
use super::redelivery::Redelivery;
use super::{now, until};
use crate::dispatch::{
    Engine, Failure, Fate, Floors, Health as State, Mark, Outcome, Place, Refusal, Settled, Step,
    Time,
};
use crate::envelope::{Event, Position, write_cloudevent};
use crate::pg::lock;
use crate::pg::spi::{Record, Spi};
use crate::settings;
use crate::sinks::{self, Batch, Config, Secrets};
use crate::store::cursors::{self, Save};
use crate::store::dead_letters::{self, DeadLetter};
use crate::store::health::{self, Health};
use crate::store::sinks::{SinkRow, Version};
use crate::store::streams::{self, Horizon};
use crate::store::{events, secrets, sinks as sink_rows};

/// How long deliveries may go unsaved. After a crash they are delivered again; saving each by itself would cost a commit a batch.
const SAVE_WITHIN: Duration = Duration::from_millis(100);

/// How a sink takes events.
pub(crate) enum Target {
    /// A network client on the I/O thread.
    Network,
    /// A function in this database.
    Function(Call),
}

/// One sink under way.
pub(crate) struct Course {
    pub(crate) sink: SinkRow,
    pub(crate) config: Config,
    pub(crate) target: Target,
    pub(crate) reader: Reader,
    pub(crate) redelivery: Redelivery,
    engine: Engine<Entry>,
    secrets: Secrets,
    version: Version,
    /// Everything up to here is settled.
    settled: Place,
    greatest: Position,
    unsaved: Unsaved,
    saved_health: Health,
    /// What went through ahead before a restart and has not been read again yet.
    ahead: BTreeSet<i64>,
    /// Counts deliveries, to tell a report of an earlier one.
    serial: u64,
    in_flight: bool,
    /// What is unsaved has been written in the transaction that is open.
    saving: bool,
    lost: bool,
    /// There may be more to read without anything new having been committed.
    pub(crate) has_more: bool,
}

#[derive(Default)]
struct Unsaved {
    since: Option<Time>,
    delivered: u64,
    dead: Vec<(Entry, String, u32)>,
}

/// What taking a sink came to.
pub(crate) enum Taken {
    Course(Box<Course>),
    /// Another process holds the lease.
    Leased,
    Paused,
    /// Kind pull: its consumers hold the lease.
    Pull,
    /// It was dropped.
    Gone,
    /// It cannot run as it is.
    Unfit(String),
}

/// What is to be handed over.
pub(crate) enum Handover {
    Network {
        serial: u64,
        batch: Batch,
    },
    Function {
        records: Vec<Record>,
        seqs: Vec<i64>,
    },
}

/// What a course wants next.
pub(crate) enum Next {
    Deliver(Handover),
    /// The engine has learned something without a delivery: ask again.
    Again,
    /// Nothing now; [`Course::due`] says when.
    Idle,
}

impl Course {
    /// Takes the lease of a sink and loads where it stands; a transaction is open.
    pub(crate) fn take(spi: &Spi, version: &Version) -> Taken {
        let Some(sink) = sink_rows::named(spi, &version.id) else {
            return Taken::Gone;
        };
        if sink.kind == "pull" {
            return Taken::Pull;
        }
        if !sink.enabled {
            return Taken::Paused;
        }
        if !lock::take_lease(sink.number) {
            return Taken::Leased;
        }
        match Self::load(spi, version, sink) {
            Ok(Some(course)) => Taken::Course(Box::new(course)),
            Ok(None) => Taken::Gone,
            Err(problem) => {
                lock::give_lease_back(version.number);
                Taken::Unfit(problem)
            }
        }
    }

    fn load(spi: &Spi, version: &Version, sink: SinkRow) -> Result<Option<Self>, String> {
        let Some(cursor) = cursors::load(spi, &sink.id, false) else {
            return Ok(None);
        };
        let Some(stream) = streams::named(spi, &sink.stream) else {
            return Ok(None);
        };
        let value = serde_json::from_str(&sink.config).map_err(|error| error.to_string())?;
        let config = sinks::parse(&sink.kind, &value).map_err(|error| error.message)?;
        let policy = settings::policy(sink.batch_size);
        let target = match &config {
            Config::Function(_) => Target::Function(Call::of(spi, &sink)?),
            _ => Target::Network,
        };
        let text = matches!(target, Target::Network);
        let reader = Reader::new(
            spi,
            &sink,
            stream,
            cursor.place.clone(),
            text,
            policy.batch_size,
        )?;
        let saved_health = health::load(spi, &sink.id).unwrap_or_default();
        let memory = Memory::from_json(saved_health.checkpoint.as_deref());
        Ok(Some(Self {
            secrets: Secrets::new(
                config
                    .secret()
                    .map(|name| secrets::values(spi, name))
                    .unwrap_or_default(),
            ),
            engine: Engine::restore(policy, memory.engine),
            redelivery: Redelivery::new(spi, &sink.id),
            settled: cursor.place,
            greatest: cursor.pair,
            unsaved: Unsaved::default(),
            version: version.clone(),
            serial: 0,
            in_flight: false,
            saving: false,
            lost: false,
            has_more: true,
            ahead: memory.ahead,
            saved_health,
            sink,
            config,
            target,
            reader,
        }))
    }

    /// Whether the sink or its secret has changed since it was taken.
    pub(crate) fn is_version(&self, version: &Version) -> bool {
        self.version == *version
    }

    /// Settings were read again.
    pub(crate) fn set_policy(&mut self) {
        let policy = settings::policy(self.sink.batch_size);
        self.engine.set_policy(policy);
        self.reader.set_batch_size(policy.batch_size);
    }

    /// The sink was changed or resumed: it is tried without waiting for its back-off.
    pub(crate) fn retry_now(&mut self) {
        self.engine.retry_now();
    }

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

    fn push(&mut self, entry: Entry) {
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

    /// What to do now.
    pub(crate) fn next(&mut self, at: Time) -> Next {
        if self.in_flight {
            return Next::Idle;
        }
        match self.engine.next(at) {
            Step::Wait(_) | Step::Idle => Next::Idle,
            Step::Deliver(range) => match self.problem_in(&range) {
                Some(error) => {
                    self.outcome(&Outcome::Failed(Refusal {
                        error,
                        retry_after: None,
                    }));
                    Next::Again
                }
                None => {
                    self.in_flight = true;
                    self.serial += 1;
                    Next::Deliver(self.handover(&range))
                }
            },
        }
    }

    fn entries(&self, range: &Range<usize>) -> impl Iterator<Item = &Entry> {
        range.clone().filter_map(|offset| self.engine.get(offset))
    }

    fn problem_in(&self, range: &Range<usize>) -> Option<String> {
        self.entries(range).find_map(|entry| entry.problem.clone())
    }

    fn handover(&self, range: &Range<usize>) -> Handover {
        let events = self.entries(range).flat_map(|entry| &entry.events);
        match self.target {
            Target::Network => Handover::Network {
                serial: self.serial,
                batch: Batch {
                    events: events.map(Arc::clone).collect(),
                    secrets: self.secrets.clone(),
                },
            },
            Target::Function(_) => Handover::Function {
                seqs: events.map(|event| event.position.seq).collect(),
                records: self
                    .entries(range)
                    .flat_map(|entry| entry.records.iter().cloned())
                    .collect(),
            },
        }
    }

    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    /// Whether a report belongs to the delivery in flight.
    pub(crate) fn awaits(&self, serial: u64) -> bool {
        self.in_flight && self.serial == serial
    }

    /// Takes what the delivery in flight came to.
    pub(crate) fn outcome(&mut self, outcome: &Outcome) {
        self.in_flight = false;
        let outcome = self.by_entry(outcome);
        let settled = self.engine.outcome(now(), &outcome);
        self.settle(settled);
    }

    /// Sinks speak of events; the engine of entries, which may hold several.
    fn by_entry(&self, outcome: &Outcome) -> Outcome {
        let (Outcome::Partial(failures), Some(range)) = (outcome, self.engine.in_flight()) else {
            return outcome.clone();
        };
        let owners = self
            .entries(&range)
            .enumerate()
            .flat_map(|(index, entry)| std::iter::repeat_n(index, entry.events.len()))
            .collect::<Vec<_>>();
        let by_entry = failures.iter().filter_map(|failure| {
            owners.get(failure.index).map(|&index| Failure {
                index,
                ..failure.clone()
            })
        });
        Outcome::Partial(by_entry.collect())
    }

    fn settle(&mut self, settled: Vec<Settled<Entry>>) {
        for Settled { item, fate } in settled {
            self.settled = item.place();
            if let Some(position) = item.events.iter().map(|event| event.position).max() {
                self.greatest = self.greatest.max(position);
            }
            match fate {
                Fate::Delivered => self.unsaved.delivered += item.events.len() as u64,
                Fate::Dead { error, attempts } => self.unsaved.dead.push((item, error, attempts)),
            }
            self.touch();
        }
        self.settle_behind_reader();
    }

    /// With nothing pending, all that was read is settled.
    fn settle_behind_reader(&mut self) {
        if self.engine.is_empty() {
            self.settled = self.reader.place.clone();
            if !self.has_more {
                self.ahead.clear();
            }
        }
    }

    fn touch(&mut self) {
        self.unsaved.since.get_or_insert_with(now);
    }

    fn health(&self) -> Health {
        let state = match self.engine.health() {
            State::Flowing => "flowing",
            State::Bisecting | State::Retrying { .. } => "retrying",
            State::Down { .. } => "down",
        };
        let memory = Memory::of(&self.engine, &self.ahead);
        let failing = !matches!(self.engine.health(), State::Flowing);
        Health {
            state: state.to_owned(),
            attempts: self.engine.attempts(),
            last_error: failing
                .then(|| self.engine.last_error().map(str::to_owned))
                .flatten(),
            next_attempt_at: self
                .engine
                .next_attempt_at()
                .map(|time| i64::try_from(time.0 * 1000).unwrap_or(i64::MAX)),
            checkpoint: memory.and_then(|memory| memory.to_json()),
        }
    }

    /// Troubles are told as soon as nothing is in flight; that all is well again, likewise. A search that goes on at once is not
    /// worth a write.
    fn health_to_save(&self) -> Option<Health> {
        let goes_on = self.engine.next_attempt_at().is_none();
        if self.in_flight || (goes_on && matches!(self.engine.health(), State::Bisecting)) {
            return None;
        }
        let health = self.health();
        let was_well = matches!(self.saved_health.state.as_str(), "" | "flowing");
        let is_well = health.state == "flowing" && health.next_attempt_at.is_none();
        (health != self.saved_health && !(was_well && is_well)).then_some(health)
    }

    /// When this course must be saved at the latest; none if there is nothing to save.
    pub(crate) fn save_due(&self) -> Option<Time> {
        if !self.unsaved.dead.is_empty()
            || self.health_to_save().is_some()
            || self.redelivery.has_news()
        {
            return Some(Time(0));
        }
        self.unsaved
            .since
            .map(|since| Time(since.0 + u64::try_from(SAVE_WITHIN.as_millis()).unwrap_or(0)))
    }

    /// Writes cursor, dead letters and health. Refused if the sink is somebody else's now, or gone. What is written counts once
    /// the transaction has committed: [`Course::committed`].
    pub(crate) fn save(&mut self, spi: &Spi) -> Save {
        if self.unsaved.since.is_some() {
            let pair = cursors::pair_of(&self.settled, Some(self.greatest));
            if cursors::save(
                spi,
                &self.sink.id,
                &self.settled,
                pair,
                self.unsaved.delivered,
            ) == Save::Refused
            {
                self.lost = true;
                return Save::Refused;
            }
            for (entry, error, attempts) in &self.unsaved.dead {
                self.bury(spi, entry, error, *attempts);
            }
        }
        if let Some(health) = self.health_to_save() {
            health::save(spi, &self.sink.id, &health);
            self.saved_health = health;
        }
        self.redelivery.save(spi, &self.sink.id);
        self.saving = true;
        Save::Moved
    }

    /// A transaction begins: nothing has been written in it yet.
    pub(crate) fn begin(&mut self) {
        self.saving = false;
    }

    /// The transaction has committed. True if the course has lost its sink.
    pub(crate) fn committed(&mut self) -> bool {
        if std::mem::take(&mut self.saving) {
            self.unsaved = Unsaved::default();
            self.redelivery.saved();
        }
        self.lost
    }

    fn bury(&self, spi: &Spi, entry: &Entry, error: &str, attempts: u32) {
        for (index, event) in entry.events.iter().enumerate() {
            // For a function the text of the payload was never made.
            let whole = entry
                .records
                .get(index)
                .and_then(|record| events::from_record(spi, record, &self.reader.stream));
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
            pgrx::warning!(
                "pg_outbox: sink \"{}\": event {position} dead-lettered after {attempts} attempts: {error}",
                self.sink.id
            );
        }
    }

    /// Whether there is something to hand over now.
    fn is_ready(&self, at: Time) -> bool {
        !self.in_flight
            && !self.engine.is_empty()
            && self.engine.next_attempt_at().is_none_or(|time| time <= at)
    }

    /// The same, at this moment.
    pub(crate) fn is_ready_now(&self) -> bool {
        self.is_ready(now())
    }

    /// When the course wants the next look, apart from reports and commits.
    pub(crate) fn due(&self, at: Time) -> Option<Duration> {
        if self.is_ready(at) {
            return Some(Duration::ZERO);
        }
        let engine = self
            .engine
            .next_attempt_at()
            .filter(|_| !self.in_flight && !self.engine.is_empty());
        let redelivery = self.is_flowing().then(|| self.redelivery.due()).flatten();
        [engine, self.save_due(), redelivery]
            .into_iter()
            .flatten()
            .min()
            .map(|time| until(time, at))
    }

    /// Whether a read could find a queued dead letter.
    pub(crate) fn wants_to_look_for_redeliveries(&self) -> bool {
        self.is_flowing() && self.redelivery.wants_to_look()
    }

    /// Reads the next queued dead letter, if there may be one.
    pub(crate) fn fill_redelivery(&mut self, spi: &Spi) {
        self.redelivery.fill(spi, &self.sink.id);
    }

    /// A dead letter to deliver now, beside the stream: only to a sink that is well.
    pub(crate) fn next_redelivery(&mut self) -> Option<(u64, Arc<Event>)> {
        if !self.is_flowing() {
            return None;
        }
        self.redelivery.next()
    }

    /// A sink of kind function: whether a pass could do something now.
    pub(crate) fn function_is_due(&self, at: Time) -> bool {
        self.wants_to_read() || self.due(at) == Some(Duration::ZERO)
    }

    /// A sink of kind function: reads, delivers once and saves, all in the transaction that is open, so that what the function did
    /// and the cursor stand or fall together. True if there may be more to do at once; an error if the sink is not ours any more.
    pub(crate) fn function_pass(
        &mut self,
        spi: &Spi,
        horizon: &Horizon,
        floors: &mut Floors,
    ) -> Result<bool, String> {
        let Target::Function(call) = &self.target else {
            return Ok(false);
        };
        let call = call.clone();
        self.begin();
        if self.wants_to_read() {
            self.fill(spi, horizon, floors);
        }
        let mut delivered = false;
        loop {
            match self.next(now()) {
                Next::Again => {}
                Next::Deliver(Handover::Function { records, seqs }) => {
                    let outcome = call.deliver(&records, &seqs);
                    if !lock::holds_lease(self.sink.number) {
                        return Err("its lease is lost: the function has released all advisory locks of the session".to_owned());
                    }
                    self.outcome(&outcome);
                    delivered = true;
                    break;
                }
                Next::Deliver(Handover::Network { .. }) | Next::Idle => break,
            }
        }
        self.fill_redelivery(spi);
        if let Some((_, event)) = self.next_redelivery() {
            let outcome = call.deliver(
                &[events::to_record(spi, &self.reader.stream, &event)],
                &[event.position.seq],
            );
            self.redelivery.outcome(&outcome);
        }
        if self.unsaved.since.is_some() || self.save_due().is_some() {
            self.save(spi);
        }
        Ok(delivered || self.wants_to_read())
    }

    /// Whether there may be trouble in the sink: redeliveries wait until it is over.
    pub(crate) fn is_flowing(&self) -> bool {
        matches!(self.engine.health(), State::Flowing)
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    pub(crate) fn secrets(&self) -> Secrets {
        self.secrets.clone()
    }

    pub(crate) fn last_error(&self) -> Option<String> {
        self.engine.last_error().map(str::to_owned)
    }

    pub(crate) fn unsaved_delivered(&self) -> u64 {
        self.unsaved.delivered
    }

    /// Whether unfinished transactions were open at its last look: they may end without a wake-up.
    pub(crate) fn awaits_transactions(&self) -> bool {
        !self.reader.place.window.upto.running().is_empty() || self.reader.place.mark != Mark::END
    }
}
