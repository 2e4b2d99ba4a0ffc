//! A source, a sink, a clock that only the test moves, and between them an engine with its lanes, whose
//! every move is checked against a plain count of what happened.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::super::{
    Checkpoint, Engine, Failure, Fate, Health, Isolation, Item, Lanes, Outcome, Policy, Refusal,
    Settled, Step, Time, Trial,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// Its place in the source.
    pub(super) id: usize,
    pub(super) key: usize,
}

impl Item for Event {
    type Key = usize;
    fn key(&self) -> &usize {
        &self.key
    }
}

/// How a sink that is up speaks of poison. It keeps the order of each key by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Fails the delivery that it is in.
    Mute,
    /// Names it, does not try later ones of its key, and takes the others.
    Naming,
    /// Names it, says that it will never be taken, and takes the others.
    Judging,
}

/// A delivery that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) at: u64,
    pub(super) ids: Vec<usize>,
    pub(super) parked: bool,
}

pub(super) struct World {
    pub(super) engine: Engine<Event>,
    pub(super) lanes: Lanes<Event>,
    pub(super) policy: Policy,
    /// How many events may be parked before the course waits.
    pub(super) room: usize,
    /// Room was always there. If not, a test by the rules of batches may have overtaken one of its key.
    strict: bool,
    pub(super) now: u64,
    pub(super) up: bool,
    pub(super) style: Style,
    pub(super) poison: BTreeSet<usize>,
    pub(super) retry_after: Option<Duration>,
    pub(super) requests: Vec<Request>,
    pub(super) source: Vec<Event>,
    /// What became of the events so far, by id.
    pub(super) fates: BTreeMap<usize, Fate>,
    /// Events given up although the sink takes them.
    pub(super) wronged: BTreeSet<usize>,
    /// How far the cursor has come.
    pub(super) passed: usize,
    read: usize,
    /// What is in the table, in order.
    pub(super) stored: Vec<(Event, Trial)>,
    /// The last of each key that the sink has taken.
    taken: BTreeMap<usize, usize>,
}

pub(super) fn policy(batch_size: usize) -> Policy {
    Policy {
        batch_size,
        retry_min: Duration::from_secs(1),
        retry_max: Duration::from_secs(300),
        poison_attempts: 5,
    }
}

impl World {
    pub(super) fn new(policy: Policy, poison: impl IntoIterator<Item = usize>) -> Self {
        World {
            engine: Engine::restore(policy, Checkpoint::default()),
            lanes: Lanes::new(policy),
            policy,
            room: usize::MAX,
            strict: true,
            now: 1_000_000,
            up: true,
            style: Style::Mute,
            poison: poison.into_iter().collect(),
            retry_after: None,
            requests: Vec::new(),
            source: Vec::new(),
            fates: BTreeMap::new(),
            wronged: BTreeSet::new(),
            passed: 0,
            read: 0,
            stored: Vec::new(),
            taken: BTreeMap::new(),
        }
    }

    /// Adds events with these keys to the source.
    pub(super) fn write(&mut self, keys: impl IntoIterator<Item = usize>) {
        for key in keys {
            let id = self.source.len();
            self.source.push(Event { id, key });
        }
    }

    fn isolate(&mut self) {
        let by_key = self.lanes.events() < self.room;
        self.strict &= by_key;
        self.engine.set_isolation(if by_key {
            Isolation::Key
        } else {
            Isolation::Batch
        });
    }

    /// Reads as much as the engine wants.
    pub(super) fn read(&mut self) {
        while self.lanes.events() < self.room
            && self.engine.wants() > 0
            && self.read < self.source.len()
        {
            let settled = self.engine.push(self.source[self.read].clone());
            self.read += 1;
            self.settle(settled);
        }
    }

    /// Reads, and makes one delivery if there is one to make now. Otherwise says when there is.
    pub(super) fn step(&mut self) -> Option<Time> {
        self.isolate();
        self.read();
        let now = Time(self.now);
        let announced = self.lanes.due();
        let picked: Vec<Event> = match self.lanes.is_due(now) {
            true => self.lanes.next(now).into_iter().cloned().collect(),
            false => Vec::new(),
        };
        if !picked.is_empty() {
            // But for a clock that went back, what was announced holds.
            let longest = now.after(self.policy.retry_max);
            assert!(announced.is_some_and(|at| at.min(longest) <= now));
            assert!(picked.len() <= self.policy.batch_size.max(1));
            assert_eq!(self.lanes.next(now), Vec::<&Event>::new(), "one at a time");
            let outcome = self.hand_over(&picked, true);
            self.report_parked(&picked, &outcome);
            return None;
        }
        let lanes = self.lanes.due();
        match self.engine.next(now) {
            Step::Deliver(range) => {
                let events: Vec<Event> = self.engine.to_deliver(&range).cloned().collect();
                let outcome = self.hand_over(&events, false);
                self.report(&events, &outcome);
                None
            }
            Step::Wait(until) => {
                assert!(until > now);
                Some(lanes.map_or(until, |lanes| lanes.min(until)))
            }
            Step::Idle => lanes,
        }
    }

    /// Steps, and lets a wait pass. False if there is nothing to do and nothing to wait for.
    pub(super) fn advance(&mut self) -> bool {
        let before = self.requests.len();
        match self.step() {
            Some(until) => {
                assert!(until.0 > self.now, "a wait lies ahead: {until:?}");
                self.now = until.0;
                true
            }
            None => self.requests.len() > before,
        }
    }

    /// Advances until everything is settled, which must take no more than `most` requests.
    pub(super) fn drain(&mut self, most: usize) {
        let most = self.requests.len() + most;
        while self.fates.len() < self.source.len() {
            assert!(self.advance(), "stuck: {:?} {:?}", self.engine, self.lanes);
            assert!(self.requests.len() <= most, "no end: {:?}", self.lanes);
        }
        assert_eq!(self.lanes.events(), 0);
        assert_eq!(self.stored, []);
    }

    fn takes(&self, event: &Event) -> bool {
        self.up && !self.poison.contains(&event.id)
    }

    fn was_taken(&self, event: &Event) -> bool {
        let last = self.taken.get(&event.key);
        last.is_some_and(|last| *last >= event.id)
    }

    /// Checks a delivery, and what the sink makes of it.
    pub(super) fn hand_over(&mut self, events: &[Event], parked: bool) -> Outcome {
        for (index, event) in events.iter().enumerate() {
            assert!(!self.fates.contains_key(&event.id), "settled is settled");
            let earlier = self.source[..event.id].iter();
            let mut earlier = earlier.filter(|other| other.key == event.key);
            let over = |other: &Event| {
                self.fates.contains_key(&other.id)
                    || self.was_taken(other)
                    || events[..index].contains(other)
            };
            assert!(
                !self.strict || earlier.all(over),
                "not before those of its key: {event:?}"
            );
        }
        self.requests.push(Request {
            at: self.now,
            ids: events.iter().map(|event| event.id).collect(),
            parked,
        });
        let Some(first) = events.iter().position(|event| !self.takes(event)) else {
            self.take(events.iter().cloned());
            return Outcome::Delivered;
        };
        let naming = self.style == Style::Judging
            || (self.style == Style::Naming && events.iter().any(|event| self.takes(event)));
        if !self.up || !naming {
            let error = if self.up { "bad event" } else { "down" };
            return Outcome::Failed(Refusal {
                error: error.to_owned(),
                retry_after: self.retry_after,
            });
        }
        let permanent = self.style == Style::Judging;
        let mut failures = Vec::new();
        let mut untried = Vec::new();
        let mut held = BTreeSet::new();
        let mut through = events[..first].to_vec();
        for (index, event) in events.iter().enumerate().skip(first) {
            if held.contains(&event.key) {
                untried.push(index);
            } else if self.takes(event) {
                through.push(event.clone());
            } else {
                failures.push(Failure {
                    index,
                    error: "bad event".to_owned(),
                    permanent,
                });
                if !permanent {
                    held.insert(event.key);
                }
            }
        }
        self.take(through.into_iter());
        Outcome::Cut {
            failures,
            untried,
            retry_after: None,
        }
    }

    fn take(&mut self, events: impl Iterator<Item = Event>) {
        for event in events {
            let in_order = !self.was_taken(&event);
            assert!(in_order || !self.strict, "in order: {event:?}");
            let last = self.taken.entry(event.key).or_default();
            *last = event.id.max(*last);
        }
    }

    /// Tells of an outcome of the stream's, as a course does.
    fn report(&mut self, events: &[Event], outcome: &Outcome) {
        let now = Time(self.now);
        if let Some(wait) = outcome.retry_after() {
            self.lanes.leave_alone(now, wait);
        }
        if outcome.proves_up(events.len()) {
            let after_outage = matches!(self.engine.health(), Health::Down { .. });
            self.lanes.sink_is_up(now, after_outage);
        }
        self.isolate();
        let settled = self.engine.outcome(now, outcome);
        self.settle(settled);
    }

    fn report_parked(&mut self, picked: &[Event], outcome: &Outcome) {
        let now = Time(self.now);
        let settled = self.lanes.outcome(now, outcome);
        let mut up = false;
        for settled in settled {
            assert!(picked.contains(&settled.item));
            self.stored.retain(|(event, _)| *event != settled.item);
            up |= settled.fate == Fate::Delivered;
            self.decide(settled);
        }
        for (event, trial) in self.lanes.take_failed() {
            let stored = self.stored.iter_mut().find(|(other, _)| other == event);
            stored.expect("what fails is stored").1 = Trial {
                excused: 0,
                ..trial.clone()
            };
        }
        if up {
            self.isolate();
            let settled = self.engine.sink_is_up();
            self.settle(settled);
        }
        self.release();
    }

    fn settle(&mut self, settled: Vec<Settled<Event>>) {
        for settled in settled {
            assert_eq!(settled.item.id, self.passed, "the cursor moves in order");
            self.passed += 1;
            if let Fate::Parked(trial) = settled.fate {
                let now = Time(self.now);
                self.lanes.park(now, settled.item.clone(), trial.clone());
                self.engine.hold(&settled.item.key);
                self.stored.push((settled.item, trial));
            } else {
                self.decide(settled);
            }
        }
        self.release();
    }

    fn release(&mut self) {
        for key in self.lanes.drained() {
            if self.engine.release(&key) {
                self.lanes.remove(&key);
            }
        }
    }

    fn decide(&mut self, settled: Settled<Event>) {
        let Settled { item, fate } = settled;
        let later = self.source[item.id + 1..].iter();
        let mut later = later.filter(|other| other.key == item.key);
        assert!(
            !self.strict || later.all(|other| !self.fates.contains_key(&other.id)),
            "settled in the order of its key: {item:?}"
        );
        match &fate {
            Fate::Delivered => assert!(self.was_taken(&item), "delivered means taken"),
            Fate::Dead { error, attempts } => {
                assert!(!error.is_empty() && *attempts > 0);
                if !self.poison.contains(&item.id) {
                    self.wronged.insert(item.id);
                }
            }
            Fate::Parked(_) => panic!("parked twice: {item:?}"),
        }
        let before = self.fates.insert(item.id, fate);
        assert_eq!(before, None, "settled once: {item:?}");
    }

    /// Another process takes over with what is stored.
    pub(super) fn restart(&mut self) {
        let checkpoint = self.engine.checkpoint().unwrap_or_default();
        self.engine = Engine::restore(self.policy, checkpoint);
        self.lanes = Lanes::new(self.policy);
        for (event, trial) in self.stored.clone() {
            self.engine.hold(&event.key);
            self.lanes.park(Time(self.now), event, trial);
        }
        assert_eq!(self.lanes.events(), self.stored.len());
        self.read = self.passed;
        // What was taken and is not settled comes once more.
        let unsettled = self.stored.iter().map(|(event, _)| event);
        let unsettled = unsettled.chain(&self.source[self.passed..]);
        for event in unsettled.cloned().collect::<Vec<_>>() {
            if self.was_taken(&event) {
                self.taken.remove(&event.key);
            }
        }
    }

    /// A delivery is made, and its outcome is lost with the process.
    pub(super) fn crash(&mut self) {
        self.isolate();
        self.read();
        let now = Time(self.now);
        let picked: Vec<Event> = self.lanes.next(now).into_iter().cloned().collect();
        if !picked.is_empty() {
            self.hand_over(&picked, true);
        } else if let Step::Deliver(range) = self.engine.next(now) {
            let events: Vec<Event> = self.engine.to_deliver(&range).cloned().collect();
            self.hand_over(&events, false);
        }
        self.restart();
    }

    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.engine.set_policy(policy);
        self.lanes.set_policy(policy);
        self.policy = policy;
    }

    pub(super) fn retry_now(&mut self) {
        self.engine.retry_now();
        self.lanes.retry_now(Time(self.now));
    }

    /// The ids of dead events, with their attempts.
    pub(super) fn dead(&self) -> Vec<(usize, u32)> {
        let dead = |(id, fate): (&usize, &Fate)| match fate {
            Fate::Dead { attempts, .. } => Some((*id, *attempts)),
            _ => None,
        };
        self.fates.iter().filter_map(dead).collect()
    }

    /// The ids of what is parked, in order.
    pub(super) fn parked(&self) -> Vec<usize> {
        self.stored.iter().map(|(event, _)| event.id).collect()
    }
}
