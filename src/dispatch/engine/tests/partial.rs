//! Sinks that say which events failed.

use std::time::Duration;

use super::super::super::{Checkpoint, Failure, Fate, Health, Outcome, Time};
use super::super::{Engine, Step};
use super::sink::{Style, policy};
use super::world::World;

fn world(style: Style, poison: impl IntoIterator<Item = usize>) -> World {
    let mut world = World::new(policy(8), poison);
    world.sink.style = style;
    world
}

#[test]
fn a_judged_event_dies_at_once_and_the_others_are_through() {
    let mut world = world(Style::Judging, [0, 3, 7]);
    world.write_many(16);
    world.drain(2);
    assert_eq!(world.dead(), [(0, 1), (3, 1), (7, 1)]);
    assert_eq!(world.engine.checkpoint(), None);
}

#[test]
fn a_judged_event_waits_for_its_turn() {
    let mut world = world(Style::Naming, [1]);
    world.write_many(8);
    world.step();
    assert_eq!(world.fates.len(), 1);
    world.sink.style = Style::Judging;
    world.sink.poison = [1, 9].into();
    world.write_many(2);
    world.drain(5);
    assert_eq!(world.dead(), [(1, 2), (9, 1)]);
}

#[test]
fn a_named_event_is_tried_by_itself_after_its_back_off() {
    let mut world = world(Style::Naming, [2, 5]);
    world.write_many(12);
    world.step();
    assert_eq!(world.fates, [Fate::Delivered, Fate::Delivered]);
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 1 });
    assert_eq!(world.engine.last_error(), Some("bad event"));
    assert_eq!(world.advance(), Some(1_000));
    world.sink.poison.remove(&2);
    world.step();
    assert_eq!(world.fates.len(), 5, "with what went through ahead of it");
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 1 });
    world.sink.poison.clear();
    world.drain(2);
    let tried: Vec<_> = world
        .requests
        .iter()
        .map(|request| request.ids.clone())
        .collect();
    assert_eq!(tried, [0..8, 2..3, 5..6, 8..12]);
}

#[test]
fn a_named_event_needs_a_neighbour_to_die() {
    let mut world = world(Style::Naming, [0]);
    world.write_many(8);
    world.requests(9);
    assert_eq!(world.fates, [], "all others are through: no neighbour");
    world.write_many(1);
    world.drain(4);
    assert_eq!(world.dead(), [(0, 9)]);
    assert_eq!(
        world
            .requests
            .iter()
            .filter(|request| request.ids.contains(&8))
            .count(),
        1
    );
}

#[test]
fn a_neighbour_that_is_named_proves_nothing_but_one_that_is_judged_does() {
    for (style, dead) in [
        (Style::Naming, vec![]),
        (Style::Judging, vec![(0, 5), (1, 1)]),
    ] {
        let mut world = world(Style::Mute, [0, 1]);
        world.write_many(2);
        while world.engine.attempts() < 5 {
            world.advance();
        }
        world.sink.style = style;
        world.requests(2);
        assert_eq!(world.dead(), dead, "{style:?}");
    }
}

#[test]
fn many_named_events_do_not_hide_a_good_one() {
    let mut world = World::new(policy(40), 0..30);
    world.sink.style = Style::Naming;
    world.write_many(200);
    world.drain(30 * 8);
    assert_eq!(world.dead().len(), 30);
    assert!(world.dead().iter().all(|(_, attempts)| *attempts == 5));
}

#[test]
fn named_events_are_neighbours_when_there_are_no_others() {
    let mut world = world(Style::Naming, 0..8);
    world.write_many(8);
    while world.engine.attempts() < 5 {
        world.advance();
    }
    world.sink.poison.remove(&1);
    world.requests(2);
    assert_eq!(world.dead(), [(0, 5)]);
    assert_eq!(world.fates.len(), 2);
}

#[test]
fn every_event_named_is_still_no_reason_to_bisect() {
    let mut world = world(Style::Naming, 0..8);
    world.write_many(30);
    world.step();
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 1 });
    assert_eq!(
        world
            .engine
            .checkpoint()
            .map(|checkpoint| checkpoint.suspects),
        Some(0)
    );
    world.drain(100);
    assert_eq!(world.dead().len(), 8);
}

#[test]
fn nothing_named_is_delivered() {
    for failures in [
        vec![],
        vec![Failure {
            index: 4,
            error: "?".into(),
            permanent: true,
        }],
    ] {
        for count in [1, 4] {
            let mut world = world(Style::Mute, []);
            world.write_many(count);
            world.read();
            let now = Time(world.now);
            assert_eq!(world.engine.next(now), Step::Deliver(0..count));
            let settled = world
                .engine
                .outcome(now, &Outcome::Partial(failures.clone()));
            assert_eq!(settled.len(), count);
            assert!(
                settled
                    .iter()
                    .all(|settled| settled.fate == Fate::Delivered)
            );
        }
    }
}

#[test]
fn a_named_event_ends_the_search_among_those_handed_over() {
    let mut world = world(Style::Mute, [1, 6]);
    world.write_many(8);
    world.step();
    world.sink.style = Style::Naming;
    world.step();
    assert_eq!(world.fates.len(), 1);
    world.sink.poison = [6].into();
    world.drain(60);
    let tried: Vec<_> = world
        .requests
        .iter()
        .map(|request| request.ids.clone())
        .collect();
    assert_eq!(tried[..5], [0..8, 0..4, 1..2, 4..6, 6..7]);
}

#[test]
fn what_was_not_tried_has_not_failed() {
    let mut world = world(Style::Mute, []);
    world.write_many(8);
    world.read();
    let now = Time(world.now);
    assert_eq!(world.engine.next(now), Step::Deliver(0..8));
    let failure = Failure {
        index: 2,
        error: "busy".into(),
        permanent: false,
    };
    let outcome = Outcome::Cut {
        failures: vec![failure],
        // What is listed as failed has failed, and there is no event 9.
        untried: vec![2, 5, 6, 7, 9],
        retry_after: None,
    };
    assert_eq!(world.engine.outcome(now, &outcome).len(), 2);
    assert_eq!(world.engine.attempts(), 1);
    assert_eq!(world.engine.next(now), Step::Wait(Time(now.0 + 1_000)));
    let later = Time(now.0 + 1_000);
    assert_eq!(world.engine.next(later), Step::Deliver(0..1));
    let settled = world.engine.outcome(later, &Outcome::Delivered);
    assert_eq!(settled.len(), 3, "with those that went through behind it");
    assert_eq!(world.engine.attempts(), 0);
    assert_eq!(world.engine.next(later), Step::Deliver(0..3));
}

#[test]
fn a_delivery_in_which_nothing_was_tried_comes_again_as_it_was() {
    let mut world = world(Style::Mute, []);
    world.write_many(4);
    world.read();
    let now = Time(world.now);
    let nothing = |count| Outcome::Cut {
        failures: Vec::new(),
        untried: (0..count).collect(),
        retry_after: None,
    };
    assert_eq!(world.engine.next(now), Step::Deliver(0..4));
    assert_eq!(world.engine.outcome(now, &nothing(4)), []);
    assert_eq!(world.engine.next(now), Step::Wait(Time(now.0 + 1_000)));
    let mut now = Time(now.0 + 1_000);
    assert_eq!(world.engine.next(now), Step::Deliver(0..4));
    // All but the head are through; what comes later is tried with it.
    let head = Outcome::Cut {
        failures: Vec::new(),
        untried: vec![0],
        retry_after: None,
    };
    assert_eq!(world.engine.outcome(now, &head), []);
    for _ in 0..20 {
        assert_eq!(world.engine.next(now), Step::Deliver(0..1));
        assert_eq!(world.engine.outcome(now, &nothing(1)), []);
        now = Time(now.0 + 1_000);
    }
    assert_eq!(
        (world.engine.attempts(), world.engine.last_error()),
        (0, None)
    );
    world.write_many(2);
    world.read();
    assert_eq!(world.engine.next(now), Step::Deliver(0..6));
    assert_eq!(world.engine.to_deliver(&(0..6)).count(), 3);
    assert_eq!(world.engine.outcome(now, &Outcome::Delivered).len(), 6);
}

#[test]
fn a_head_that_is_put_off_keeps_nobody_waiting_in_a_small_batch() {
    let mut world = world(Style::Mute, []);
    // The search for an event that is gone since has left it at one.
    let checkpoint = Checkpoint {
        size: Some(1),
        ..Checkpoint::default()
    };
    world.engine = Engine::restore(world.policy, checkpoint);
    world.write_many(4);
    world.read();
    let mut now = Time(world.now);
    let head = Outcome::Cut {
        failures: Vec::new(),
        untried: vec![0],
        retry_after: None,
    };
    for _ in 0..4 {
        if let Step::Deliver(_) = world.engine.next(now) {
            assert!(world.engine.outcome(now, &head).is_empty());
        }
        now = Time(now.0 + 1_000);
    }
    assert_eq!(world.engine.through_ahead().count(), 3);
}

#[test]
fn a_sink_that_asks_to_be_left_alone_in_the_middle_is() {
    let mut world = world(Style::Mute, []);
    world.write_many(4);
    world.read();
    let now = Time(world.now);
    assert_eq!(world.engine.next(now), Step::Deliver(0..4));
    let outcome = Outcome::Cut {
        failures: Vec::new(),
        untried: vec![2, 3],
        retry_after: Some(Duration::from_secs(7)),
    };
    assert_eq!(world.engine.outcome(now, &outcome).len(), 2);
    assert_eq!(world.engine.attempts(), 0);
    assert_eq!(world.engine.next(now), Step::Wait(Time(now.0 + 7_000)));
}
