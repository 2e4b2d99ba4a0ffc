//! The state machine of one sink: what to do next, and what an outcome means. It keeps the phase
//! and the due times; sizes, neighbours, marks and delays are counted in their own files.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use super::backoff::{Time, delay, remaining};
use super::checkpoint::Checkpoint;
use super::health::Health;
use super::neighbours::{self, NEIGHBOURS, Neighbours};
use super::outcome::{Outcome, Setback, Verdict};
use super::policy::{Isolation, Policy};
use super::queue::{Item, Queue, Settled, Trial};
use super::sizing::Sizing;

#[cfg(test)]
mod tests;

/// Isolated by key, how many events are pending at most while another key is looked for. If all of
/// them are of the one that fails, that one is parked without proof.
const LOOK_FOR_KEYS: usize = 1_000;

/// What the caller is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Hand over these events, given as offsets from the head of the queue, in one delivery, but for
    /// those among them that are not pending (see [`Engine::to_deliver`]); then report its outcome.
    Deliver(Range<usize>),
    /// Ask again at this time, which is later than now.
    Wait(Time),
    /// Nothing to do: no event is pending, or a delivery is in flight.
    Idle,
}

/// What the next or the current delivery is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// To get the events at the head through.
    #[default]
    Advance,
    /// To find out whether the sink is up: the head has just failed, often enough.
    Test,
    /// To decide on the head: an event behind it has just gone through.
    Decide,
}

/// What was handed over and has no outcome yet.
#[derive(Debug)]
struct InFlight {
    /// Where it is now, as offsets from the head.
    range: Range<usize>,
    /// How many events were handed over.
    count: usize,
    /// Those that are known to be through already, by their indices within what was handed over.
    told: BTreeSet<usize>,
}

/// The engine of one sink, with the queue of its pending events in delivery order.
#[derive(Debug)]
pub struct Engine<T: Item> {
    policy: Policy,
    isolation: Isolation,
    queue: Queue<T>,
    phase: Phase,
    in_flight: Option<InFlight>,
    /// An event that is not in this queue went through while a delivery was in flight.
    up_meanwhile: bool,
    /// Until when the sink asked to be left alone.
    not_before: Option<Time>,
    sizing: Sizing,
    neighbours: Neighbours,
    /// How many events from the head on lie before one that has just gone through. No wait has come
    /// since: such a proof does not keep.
    proven: usize,
}

impl<T: Item> Engine<T> {
    /// An engine without events that carries on from `checkpoint`; from the default one, it knows of
    /// no trouble. The first event that is pushed must be the one
    /// that was the head then: it takes over the attempts.
    pub fn restore(policy: Policy, checkpoint: Checkpoint) -> Self {
        let Checkpoint {
            attempts,
            excused,
            error,
            due,
            size,
            suspects,
            tested,
        } = checkpoint;
        let sizing = Sizing::restore(size, suspects, error.as_deref().unwrap_or_default());
        let (trial, not_before) = match attempts {
            0 => (Trial::default(), due),
            _ => (
                Trial {
                    attempts,
                    excused: excused.min(attempts),
                    due,
                    error,
                },
                None,
            ),
        };
        Engine {
            policy: policy.usable(),
            isolation: Isolation::Batch,
            queue: Queue::new(trial),
            phase: Phase::Advance,
            in_flight: None,
            up_meanwhile: false,
            not_before,
            sizing,
            neighbours: Neighbours::restore(tested),
            proven: 0,
        }
    }

    /// What is to be remembered over a restart, as things stand between two calls; `None` when all
    /// is well.
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        let checkpoint = Checkpoint {
            attempts: self.attempts(),
            excused: self.queue.head_trial().excused,
            error: self.last_error().map(str::to_owned),
            due: self.due(),
            size: self.sizing.reduced(),
            suspects: self.sizing.suspects_end(),
            tested: self.neighbours.tested().to_vec(),
        };
        (!checkpoint.is_empty()).then_some(checkpoint)
    }

    /// Takes effect with the next step.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy.usable();
    }

    /// What an event that fails from now on holds up. Keys that are held stay so.
    pub fn set_isolation(&mut self, isolation: Isolation) {
        self.isolation = isolation;
    }

    /// Events of this key are parked: one of them is already.
    pub fn hold(&mut self, key: &T::Key) {
        self.queue.hold(key);
    }

    /// Nothing of this key is parked any more: it takes part again. False if it cannot do so yet, for
    /// something of it is about to leave as parked.
    pub fn release(&mut self, key: &T::Key) -> bool {
        self.queue.release(key)
    }

    /// Somebody changed or resumed the sink: the head is tried without further waiting. Attempts
    /// stay counted.
    pub fn retry_now(&mut self) {
        self.not_before = None;
        self.queue.forget_due();
        if self.in_flight.is_none() {
            self.phase = Phase::Advance;
            self.proven = 0;
        }
    }

    /// An event that is not in this queue has just gone through to the same sink: a head that has
    /// failed often enough is decided on without further waiting; isolated by key, one that has failed
    /// is parked. Returns what leaves the queue.
    pub fn sink_is_up(&mut self) -> Vec<Settled<T>> {
        if self.in_flight.is_some() {
            self.up_meanwhile = true;
            return Vec::new();
        }
        if self.attempts() < self.enough_to_test() {
            return Vec::new();
        }
        match self.isolation {
            Isolation::Batch => self.phase = Phase::Decide,
            Isolation::Key => self.park_failed(1),
        }
        self.settle()
    }

    /// Adds an event behind all others. Returns it at once if its key is held and nothing is ahead of
    /// it.
    pub fn push(&mut self, item: T) -> Vec<Settled<T>> {
        self.queue.push(item);
        self.settle()
    }

    /// Adds an event that went through ahead of the head before a restart; it is not handed over
    /// again. Returns it at once if there is no head any more that it has to wait for.
    pub fn push_through(&mut self, item: T) -> Vec<Settled<T>> {
        self.queue.push_through(item);
        self.settle()
    }

    /// The events behind the head that went through ahead of it. A checkpoint does not hold them:
    /// a caller that must not hand over any event twice keeps them itself, for
    /// [`push_through`](Self::push_through).
    pub fn through_ahead(&self) -> impl Iterator<Item = &T> {
        self.queue.through()
    }

    /// What is in flight, to be changed: it may come to stand for fewer events.
    pub fn in_flight_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let range = self.in_flight().unwrap_or_default();
        self.queue.pending_mut(range)
    }

    /// All events that have not left.
    pub fn items(&self) -> impl Iterator<Item = &T> {
        self.queue.items()
    }

    /// Whether no event is in the queue.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The event at `offset` from the head.
    pub fn get(&self, offset: usize) -> Option<&T> {
        self.queue.get(offset).map(|entry| entry.item())
    }

    /// The events to hand over of a stretch that a step has named.
    pub fn to_deliver(&self, range: &Range<usize>) -> impl Iterator<Item = &T> {
        self.queue.pending(range.clone()).map(|entry| entry.item())
    }

    /// How many more events a read should bring now: for four full batches, and enough to choose a
    /// neighbour from once the head has failed.
    pub fn wants(&self) -> usize {
        let for_batches = self
            .policy
            .batch_size
            .saturating_mul(4)
            .saturating_sub(self.queue.events());
        if self.attempts() == 0 {
            return for_batches;
        }
        let neighbours = neighbours::available(&self.queue, self.isolation);
        let there = usize::from(!self.is_empty()) + neighbours;
        let for_tests = (1 + NEIGHBOURS).saturating_sub(there);
        match self.isolation {
            Isolation::Batch => for_batches.max(for_tests),
            Isolation::Key => {
                let room = LOOK_FOR_KEYS.saturating_sub(self.queue.events());
                let for_tests = if neighbours == 0 { room } else { for_tests };
                for_batches.max(for_tests.min(room))
            }
        }
    }

    /// What was handed over and has no outcome yet.
    pub fn in_flight(&self) -> Option<Range<usize>> {
        Some(self.in_flight.as_ref()?.range.clone())
    }

    /// How many events were handed over in it.
    pub fn handed_over(&self) -> usize {
        self.in_flight.as_ref().map_or(0, |delivery| delivery.count)
    }

    /// What to do now; to be asked without delay after an outcome and a read, as a test decides
    /// best on what is tried right after it. A step to deliver puts those events in flight; until
    /// their [`outcome`](Self::outcome), nothing more is handed over.
    pub fn next(&mut self, now: Time) -> Step {
        if self.in_flight.is_some() || self.queue.is_empty() {
            return Step::Idle;
        }
        if self.phase == Phase::Advance && self.has_key_to_ask() {
            self.phase = Phase::Test;
        }
        let neighbour = match self.phase {
            Phase::Test => self.neighbours.choose(&self.queue, self.isolation),
            Phase::Advance | Phase::Decide => None,
        };
        // Without a neighbour the head goes on waiting; one that comes later must not cut the wait
        // short.
        let too_early = self.attempts() < self.enough_to_test();
        if self.phase == Phase::Test && (neighbour.is_none() || too_early) {
            self.phase = Phase::Advance;
        }
        let longest = self.policy.retry_max;
        let asked_for = remaining(&mut self.not_before, now, longest);
        let backed_off = remaining(&mut self.queue.head_trial_mut().due, now, longest);
        let until = match self.phase {
            Phase::Advance => asked_for.max(backed_off),
            Phase::Test | Phase::Decide => asked_for,
        };
        if let Some(until) = until {
            return Step::Wait(until);
        }
        let range = match (self.phase, neighbour) {
            (Phase::Test, Some(offset)) => offset..offset + 1,
            (Phase::Test, None) | (Phase::Decide, _) => 0..1,
            (Phase::Advance, _) => {
                let untried = self.queue.untried_before(self.sizing.suspects_end());
                let room = self.policy.batch_size;
                self.queue
                    .first_batch(self.sizing.limit(room, untried), room)
            }
        };
        self.in_flight = Some(InFlight {
            range: range.clone(),
            count: self.queue.pending(range.clone()).count(),
            told: BTreeSet::new(),
        });
        Step::Deliver(range)
    }

    /// Some of the events in flight are through, given by their indices within what was handed over, and the delivery goes on. Its
    /// outcome counts for the others. Returns the events that leave the head of the queue, in order.
    pub fn progress(&mut self, through: &[usize]) -> Vec<Settled<T>> {
        let Some(InFlight { range, count, told }) = &mut self.in_flight else {
            return Vec::new();
        };
        // What is tried by itself decides on more than itself.
        if *count < 2 {
            return Vec::new();
        }
        let open: Vec<usize> = (0..*count).filter(|index| !told.contains(index)).collect();
        let through: BTreeSet<usize> = through.iter().copied().collect();
        let handed_over = self.queue.range_mut(range.clone());
        let handed_over = handed_over.filter(|entry| entry.is_pending());
        for (entry, index) in handed_over.zip(open) {
            if through.contains(&index) {
                entry.went_through();
                told.insert(index);
            }
        }
        let settled = self.settle();
        if let Some(InFlight { range, .. }) = &mut self.in_flight {
            range.start = range.start.saturating_sub(settled.len());
            range.end = range.end.saturating_sub(settled.len());
        }
        settled
    }

    /// The delivery in flight has ended, and of what it has not told, nothing was tried.
    pub fn give_back(&mut self) {
        self.in_flight = None;
        self.up_meanwhile = false;
    }

    /// Takes the outcome of the delivery in flight at the time it became known. Returns the events
    /// that leave the head of the queue, in order. Without a delivery in flight it does nothing.
    pub fn outcome(&mut self, now: Time, outcome: &Outcome) -> Vec<Settled<T>> {
        let Some(delivery) = self.in_flight.take() else {
            return Vec::new();
        };
        let InFlight { range, count, .. } = &delivery;
        if let Some(wait) = outcome.retry_after() {
            self.not_before = Some(now.after(wait.min(self.policy.retry_max)));
            self.proven = 0;
        }
        if delivery.told.is_empty() && outcome.puts_off(*count) {
            self.put_off(now, range.start);
            return Vec::new();
        }
        let up = match (std::mem::take(&mut self.phase), *count) {
            (Phase::Decide, _) => self.decided(now, outcome.alone()),
            (Phase::Test, _) => self.tested(now, range.start, outcome.alone()),
            (Phase::Advance, 1) => self.tried_alone(now, outcome.alone()),
            (Phase::Advance, _) => self.tried_together(now, delivery, outcome),
        };
        let mut settled = self.settle();
        if self.proven > 0 && self.attempts() > 0 {
            self.phase = Phase::Decide;
        }
        if self.queue.untried_before(self.sizing.suspects_end()) == 0 {
            self.sizing.cleared();
        }
        if up {
            self.sizing.grow(self.policy.batch_size);
        }
        // A proof does not keep over a wait.
        if std::mem::take(&mut self.up_meanwhile)
            && self.not_before.is_none_or(|until| until <= now)
        {
            settled.extend(self.sink_is_up());
        }
        settled
    }

    /// How the sink is doing.
    pub fn health(&self) -> Health {
        match self.attempts() {
            0 if self.sizing.error().is_some() => Health::Bisecting,
            0 => Health::Flowing,
            attempts if self.neighbours.any_failed() => Health::Down { attempts },
            attempts => Health::Retrying { attempts },
        }
    }

    /// Until when nothing is handed over. `None`, or a time that has passed: the next step may do
    /// something. Always `None` while a delivery is in flight. It takes no account of a clock that
    /// went back: only [`next`](Self::next) draws such a time in.
    pub fn next_attempt_at(&self) -> Option<Time> {
        match (&self.in_flight, self.phase) {
            (Some(_), _) => None,
            (None, Phase::Advance) if self.has_key_to_ask() => self.not_before,
            (None, Phase::Advance) => self.due(),
            // A test and a decision do not wait for the head's back-off.
            (None, Phase::Test | Phase::Decide) => self.not_before,
        }
    }

    /// What the latest failure said that still holds things up.
    pub fn last_error(&self) -> Option<&str> {
        self.queue
            .head_trial()
            .error
            .as_deref()
            .or(self.sizing.error())
    }

    /// How often the event at the head has failed by itself.
    pub fn attempts(&self) -> u32 {
        self.queue.head_trial().attempts
    }

    fn due(&self) -> Option<Time> {
        self.not_before.max(self.queue.head_trial().due)
    }

    /// Several events from the head on. Returns, like its siblings, whether the sink has shown that
    /// it is up.
    fn tried_together(&mut self, now: Time, delivery: InFlight, outcome: &Outcome) -> bool {
        let InFlight { range, count, told } = delivery;
        let verdicts = match outcome.verdicts(count) {
            Ok(verdicts) => verdicts,
            // It has shown that it is up, whatever has become of it since.
            Err(_) if !told.is_empty() => vec![Verdict::Untried; count],
            Err(error) => {
                self.sizing.failed(count, range.end, error);
                return false;
            }
        };
        let mut proven = !told.is_empty();
        let open = verdicts.into_iter().enumerate();
        let open = open.filter(|(index, _)| !told.contains(index));
        let handed_over = self.queue.range_mut(range.clone());
        let handed_over = handed_over.filter(|entry| entry.is_pending());
        for (entry, (_, verdict)) in handed_over.zip(open) {
            let failure = match verdict {
                Verdict::Through => {
                    entry.went_through();
                    proven = true;
                    continue;
                }
                Verdict::Untried => continue,
                Verdict::Failed(failure) => failure,
            };
            entry.trial.failed(&failure.error);
            entry.named = true;
            if failure.permanent {
                entry.condemn(&failure.error);
                proven = true;
            } else {
                entry.trial.due = Some(now.after(delay(&self.policy, entry.trial.attempts, None)));
            }
        }
        if proven && self.isolation == Isolation::Key {
            self.park_failed(range.end);
        }
        true
    }

    /// Nothing of a delivery was tried. No event has failed by that, and nothing is known of the sink. The same comes again after the
    /// shortest wait, but for a test, for which the next neighbour is asked.
    fn put_off(&mut self, now: Time, offset: usize) {
        if std::mem::take(&mut self.phase) == Phase::Test {
            self.neighbours.failed(offset);
            self.postpone(now, 0, None);
        }
        // In a small batch it would keep all others waiting.
        self.sizing.cleared();
        self.sizing.grow(self.policy.batch_size);
        self.proven = 0;
        self.up_meanwhile = false;
        self.not_before = self.not_before.max(Some(now.after(self.policy.retry_min)));
    }

    /// The head by itself.
    fn tried_alone(&mut self, now: Time, result: Result<(), Setback<'_>>) -> bool {
        let up = self.record(now, 0, result);
        if !up {
            self.sizing.found();
            if self.attempts() >= self.enough_to_test() {
                self.phase = Phase::Test;
            }
            if self.isolation == Isolation::Key && self.nothing_else_to_try() {
                self.park_failed(1);
            }
        }
        up
    }

    /// A neighbour by itself. Only one that goes through, or that the sink has judged for good,
    /// shows that the sink is up: a sink that names every event it cannot pass on may be in an
    /// outage of its own.
    fn tested(&mut self, now: Time, offset: usize, result: Result<(), Setback<'_>>) -> bool {
        let up = self.record(now, offset, result);
        if up {
            if self.neighbours.any_failed() {
                for entry in self.queue.range_mut(0..offset) {
                    entry.trial.excuse();
                }
            }
            self.neighbours.forget();
            match self.isolation {
                Isolation::Batch => self.proven = offset,
                Isolation::Key => self.park_failed(offset),
            }
        } else {
            self.neighbours.failed(offset);
            let retry_after = result.err().and_then(|setback| setback.retry_after);
            self.postpone(now, 0, retry_after);
        }
        up
    }

    /// The head by itself, just after an event behind it went through. One that had failed often
    /// enough before is condemned by this failure, which is not counted: the count says what led
    /// here. Any other is tried on, without a wait, until it has failed often enough: failures in
    /// what may have been an outage do not speak against it.
    fn decided(&mut self, now: Time, result: Result<(), Setback<'_>>) -> bool {
        let enough = self.policy.poison_attempts;
        let up = match result {
            Err(setback) if self.queue.head_trial().evidence() >= enough => setback.permanent,
            _ => self.record(now, 0, result),
        };
        if let Err(setback) = result
            && self.queue.head_trial().evidence() >= enough
            && let Some(head) = self.queue.get_mut(0)
        {
            head.condemn(setback.error);
        }
        up
    }

    /// How often the head must have failed for a neighbour to be tried. Isolated by key, nothing else is
    /// at stake than who waits.
    fn enough_to_test(&self) -> u32 {
        match self.isolation {
            Isolation::Batch => self.policy.poison_attempts,
            Isolation::Key => 1,
        }
    }

    /// Whether the head has failed, and no other key has been tried since though there is one now: it must
    /// not wait for the head's back-off.
    fn has_key_to_ask(&self) -> bool {
        self.isolation == Isolation::Key
            && self.attempts() > 0
            && !self.neighbours.any_failed()
            && neighbours::available(&self.queue, self.isolation) > 0
    }

    /// Whether all that is pending is of the head's key, and that is as much as may be looked at.
    fn nothing_else_to_try(&self) -> bool {
        self.queue.events() >= LOOK_FOR_KEYS
            && neighbours::available(&self.queue, self.isolation) == 0
    }

    /// Parks what has failed of the first `end` events, and all behind it of the same keys.
    fn park_failed(&mut self, end: usize) {
        let failed = self.queue.pending(0..end);
        let failed = failed.filter(|entry| entry.trial.attempts > 0);
        let keys: Vec<T::Key> = failed.map(|entry| entry.item().key().clone()).collect();
        for key in keys {
            self.queue.hold(&key);
        }
    }

    /// Lets go of what is decided at the head.
    fn settle(&mut self) -> Vec<Settled<T>> {
        let settled = self.queue.settle();
        if !settled.is_empty() {
            self.neighbours.forget();
            self.sizing.advance(settled.len());
            self.proven = self.proven.saturating_sub(settled.len());
        }
        settled
    }

    /// Notes what came of one event by itself, and whether that shows that the sink is up.
    fn record(&mut self, now: Time, offset: usize, result: Result<(), Setback<'_>>) -> bool {
        let Some(entry) = self.queue.get_mut(offset) else {
            return false;
        };
        let Err(setback) = result else {
            entry.went_through();
            return true;
        };
        entry.trial.failed(setback.error);
        if setback.permanent {
            entry.condemn(setback.error);
        } else {
            self.postpone(now, offset, setback.retry_after);
        }
        setback.permanent
    }

    /// Starts the back-off of an event.
    fn postpone(&mut self, now: Time, offset: usize, retry_after: Option<Duration>) {
        if let Some(entry) = self.queue.get_mut(offset) {
            entry.trial.due =
                Some(now.after(delay(&self.policy, entry.trial.attempts, retry_after)));
        }
    }
}
