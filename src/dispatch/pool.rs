//! Which webhook deliveries are under way: bounded for each endpoint and in all, so that a slow or dead endpoint costs the others
//! nothing.
//!
//! Pure, like the engine. An endpoint begins with one delivery at a time, gets more with each success, and falls back to one when it
//! fails. Deliveries count as *fresh* until they have taken [`Limits::slow_after`], then as *slow*: endpoints that have just failed share
//! the slow places, all others the fresh ones. So what hangs gives its fresh place back after a moment, as long as there is a slow one
//! for it, and what is known to fail does not take one.
//!
//! The queue of an endpoint holds a few deliveries; `more` says that the table has others.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use super::backoff::Time;

/// How many deliveries may be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub fresh: usize,
    pub slow: usize,
    /// To one endpoint.
    pub each: usize,
    pub slow_after: Duration,
}

/// Deliveries of one endpoint that are kept in mind.
pub const QUEUE: usize = 32;

#[derive(Debug, Default)]
struct Endpoint {
    /// By due time.
    queue: VecDeque<(Time, i64)>,
    more: bool,
    under_way: usize,
    /// How many it may have under way; 0 counts as 1.
    window: usize,
    /// Its latest attempt failed.
    failing: bool,
    not_before: Option<Time>,
}

#[derive(Debug)]
struct Flight {
    endpoint: String,
    since: Time,
}

#[derive(Debug)]
pub struct Pool {
    limits: Limits,
    endpoints: BTreeMap<String, Endpoint>,
    flights: HashMap<i64, Flight>,
    /// Endpoints up to this one have had their turn.
    turn: String,
}

impl Endpoint {
    fn room(&self, each: usize) -> bool {
        self.under_way < self.window.clamp(1, each.max(1))
    }

    fn is_known(&self) -> bool {
        self.under_way > 0 || self.window > 1 || self.failing || self.not_before.is_some()
    }

    /// When its next delivery is due, if it may have one more.
    fn due(&self, each: usize) -> Option<Time> {
        let (due, _) = self.queue.front().filter(|_| self.room(each))?;
        Some(self.not_before.map_or(*due, |time| time.max(*due)))
    }
}

impl Pool {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            endpoints: BTreeMap::new(),
            flights: HashMap::new(),
            turn: String::new(),
        }
    }

    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Forgets what is queued. What is under way goes on, and what is known of endpoints stays known.
    pub fn clear(&mut self) {
        self.endpoints.retain(|_, endpoint| endpoint.is_known());
        for endpoint in self.endpoints.values_mut() {
            endpoint.queue.clear();
            endpoint.more = false;
        }
    }

    /// Forgets what is queued for one endpoint: it is gone, or disabled.
    pub fn forget(&mut self, endpoint: &str) {
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.queue.clear();
            endpoint.more = false;
        }
    }

    /// The deliveries of an endpoint that the table names first, by due time; `more` if there may be others. `failing`: what is known of
    /// it where nothing is known here.
    pub fn fill(&mut self, name: &str, deliveries: &[(Time, i64)], more: bool, failing: bool) {
        let endpoint = self.endpoints.entry(name.to_owned()).or_insert(Endpoint {
            failing,
            ..Endpoint::default()
        });
        endpoint.queue = deliveries
            .iter()
            .filter(|(_, id)| !self.flights.contains_key(id))
            .copied()
            .collect();
        endpoint.more = more;
    }

    /// A delivery that was just written, or is to be tried again. Of what the table has, the queue is what is due first.
    pub fn offer(&mut self, name: &str, id: i64, due: Time) {
        let endpoint = self.endpoints.entry(name.to_owned()).or_default();
        let is_first = |(last, _): &(Time, i64)| due < *last;
        let full = endpoint.more || endpoint.queue.len() >= QUEUE;
        if full && !endpoint.queue.back().is_some_and(is_first) {
            endpoint.more = true;
            return;
        }
        let place = endpoint.queue.partition_point(|(other, _)| *other <= due);
        endpoint.queue.insert(place, (due, id));
        if endpoint.queue.len() > QUEUE {
            endpoint.queue.pop_back();
            endpoint.more = true;
        }
    }

    /// Endpoints of which nothing is kept in mind although the table has more.
    pub fn wanting(&self) -> Vec<String> {
        let wanting = self
            .endpoints
            .iter()
            .filter(|(_, endpoint)| endpoint.more && endpoint.queue.is_empty());
        wanting.map(|(name, _)| name.clone()).collect()
    }

    /// What is to be delivered now: from then on it is under way, until it has [`finished`](Self::finished).
    pub fn start(&mut self, now: Time) -> Vec<i64> {
        let (mut fresh, mut slow) = self.counted(now);
        let is_due =
            |endpoint: &Endpoint| endpoint.due(self.limits.each).is_some_and(|due| due <= now);
        let due = self
            .endpoints
            .iter()
            .filter(|(_, endpoint)| is_due(endpoint));
        // Those behind the one that had its turn last come first.
        let (first, second): (Vec<_>, Vec<_>) = due
            .map(|(name, _)| name.clone())
            .partition(|name| *name > self.turn);
        let order: Vec<String> = first.into_iter().chain(second).collect();
        let mut started = Vec::new();
        loop {
            let before = started.len();
            for name in &order {
                let Some(endpoint) = self.endpoints.get_mut(name) else {
                    continue;
                };
                if endpoint.due(self.limits.each).is_none_or(|due| due > now) {
                    continue;
                }
                let (count, limit) = if endpoint.failing {
                    (&mut slow, self.limits.slow)
                } else {
                    (&mut fresh, self.limits.fresh)
                };
                if *count >= limit.max(1) {
                    continue;
                }
                let Some((_, id)) = endpoint.queue.pop_front() else {
                    continue;
                };
                *count += 1;
                endpoint.under_way += 1;
                self.turn.clone_from(name);
                let flight = Flight {
                    endpoint: name.clone(),
                    since: now,
                };
                self.flights.insert(id, flight);
                started.push(id);
            }
            if started.len() == before {
                return started;
            }
        }
    }

    /// How many places are taken, fresh and slow. What is slow and finds no slow place keeps its fresh one: so the places are all there are.
    fn counted(&self, now: Time) -> (usize, usize) {
        let is_slow = |flight: &&Flight| {
            let failing = self
                .endpoints
                .get(&flight.endpoint)
                .is_some_and(|e| e.failing);
            failing || flight.since.after(self.limits.slow_after) <= now
        };
        let slow = self.flights.values().filter(is_slow).count();
        let slow = slow.min(self.limits.slow.max(1));
        (self.flights.len() - slow, slow)
    }

    /// A delivery has ended. With `again` it is due once more; with `wait` its endpoint has asked for a pause.
    pub fn finished(&mut self, id: i64, ok: bool, again: Option<Time>, wait: Option<Time>) {
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        let each = self.limits.each.max(1);
        if let Some(endpoint) = self.endpoints.get_mut(&flight.endpoint) {
            endpoint.under_way = endpoint.under_way.saturating_sub(1);
            endpoint.failing = !ok;
            endpoint.window = if ok {
                (endpoint.window.max(1) * 2).min(each)
            } else {
                1
            };
            endpoint.not_before = wait;
        }
        if let Some(due) = again {
            self.offer(&flight.endpoint, id, due);
        }
    }

    #[cfg(test)]
    fn is_under_way(&self, id: i64) -> bool {
        self.flights.contains_key(&id)
    }

    pub fn ids_under_way(&self) -> Vec<i64> {
        self.flights.keys().copied().collect()
    }

    /// When [`start`](Self::start) may start something, if nothing ends before.
    pub fn due(&self, now: Time) -> Option<Time> {
        let (fresh, slow) = self.counted(now);
        let endpoints = self.endpoints.values();
        let due = endpoints.filter_map(|endpoint| {
            let due = endpoint.due(self.limits.each)?;
            if endpoint.failing {
                return (slow < self.limits.slow.max(1)).then_some(due);
            }
            if fresh < self.limits.fresh.max(1) {
                return Some(due);
            }
            if slow >= self.limits.slow.max(1) {
                return None;
            }
            // A place is free again when something has become slow.
            let flights = self.flights.values().map(|flight| flight.since);
            let slow = flights.map(|since| since.after(self.limits.slow_after));
            slow.filter(|time| *time > now)
                .min()
                .map(|time| time.max(due))
        });
        due.min()
    }
}

/// How long a delivery waits after each failed attempt; the last wait stands for all further ones.
pub fn webhook_wait(
    waits: &[Duration],
    attempts: u32,
    retry_after: Option<Duration>,
    chance: f64,
) -> Duration {
    let index = usize::try_from(attempts.saturating_sub(1)).unwrap_or(usize::MAX);
    let wait = waits.get(index).or(waits.last()).copied();
    // A tenth up or down, so that what failed together does not come back together.
    let wait = wait
        .unwrap_or_default()
        .mul_f64(0.9 + 0.2 * chance.clamp(0.0, 1.0));
    wait.max(retry_after.unwrap_or_default())
}

#[cfg(test)]
mod tests;
