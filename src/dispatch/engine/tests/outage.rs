//! A sink that is down, nobody knows for how long.

use std::time::Duration;

use super::super::super::neighbours::NEIGHBOURS;
use super::super::super::{Checkpoint, Health, Item, Policy, Time};
use super::super::{Engine, Step};
use super::sink::policy;
use super::world::World;

/// A world whose head has failed five times, in an outage.
fn failing(keys: impl IntoIterator<Item = usize>) -> World {
    let mut world = World::new(policy(8), []);
    world.write(keys);
    world.sink.up = false;
    while world.engine.attempts() < 5 {
        world.advance();
    }
    world.requests.clear();
    world
}

fn tested(world: &World) -> Vec<usize> {
    let tests = world
        .requests
        .iter()
        .filter(|request| request.ids.start > 0);
    tests.map(|request| request.ids.start).collect()
}

#[test]
fn nothing_dies_and_each_step_tests_one_event_further_on() {
    let mut world = failing(0..100);
    let mut waits = Vec::new();
    while world.requests.len() < 2 * 18 {
        waits.extend(world.advance().map(|wait| wait / 1_000));
    }
    let expected: Vec<usize> = (1..=NEIGHBOURS).chain(1..=2).collect();
    assert_eq!(tested(&world), expected);
    assert!(
        world
            .requests
            .iter()
            .skip(1)
            .step_by(2)
            .all(|request| request.ids == (0..1))
    );
    assert_eq!(waits[..7], [16, 32, 64, 128, 256, 300, 300]);
    assert_eq!(world.engine.health(), Health::Down { attempts: 5 + 18 });
    assert_eq!(world.fates, []);
    world.sink.up = true;
    world.drain(NEIGHBOURS + 15);
    assert_eq!(world.dead(), []);
}

#[test]
fn health_tells_what_is_known() {
    let mut world = failing(0..10);
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 5 });
    world.step();
    assert_eq!(world.engine.health(), Health::Down { attempts: 5 });
    assert_eq!(
        world.engine.next_attempt_at(),
        Some(Time(world.now + 16_000))
    );
    assert_eq!(world.engine.last_error(), Some("down"));
    world.advance();
    world.sink.up = true;
    world.step();
    assert_eq!(world.fates.len(), 1);
    assert_eq!(
        world.engine.health(),
        Health::Retrying { attempts: 1 },
        "the one that was tested"
    );
    world.step();
    assert_eq!(world.engine.health(), Health::Flowing);
}

#[test]
fn a_neighbour_that_passes_ends_it() {
    let mut world = failing(0..10);
    world.sink.poison = [0].into();
    world.requests(2);
    assert_eq!(world.engine.health(), Health::Down { attempts: 6 });
    world.sink.up = true;
    world.step();
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 6 });
    for attempts in 7..=10 {
        world.step();
        assert_eq!(world.engine.health(), Health::Retrying { attempts });
    }
    world.step();
    assert_eq!(world.dead(), [(0, 11)], "five after the outage");
}

#[test]
fn an_event_may_fail_while_the_sink_comes_back() {
    for failures in 0..5 {
        let mut world = failing(0..10);
        world.requests(2);
        world.sink.up = true;
        world.sink.poison = [0].into();
        world.requests(1 + failures);
        world.sink.poison.clear();
        world.drain(10);
        assert_eq!(world.dead(), []);
    }
}

#[test]
fn ends_between_the_try_and_the_test() {
    let mut world = failing(0..10);
    world.sink.up = true;
    world.drain(9);
    assert_eq!(world.dead(), []);
    assert_eq!(tested(&world)[0], 1);
}

#[test]
fn begins_between_the_test_and_the_decision() {
    // What no engine can tell from poison, and the only way in which it errs.
    let mut world = failing(0..10);
    world.sink.up = true;
    world.step();
    world.sink.up = false;
    world.step();
    assert_eq!(world.dead(), [(0, 5)]);
    assert_eq!(world.wronged, [0].into());
    world.sink.up = true;
    world.drain(10);
    assert_eq!(world.wronged, [0].into());
}

#[test]
fn what_was_passed_over_is_delivered_when_the_outage_ends() {
    let mut world = failing(0..10);
    while tested(&world).len() < 4 {
        world.advance();
    }
    world.advance();
    world.step();
    world.sink.up = true;
    world.requests.clear();
    while world.fates.len() < 10 {
        assert_eq!(world.advance(), None, "no wait once one went through");
    }
    let tried: Vec<_> = world
        .requests
        .iter()
        .map(|request| request.ids.start)
        .collect();
    assert_eq!(tried[..6], [5, 0, 1, 2, 3, 4]);
    assert_eq!(world.dead(), []);
    assert_eq!(world.engine.checkpoint(), None);
}

#[test]
fn an_outage_after_a_wait_in_the_run_kills_nothing() {
    let mut world = failing(0..10);
    while tested(&world).len() < 3 {
        world.advance();
    }
    world.advance();
    world.step();
    world.sink.up = true;
    world.requests(2);
    assert_eq!(world.fates.len(), 1);
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 1 });
    world.sink.up = false;
    world.sink.retry_after = Some(Duration::from_secs(2));
    world.step();
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 2 });
    assert_eq!(
        world.engine.next_attempt_at(),
        Some(Time(world.now + 2_000))
    );
    world.sink.retry_after = None;
    let waits: Vec<_> = (0..40).filter_map(|_| world.advance()).collect();
    assert_eq!(waits[..4], [2_000, 4_000, 8_000, 16_000]);
    assert!(matches!(world.engine.health(), Health::Down { .. }));
    world.sink.up = true;
    world.drain(60);
    assert_eq!(world.dead(), []);
}

#[test]
fn other_keys_are_preferred() {
    let keys = [7, 7, 7, 1, 1, 2, 1, 3];
    let mut world = failing(keys);
    while tested(&world).len() < keys.len() {
        world.advance();
    }
    assert_eq!(tested(&world), [3, 5, 7, 1, 2, 4, 6, 3]);
    assert_eq!(world.engine.get(3).map(|event| *event.key()), Some(1));
}

#[test]
fn an_event_that_never_failed_is_the_better_neighbour() {
    let mut world = World::new(policy(1), [0, 1, 2]);
    world.write_many(12);
    while world.dead().is_empty() {
        world.advance();
    }
    assert_eq!(tested(&world), [1, 2, 3]);
    // The run ends, and 1 needs a neighbour of its own.
    world.sink.retry_after = Some(Duration::from_secs(1));
    world.step();
    world.requests.clear();
    while world.dead().len() < 2 {
        world.advance();
    }
    let tried: Vec<_> = world
        .requests
        .iter()
        .map(|request| request.ids.start)
        .collect();
    assert_eq!(tried, [1, 1, 1, 4, 1], "not 2 once more");
}

#[test]
fn no_event_overtakes_another_with_its_key_while_there_are_others_to_test() {
    let mut world = failing([0, 1, 2, 2, 3]);
    while tested(&world) != [1, 2] {
        world.advance();
    }
    // The head gets through, and then there is another outage.
    world.sink.up = true;
    while world.fates.is_empty() {
        world.advance();
    }
    world.sink.up = false;
    world.requests.clear();
    while world.requests.len() < 5 + 5 {
        world.advance();
    }
    let tests = world.requests.iter().map(|request| request.ids.start);
    let tests: Vec<_> = tests.filter(|id| *id != 1).collect();
    assert_eq!(tests, [4, 2, 3], "3 is untried, but 2 comes before it");
}

#[test]
fn few_neighbours_take_turns() {
    let mut world = failing(0..4);
    while tested(&world).len() < 8 {
        world.advance();
    }
    assert_eq!(tested(&world), [1, 2, 3, 1, 2, 3, 1, 2]);
}

#[test]
fn a_round_has_an_end_even_if_its_events_are_out_of_reach() {
    let mut world = failing(0..4);
    world.engine = Engine::restore(
        world.policy,
        Checkpoint {
            attempts: 5,
            tested: (100..100 + NEIGHBOURS).collect(),
            ..Checkpoint::default()
        },
    );
    world.pushed = 0;
    world.requests(2);
    assert_eq!(
        world
            .engine
            .checkpoint()
            .map(|checkpoint| checkpoint.tested),
        Some(vec![1])
    );
}

#[test]
fn small_batches_read_enough_to_choose_from() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(100);
    world.read();
    assert_eq!((world.pushed, world.engine.wants()), (4, 0));
    world.step();
    assert_eq!(world.engine.wants(), 1 + NEIGHBOURS - 4);
    world.read();
    assert_eq!((world.pushed, world.engine.wants()), (1 + NEIGHBOURS, 0));
}

#[test]
fn tries_are_bounded_by_the_back_off() {
    let mut world = World::new(policy(1_000), []);
    world.write_many(5_000);
    world.sink.up = false;
    let end = world.now + 24 * 3_600 * 1_000;
    while world.now < end {
        world.advance();
    }
    let isolating = 10;
    let doubling = 9;
    let longest = 24 * 12;
    assert!(world.requests.len() <= isolating + 2 * (doubling + longest));
    assert_eq!(world.fates, []);
}

#[test]
fn the_clock_may_jump() {
    let mut world = failing(0..3);
    world.step();
    world.now = 5;
    assert_eq!(
        world.step(),
        Step::Wait(Time(300_005)),
        "back: the longest wait at most"
    );
    world.now = 200_000;
    assert_eq!(
        world.step(),
        Step::Wait(Time(300_005)),
        "and no longer for asking again"
    );
    world.now = u64::MAX;
    assert_eq!(world.step(), Step::Deliver(0..1), "ahead: due");
    world.now = 0;
    world.step();
    assert_eq!(world.step(), Step::Wait(Time(32_000)));
}

#[test]
fn a_clock_that_went_back_draws_every_wait_in_at_once() {
    let mut world = failing(0..3);
    world.sink.retry_after = Some(Duration::from_secs(100));
    world.step();
    world.sink.retry_after = None;
    world.now -= 900_000;
    let longest = world.policy.retry_max.as_millis() as u64;
    assert_eq!(world.advance(), Some(longest));
    assert_eq!(
        world.step(),
        Step::Deliver(0..1),
        "one wait, not one after the other"
    );
}

#[test]
fn a_policy_in_zero_time() {
    let none = Duration::ZERO;
    let mut world = World::new(
        Policy {
            retry_min: none,
            retry_max: none,
            ..policy(8)
        },
        [],
    );
    world.write_many(30);
    world.sink.up = false;
    for _ in 0..200 {
        assert!(matches!(world.step(), Step::Deliver(_)));
    }
    world.sink.up = true;
    world.drain(60);
    assert_eq!(world.dead(), []);
}
