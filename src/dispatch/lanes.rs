//! The events that a sink isolates by key has not taken: each failing one parked, with the later events of
//! its key behind it, while all other keys flow on. It says which parked events are tried when, and what
//! their outcomes mean; it neither holds the stream's queue nor moves a cursor.
//!
//! What a lane promises, whatever the sink does:
//! - *Events of a key are tried and settled in the order in which they were parked.* Only the first of a
//!   lane is tried once it has failed; the others follow when it is through or dead.
//! - *Lanes do not wait for each other*: each has its own back-off. Only while one delivery that held
//!   several lanes is searched for its fault do they take turns.
//! - *An outage dead-letters nothing.* The first of a lane is given up only if it has failed
//!   [`Policy::poison_attempts`] times and fails once more right after an event of another key went
//!   through, before any wait. What failed in what may have been an outage is excused, once.
//! - *After an outage nobody waits*: when the sink is up again, all lanes are tried at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::backoff::{Time, delay, remaining};
use super::outcome::{Failure, Outcome, Setback, Verdict};
use super::policy::Policy;
use super::queue::{Fate, Item, Settled, Trial};

#[cfg(test)]
mod tests;

/// The lanes of one sink. Invariant: a lane that holds an event and is not in flight is in `due`.
#[derive(Debug)]
pub struct Lanes<T: Item> {
    policy: Policy,
    lanes: BTreeMap<T::Key, Lane<T>>,
    /// When the first of each lane may be tried; of those that may be tried already, since when.
    due: BTreeSet<(Time, T::Key)>,
    /// Lanes whose first has failed often enough to be given up, if the sink is up.
    suspects: BTreeSet<T::Key>,
    /// Those of them that are decided on by their next try: another key has just gone through.
    deciding: BTreeSet<T::Key>,
    /// Lanes without events that nobody has removed yet.
    drained: BTreeSet<T::Key>,
    /// Lanes whose first has failed since somebody asked.
    failed: BTreeSet<T::Key>,
    in_flight: Vec<Pick<T::Key>>,
    /// The sink has shown that it is up while something was in flight: what fails in it is decided on by its next try.
    proven_meanwhile: bool,
    /// The most events to hand over at once while a fault is searched for; `None`: full batches.
    reduced: Option<usize>,
    /// Until when the sink asked to be left alone.
    not_before: Option<Time>,
    events: usize,
}

#[derive(Debug)]
struct Lane<T> {
    waiting: VecDeque<T>,
    /// Of the first.
    trial: Trial,
    /// As in `Lanes::due`.
    due: Option<Time>,
}

/// Part of a delivery: so many events from the front of a lane.
#[derive(Debug, Clone)]
struct Pick<K> {
    key: K,
    count: usize,
}

impl<T: Item> Lanes<T> {
    /// No lanes yet.
    pub fn new(policy: Policy) -> Self {
        Lanes {
            policy: policy.usable(),
            lanes: BTreeMap::new(),
            due: BTreeSet::new(),
            suspects: BTreeSet::new(),
            deciding: BTreeSet::new(),
            drained: BTreeSet::new(),
            failed: BTreeSet::new(),
            in_flight: Vec::new(),
            proven_meanwhile: false,
            reduced: None,
            not_before: None,
            events: 0,
        }
    }

    /// Takes effect with the next delivery.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy.usable();
        let enough = self.policy.poison_attempts;
        let lanes = self.lanes.iter();
        let suspects = lanes.filter(|(_, lane)| lane.trial.evidence() >= enough);
        self.suspects = suspects.map(|(key, _)| key.clone()).collect();
    }

    /// Adds an event behind those of its key. What is known of its failures counts if it is the first.
    pub fn park(&mut self, now: Time, item: T, trial: Trial) {
        let key = item.key().clone();
        self.events += 1;
        self.drained.remove(&key);
        let lane = self.lanes.entry(key.clone()).or_insert_with(|| Lane {
            waiting: VecDeque::new(),
            trial: Trial::default(),
            due: None,
        });
        lane.waiting.push_back(item);
        if lane.waiting.len() == 1 {
            let due = trial.due.unwrap_or(now);
            lane.trial = trial;
            self.suspect(&key);
            self.wait_until(&key, due);
        }
    }

    /// How many events are parked.
    pub fn events(&self) -> usize {
        self.events
    }

    /// The keys that have a lane, be it an empty one.
    pub fn keys(&self) -> impl Iterator<Item = &T::Key> {
        self.lanes.keys()
    }

    /// Keys whose events are all settled. Their lanes stay until [`remove`](Self::remove): there may
    /// be more of them on the way.
    pub fn drained(&self) -> Vec<T::Key> {
        self.drained.iter().cloned().collect()
    }

    /// Removes an empty lane: events of its key are not parked any more.
    pub fn remove(&mut self, key: &T::Key) {
        if self.drained.remove(key) {
            self.lanes.remove(key);
        }
    }

    /// Somebody changed or resumed the sink: every lane is tried without further waiting. Attempts stay
    /// counted.
    pub fn retry_now(&mut self, now: Time) {
        self.not_before = None;
        let waiting = self.due.iter().map(|(_, key)| key.clone());
        for key in waiting.collect::<Vec<_>>() {
            self.wait_until(&key, now);
        }
    }

    /// The sink asked, on another occasion, to be left alone for so long.
    pub fn leave_alone(&mut self, now: Time, wait: Duration) {
        let until = now.after(wait.min(self.policy.retry_max));
        self.not_before = self.not_before.max(Some(until));
        // A proof does not keep over a wait.
        self.deciding.clear();
        self.proven_meanwhile = false;
    }

    /// An event that is not parked has just gone through to the same sink. `after_outage`: others had
    /// failed before it.
    pub fn sink_is_up(&mut self, now: Time, after_outage: bool) {
        if after_outage {
            for lane in self.lanes.values_mut() {
                lane.trial.excuse();
            }
            let enough = self.policy.poison_attempts;
            self.suspects
                .retain(|key| self.lanes[key].trial.evidence() >= enough);
            self.retry_now(now);
        }
        self.prove(now, None);
    }

    /// What is to be tried now, if anything is: events in the order in which they are to be handed over,
    /// in one delivery. It is in flight until its [`outcome`](Self::outcome), or until some of it is
    /// [gone](Self::forget); before, there is nothing more.
    pub fn next(&mut self, now: Time) -> Vec<&T> {
        if !self.in_flight.is_empty() || self.waits_until(now).is_some() {
            return Vec::new();
        }
        let full = self.policy.batch_size;
        let mut room = self.reduced.map_or(full, |reduced| reduced.min(full));
        while room > 0
            && let Some((due, key)) = self.due.first()
            && *due <= now
        {
            let key = key.clone();
            self.due.pop_first();
            let Some(lane) = self.lanes.get_mut(&key) else {
                continue;
            };
            lane.due = None;
            let count = if lane.trial.attempts == 0 {
                lane.waiting.len().min(room)
            } else {
                1
            };
            room -= count;
            self.in_flight.push(Pick { key, count });
        }
        self.handed_over().collect()
    }

    /// What is in flight, in the order in which it was handed over.
    pub fn handed_over(&self) -> impl Iterator<Item = &T> {
        self.in_flight.iter().flat_map(|pick| {
            let lane = self.lanes.get(&pick.key);
            lane.into_iter()
                .flat_map(|lane| lane.waiting.iter().take(pick.count))
        })
    }

    /// What was in flight was not tried after all, and goes but for what is `there`. Returns what has
    /// gone.
    pub fn forget(&mut self, now: Time, there: impl Fn(&T) -> bool) -> Vec<T> {
        let mut gone = Vec::new();
        for Pick { key, count } in std::mem::take(&mut self.in_flight) {
            let Some(lane) = self.lanes.get_mut(&key) else {
                continue;
            };
            let front = lane.waiting.drain(..count).collect::<Vec<_>>();
            if front.first().is_some_and(|first| !there(first)) {
                lane.trial = Trial::default();
                self.deciding.remove(&key);
            }
            let before = gone.len();
            let mut kept = Vec::new();
            for item in front {
                if there(&item) {
                    kept.push(item);
                } else {
                    gone.push(item);
                }
            }
            for item in kept.into_iter().rev() {
                lane.waiting.push_front(item);
            }
            self.events -= gone.len() - before;
            self.goes_on(&key, now);
        }
        gone
    }

    /// Whether something is in flight.
    pub fn is_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// When something is to be tried next; `None` if that is open, or nothing is parked.
    pub fn due(&self) -> Option<Time> {
        if self.is_in_flight() {
            return None;
        }
        let (first, _) = self.due.first()?;
        Some(self.not_before.map_or(*first, |wait| wait.max(*first)))
    }

    /// Whether it makes sense to ask for the next now: something is due, or so far off that the time must
    /// come from another clock, or from another policy.
    pub fn is_due(&self, now: Time) -> bool {
        let furthest = now.after(self.policy.retry_max);
        self.due().is_some_and(|due| due <= now || due > furthest)
    }

    /// The failures of the event that is tried next, if it has failed.
    pub fn next_trial(&self) -> Option<&Trial> {
        let in_flight = self.in_flight.first().map(|pick| &pick.key);
        let key = in_flight.or(self.due.first().map(|(_, key)| key))?;
        let trial = &self.lanes.get(key)?.trial;
        (trial.attempts > 0).then_some(trial)
    }

    /// The first of each lane that has failed since this was asked last, with its failures.
    pub fn take_failed(&mut self) -> Vec<(&T, &Trial)> {
        let failed = std::mem::take(&mut self.failed).into_iter();
        let lanes = failed.filter_map(|key| self.lanes.get(&key));
        lanes
            .filter(|lane| lane.trial.attempts > 0)
            .filter_map(|lane| Some((lane.waiting.front()?, &lane.trial)))
            .collect()
    }

    /// Takes the outcome of what is in flight; its indices count what was handed over. Returns what is
    /// settled by it, in the order of each lane.
    pub fn outcome(&mut self, now: Time, outcome: &Outcome) -> Vec<Settled<T>> {
        let picks = std::mem::take(&mut self.in_flight);
        let total = picks.iter().map(|pick| pick.count).sum::<usize>();
        if total == 0 {
            return Vec::new();
        }
        if let Some(wait) = outcome.retry_after() {
            self.leave_alone(now, wait);
        }
        if outcome.puts_off(total) {
            self.proven_meanwhile = false;
            for pick in picks {
                self.wait_until(&pick.key, now.after(self.policy.retry_min));
            }
            return Vec::new();
        }
        let lone;
        let verdicts = match outcome.verdicts(total) {
            Ok(verdicts) => verdicts,
            Err(error) if total == 1 => {
                lone = Failure {
                    index: 0,
                    error: error.to_owned(),
                    permanent: false,
                };
                vec![Verdict::Failed(&lone)]
            }
            Err(_) => {
                self.reduced = Some(total / 2);
                for pick in picks {
                    self.wait_until(&pick.key, now);
                }
                if std::mem::take(&mut self.proven_meanwhile) {
                    self.prove(now, None);
                }
                return Vec::new();
            }
        };
        let mut settled = Vec::new();
        let mut went_through = BTreeSet::new();
        let mut verdicts = verdicts.into_iter();
        for pick in picks {
            let of_lane = verdicts.by_ref().take(pick.count).collect::<Vec<_>>();
            let before = settled.len();
            if self.judge(
                now,
                &pick.key,
                &of_lane,
                outcome.retry_after(),
                &mut settled,
            ) {
                went_through.insert(pick.key.clone());
            }
            self.events -= settled.len() - before;
        }
        if !went_through.is_empty() {
            self.grow();
            let only = went_through.pop_first().filter(|_| went_through.is_empty());
            self.prove(now, only.as_ref());
        }
        if std::mem::take(&mut self.proven_meanwhile) {
            self.prove(now, None);
        }
        settled
    }

    /// Notes what became of the first events of one lane. Returns whether that shows that the sink is up.
    fn judge(
        &mut self,
        now: Time,
        key: &T::Key,
        verdicts: &[Verdict<'_>],
        retry_after: Option<Duration>,
        settled: &mut Vec<Settled<T>>,
    ) -> bool {
        let decisive = self.deciding.remove(key);
        let policy = self.policy;
        let Some(lane) = self.lanes.get_mut(key) else {
            return false;
        };
        let mut up = false;
        let mut kept = Vec::new();
        let mut due = now;
        for (index, verdict) in verdicts.iter().enumerate() {
            let Some(item) = lane.waiting.pop_front() else {
                break;
            };
            let is_first = kept.is_empty();
            if is_first && index > 0 {
                lane.trial = Trial::default();
            }
            let failure = match verdict {
                Verdict::Through => {
                    up = true;
                    let fate = Fate::Delivered;
                    settled.push(Settled { item, fate });
                    continue;
                }
                Verdict::Untried => {
                    kept.push(item);
                    continue;
                }
                Verdict::Failed(failure) => failure,
            };
            let setback = Setback {
                error: &failure.error,
                permanent: failure.permanent,
                retry_after,
            };
            match lane.fail(&policy, now, setback, is_first, decisive && index == 0) {
                Ruling::Stays(until) => {
                    due = until.unwrap_or(due);
                    kept.push(item);
                }
                Ruling::Dead(fate) => {
                    up |= failure.permanent;
                    settled.push(Settled { item, fate });
                }
            }
        }
        if kept.is_empty() {
            lane.trial = Trial::default();
        }
        for item in kept.into_iter().rev() {
            lane.waiting.push_front(item);
        }
        if lane.trial.attempts > 0 {
            self.failed.insert(key.clone());
        }
        self.goes_on(key, due);
        up
    }

    /// A lane that was in flight waits for its next turn, if there is anything left in it.
    fn goes_on(&mut self, key: &T::Key, due: Time) {
        let is_empty = |lane: &Lane<T>| lane.waiting.is_empty();
        self.suspect(key);
        if self.lanes.get(key).is_some_and(is_empty) {
            self.drained.insert(key.clone());
        } else {
            self.wait_until(key, due);
        }
    }

    /// An event of a key other than `but_for` has just gone through. That proves nothing for what has to
    /// wait first.
    fn prove(&mut self, now: Time, but_for: Option<&T::Key>) {
        if self.waits_until(now).is_some() {
            return;
        }
        self.proven_meanwhile |= !self.in_flight.is_empty();
        let suspects = self.suspects.iter().filter(|key| Some(*key) != but_for);
        let idle = |key: &&T::Key| !self.in_flight.iter().any(|pick| pick.key == **key);
        for key in suspects.filter(idle).cloned().collect::<Vec<_>>() {
            self.wait_until(&key, now);
            self.deciding.insert(key);
        }
    }

    /// Notes whether the first of a lane has failed often enough.
    fn suspect(&mut self, key: &T::Key) {
        let enough = self.policy.poison_attempts;
        let lane = self.lanes.get(key);
        if lane.is_some_and(|lane| lane.trial.evidence() >= enough) {
            self.suspects.insert(key.clone());
        } else {
            self.suspects.remove(key);
        }
    }

    fn wait_until(&mut self, key: &T::Key, due: Time) {
        let Some(lane) = self.lanes.get_mut(key) else {
            return;
        };
        if let Some(before) = lane.due.replace(due) {
            self.due.remove(&(before, key.clone()));
        }
        self.due.insert((due, key.clone()));
    }

    /// Until when nothing is tried, whatever is due. A time further off than the longest wait comes from a
    /// clock that has gone back since, and is drawn in.
    fn waits_until(&mut self, now: Time) -> Option<Time> {
        let longest = self.policy.retry_max;
        while let Some((last, key)) = self.due.last()
            && *last > now.after(longest)
        {
            let key = key.clone();
            self.wait_until(&key, now.after(longest));
        }
        remaining(&mut self.not_before, now, longest)
    }

    fn grow(&mut self) {
        self.reduced = self
            .reduced
            .map(|size| size.saturating_mul(2))
            .filter(|size| *size < self.policy.batch_size);
    }
}

/// What a failure makes of an event.
enum Ruling {
    /// It stays in its lane; if it is the first, until then.
    Stays(Option<Time>),
    Dead(Fate),
}

impl<T> Lane<T> {
    /// An event that was tried has failed; `is_first`: those before it in the lane are settled.
    fn fail(
        &mut self,
        policy: &Policy,
        now: Time,
        setback: Setback<'_>,
        is_first: bool,
        decisive: bool,
    ) -> Ruling {
        if setback.permanent && !is_first {
            // It is not its turn, but there is nothing to wait for.
            let error = setback.error.to_owned();
            return Ruling::Dead(Fate::Dead { error, attempts: 1 });
        }
        if !is_first {
            return Ruling::Stays(None);
        }
        let condemned = decisive && self.trial.evidence() >= policy.poison_attempts;
        if !condemned {
            self.trial.failed(setback.error);
        }
        if condemned || setback.permanent {
            let error = setback.error.to_owned();
            let Trial { attempts, .. } = std::mem::take(&mut self.trial);
            return Ruling::Dead(Fate::Dead { error, attempts });
        }
        // After an outage, the waits begin anew.
        let wait = delay(policy, self.trial.evidence(), setback.retry_after);
        let due = now.after(wait);
        self.trial.due = Some(due);
        Ruling::Stays(Some(due))
    }
}
