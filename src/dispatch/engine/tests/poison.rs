//! Events that a sink never takes, while it takes others.

use std::time::Duration;

use super::super::super::{Checkpoint, Fate, Health, Outcome, Policy, Refusal, Settled, Time};
use super::super::{Engine, Step};
use super::sink::{Event, Style, policy};
use super::world::World;

/// The ids tried, by themselves or first of a batch, and the waits in seconds in between.
fn story(world: &mut World, requests: usize) -> (Vec<usize>, Vec<u64>) {
    let start = world.requests.len();
    let mut waits = Vec::new();
    while world.requests.len() < start + requests {
        waits.extend(world.advance().map(|wait| wait / 1_000));
    }
    (
        world.requests[start..]
            .iter()
            .map(|request| request.ids.start)
            .collect(),
        waits,
    )
}

fn tries(world: &World, id: usize) -> usize {
    let tries = world.requests.iter();
    tries.filter(|request| request.ids.contains(&id)).count()
}

#[test]
fn five_failures_a_neighbour_and_a_last_try() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(3);
    assert_eq!(
        story(&mut world, 7),
        (vec![0, 0, 0, 0, 0, 1, 0], vec![1, 2, 4, 8])
    );
    let dead = Fate::Dead {
        error: "bad event".into(),
        attempts: 5,
    };
    assert_eq!(world.fates, [dead, Fate::Delivered]);
    assert_eq!(world.engine.health(), Health::Flowing);
    world.drain(1);
}

#[test]
fn an_event_that_goes_through_elsewhere_decides_on_one_that_failed_often_enough() {
    for while_in_flight in [false, true] {
        let mut engine = Engine::restore(policy(1), Checkpoint::default());
        engine.push(Event {
            id: 0,
            key: 0,
            weight: 1,
        });
        let failed = Outcome::Failed(Refusal {
            error: "bad event".into(),
            retry_after: None,
        });
        let mut now = Time(0);
        for attempts in 1..=5 {
            while let Step::Wait(until) = engine.next(now) {
                now = until;
            }
            if while_in_flight && attempts == 5 {
                engine.sink_is_up();
            }
            assert!(engine.outcome(now, &failed).is_empty());
            assert_eq!(engine.attempts(), attempts);
            if attempts < 5 {
                engine.sink_is_up();
                assert!(matches!(engine.next(now), Step::Wait(_)), "not yet");
            }
        }
        if !while_in_flight {
            engine.sink_is_up();
        }
        assert_eq!(engine.next(now), Step::Deliver(0..1), "without a wait");
        let settled = engine.outcome(now, &failed);
        assert!(matches!(
            &settled[..],
            [Settled {
                fate: Fate::Dead { attempts: 5, .. },
                ..
            }]
        ));
        assert!(engine.is_empty());
    }
}

#[test]
fn an_event_that_is_taken_in_the_end_is_delivered() {
    for tries in 1..=5 {
        let mut world = World::new(policy(1), [0]);
        world.write_many(3);
        world.requests(tries);
        world.sink.poison.clear();
        world.drain(10);
        assert_eq!(world.dead(), []);
        assert_eq!(world.engine.checkpoint(), None);
    }
}

#[test]
fn the_last_try_may_still_succeed() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(2);
    world.requests(6);
    world.sink.poison.clear();
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 5 });
    world.drain(1);
    assert_eq!(world.fates, [Fate::Delivered, Fate::Delivered]);
}

#[test]
fn the_dead_letter_carries_the_latest_error() {
    let mut world = World::new(policy(1), []);
    world.write_many(2);
    world.sink.up = false;
    world.requests(5);
    world.sink.up = true;
    world.sink.poison = [0].into();
    world.requests(2);
    assert_eq!(
        world.fates[0],
        Fate::Dead {
            error: "bad event".into(),
            attempts: 5
        }
    );
}

#[test]
fn a_last_event_is_retried_until_there_is_another() {
    let mut world = World::new(policy(4), [0]);
    world.write_many(1);
    let (tried, waits) = story(&mut world, 8);
    assert_eq!(tried, [0; 8]);
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64]);
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 8 });
    let Step::Wait(until) = world.step() else {
        panic!("a wait")
    };
    world.write_many(1);
    world.now += 1;
    assert_eq!(
        world.step(),
        Step::Wait(until),
        "a newcomer does not cut the wait short"
    );
    let (tried, _) = story(&mut world, 3);
    assert_eq!(tried, [0, 1, 0]);
    assert_eq!(world.dead(), [(0, 9)]);
    assert_eq!(world.fates.len(), 2);
}

#[test]
fn one_that_comes_before_the_next_step_is_a_neighbour_at_once() {
    let mut world = World::new(policy(4), [0]);
    world.write_many(1);
    world.requests(5);
    world.write_many(1);
    let (tried, waits) = story(&mut world, 2);
    assert_eq!((tried, waits), (vec![1, 0], vec![]));
    assert_eq!(world.dead(), [(0, 5)]);
}

#[test]
fn two_side_by_side() {
    let mut world = World::new(policy(1), [0, 1]);
    world.write_many(4);
    let (tried, waits) = story(&mut world, 8);
    assert_eq!(tried, [0, 0, 0, 0, 0, 1, 0, 2]);
    assert_eq!(waits, [1, 2, 4, 8, 16]);
    // 2 has shown that the sink is up. It may not have been when 1 failed, and 0 with it.
    let (tried, waits) = story(&mut world, 10);
    assert_eq!(tried, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
    assert!(waits.is_empty());
    assert_eq!(world.dead(), [(0, 11), (1, 6)]);
    assert_eq!(world.fates.len(), 3);
    world.drain(1);
}

#[test]
fn one_good_event_behind_several_is_enough() {
    for count in [2, 5, 16] {
        for batch_size in [1, 4, 32] {
            let mut world = World::new(policy(batch_size), 0..count);
            world.write_many(count + 1);
            world.drain(40 + 6 * count);
            let dead: Vec<usize> = world.dead().iter().map(|(id, _)| *id).collect();
            assert_eq!(dead, (0..count).collect::<Vec<_>>());
            assert!(world.dead()[1..].iter().all(|(_, attempts)| *attempts == 6));
            assert_eq!(world.fates.last(), Some(&Fate::Delivered));
            assert_eq!(world.engine.health(), Health::Flowing);
        }
    }
}

#[test]
fn what_was_not_tried_ahead_of_the_good_one_is_tried_in_the_run_too() {
    // Of 0 and 1 with their one key, 1 is no neighbour that is preferred.
    for poison in [vec![0, 2], vec![0, 1, 2]] {
        let mut world = World::new(policy(1), poison.clone());
        world.write([7, 7, 8, 9]);
        while world.dead().is_empty() {
            world.advance();
        }
        while world.fates.len() < 4 {
            assert_eq!(world.advance(), None);
        }
        let dead: Vec<usize> = world.dead().iter().map(|(id, _)| *id).collect();
        assert_eq!(dead, poison);
        assert_eq!(tries(&world, 3), 1);
    }
}

#[test]
fn what_was_not_tried_may_still_go_together_in_the_run() {
    let mut world = World::new(policy(8), [0]);
    world.write([7, 7, 7, 8]);
    while world.dead().is_empty() {
        world.advance();
    }
    assert_eq!(world.step(), Step::Deliver(0..2));
    assert_eq!(world.fates.len(), 4);
}

#[test]
fn a_judgement_in_the_run_is_final() {
    let mut world = World::new(policy(1), [0, 1, 2]);
    world.write_many(4);
    while world.dead().is_empty() {
        world.advance();
    }
    world.sink.style = Style::Judging;
    assert_eq!(story(&mut world, 2), (vec![1, 2], vec![]));
    let attempts: Vec<_> = world.dead().iter().map(|(_, attempts)| *attempts).collect();
    assert_eq!(attempts, [12, 2, 2]);
    assert_eq!(world.fates.len(), 4);
}

#[test]
fn a_sink_that_asks_for_calm_in_the_run_ends_it() {
    let mut world = World::new(policy(1), [0, 1]);
    world.write_many(3);
    while world.dead().is_empty() {
        world.advance();
    }
    world.sink.retry_after = Some(Duration::from_secs(60));
    let (tried, waits) = story(&mut world, 5);
    assert_eq!(tried, [1; 5]);
    assert_eq!(waits, [60; 4]);
    assert_eq!(world.dead(), [(0, 11)], "what 2 has shown is long past");
    world.write_many(1);
    let (tried, waits) = story(&mut world, 2);
    assert_eq!((tried, waits), (vec![3, 1], vec![60]));
    assert_eq!(world.dead(), [(0, 11), (1, 6)]);
    assert_eq!(world.fates.len(), 4);
}

#[test]
fn a_verdict_with_a_call_for_calm_is_the_last_of_the_run() {
    let mut world = World::new(policy(1), [0, 1]);
    world.write_many(3);
    world.requests(12);
    world.sink.retry_after = Some(Duration::from_secs(60));
    let (tried, waits) = story(&mut world, 2);
    assert_eq!((tried, waits), (vec![0, 1], vec![60]));
    assert_eq!(world.dead(), [(0, 11)]);
}

#[test]
fn the_attempts_that_are_enough_may_change_in_the_run() {
    let mut world = World::new(policy(1), [0, 1]);
    world.write_many(3);
    world.requests(8);
    world.set_policy(Policy {
        poison_attempts: 2,
        ..policy(1)
    });
    assert_eq!(story(&mut world, 2), (vec![0, 0], vec![]));
    assert_eq!(world.dead(), [(0, 8)]);
    world.set_policy(Policy {
        poison_attempts: 1,
        ..policy(1)
    });
    assert_eq!(story(&mut world, 1), (vec![1], vec![]));
    assert_eq!(world.dead(), [(0, 8), (1, 2)]);
}

#[test]
fn any_number_side_by_side_that_the_tests_can_look_past() {
    for count in 2..=16 {
        for batch_size in [1, 4, 32] {
            let mut world = World::new(policy(batch_size), 3..3 + count);
            world.write_many(60);
            world.drain(40 * count);
            let dead: Vec<usize> = world.dead().iter().map(|(id, _)| *id).collect();
            assert_eq!(
                dead,
                (3..3 + count).collect::<Vec<_>>(),
                "batches of {batch_size}"
            );
        }
    }
}

#[test]
fn every_other_event() {
    let mut world = World::new(policy(8), (0..40).step_by(2));
    world.write_many(60);
    world.drain(600);
    assert_eq!(world.dead().len(), 20);
    assert!(world.dead().iter().all(|(_, attempts)| *attempts <= 6));
}

#[test]
fn one_attempt_may_be_enough() {
    for poison_attempts in [0, 1] {
        let mut world = World::new(
            Policy {
                poison_attempts,
                ..policy(1)
            },
            [0, 1],
        );
        world.write_many(4);
        let (tried, waits) = story(&mut world, 6);
        assert_eq!((tried, waits), (vec![0, 1, 0, 2, 0, 1], vec![1]));
        assert_eq!(world.dead(), [(0, 3), (1, 2)]);
        world.drain(1);
    }
}

#[test]
fn odd_limits_do_no_harm() {
    let odd = Policy {
        batch_size: 0,
        retry_min: Duration::from_secs(9),
        retry_max: Duration::from_secs(3),
        poison_attempts: 2,
    };
    let mut world = World::new(odd, [1]);
    world.write_many(5);
    let (tried, waits) = story(&mut world, 6);
    assert_eq!((tried, waits), (vec![0, 1, 1, 2, 1, 3], vec![3]));
    let none = Policy {
        retry_min: Duration::ZERO,
        retry_max: Duration::ZERO,
        ..odd
    };
    let mut world = World::new(none, [1]);
    world.write_many(5);
    let (tried, waits) = story(&mut world, 6);
    assert_eq!((tried, waits), (vec![0, 1, 1, 2, 1, 3], vec![]));
}

#[test]
fn a_sink_that_asks_for_calm_gets_it_before_the_test_too() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(2);
    world.sink.retry_after = Some(Duration::from_secs(60));
    let (tried, waits) = story(&mut world, 7);
    assert_eq!((tried, waits), (vec![0, 0, 0, 0, 0, 1, 0], vec![60; 5]));
    assert_eq!(world.dead(), [(0, 5)]);
    world.write_many(1);
    assert_eq!(world.advance(), Some(60_000), "and after the verdict");
}
