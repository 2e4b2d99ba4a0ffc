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

/// The table that a pool works off, and what becomes of deliveries by the throw of dice.
struct World {
    pool: Pool,
    /// Pending deliveries: the endpoint, and when they are due.
    table: BTreeMap<i64, (String, Time)>,
    now: u64,
    next: i64,
    dice: u64,
}

impl World {
    fn new(dice: u64) -> Self {
        Self {
            pool: Pool::new(LIMITS),
            table: BTreeMap::new(),
            now: 0,
            next: 0,
            dice,
        }
    }

    fn throw(&mut self, below: u64) -> u64 {
        // Knuth's generator; its upper bits are the random ones.
        let (factor, step) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);
        self.dice = self.dice.wrapping_mul(factor).wrapping_add(step);
        (self.dice >> 33) % below
    }

    fn write(&mut self, offered: bool) {
        let name = format!("e{}", self.throw(6));
        self.table.insert(self.next, (name.clone(), Time(self.now)));
        if offered {
            self.pool.offer(&name, self.next, Time(self.now));
        }
        self.next += 1;
    }

    fn fill(&mut self, name: &str) {
        let rows = self.table.iter().filter(|(_, (of, _))| of == name);
        let mut rows = rows.map(|(id, (_, due))| (*due, *id)).collect::<Vec<_>>();
        rows.sort_by_key(|(due, id)| (*due, *id));
        rows.truncate(QUEUE);
        self.pool.forget(name);
        self.pool.fill(name, &rows, rows.len() == QUEUE, false);
    }

    fn look_at_all(&mut self) {
        self.pool.clear();
        for endpoint in 0..6 {
            self.fill(&format!("e{endpoint}"));
        }
    }

    /// A turn as the worker takes it.
    fn turn(&mut self) {
        for name in self.pool.wanting() {
            self.fill(&name);
        }
        let started = self.pool.start(Time(self.now));
        for id in &started {
            assert!(self.table[id].1 <= Time(self.now), "{id} is not due");
        }
        assert!(self.pool.flights.len() <= LIMITS.fresh + LIMITS.slow);
        for endpoint in self.pool.endpoints.values() {
            assert!(endpoint.under_way <= LIMITS.each);
        }
        let due = self.pool.due(Time(self.now));
        assert!(
            due.is_none_or(|due| due > Time(self.now)),
            "it would be asked again at once, for nothing"
        );
    }

    /// Some of what is under way ends; a share of it fails.
    fn end_some(&mut self, failing: u64) {
        let mut under_way = self.pool.ids_under_way();
        under_way.sort_unstable();
        for id in under_way {
            if self.throw(3) == 0 {
                continue;
            }
            if self.throw(10) < failing {
                let due = Time(self.now + [1, 50, 5_000][self.throw(3) as usize]);
                let wait = (self.throw(8) == 0).then_some(Time(self.now + 100));
                if let Some(row) = self.table.get_mut(&id) {
                    row.1 = due;
                }
                self.pool.finished(id, false, Some(due), wait);
            } else {
                self.table.remove(&id);
                self.pool.finished(id, true, None, None);
            }
        }
    }

    fn has_due(&self) -> bool {
        self.table.values().any(|(_, due)| *due <= Time(self.now))
    }
}

/// Whatever is written, fails, is looked at again and asks for pauses: what is due gets its turn, without anybody's looking at all again.
#[test]
fn nothing_that_is_due_is_lost_sight_of() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        for _ in 0..200 {
            for _ in 0..world.throw(8) {
                world.write(true);
            }
            if world.throw(40) == 0 {
                world.write(false);
                world.look_at_all();
            }
            world.turn();
            world.end_some(5);
            world.now += world.throw(30);
        }
        // From now on all endpoints are well: what is due goes out, though others are to be tried again much later.
        world.now += 100;
        let mut turns = 0;
        while world.has_due() {
            world.turn();
            world.end_some(0);
            world.now += 1;
            turns += 1;
            assert!(turns < 2_000, "seed {seed}: {:?}", world.table);
        }
        world.now += 5_000;
        while !world.table.is_empty() {
            world.turn();
            world.end_some(0);
            world.now += 1;
            turns += 1;
            assert!(turns < 40_000, "seed {seed}: {:?}", world.table);
        }
    }
}
