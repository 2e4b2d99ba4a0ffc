//! Random sources, sinks, outages, clocks, policies and restarts. `World` checks every move; what is left
//! for here is that nothing is lost, who dies, and who waits.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::super::super::{Fate, Policy};
use super::world::{Style, World, policy};

#[derive(Clone, Debug)]
enum Move {
    Step,
    Write(Vec<usize>),
    Toggle,
    Speak(Style),
    Jump(i64),
    Ask(Option<Duration>),
    Adopt(Policy),
    Restart,
    Crash,
    RetryNow,
    Room(usize),
}

/// When the sink may go down or come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outages {
    /// While there is nothing to do.
    InWaits,
    /// Between any two deliveries.
    Anywhere,
}

fn millis(range: std::ops::Range<u64>) -> impl Strategy<Value = Duration> {
    range.prop_map(Duration::from_millis)
}

fn policies() -> impl Strategy<Value = Policy> {
    (0..20_usize, millis(1..2_000), millis(1..60_000), 0..6_u32).prop_map(
        |(batch_size, retry_min, retry_max, poison_attempts)| Policy {
            batch_size,
            retry_min,
            retry_max,
            poison_attempts,
        },
    )
}

fn styles() -> impl Strategy<Value = Style> {
    prop_oneof![Just(Style::Mute), Just(Style::Naming)]
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        50 => Just(Move::Step),
        6 => vec(0..6_usize, 1..12).prop_map(Move::Write),
        6 => Just(Move::Toggle),
        2 => styles().prop_map(Move::Speak),
        2 => (-100_000..100_000_i64).prop_map(Move::Jump),
        1 => proptest::option::of(millis(0..90_000)).prop_map(Move::Ask),
        1 => policies().prop_map(Move::Adopt),
        2 => Just(Move::Restart),
        2 => Just(Move::Crash),
        1 => Just(Move::RetryNow),
    ];
    vec(one, 0..250)
}

/// The same, with little room here and there.
fn moves_in_little_room() -> impl Strategy<Value = Vec<Move>> {
    let room = prop_oneof![(0..20_usize).prop_map(Move::Room), Just(Move::Step)];
    (moves(), vec(room, 250)).prop_map(|(moves, rooms)| {
        let pairs = moves.into_iter().zip(rooms);
        pairs.flat_map(|(one, room)| [one, room]).collect()
    })
}

fn play(mut world: World, moves: Vec<Move>, outages: Outages) -> World {
    let mut toggle = false;
    for one in moves {
        match one {
            Move::Step => {
                let before = world.requests.len();
                world.advance();
                let waited = world.requests.len() == before;
                if waited && std::mem::take(&mut toggle) {
                    world.up = !world.up;
                }
            }
            Move::Toggle if outages == Outages::InWaits => toggle = !toggle,
            Move::Toggle => world.up = !world.up,
            Move::Write(keys) => world.write(keys),
            Move::Speak(style) => world.style = style,
            Move::Jump(by) => world.now = world.now.saturating_add_signed(by),
            Move::Ask(retry_after) => world.retry_after = retry_after,
            Move::Adopt(policy) => world.set_policy(policy),
            Move::Restart => world.restart(),
            Move::Crash => world.crash(),
            Move::RetryNow => world.retry_now(),
            Move::Room(room) => world.room = room,
        }
    }
    world
}

/// In the end the sink is up, and a good event of another key comes now and then: everything is settled.
fn settle(world: &mut World) {
    world.up = true;
    world.room = usize::MAX;
    world.retry_after = None;
    let last = world.poison.last().map_or(0, |id| id + 1);
    let missing = last.saturating_sub(world.source.len());
    world.write((0..missing).map(|id| id % 6));
    for round in 0..1_000 {
        if world.fates.len() == world.source.len() && round > 0 {
            break;
        }
        world.write([100 + round]);
        for _ in 0..20 {
            world.advance();
        }
    }
    let all = world.fates.len() == world.source.len();
    assert!(all, "{:?} {:?}", world.engine, world.lanes);
    for (id, fate) in &world.fates {
        let poison = world.poison.contains(id);
        let wronged = world.wronged.contains(id);
        assert_eq!(
            matches!(fate, Fate::Dead { .. }),
            poison || wronged,
            "event {id}"
        );
    }
    assert_eq!(world.stored, []);
    assert!(world.engine.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    })]

    /// An outage that begins and ends while there is nothing to do kills nothing, whatever else happens.
    #[test]
    fn only_poison_dies(
        policy in policies(),
        poison in btree_set(0..100_usize, 0..10),
        moves in moves(),
    ) {
        let mut world = play(World::new(policy, poison), moves, Outages::InWaits);
        settle(&mut world);
        prop_assert_eq!(&world.wronged, &BTreeSet::new());
    }

    /// Whenever outages come and go, nothing is lost, settled twice or out of the order of its key:
    /// `World` has checked.
    #[test]
    fn everything_is_settled_once_and_in_order(
        policy in policies(),
        poison in btree_set(0..100_usize, 0..10),
        moves in moves(),
    ) {
        let mut world = play(World::new(policy, poison), moves, Outages::Anywhere);
        settle(&mut world);
    }

    /// The same where there is hardly any room to park anything.
    #[test]
    fn everything_is_settled_in_little_room(
        policy in policies(),
        poison in btree_set(0..100_usize, 0..10),
        moves in moves_in_little_room(),
    ) {
        let mut world = play(World::new(policy, poison), moves, Outages::Anywhere);
        settle(&mut world);
    }

    /// What the sink judges for good is dead at once and holds nobody up.
    #[test]
    fn what_is_judged_waits_for_nobody(
        batch_size in 1..20_usize,
        poison in btree_set(0..60_usize, 0..20),
        keys in vec(0..6_usize, 60),
    ) {
        let mut world = World::new(policy(batch_size), poison.clone());
        world.style = Style::Judging;
        world.write(keys);
        let begin = world.now;
        world.drain(120);
        prop_assert_eq!(world.now, begin);
        let dead: BTreeSet<usize> = world.dead().iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(dead, poison);
    }

    /// Keys that fail hold others no longer than it takes to find one that goes through.
    #[test]
    fn failing_keys_hold_nobody_else(
        batch_size in 1..20_usize,
        bad in btree_set(0..8_usize, 1..8),
        style in styles(),
        keys in vec(0..9_usize, 100),
    ) {
        let mut world = World::new(policy(batch_size), []);
        world.style = style;
        world.write(keys);
        let ids = |is_bad: bool| {
            let events = world.source.iter().filter(|event| bad.contains(&event.key) == is_bad);
            events.map(|event| event.id).collect::<Vec<_>>()
        };
        let (poison, good) = (ids(true), ids(false));
        world.poison.extend(poison);
        let begin = world.now;
        while !good.iter().all(|id| world.fates.contains_key(id)) {
            prop_assert!(world.advance());
        }
        // One that fails, and each wait twice the one before: so often another one was tried.
        let waited = (world.now - begin) / 1_000;
        prop_assert!(waited < 1 << bad.len(), "{waited} {:?}", world.requests);
    }

    /// In an outage nothing is parked that the sink does not name, and two tries are made for each wait.
    #[test]
    fn an_outage_parks_nothing(
        batch_size in 1..20_usize,
        keys in vec(0..9_usize, 1..100),
        steps in 1..200_usize,
    ) {
        let mut world = World::new(policy(batch_size), []);
        world.write(keys);
        world.up = false;
        let mut waits = 0;
        for _ in 0..steps {
            let before = world.now;
            prop_assert!(world.advance());
            waits += usize::from(world.now > before);
            prop_assert_eq!(world.parked(), Vec::<usize>::new());
            prop_assert_eq!(world.fates.len(), 0);
            let search = batch_size.ilog2() as usize + 1;
            prop_assert!(world.requests.len() <= search + 1 + 2 * waits);
        }
        world.up = true;
        world.drain(300);
        prop_assert_eq!(world.dead(), []);
    }
}
