//! Finding the failing event of a batch, and growing back.

use std::time::Duration;

use super::super::super::{Health, Outcome, Refusal, Time};
use super::super::Step;
use super::sink::policy;
use super::world::World;

fn sizes(world: &World) -> Vec<usize> {
    world
        .requests
        .iter()
        .map(|request| request.ids.len())
        .collect()
}

#[test]
fn halves_at_once_until_the_failing_event_is_alone() {
    let mut world = World::new(policy(32), [0]);
    world.write_many(32);
    for _ in 0..6 {
        assert_eq!(world.engine.attempts(), 0);
        assert_eq!(world.advance(), None, "no wait in between");
    }
    assert_eq!(sizes(&world), [32, 16, 8, 4, 2, 1]);
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 1 });
}

#[test]
fn searches_the_other_half_when_one_passes() {
    let mut world = World::new(policy(32), [21]);
    world.write_many(100);
    world.requests(7);
    let tried: Vec<_> = world
        .requests
        .iter()
        .map(|request| request.ids.clone())
        .collect();
    assert_eq!(
        tried,
        [0..32, 0..16, 16..24, 16..20, 20..22, 20..21, 21..22]
    );
    assert_eq!(world.engine.health(), Health::Retrying { attempts: 1 });
    assert_eq!(world.fates.len(), 21);
}

#[test]
fn isolates_one_of_n_in_log_n() {
    for size in 1..=70_usize {
        for bad in 0..size {
            let mut world = World::new(policy(size), [bad]);
            world.write_many(size);
            while world.engine.attempts() == 0 {
                world.advance();
            }
            // The batch, its halves, and the one that is left.
            let most = 2 + size.next_power_of_two().ilog2() as usize;
            assert!(
                world.requests.len() <= most,
                "{bad} of {size}: {:?}",
                world.requests
            );
            assert_eq!(world.fates.len(), bad);
        }
    }
}

#[test]
fn doubles_back_to_full_batches() {
    let mut world = World::new(policy(32), [0]);
    world.write_many(200);
    world.requests(6 + 4);
    world.requests.clear();
    world.drain(100);
    // The test, the decision, and on: the test was a success already.
    assert_eq!(sizes(&world), [1, 1, 2, 4, 8, 16, 32, 32, 32, 32, 32, 8]);
}

#[test]
fn all_is_well_when_every_suspect_passes() {
    let mut world = World::new(policy(8), []);
    world.write_many(20);
    world.sink.up = false;
    world.step();
    assert_eq!(world.engine.health(), Health::Bisecting);
    assert_eq!(world.engine.last_error(), Some("down"));
    world.sink.up = true;
    world.drain(10);
    assert_eq!(sizes(&world), [8, 4, 2, 1, 1, 8, 4]);
    assert_eq!(world.engine.health(), Health::Flowing);
    assert_eq!(world.engine.last_error(), None);
    assert_eq!(world.engine.checkpoint(), None);
}

#[test]
fn growth_begins_after_the_search_and_from_where_it_got_to() {
    let mut world = World::new(policy(8), []);
    world.write_many(20);
    world.sink.up = false;
    world.requests(2);
    world.sink.up = true;
    world.drain(10);
    assert_eq!(sizes(&world), [8, 4, 2, 1, 1, 4, 8, 4]);
}

#[test]
fn a_single_event_that_failed_is_followed_by_few() {
    let mut world = World::new(policy(8), []);
    world.write_many(1);
    world.sink.up = false;
    world.requests(2);
    world.write_many(30);
    world.sink.up = true;
    world.drain(10);
    assert_eq!(sizes(&world), [1, 1, 1, 2, 4, 8, 8, 8]);
}

#[test]
fn waits_between_halves_only_if_the_sink_asked() {
    let mut world = World::new(policy(4), [0]);
    world.write_many(4);
    world.sink.retry_after = Some(Duration::from_secs(7));
    world.step();
    assert_eq!(
        world.engine.next_attempt_at(),
        Some(Time(world.now + 7_000))
    );
    assert_eq!(world.advance(), Some(7_000));
    world.sink.retry_after = Some(Duration::MAX);
    world.step();
    assert_eq!(
        world.engine.next_attempt_at(),
        Some(Time(world.now + 300_000))
    );
    assert_eq!(world.advance(), Some(300_000), "no longer than the longest");
    assert_eq!(world.engine.attempts(), 0);
}

#[test]
fn one_bad_event_in_ten_thousand_costs_a_logarithm() {
    for bad in [0, 1, 777, 5_000, 9_983] {
        let mut world = World::new(policy(32), [bad]);
        world.write_many(10_000);
        world.drain(10_000);
        let isolating = 1 + 32_usize.ilog2() as usize;
        let judging = 4 + 2;
        let growing_back = 32_usize.ilog2() as usize;
        let most = 10_000_usize.div_ceil(32) + isolating + judging + growing_back + 1;
        assert!(
            world.requests.len() <= most,
            "{} for {bad}",
            world.requests.len()
        );
        assert_eq!(world.dead(), [(bad, 5)]);
    }
}

#[test]
fn the_batch_size_may_change_at_any_time() {
    let mut world = World::new(policy(16), [9]);
    world.write_many(100);
    world.step();
    world.set_policy(policy(3));
    world.requests(1);
    world.set_policy(policy(0));
    world.requests(2);
    world.set_policy(policy(64));
    world.drain(100);
    assert_eq!(sizes(&world)[..4], [16, 3, 1, 1]);
    assert_eq!(world.dead(), [(9, 5)]);

    let mut world = World::new(policy(4), []);
    world.write_many(100);
    world.step();
    world.set_policy(policy(8));
    world.step();
    world.set_policy(policy(2));
    world.step();
    assert_eq!(sizes(&world), [4, 8, 2], "without trouble at once");
}

#[test]
fn items_that_stand_for_several_events_fill_a_batch_sooner() {
    let mut world = World::new(policy(4), []);
    world.write_weighted([2, 2, 2, 9, 1, 3, 1].map(|weight| (0, weight)));
    world.drain(5);
    assert_eq!(sizes(&world), [2, 1, 1, 2, 1]);
}

#[test]
fn an_outcome_that_nothing_waits_for_is_ignored() {
    let mut world = World::new(policy(4), []);
    world.write_many(4);
    world.read();
    let refused = Outcome::Failed(Refusal {
        error: "late".into(),
        retry_after: Some(Duration::MAX),
    });
    assert_eq!(world.engine.outcome(Time(world.now), &refused), []);
    assert_eq!(world.engine.checkpoint(), None);
    assert_eq!(world.engine.next(Time(world.now)), Step::Deliver(0..4));
}
