//! Chosen situations.

use std::time::Duration;

use super::super::super::{Fate, Health, Lanes, Outcome, Refusal, Time, Trial};
use super::world::{Event, Style, World, policy};

/// The ids in each request since one, with a mark at those of lanes.
fn tried(world: &World, from: usize) -> Vec<(Vec<usize>, bool)> {
    let requests = world.requests[from..].iter();
    requests
        .map(|request| (request.ids.clone(), request.parked))
        .collect()
}

fn stream(ids: impl IntoIterator<Item = usize>) -> (Vec<usize>, bool) {
    (ids.into_iter().collect(), false)
}

fn parked(ids: impl IntoIterator<Item = usize>) -> (Vec<usize>, bool) {
    (ids.into_iter().collect(), true)
}

/// Until there is something to wait for.
fn work(world: &mut World) -> Option<u64> {
    for _ in 0..1_000 {
        let before = world.requests.len();
        if let Some(until) = world.step() {
            return Some(until.0 - world.now);
        }
        if world.requests.len() == before {
            return None;
        }
    }
    panic!("no end: {:?}", world.requests);
}

#[test]
fn a_failing_event_is_parked_with_the_later_ones_of_its_key() {
    let mut world = World::new(policy(8), [1]);
    world.write([0, 1, 2, 1, 0, 1]);
    assert_eq!(work(&mut world), Some(1_000));
    assert_eq!(world.parked(), [1, 3, 5]);
    assert_eq!(world.passed, 6);
    assert_eq!(world.engine.health(), Health::Flowing);
    // What comes later of the key is parked at once, and others are not held.
    world.write([1, 0]);
    assert_eq!(work(&mut world), Some(1_000));
    assert_eq!(world.parked(), [1, 3, 5, 6]);
    assert_eq!(world.fates[&7], Fate::Delivered);
    // Mended: the rest follows in order, and then the key takes part in the stream again.
    world.poison.clear();
    let from = world.requests.len();
    world.now += 1_000;
    assert_eq!(work(&mut world), None);
    assert_eq!(tried(&world, from), [parked([1]), parked([3, 5, 6])]);
    world.write([1]);
    assert_eq!(work(&mut world), None);
    assert_eq!(tried(&world, from)[2..], [stream([8])]);
}

#[test]
fn the_first_of_a_key_dies_and_the_next_follows() {
    let mut world = World::new(policy(8), [0]);
    world.write([7, 1, 7]);
    assert_eq!(work(&mut world), Some(1_000));
    for wait in [1, 2, 4, 8] {
        assert_eq!(work(&mut world), Some(wait * 1_000));
        world.now += wait * 1_000;
    }
    assert_eq!(work(&mut world), Some(16_000));
    assert_eq!(world.dead(), [], "nothing else has gone through since");
    world.write([2]);
    let from = world.requests.len();
    assert_eq!(work(&mut world), None);
    assert_eq!(world.dead(), [(0, 5)]);
    assert_eq!(
        tried(&world, from),
        [stream([3]), parked([0]), parked([2])],
        "at once"
    );
}

#[test]
fn an_event_of_another_key_that_comes_in_need_not_wait() {
    let mut world = World::new(policy(8), [0]);
    world.write([7]);
    assert_eq!(work(&mut world), Some(1_000));
    assert!(
        world.parked().is_empty(),
        "nobody is held up, and nothing known"
    );
    world.write([7, 7]);
    assert_eq!(work(&mut world), Some(1_000));
    assert_eq!(world.passed, 0);
    world.now += 400;
    world.write([8]);
    assert_eq!(work(&mut world), Some(600), "as was its turn");
    assert_eq!(world.parked(), [0, 1, 2]);
    assert_eq!(world.fates[&3], Fate::Delivered);
}

#[test]
fn in_an_outage_one_that_comes_in_is_tried_and_the_next_ones_wait() {
    let mut world = World::new(policy(8), []);
    world.up = false;
    world.write([7]);
    assert_eq!(work(&mut world), Some(1_000));
    for key in 0..20 {
        world.write([key]);
        assert_eq!(work(&mut world), Some(1_000));
    }
    assert_eq!(world.requests.len(), 2);
    assert_eq!(world.engine.health(), Health::Down { attempts: 1 });
    world.up = true;
    world.drain(10);
    assert_eq!(world.dead(), []);
}

#[test]
fn after_an_outage_what_is_parked_is_tried_at_once_and_its_failures_are_excused() {
    let mut world = World::new(policy(8), [0]);
    world.write([7, 1]);
    work(&mut world);
    assert_eq!(world.parked(), [0]);
    world.up = false;
    world.write([2, 3]);
    for _ in 0..60 {
        world.advance();
    }
    assert_eq!((world.dead(), world.parked()), (vec![], vec![0]));
    world.poison.clear();
    world.up = true;
    // By then the lane waits for minutes.
    while world.fates.len() < 3 {
        assert!(world.advance());
    }
    let recovered = world.now;
    world.drain(10);
    assert_eq!((world.now, world.dead()), (recovered, vec![]));
}

#[test]
fn failures_in_an_outage_do_not_count() {
    let mut world = World::new(policy(8), [0]);
    world.write([7, 1]);
    work(&mut world);
    world.up = false;
    world.write([2, 3]);
    for _ in 0..60 {
        world.advance();
    }
    world.up = true;
    let tries = |world: &World| {
        let of_it = |request: &&super::world::Request| request.ids == [0];
        world.requests.iter().filter(of_it).count()
    };
    let before = tries(&world);
    for key in 10..200 {
        world.write([key]);
        work(&mut world);
        world.now += 1_000;
        if !world.dead().is_empty() {
            break;
        }
    }
    assert_eq!(world.dead().len(), 1);
    assert!(
        tries(&world) - before >= 5,
        "as often as it takes without an outage"
    );
}

#[test]
fn lanes_are_tried_together_and_searched_when_they_fail_together() {
    let mut world = World::new(policy(16), [0, 1, 2, 3]);
    world.style = Style::Naming;
    world.write([0, 1, 2, 3, 4]);
    assert_eq!(work(&mut world), Some(1_000));
    assert_eq!(world.requests.len(), 1);
    assert_eq!(world.parked(), [0, 1, 2, 3]);
    // One mends, and the sink does not say which.
    world.style = Style::Mute;
    world.poison.remove(&3);
    world.now += 1_000;
    let from = world.requests.len();
    assert_eq!(work(&mut world), Some(2_000));
    assert_eq!(world.fates[&3], Fate::Delivered);
    let lone = tried(&world, from);
    assert_eq!(lone[..2], [parked([0, 1, 2, 3]), parked([0, 1])]);
    assert_eq!(lone.len(), 2 + 4, "{lone:?}");
}

#[test]
fn a_sink_that_asks_to_be_left_alone_is_by_all_lanes() {
    let mut world = World::new(policy(8), [0, 1]);
    world.write([7, 8, 1]);
    while world.passed < 3 {
        world.advance();
    }
    assert_eq!(world.parked(), [0, 1]);
    world.now += 60_000;
    world.retry_after = Some(Duration::from_secs(60));
    let from = world.requests.len();
    assert_eq!(work(&mut world), Some(60_000));
    assert_eq!(
        tried(&world, from),
        [parked([1, 0])],
        "the one that waits longest first"
    );
}

#[test]
fn a_burst_of_one_key_is_looked_past() {
    let mut world = World::new(policy(8), [0]);
    world.write([7; 500]);
    world.write([8]);
    assert_eq!(work(&mut world), Some(1_000));
    assert_eq!(world.fates[&500], Fate::Delivered);
    assert_eq!(world.parked().len(), 500);
}

#[test]
fn a_long_burst_of_one_key_is_parked_without_proof() {
    let mut world = World::new(policy(8), [0]);
    world.write([7; 2_000]);
    world.write([8]);
    while !world.fates.contains_key(&2_000) {
        assert!(world.advance());
    }
    assert_eq!(world.parked().len(), 2_000);
    assert!(world.now - 1_000_000 <= 2_000);
}

#[test]
fn attempts_and_order_survive_a_restart() {
    let mut world = World::new(policy(8), [0]);
    world.write([7, 1, 7, 7]);
    work(&mut world);
    world.now += 1_000;
    assert_eq!(work(&mut world), Some(2_000));
    world.restart();
    assert_eq!(work(&mut world), Some(2_000));
    assert_eq!(world.stored[0].1.attempts, 2);
    world.now += 2_000;
    world.poison.clear();
    let from = world.requests.len();
    assert_eq!(work(&mut world), None);
    assert_eq!(tried(&world, from), [parked([0]), parked([2, 3])]);
}

#[test]
fn a_proof_that_comes_while_a_suspect_is_in_flight_counts_for_its_next_try() {
    let mut lanes = Lanes::new(policy(8));
    let mut now = Time(1_000_000);
    let failed = Outcome::Failed(Refusal {
        error: "no".to_owned(),
        retry_after: None,
    });
    lanes.park(now, Event { id: 0, key: 0 }, Trial::default());
    for _ in 0..5 {
        assert_eq!(lanes.next(now).len(), 1);
        assert!(lanes.outcome(now, &failed).is_empty());
        now = lanes.due().unwrap();
    }
    assert_eq!(lanes.next(now).len(), 1);
    lanes.sink_is_up(now, false);
    assert!(lanes.outcome(now, &failed).is_empty(), "it began before");
    assert_eq!(lanes.due(), Some(now), "at once");
    assert_eq!(lanes.next(now).len(), 1);
    assert_eq!(lanes.outcome(now, &failed).len(), 1);
    assert_eq!(lanes.events(), 0);
}
