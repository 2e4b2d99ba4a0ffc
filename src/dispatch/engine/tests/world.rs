//! A source, a sink, a clock that only the test moves, and between them an engine whose every move
//! is checked against a plain count of what happened.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::super::super::{Checkpoint, Fate, Outcome, Policy, Time};
use super::super::{Engine, Step};
use super::sink::{Event, Sink};

/// A delivery that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) at: u64,
    pub(super) ids: Range<usize>,
}

pub(super) struct World {
    pub(super) engine: Engine<Event>,
    pub(super) sink: Sink,
    pub(super) policy: Policy,
    pub(super) now: u64,
    pub(super) requests: Vec<Request>,
    /// What became of the events so far, by id.
    pub(super) fates: Vec<Fate>,
    /// Events given up although the sink takes them.
    pub(super) wronged: BTreeSet<usize>,
    pub(super) source: Vec<Event>,
    pub(super) pushed: usize,
    /// Over restarts, the caller keeps which events went through ahead of the head.
    pub(super) keeps_marks: bool,
    /// Went through since the engine last started.
    through: BTreeSet<usize>,
    ever_through: BTreeSet<usize>,
    /// Failures by themselves or by name, as far as the engine can know of them.
    failures: BTreeMap<usize, u32>,
    /// How many of these may be an outage's fault.
    excused: BTreeMap<usize, u32>,
    /// On behalf of this head, and since one passed.
    tests_failed: bool,
    /// This event has gone through, and since then no wait has come: what lies ahead of it is
    /// decided on.
    run: Option<usize>,
}

impl World {
    pub(super) fn new(policy: Policy, poison: impl IntoIterator<Item = usize>) -> Self {
        World {
            engine: Engine::restore(policy, Checkpoint::default()),
            sink: Sink::new(poison),
            policy,
            now: 1_000_000,
            requests: Vec::new(),
            fates: Vec::new(),
            wronged: BTreeSet::new(),
            source: Vec::new(),
            pushed: 0,
            keeps_marks: false,
            through: BTreeSet::new(),
            ever_through: BTreeSet::new(),
            failures: BTreeMap::new(),
            excused: BTreeMap::new(),
            tests_failed: false,
            run: None,
        }
    }

    /// Adds events with these keys to the source.
    pub(super) fn write(&mut self, keys: impl IntoIterator<Item = usize>) {
        self.write_weighted(keys.into_iter().map(|key| (key, 1)));
    }

    /// Adds items with these keys, and these numbers of events in each.
    pub(super) fn write_weighted(&mut self, items: impl IntoIterator<Item = (usize, usize)>) {
        for (key, weight) in items {
            let id = self.source.len();
            self.source.push(Event { id, key, weight });
        }
    }

    /// Adds events that have nothing to do with each other.
    pub(super) fn write_many(&mut self, count: usize) {
        let start = self.source.len();
        self.write(start..start + count);
    }

    /// Reads as much as the engine wants.
    pub(super) fn read(&mut self) {
        let end = self.source.len().min(self.pushed + self.engine.wants());
        for event in &self.source[self.pushed..end] {
            if self.through.contains(&event.id) {
                for settled in self.engine.push_through(event.clone()) {
                    assert_eq!(
                        settled.item.id,
                        self.fates.len(),
                        "nothing lies ahead of it"
                    );
                    self.fates.push(settled.fate);
                }
            } else {
                self.engine.push(event.clone());
            }
        }
        self.pushed = end;
    }

    /// Reads, and makes one delivery if there is one to make now.
    pub(super) fn step(&mut self) -> Step {
        self.read();
        let announced = self.engine.next_attempt_at();
        let step = self.engine.next(Time(self.now));
        match &step {
            Step::Deliver(range) => {
                // But for a clock that went back, what was announced holds.
                let longest = Time(self.now).after(self.policy.retry_max);
                assert!(announced.is_none_or(|at| at.min(longest) <= Time(self.now)));
                let outcome = self.hand_over(range.clone());
                self.report(range.clone(), &outcome);
            }
            Step::Wait(until) => {
                assert_eq!(self.run, None, "no wait in a run");
                assert_eq!(self.engine.next_attempt_at(), Some(*until));
                assert!(until.0 > self.now, "a wait lies ahead");
                assert!(*until <= Time(self.now).after(self.policy.retry_max));
                assert_eq!(
                    self.engine.next(Time(until.0 - 1)),
                    step,
                    "asking early changes nothing"
                );
            }
            Step::Idle => assert!(self.engine.is_empty()),
        }
        step
    }

    /// Steps, and lets a wait pass. Returns how long it was, if that was the step.
    pub(super) fn advance(&mut self) -> Option<u64> {
        let Step::Wait(until) = self.step() else {
            return None;
        };
        let wait = until.0 - self.now;
        self.now = until.0;
        Some(wait)
    }

    /// Advances until everything is settled, which must take no more than `most` requests.
    pub(super) fn drain(&mut self, most: usize) {
        let most = self.requests.len() + most;
        while self.fates.len() < self.source.len() {
            self.advance();
            assert!(self.requests.len() <= most, "no end: {:?}", self.engine);
        }
    }

    /// Makes `count` requests, letting waits pass.
    pub(super) fn requests(&mut self, count: usize) -> &[Request] {
        let start = self.requests.len();
        while self.requests.len() < start + count {
            assert_ne!(self.step_over(), Step::Idle);
        }
        &self.requests[start..]
    }

    /// The next step that is no wait.
    fn step_over(&mut self) -> Step {
        loop {
            match self.step() {
                Step::Wait(until) => self.now = until.0,
                step => return step,
            }
        }
    }

    fn ids(&self, range: &Range<usize>) -> Vec<usize> {
        self.engine
            .to_deliver(range)
            .map(|event| event.id)
            .collect()
    }

    /// Checks a step to deliver, and what the sink makes of it.
    pub(super) fn hand_over(&mut self, range: Range<usize>) -> Outcome {
        let ids = self.ids(&range);
        let head = self.fates.len();
        assert_eq!(self.engine.in_flight(), Some(range.clone()));
        assert_eq!(
            self.engine.next(Time(self.now)),
            Step::Idle,
            "one delivery at a time"
        );
        let weight: usize = ids.iter().map(|id| self.source[*id].weight).sum();
        let batch_size = self.policy.batch_size.max(1);
        assert!(ids.len() == 1 || (ids.len() <= batch_size && weight <= batch_size));
        assert!(
            ids.iter().all(|id| !self.through.contains(id)),
            "never again what went through"
        );
        assert!(
            !self.keeps_marks || ids.iter().all(|id| !self.ever_through.contains(id)),
            "never, if that is kept"
        );
        if ids.len() > 1 {
            let failed_before = |id| self.failures.get(id).is_some_and(|failures| *failures > 0);
            assert!(
                !ids.iter().any(failed_before),
                "what failed by itself stays by itself"
            );
        }
        if range.start == 0 {
            assert_eq!(ids[0], head, "from the head on");
            let undecided = (head..=ids[ids.len() - 1]).filter(|id| !self.through.contains(id));
            assert!(
                ids.iter().copied().eq(undecided),
                "in order, nothing left out"
            );
        } else {
            assert_eq!(ids.len(), 1);
            assert_eq!(self.run, None, "one test for all that lies ahead of it");
            assert!(self.failures[&head] >= self.enough(), "no test too early");
        }
        let last = ids[ids.len() - 1];
        self.requests.push(Request {
            at: self.now,
            ids: ids[0]..last + 1,
        });
        self.sink.deliver(&ids)
    }

    /// Tells the engine of an outcome, and checks what it makes of it.
    pub(super) fn report(&mut self, range: Range<usize>, outcome: &Outcome) {
        let ids = self.ids(&range);
        let testing = range.start > 0;
        let head = self.fates.len();
        let alone = ids.len() == 1;
        let deciding = self.run.is_some() && alone;
        let failed_before = self.failures.get(&head).copied().unwrap_or_default();
        let evidence_before = self.evidence(head);
        let mut condemned = BTreeSet::new();
        let mut gone = BTreeSet::new();
        let mut untried: BTreeSet<usize> = BTreeSet::new();
        match outcome {
            Outcome::Delivered => gone.extend(&ids),
            Outcome::Cut {
                failures,
                untried: put_off,
                ..
            } => {
                for (index, id) in ids.iter().enumerate() {
                    if put_off.contains(&index) {
                        untried.insert(*id);
                    } else if failures.iter().all(|failure| failure.index != index) {
                        gone.insert(*id);
                    }
                }
            }
            Outcome::Partial(failures) => {
                gone.extend(&ids);
                for failure in failures.iter().filter(|failure| failure.index < ids.len()) {
                    // The first mention counts.
                    if gone.remove(&ids[failure.index]) && failure.permanent {
                        condemned.insert(ids[failure.index]);
                    }
                }
            }
            Outcome::Failed(_) => {}
        }
        // The last try of an event that had failed often enough before is not counted.
        let counted = !(deciding && evidence_before >= self.enough())
            && (alone || !matches!(outcome, Outcome::Failed(_)));
        let failed = |id: &&usize| !gone.contains(*id) && !untried.contains(*id);
        for id in ids.iter().filter(|id| counted && failed(id)) {
            *self.failures.entry(*id).or_default() += 1;
        }
        self.through.extend(&gone);
        self.ever_through.extend(&gone);
        self.through.extend(&condemned);
        if testing && self.through.contains(&ids[0]) {
            self.run = Some(ids[0]);
            if std::mem::take(&mut self.tests_failed) {
                for (id, failures) in self.failures.range(head..ids[0]) {
                    self.excused.entry(*id).or_insert(*failures);
                }
            }
        } else if testing {
            self.tests_failed = true;
        }
        let all_put_off = untried.len() == ids.len();
        let decided =
            deciding && !all_put_off && failed_before > 0 && self.evidence(head) >= self.enough();

        for settled in self.engine.outcome(Time(self.now), outcome) {
            let id = settled.item.id;
            assert_eq!(id, self.fates.len(), "settled in order, and once");
            match &settled.fate {
                Fate::Parked(_) => panic!("it is not isolated by key"),
                Fate::Delivered => {
                    assert!(self.ever_through.contains(&id), "delivered means taken")
                }
                Fate::Dead { error, attempts } => {
                    assert!(!error.is_empty());
                    assert_eq!(*attempts, self.failures[&id], "the failures that led to it");
                    if !self.through.contains(&id) {
                        assert!(deciding && id == head, "given up only in a run, by itself");
                        assert!(self.evidence(id) >= self.enough());
                    }
                    if !self.sink.poison.contains(&id) {
                        assert!(!self.sink.up);
                        self.wronged.insert(id);
                    }
                }
            }
            self.fates.push(settled.fate);
        }
        assert!(!decided || self.fates.len() > head, "a decision is one");
        let asked_for_calm = outcome.retry_after().is_some() || all_put_off;
        let next = self.fates.len();
        self.tests_failed &= next == head;
        self.run = self.run.filter(|end| !asked_for_calm && *end > next);
    }

    /// How many failures speak against an event.
    fn evidence(&self, id: usize) -> u32 {
        let of = |counts: &BTreeMap<usize, u32>| counts.get(&id).copied().unwrap_or_default();
        of(&self.failures) - of(&self.excused)
    }

    fn enough(&self) -> u32 {
        self.policy.poison_attempts.max(1)
    }

    /// Another process takes over with what the checkpoint says.
    pub(super) fn restart(&mut self) {
        let remembered = serde_json::to_string(&self.engine.checkpoint()).expect("plain values");
        let checkpoint: Option<Checkpoint> =
            serde_json::from_str(&remembered).expect("written just now");
        let attempts = self.engine.attempts();
        let marks: BTreeSet<usize> = self.engine.through_ahead().map(|event| event.id).collect();
        self.engine = Engine::restore(self.policy, checkpoint.unwrap_or_default());
        assert_eq!(self.engine.attempts(), attempts);
        assert_eq!(
            serde_json::to_string(&self.engine.checkpoint()).expect("plain values"),
            remembered
        );
        let head = self.fates.len();
        self.through.clear();
        if self.keeps_marks {
            let ahead = self.ever_through.range(head..).copied();
            self.through = ahead.collect();
            let told = self.through.range(..self.pushed).copied();
            assert_eq!(marks, told.collect(), "all that went through is told");
        }
        self.pushed = head;
        self.failures.retain(|id, _| *id == head);
        self.excused.retain(|id, _| *id == head);
        self.run = None;
    }

    pub(super) fn retry_now(&mut self) {
        self.engine.retry_now();
        self.run = self.run.filter(|_| self.engine.in_flight().is_some());
    }

    /// A delivery is made, and its outcome is lost with the process. A sink that must not see an
    /// event twice shares the transaction of the marks, so to it nothing was delivered.
    pub(super) fn crash(&mut self) {
        self.read();
        if let Step::Deliver(range) = self.engine.next(Time(self.now)) {
            self.hand_over(range);
        }
        self.restart();
    }

    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.engine.set_policy(policy);
        self.policy = policy;
    }

    /// The ids of dead events, with their attempts.
    pub(super) fn dead(&self) -> Vec<(usize, u32)> {
        let dead = |(id, fate): (usize, &Fate)| match fate {
            Fate::Dead { attempts, .. } => Some((id, *attempts)),
            Fate::Delivered | Fate::Parked(_) => None,
        };
        self.fates.iter().enumerate().filter_map(dead).collect()
    }
}
