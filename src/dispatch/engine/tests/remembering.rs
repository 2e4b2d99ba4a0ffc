//! Restarts, and what operators do to a sink.

use super::super::super::{Checkpoint, Fate, Health, Time};
use super::super::{Engine, Step};
use super::sink::{Style, policy};
use super::world::World;

fn down(count: usize) -> World {
    let mut world = World::new(policy(8), []);
    world.write_many(count);
    world.sink.up = false;
    world
}

#[test]
fn a_healthy_engine_has_nothing_to_remember() {
    let mut world = World::new(policy(8), []);
    world.write_many(100);
    assert_eq!(world.engine.checkpoint(), None);
    while world.fates.len() < 100 {
        world.step();
        assert_eq!(world.engine.checkpoint(), None);
    }
}

#[test]
fn attempts_due_time_size_and_tests_carry_on() {
    let mut world = down(30);
    while world.engine.attempts() < 7 {
        world.advance();
    }
    world.step();
    let before = world.engine.checkpoint().expect("trouble");
    assert_eq!(before.attempts, 7);
    assert_eq!(before.tested, [1, 2, 3]);
    assert_eq!(before.size, Some(1));
    assert_eq!(before.due, Some(Time(world.now + 64_000)));
    assert_eq!(before.error.as_deref(), Some("down"));
    world.restart();
    assert_eq!(
        world.engine.health(),
        Health::Down { attempts: 7 },
        "before anything is read"
    );
    assert_eq!(world.engine.next(Time(world.now)), Step::Idle);
    assert_eq!(world.advance(), Some(64_000));
    let tried: Vec<_> = world
        .requests(2)
        .iter()
        .map(|request| request.ids.start)
        .collect();
    assert_eq!(tried, [0, 4]);
    assert_eq!(world.advance(), Some(128_000));
}

#[test]
fn a_search_carries_on() {
    let mut world = World::new(policy(32), [21]);
    world.write_many(100);
    world.requests(3);
    world.restart();
    assert_eq!(world.engine.health(), Health::Bisecting);
    let tried: Vec<_> = world
        .requests(2)
        .iter()
        .map(|request| request.ids.clone())
        .collect();
    assert_eq!(tried, [16..20, 20..22]);
}

#[test]
fn a_restart_between_test_and_decision_decides_nothing() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(3);
    world.requests(6);
    world.restart();
    assert_eq!(world.advance(), Some(16_000));
    let tried: Vec<_> = world
        .requests(3)
        .iter()
        .map(|request| request.ids.start)
        .collect();
    assert_eq!(tried, [0, 1, 0]);
    assert_eq!(world.dead(), [(0, 6)]);
}

#[test]
fn a_checkpoint_of_another_version_is_read() {
    let read = |json: &str| serde_json::from_str::<Checkpoint>(json).expect("lenient");
    assert_eq!(read("{}"), Checkpoint::default());
    assert_eq!(read(r#"{"attempts": 3, "mood": ["low"]}"#).attempts, 3);
    let odd = r#"{"attempts": 4294967295, "size": 0, "suspects": 18446744073709551615,
        "due": 18446744073709551615, "tested": [0, 0, 18446744073709551615]}"#;
    let mut world = World::new(policy(8), []);
    world.engine = Engine::restore(world.policy, read(odd));
    world.write_many(20);
    assert_eq!(world.advance(), Some(300_000));
    world.drain(20);
}

#[test]
fn a_checkpoint_is_small() {
    let mut world = down(100);
    while world.engine.attempts() < 40 {
        world.advance();
    }
    let written = serde_json::to_string(&world.engine.checkpoint()).expect("plain values");
    assert!(written.len() < 200, "{written}");
}

#[test]
fn retry_now_forgets_the_wait_but_not_the_attempts() {
    let mut world = down(20);
    while world.engine.attempts() < 5 {
        world.advance();
    }
    world.step();
    assert!(matches!(world.step(), Step::Wait(_)));
    world.retry_now();
    assert_eq!(world.engine.next_attempt_at(), None);
    assert_eq!(world.step(), Step::Deliver(0..1));
    assert_eq!(world.engine.attempts(), 6);

    // Between the try and the test: what failed was the sink as it was before.
    world.retry_now();
    assert_eq!(world.step(), Step::Deliver(0..1));
    // Between a test that passed and the decision, likewise.
    world.sink.up = true;
    assert_eq!(world.step(), Step::Deliver(2..3));
    world.sink.up = false;
    world.retry_now();
    assert_eq!(world.step(), Step::Deliver(0..1));
    assert_eq!(world.fates, []);
    assert_eq!(world.engine.attempts(), 8);
}

#[test]
fn a_delivery_whose_outcome_is_lost_counts_for_nothing() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(3);
    world.requests(6);
    world.crash();
    assert_eq!(world.engine.in_flight(), None);
    assert_eq!(world.engine.attempts(), 5);
    assert_eq!(
        world.advance(),
        Some(16_000),
        "what a test had shown may be long past"
    );
    world.requests(1);
    assert_eq!(world.fates, []);
}

#[test]
fn retry_now_ends_a_run() {
    let mut world = World::new(policy(1), [0, 1]);
    world.write_many(3);
    world.requests(13);
    assert_eq!(world.dead(), [(0, 11)]);
    world.retry_now();
    world.requests(1);
    assert_eq!(world.advance(), Some(2_000));
}

#[test]
fn kept_marks_spare_a_second_delivery() {
    for keeps_marks in [false, true] {
        let mut world = World::new(policy(8), [0, 3]);
        world.keeps_marks = keeps_marks;
        world.sink.style = Style::Naming;
        world.write_many(8);
        world.step();
        let marks: Vec<_> = world.engine.through_ahead().map(|event| event.id).collect();
        assert_eq!(marks, [1, 2, 4, 5, 6, 7]);
        world.restart();
        world.sink.poison.clear();
        world.requests.clear();
        world.drain(4);
        let handed_over: usize = world.requests.iter().map(|request| request.ids.len()).sum();
        assert_eq!(handed_over, if keeps_marks { 2 } else { 8 });
    }
}

#[test]
fn a_mark_without_a_head_leaves_at_once() {
    let mut world = World::new(policy(8), []);
    world.write_many(3);
    world.engine = Engine::restore(
        world.policy,
        Checkpoint {
            attempts: 7,
            ..Checkpoint::default()
        },
    );
    // The head has been deleted meanwhile.
    let settled = world.engine.push_through(world.source[1].clone());
    assert_eq!(settled.len(), 1);
    assert_eq!(settled[0].fate, Fate::Delivered);
    assert!(world.engine.is_empty());
    assert_eq!(
        world.engine.checkpoint(),
        None,
        "the failures were another's"
    );
    world.engine.push(world.source[2].clone());
    assert_eq!(world.engine.next(Time(world.now)), Step::Deliver(0..1));
}

#[test]
fn retry_now_leaves_a_delivery_in_flight_what_it_is() {
    let mut world = World::new(policy(1), [0]);
    world.write_many(3);
    world.requests(5);
    assert_eq!(world.engine.next(Time(world.now)), Step::Deliver(1..2));
    let outcome = world.hand_over(1..2);
    world.retry_now();
    world.report(1..2, &outcome);
    assert_eq!(
        world.engine.attempts(),
        5,
        "the neighbour's outcome is not the head's"
    );
    assert_eq!(world.engine.next(Time(world.now)), Step::Deliver(0..1));
    let outcome = world.hand_over(0..1);
    world.retry_now();
    world.report(0..1, &outcome);
    assert_eq!(world.dead(), [(0, 5)]);
}
