//! What a course hands over, and what becomes of it. With a function, delivery and save are one transaction.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pgrx::PgSqlErrorCode;

use super::super::{entry::Entry, now, until};
use super::{Course, Delivery, Target, Written};
use crate::dispatch::{
    Failure, Fate, Floors, Health, Item, Outcome, Place, Refusal, Settled, Step, Time,
};
use crate::envelope::Event;
use crate::pg::error::Complaint;
use crate::pg::spi::{Record, Spi};
use crate::settings;
use crate::sinks::{Batch, Watch};
use crate::store::events;
use crate::store::sinks;
use crate::store::streams::{self, Horizon};

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

/// What a pass of a function has come to.
#[derive(Default)]
pub(crate) struct Pass {
    /// There may be more to do at once.
    pub(crate) goes_on: bool,
    pub(crate) written: Option<Written>,
}

impl Course {
    /// What to do now.
    pub(crate) fn next(&mut self, at: Time) -> Next {
        if self.in_flight || self.called_off || self.asked.is_some() {
            return Next::Idle;
        }
        self.isolate();
        match self.engine.next(at) {
            Step::Wait(_) | Step::Idle => Next::Idle,
            Step::Deliver(range) => match self.problem_in(&range) {
                Some(error) => {
                    self.misshapen = true;
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

    pub(super) fn entries(&self, range: &Range<usize>) -> impl Iterator<Item = &Entry> {
        self.engine.to_deliver(range)
    }

    pub(super) fn problem_in(&self, range: &Range<usize>) -> Option<String> {
        self.entries(range).find_map(|entry| entry.problem.clone())
    }

    pub(super) fn handover(&mut self, range: &Range<usize>) -> Handover {
        let secrets = self.secrets.now();
        let watch = Arc::<Watch>::default();
        let sizes = self.entries(range).map(|entry| entry.events.len());
        self.delivery = Some(Delivery::new(Arc::clone(&watch), sizes.collect()));
        let events = self.entries(range).flat_map(|entry| &entry.events);
        match self.target {
            Target::Network => Handover::Network {
                serial: self.serial,
                batch: Batch {
                    events: events.map(Arc::clone).collect(),
                    secrets,
                    origin: Arc::clone(&self.origin),
                    reaches: self.reaches(range),
                    watch,
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

    /// What is settled once these are through: what is before the head is already, unless it is parked; what is before any other
    /// event is not.
    fn reaches(&self, range: &Range<usize>) -> Option<Place> {
        if range.start > 0 || !self.parking().is_empty() {
            return None;
        }
        Some(self.entries(range).last()?.place())
    }

    /// Whether a report belongs to the delivery in flight.
    pub(crate) fn awaits(&self, serial: u64) -> bool {
        self.in_flight && self.serial == serial
    }

    /// Takes what the delivery in flight came to.
    pub(crate) fn outcome(&mut self, outcome: &Outcome) {
        self.in_flight = false;
        if *outcome == Outcome::Delivered {
            self.redelivery.sink_is_up();
        }
        self.leave_out_what_is_done(outcome);
        let outcome = self.by_entry(outcome);
        self.delivery = None;
        self.tell_parked(&outcome);
        self.isolate();
        let settled = self.engine.outcome(now(), &outcome);
        self.settle(settled);
        self.note_ahead();
    }

    /// What a function has done of an entry that comes again is committed with this call, and it must not be asked for it twice. Other
    /// destinations get the entry again as a whole.
    fn leave_out_what_is_done(&mut self, outcome: &Outcome) {
        let Some(Delivery { owners, .. }) = &self.delivery else {
            return;
        };
        let (failures, untried): (&[Failure], &[usize]) = match outcome {
            Outcome::Partial(failures) => (failures, &[]),
            Outcome::Cut {
                failures, untried, ..
            } => (failures, untried),
            Outcome::Delivered | Outcome::Failed(_) => return,
        };
        if matches!(self.target, Target::Network) {
            return;
        }
        let open = failures.iter().map(|failure| failure.index);
        let open = open.chain(untried.iter().copied()).collect::<BTreeSet<_>>();
        let comes_again = open.iter().filter_map(|index| owners.get(*index).copied());
        let comes_again = comes_again.collect::<BTreeSet<_>>();
        let mut first = 0;
        for (index, entry) in self.engine.in_flight_mut().enumerate() {
            let seqs = entry
                .events
                .iter()
                .map(|event| event.position.seq)
                .enumerate();
            let done = seqs.filter(|(offset, _)| !open.contains(&(first + offset)));
            let done = done.map(|(_, seq)| seq).collect::<BTreeSet<_>>();
            first += entry.events.len();
            if comes_again.contains(&index) && !done.is_empty() {
                self.unsaved.delivered += done.len() as u64;
                entry.leave_out(|seq| done.contains(&seq));
            }
        }
    }

    /// Sinks speak of events; the engine of entries, which may hold several. An entry of which some events were not tried was not
    /// tried, for it is handed over whole or not at all.
    pub(super) fn by_entry(&self, outcome: &Outcome) -> Outcome {
        if self.sink.stream == streams::AUDIT {
            return as_a_whole(outcome);
        }
        let Some(Delivery { owners, .. }) = &self.delivery else {
            return outcome.clone();
        };
        let of_entries = |failures: &[Failure]| {
            let by_entry = failures.iter().filter_map(|failure| {
                owners.get(failure.index).map(|&index| Failure {
                    index,
                    ..failure.clone()
                })
            });
            by_entry.collect::<Vec<_>>()
        };
        match outcome {
            Outcome::Delivered | Outcome::Failed(_) => outcome.clone(),
            Outcome::Partial(failures) => Outcome::Partial(of_entries(failures)),
            Outcome::Cut {
                failures,
                untried,
                retry_after,
            } => Outcome::Cut {
                failures: of_entries(failures),
                untried: untried
                    .iter()
                    .filter_map(|&index| owners.get(index).copied())
                    .collect(),
                retry_after: *retry_after,
            },
        }
    }

    /// Takes what has left the engine, while all that was read is in it.
    pub(super) fn settle(&mut self, settled: Vec<Settled<Entry>>) {
        self.take_settled(settled);
        self.settle_behind_reader();
    }

    /// Takes what has left the engine, while more of what was read is still to come.
    pub(super) fn take_settled(&mut self, settled: Vec<Settled<Entry>>) {
        for Settled { item, fate } in settled {
            self.settled = item.place();
            if let Some(position) = item.events.iter().map(|event| event.position).max() {
                self.greatest = self.greatest.max(position);
            }
            match fate {
                Fate::Delivered => self.unsaved.delivered += item.events.len() as u64,
                Fate::Dead { error, attempts } => self.unsaved.dead.push((item, error, attempts)),
                Fate::Parked(trial) => {
                    self.parking.park(now(), &item, &trial);
                    self.engine.hold(item.key());
                }
            }
            self.touch();
        }
        self.release_keys();
    }

    /// Whether there is something to hand over now.
    pub(super) fn is_ready(&self, at: Time) -> bool {
        !self.in_flight
            && !self.called_off
            && self.asked.is_none()
            && !self.is_held_up(at)
            && !self.engine.is_empty()
            && self
                .engine
                .next_attempt_at()
                .is_none_or(|time| time <= at || is_of_another_clock(time, at))
    }

    /// The same, at this moment.
    pub(crate) fn is_ready_now(&self) -> bool {
        self.is_ready(now())
    }

    /// When the course wants the next look, apart from reports and commits.
    pub(crate) fn due(&self, at: Time) -> Option<Duration> {
        // A function's passes follow one another anyway.
        let goes_on = self.goes_on && matches!(self.target, Target::Network);
        if self.is_ready(at) || self.wants_to_verify() || goes_on {
            return Some(Duration::ZERO);
        }
        if self.called_off {
            return self.save_due().map(|time| until(time, at));
        }
        if self.is_held_up(at) {
            return self.postponed.map(|time| until(time, at));
        }
        let engine = self
            .engine
            .next_attempt_at()
            .filter(|_| !self.in_flight && !self.engine.is_empty());
        let redelivery = self.is_flowing().then(|| self.redelivery.due()).flatten();
        let parked = if self.parking().is_ready() || self.parking().wants_to_read(at) {
            Some(at)
        } else {
            self.parking().due()
        };
        [engine, self.save_due(), redelivery, parked]
            .into_iter()
            .flatten()
            .min()
            .map(|time| until(time, at))
    }

    /// A dead letter to deliver now, beside the stream: only to a sink that is well.
    pub(crate) fn next_redelivery(&mut self) -> Option<(u64, Arc<Event>)> {
        if !self.is_flowing() || self.called_off {
            return None;
        }
        self.redelivery.next()
    }

    /// Events that come from beside the stream, as a delivery of their own.
    pub(crate) fn batch_of(&mut self, events: Vec<Arc<Event>>) -> Batch {
        Batch {
            events,
            secrets: self.secrets.now(),
            origin: Arc::clone(&self.origin),
            reaches: None,
            watch: Arc::default(),
        }
    }

    /// Reads the next queued dead letter, if there may be one.
    pub(crate) fn fill_redelivery(&mut self, spi: &Spi) {
        self.redelivery.fill(spi, &self.sink.id);
    }

    /// Whether a read could find a queued dead letter.
    pub(crate) fn wants_to_look_for_redeliveries(&self) -> bool {
        self.is_flowing() && !self.called_off && self.redelivery.wants_to_look()
    }

    /// Whether there may be trouble in the sink: redeliveries wait until it is over.
    pub(crate) fn is_flowing(&self) -> bool {
        matches!(self.engine.health(), Health::Flowing)
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.in_flight || self.redelivery.is_in_flight() || self.parking().is_in_flight()
    }

    /// With a function, nothing can be delivered that cannot be saved.
    pub(super) fn is_held_up(&self, at: Time) -> bool {
        matches!(self.target, Target::Function(_)) && self.is_postponed(at)
    }

    /// A sink of kind function: whether a pass could do something now.
    pub(crate) fn function_is_due(&self, at: Time) -> bool {
        !self.is_held_up(at) && (self.wants_to_read() || self.due(at) == Some(Duration::ZERO))
    }

    /// A sink of kind function: reads, delivers once and saves, all in the transaction that is open, so that what the function did
    /// and the cursor stand or fall together. If the sink is not ours any more, this raises
    /// an error, for then both must fall.
    pub(crate) fn function_pass(
        &mut self,
        spi: &Spi,
        horizon: &Horizon,
        floors: &mut Floors,
    ) -> Pass {
        let Target::Function(call) = &self.target else {
            return Pass::default();
        };
        let call = call.clone();
        self.begin();
        if self.wants_to_read() {
            self.fill(spi, horizon, floors);
        }
        if self.unfit.is_some() {
            return Pass::default();
        }
        self.fill_redelivery(spi);
        // So far nothing has been written: a look that finds nothing leaves no trace.
        if self.due(now()) != Some(Duration::ZERO) && self.unsaved.since.is_none() {
            return Pass {
                goes_on: self.wants_to_read(),
                written: None,
            };
        }
        if !sinks::may_be_held(spi, &self.sink) {
            self.postpone();
            return Pass::default();
        }
        let mut delivered = false;
        loop {
            match self.next(now()) {
                Next::Again => {}
                Next::Deliver(Handover::Function { records, seqs }) => {
                    let outcome = call.deliver(spi, &records, &seqs);
                    if matches!(outcome, Outcome::Failed(_)) {
                        self.unfit = call.unfit();
                        if self.unfit.is_some() {
                            return Pass::default();
                        }
                    }
                    self.outcome(&outcome);
                    delivered = true;
                    break;
                }
                Next::Deliver(Handover::Network { .. }) | Next::Idle => break,
            }
        }
        self.fill_parked(spi);
        if let Some(Handover::Function { records, seqs }) = self.next_parked() {
            let outcome = call.deliver(spi, &records, &seqs);
            if matches!(outcome, Outcome::Failed(_)) {
                self.unfit = call.unfit();
            }
            self.parked_outcome(&outcome);
            delivered = true;
        }
        if self.unfit.is_some() {
            return Pass::default();
        }
        let redelivers = self.is_flowing()
            && self.redelivery.due().is_some_and(|due| due <= now())
            && self.redelivery.hold(spi, &self.sink.id);
        if redelivers && let Some((_, event)) = self.next_redelivery() {
            let outcome = call.deliver(
                spi,
                &[events::to_record(spi, &self.reader.stream, &event)],
                &[event.position.seq],
            );
            self.redelivery.outcome(&outcome);
        }
        let to_save = self.unsaved.since.is_some() || self.save_due().is_some();
        let written = to_save.then(|| self.save(spi)).flatten();
        if to_save && written.is_none() {
            let message = format!("sink \"{}\" is delivered by another process", self.sink.id);
            Complaint::new(PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, message).raise();
        }
        Pass {
            goes_on: delivered || self.wants_to_read(),
            written,
        }
    }
}

/// A batch of the audit trail has gone through or it has not: no record of it is given up or left behind.
fn as_a_whole(outcome: &Outcome) -> Outcome {
    match outcome {
        Outcome::Partial(failures) if failures.is_empty() => Outcome::Delivered,
        Outcome::Partial(failures) | Outcome::Cut { failures, .. } => {
            let error = failures.first().map(|failure| failure.error.clone());
            Outcome::Failed(Refusal {
                error: error.unwrap_or_else(|| "not all of them were tried".to_owned()),
                retry_after: outcome.retry_after(),
            })
        }
        Outcome::Delivered | Outcome::Failed(_) => outcome.clone(),
    }
}

/// A time further off than any wait comes from a clock that has gone back since.
fn is_of_another_clock(time: Time, at: Time) -> bool {
    until(time, at) > settings::retry_max()
}
