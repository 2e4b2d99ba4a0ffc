//! Which webhook deliveries are under way: bounded for each endpoint and in all, so that a slow or dead endpoint costs the others
//! nothing.
//!
//! Pure, like the engine. An endpoint begins with one delivery at a time, gets more with each success, and falls back to one when it
//! fails. Deliveries count as *fresh* until they have taken [`Limits::slow_after`], then as *slow*: endpoints that have just failed share
//! the slow places, all others the fresh ones. So what hangs gives its fresh place back after a moment, and what is known to fail does
//! not take one.
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

    /// How many places are taken, fresh and slow.
    fn counted(&self, now: Time) -> (usize, usize) {
        let is_slow = |flight: &&Flight| {
            let failing = self
                .endpoints
                .get(&flight.endpoint)
                .is_some_and(|e| e.failing);
            failing || flight.since.after(self.limits.slow_after) <= now
        };
        let slow = self.flights.values().filter(is_slow).count();
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
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        fresh: 4,
        slow: 2,
        each: 3,
        slow_after: Duration::from_millis(100),
    };

    fn pool(endpoints: &[(&str, i64)]) -> Pool {
        let mut pool = Pool::new(LIMITS);
        for (at, (name, count)) in endpoints.iter().enumerate() {
            let base = i64::try_from(at).unwrap() * 100;
            for id in base..base + count {
                pool.offer(name, id, Time(0));
            }
        }
        pool
    }

    #[test]
    fn an_endpoint_begins_with_one_and_grows_with_success() {
        let mut pool = pool(&[("a", 9)]);
        assert_eq!(pool.start(Time(0)), [0]);
        pool.finished(0, true, None, None);
        assert_eq!(pool.start(Time(0)), [1, 2]);
        pool.finished(1, true, None, None);
        assert_eq!(pool.start(Time(0)), [3, 4]);
        for id in 2..=4 {
            pool.finished(id, true, None, None);
        }
        assert_eq!(pool.start(Time(0)).len(), 3);
        pool.finished(5, false, Some(Time(50)), None);
        assert!(pool.start(Time(0)).is_empty());
    }

    #[test]
    fn what_hangs_gives_its_place_back_and_what_failed_has_others() {
        let mut pool = pool(&[("a", 9), ("b", 9), ("c", 9), ("d", 9), ("e", 9), ("f", 9)]);
        assert_eq!(pool.start(Time(0)), [0, 100, 200, 300]);
        assert!(pool.start(Time(50)).is_empty());
        assert_eq!(pool.due(Time(50)), Some(Time(100)));
        assert_eq!(pool.start(Time(100)), [400, 500]);
        // Those that hang are told apart once they have failed: they share two places.
        for id in [0, 100, 200, 300] {
            pool.finished(id, false, Some(Time(9_000)), None);
        }
        assert_eq!(pool.start(Time(110)), [1, 101]);
        pool.finished(400, true, None, None);
        assert_eq!(pool.start(Time(120)), [401, 402]);
    }

    #[test]
    fn turns_are_taken() {
        let mut pool = pool(&[("a", 9), ("b", 9), ("c", 9), ("d", 9), ("e", 9)]);
        assert_eq!(pool.start(Time(0)), [0, 100, 200, 300]);
        pool.finished(0, true, None, None);
        assert_eq!(pool.start(Time(0)), [400]);
    }

    #[test]
    fn nothing_starts_before_it_is_due_or_while_its_endpoint_wants_a_pause() {
        let mut pool = Pool::new(LIMITS);
        pool.offer("a", 2, Time(20));
        pool.offer("a", 1, Time(10));
        assert_eq!(pool.due(Time(0)), Some(Time(10)));
        assert!(pool.start(Time(9)).is_empty());
        assert_eq!(pool.start(Time(10)), [1]);
        pool.finished(1, false, Some(Time(500)), Some(Time(300)));
        assert_eq!(pool.due(Time(10)), Some(Time(300)));
        // It is still known when the table is looked at again.
        pool.clear();
        pool.fill("a", &[(Time(20), 2), (Time(500), 1)], false, false);
        assert!(pool.start(Time(299)).is_empty());
        assert_eq!(pool.start(Time(300)), [2]);
    }

    #[test]
    fn a_queue_is_short_and_knows_of_more() {
        let mut pool = Pool::new(LIMITS);
        for id in 0..100 {
            pool.offer("a", id, Time(0));
        }
        assert!(pool.wanting().is_empty());
        for id in 0..31 {
            assert!(pool.start(Time(0)).contains(&id) || pool.is_under_way(id));
            pool.finished(id, true, None, None);
        }
        assert!(pool.is_under_way(31));
        assert_eq!(pool.wanting(), ["a"]);
        // What is under way is not taken up again.
        pool.fill("a", &[(Time(0), 31), (Time(0), 32)], false, false);
        assert_eq!(pool.start(Time(0)), [32]);
        assert!(pool.wanting().is_empty());
    }

    #[test]
    fn what_is_new_does_not_wait_behind_what_is_to_be_tried_again_later() {
        let mut pool = Pool::new(LIMITS);
        let later = (0..32).map(|id| (Time(9_000), id)).collect::<Vec<_>>();
        for more in [false, true] {
            pool.fill("a", &later, more, false);
            pool.offer("a", 100, Time(10));
            pool.offer("a", 101, Time(10));
            pool.offer("a", 102, Time(9_001));
            assert_eq!(pool.due(Time(0)), Some(Time(10)));
            let mut started = pool.start(Time(10));
            pool.finished(started[0], true, None, None);
            started.extend(pool.start(Time(10)));
            assert_eq!(started, [100, 101]);
            pool.finished(101, true, None, None);
            assert_eq!(pool.due(Time(10)), Some(Time(9_000)));
            // What fell out of the queue is read again once it is empty.
            while let Some(&id) = pool.start(Time(9_000)).first() {
                pool.ids_under_way()
                    .into_iter()
                    .chain([id])
                    .for_each(|id| pool.finished(id, true, None, None));
            }
            assert_eq!(pool.wanting(), ["a"]);
        }
    }

    #[test]
    fn waits_follow_the_schedule() {
        let waits = [60, 300, 1800].map(Duration::from_secs);
        let wait = |attempts, chance| webhook_wait(&waits, attempts, None, chance);
        assert_eq!(wait(1, 0.5), Duration::from_secs(60));
        assert_eq!(wait(2, 0.0), Duration::from_secs(270));
        assert_eq!(wait(2, 1.0), Duration::from_secs(330));
        assert_eq!(wait(9, 0.5), Duration::from_secs(1800));
        let asked = Some(Duration::from_secs(100));
        assert_eq!(
            webhook_wait(&waits, 1, asked, 0.5),
            Duration::from_secs(100)
        );
        assert_eq!(
            webhook_wait(&waits, 2, asked, 0.5),
            Duration::from_secs(300)
        );
    }
}
