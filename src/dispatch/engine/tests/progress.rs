//! Deliveries that tell what is through before they end.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::super::{Checkpoint, Failure, Isolation, Outcome, Refusal, Settled, Time};
use super::super::{Engine, Step};
use super::sink::{Event, policy};

const NOW: Time = Time(1_000_000);

/// What becomes of an event, and whether that is told before the end.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Through { told: Option<bool> },
    Untried,
    Failed { permanent: bool },
}

fn fates() -> impl Strategy<Value = Vec<Fate>> {
    let told = prop::option::of(any::<bool>());
    let fate = prop_oneof![
        3 => told.prop_map(|told| Fate::Through { told }),
        1 => Just(Fate::Untried),
        1 => any::<bool>().prop_map(|permanent| Fate::Failed { permanent }),
    ];
    prop::collection::vec(fate, 2..12)
}

/// An engine with one delivery of so many events in flight, and a few behind them.
fn engine(count: usize, isolation: Isolation) -> Engine<Event> {
    let mut engine = Engine::restore(policy(count), Checkpoint::default());
    engine.set_isolation(isolation);
    for id in 0..count + 3 {
        let key = id / 2;
        engine.push(Event { id, key, weight: 1 });
    }
    assert_eq!(engine.next(NOW), Step::Deliver(0..count));
    assert_eq!(engine.handed_over(), count);
    engine
}

fn outcome(fates: &[Fate]) -> Outcome {
    let mut failures = Vec::new();
    let mut untried = Vec::new();
    for (index, fate) in fates.iter().enumerate() {
        match fate {
            Fate::Through { .. } => {}
            Fate::Untried => untried.push(index),
            Fate::Failed { permanent } => failures.push(Failure {
                index,
                error: "busy".into(),
                permanent: *permanent,
            }),
        }
    }
    Outcome::Cut {
        failures,
        untried,
        retry_after: None,
    }
}

proptest! {
    #[test]
    fn what_was_told_before_changes_nothing(fates in fates(), by_key in any::<bool>()) {
        let isolation = if by_key { Isolation::Key } else { Isolation::Batch };
        let outcome = outcome(&fates);
        let mut plain = engine(fates.len(), isolation);
        let at_once = plain.outcome(NOW, &outcome);
        let mut telling = engine(fates.len(), isolation);
        let mut bit_by_bit = Vec::new();
        for turn in [false, true] {
            let is_told = |fate: &Fate| matches!(fate, Fate::Through { told } if *told == Some(turn));
            let told: Vec<_> = (0..fates.len()).filter(|&index| is_told(&fates[index])).collect();
            bit_by_bit.extend(telling.progress(&told));
            prop_assert_eq!(telling.next(NOW), Step::Idle);
        }
        bit_by_bit.extend(telling.outcome(NOW, &outcome));
        prop_assert_eq!(at_once, bit_by_bit);
        prop_assert_eq!(plain.checkpoint(), telling.checkpoint());
        prop_assert_eq!(plain.health(), telling.health());
        let ahead = |engine: &Engine<Event>| engine.through_ahead().map(|event| event.id).collect::<Vec<_>>();
        prop_assert_eq!(ahead(&plain), ahead(&telling));
        prop_assert_eq!(plain.next(NOW), telling.next(NOW));
    }
}

fn ids(settled: Vec<Settled<Event>>) -> Vec<usize> {
    settled.into_iter().map(|settled| settled.item.id).collect()
}

#[test]
fn what_is_through_stays_through_when_the_rest_is_given_up() {
    let failed = Outcome::Failed(Refusal {
        error: "the delivery ended without an outcome".into(),
        retry_after: None,
    });
    let give_up: [fn(&mut Engine<Event>, &Outcome); 2] = [
        |engine, outcome| assert!(engine.outcome(NOW, outcome).is_empty()),
        |engine, _| engine.give_back(),
    ];
    for give_up in give_up {
        let mut engine = engine(6, Isolation::Batch);
        assert_eq!(ids(engine.progress(&[0, 1, 4])), [0, 1]);
        assert_eq!(ids(engine.progress(&[1, 2])), [2]);
        give_up(&mut engine, &failed);
        assert_eq!(engine.checkpoint(), None, "nothing has failed");
        let Step::Deliver(range) = engine.next(NOW) else {
            panic!("a delivery");
        };
        let again: BTreeSet<_> = engine.to_deliver(&range).map(|event| event.id).collect();
        assert_eq!(
            again,
            [3, 5, 6, 7, 8].into(),
            "but for what is through ahead"
        );
    }
}

#[test]
fn a_delivery_that_is_given_back_was_none() {
    let mut engine = engine(6, Isolation::Batch);
    engine.give_back();
    assert_eq!(engine.checkpoint(), None);
    assert_eq!(engine.next(NOW), Step::Deliver(0..6));
}

#[test]
fn what_is_tried_by_itself_has_its_outcome_alone() {
    let mut engine = engine(1, Isolation::Batch);
    assert!(engine.progress(&[0]).is_empty());
    assert_eq!(ids(engine.outcome(NOW, &Outcome::Delivered)), [0]);
    assert!(engine.progress(&[0]).is_empty());
}
