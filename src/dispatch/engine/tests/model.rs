//! Random sources, sinks, outages, clocks, policies and restarts. `World` checks every move; what
//! is left for here is that nothing is lost, and who dies.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::super::super::neighbours::NEIGHBOURS;
use super::super::super::{Fate, Policy, Time};
use super::super::Step;
use super::sink::Style;
use super::world::World;

#[derive(Clone, Debug)]
enum Move {
    Step,
    Write(Vec<(usize, usize)>),
    Toggle,
    Speak(Style),
    Jump(i64),
    Ask(Option<Duration>),
    Adopt(Policy),
    Restart,
    Crash,
    RetryNow,
    /// While a delivery is in flight, events arrive and somebody changes the sink.
    Meanwhile(Vec<(usize, usize)>, Policy),
}

/// When the sink may go down or come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outages {
    /// While the engine waits.
    InWaits,
    /// Between any two deliveries.
    Anywhere,
}

fn millis(range: std::ops::Range<u64>) -> impl Strategy<Value = Duration> {
    range.prop_map(Duration::from_millis)
}

fn policies() -> impl Strategy<Value = Policy> {
    (0..20_usize, millis(0..2_000), millis(0..60_000), 0..6_u32).prop_map(
        |(batch_size, retry_min, retry_max, poison_attempts)| Policy {
            batch_size,
            retry_min,
            retry_max,
            poison_attempts,
        },
    )
}

/// In each of which everything is settled in the end.
fn styles() -> impl Strategy<Value = Style> {
    prop_oneof![3 => Just(Style::Mute), 2 => Just(Style::Naming), 1 => Just(Style::Judging), 2 => Just(Style::Halting)]
}

/// Key and weight.
fn items() -> impl Strategy<Value = (usize, usize)> {
    (0..5_usize, prop_oneof![4 => Just(1_usize), 1 => 0..6_usize])
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        40 => Just(Move::Step),
        6 => vec(items(), 1..12).prop_map(Move::Write),
        6 => Just(Move::Toggle),
        3 => prop_oneof![2 => styles(), 1 => Just(Style::PuttingOff)].prop_map(Move::Speak),
        2 => (-100_000..100_000_i64).prop_map(Move::Jump),
        2 => proptest::option::of(millis(0..90_000)).prop_map(Move::Ask),
        1 => policies().prop_map(Move::Adopt),
        2 => Just(Move::Restart),
        2 => Just(Move::Crash),
        1 => Just(Move::RetryNow),
        2 => (vec(items(), 0..5), policies())
            .prop_map(|(items, policy)| Move::Meanwhile(items, policy)),
    ];
    vec(one, 0..250)
}

/// At most as many as the tests can look past.
fn poison() -> impl Strategy<Value = BTreeSet<usize>> {
    prop_oneof![
        btree_set(0..100_usize, 0..10),
        (0..30_usize, 0..12_usize).prop_map(|(at, count)| (at..at + count).collect())
    ]
}

fn play(mut world: World, moves: Vec<Move>, outages: Outages) -> World {
    let mut toggle = false;
    for one in moves {
        match one {
            Move::Step => {
                if world.advance().is_some() && std::mem::take(&mut toggle) {
                    world.sink.up = !world.sink.up;
                }
            }
            Move::Toggle if outages == Outages::InWaits => toggle = !toggle,
            Move::Toggle => world.sink.up = !world.sink.up,
            Move::Write(items) => world.write_weighted(items),
            Move::Speak(style) => world.sink.style = style,
            Move::Jump(by) => world.now = world.now.saturating_add_signed(by),
            Move::Ask(retry_after) => world.sink.retry_after = retry_after,
            Move::Adopt(policy) => world.set_policy(policy),
            Move::Restart => world.restart(),
            Move::Crash => world.crash(),
            Move::RetryNow => world.retry_now(),
            Move::Meanwhile(items, policy) => {
                world.read();
                if let Step::Deliver(range) = world.engine.next(Time(world.now)) {
                    let outcome = world.hand_over(range.clone());
                    world.write_weighted(items);
                    world.read();
                    world.retry_now();
                    world.report(range, &outcome);
                    world.set_policy(policy);
                }
            }
        }
    }
    world
}

/// In the end the sink is up and good events keep coming: everything is settled.
fn settle(world: &mut World) {
    world.sink.up = true;
    let last = world.sink.poison.last().map_or(0, |id| id + 1);
    let missing = last.saturating_sub(world.source.len());
    world.write((0..missing + 60).map(|id| id % 5));
    let poison = world.sink.poison.len();
    world.drain(world.source.len() + (poison + 1) * 60);
    for (id, fate) in world.fates.iter().enumerate() {
        let poison = world.sink.poison.contains(&id);
        let wronged = world.wronged.contains(&id);
        assert_eq!(
            matches!(fate, Fate::Dead { .. }),
            poison || wronged,
            "event {id}"
        );
    }
    assert!(world.engine.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(500)
    })]

    /// An outage that begins and ends while the engine waits kills nothing, whatever else happens.
    #[test]
    fn only_poison_dies(
        policy in policies(),
        poison in poison(),
        style in styles(),
        moves in moves(),
    ) {
        let mut world = play(World::new(policy, poison), moves, Outages::InWaits);
        world.sink.style = style;
        settle(&mut world);
        prop_assert_eq!(&world.wronged, &BTreeSet::new());
    }

    /// One that begins at any moment can kill an event only within a run, and `World` has checked
    /// that this, and enough failures, is what happened.
    #[test]
    fn everything_is_settled_once(
        policy in policies(),
        poison in poison(),
        style in styles(),
        moves in moves(),
    ) {
        let mut world = play(World::new(policy, poison), moves, Outages::Anywhere);
        world.sink.style = style;
        settle(&mut world);
    }

    /// With a caller that keeps what went through, nothing goes through twice: `World` has checked.
    #[test]
    fn kept_marks_deliver_once(
        policy in policies(),
        poison in poison(),
        style in styles(),
        moves in moves(),
    ) {
        let mut world = World::new(policy, poison);
        world.keeps_marks = true;
        let mut world = play(world, moves, Outages::Anywhere);
        world.sink.style = style;
        settle(&mut world);
    }

    /// One good event behind any others settles them all, without more to come.
    #[test]
    fn one_good_event_decides_on_all_ahead_of_it(
        policy in policies(),
        poison in btree_set(0..NEIGHBOURS, 0..=NEIGHBOURS),
        items in vec(items(), 1 + NEIGHBOURS),
    ) {
        let mut world = World::new(policy, poison.clone());
        world.write_weighted(items);
        world.drain((1 + NEIGHBOURS) * 20);
        let dead: BTreeSet<usize> = world.dead().iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(dead, poison);
    }

    /// While the sink is down, a search and then two tries for each wait; the waits double.
    #[test]
    fn an_outage_is_not_hammered(
        policy in policies(),
        written in 1..100_usize,
        deliveries in 10..80_usize,
    ) {
        let mut world = World::new(policy, []);
        world.write_many(written);
        world.sink.up = false;
        while world.engine.attempts() == 0 {
            prop_assert_eq!(world.advance(), None);
        }
        let size = policy.batch_size.clamp(1, written);
        prop_assert_eq!(world.requests.len(), size.ilog2() as usize + 1);
        let mut waits = 0;
        let mut tries = 0;
        let mut failures = world.engine.attempts();
        while tries < deliveries {
            match world.advance() {
                Some(wait) => {
                    let doubled = policy.retry_min.saturating_mul(1 << (failures - 1).min(20));
                    prop_assert_eq!(u128::from(wait), doubled.min(policy.retry_max).as_millis());
                    waits += 1;
                }
                None => tries += 1,
            }
            failures = world.engine.attempts();
        }
        if policy.retry_min.min(policy.retry_max) > Duration::ZERO {
            prop_assert!(tries <= 2 * (waits + 1));
        }
        prop_assert!(world.fates.is_empty());
    }
}
