//! The order of each key's events, while connections and the broker itself go down.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use outbox_tests::{Kafka, Sql};
use postgres::Client;
use serde_json::json;

use crate::scene::{Status, assert_clear, emit, quick, status, until_idle, until_status};
use crate::{NUMBERED, kafka_sink, until_delivered, with_sink};

/// Events of ten keys.
fn emit_many(db: &mut Client, numbers: RangeInclusive<i64>) {
    let (first, last) = numbers.into_inner();
    db.run(&format!(
        "select outbox.emit('test.numbered', jsonb_build_object('n', n), subject => (n % 10)::text, source => 'test', id => 'n' || n)
           from generate_series({first}, {last}) n"
    ));
}

/// All of them arrive, and where each is first, it is behind those of its key that came before it.
#[track_caller]
fn assert_in_order(db: &mut Client, broker: &Kafka, events: i64) {
    until_delivered(db, events);
    let mut latest: HashMap<String, i64> = HashMap::new();
    let mut seen = HashSet::new();
    for record in broker.records(NUMBERED) {
        let n: i64 = record.id()[1..].parse().expect("a number");
        if seen.insert(n) {
            let key = record.key.expect("a key");
            let before = latest.insert(key.clone(), n).unwrap_or_default();
            assert!(before < n, "key {key}: {n} after {before}");
        }
    }
    assert_eq!(seen.len() as i64, events);
    assert_eq!(until_idle(db, "log").dead_letters, 0);
}

#[test]
fn the_order_of_each_key_survives_cut_connections() {
    const EVENTS: i64 = 20_000;
    let (mut broker, _cluster, mut db) = with_sink(&[NUMBERED], json!({}));
    db.run("select outbox.alter_sink('log', batch_size => 500)");
    emit_many(&mut db, 1..=EVENTS);
    for share in 1..=6 {
        until_status(&mut db, "log", "some delivered", |status| {
            status.delivered >= EVENTS * share / 8
        });
        if share % 2 == 0 {
            broker.gate().close();
            broker.gate().open();
        } else {
            broker.gate().cut();
        }
    }
    assert_in_order(&mut db, &broker, EVENTS);
}

#[test]
fn the_order_of_each_key_survives_a_broker_that_is_killed() {
    const ROUNDS: i64 = 4;
    const A_ROUND: i64 = 3_000;
    let mut broker = Kafka::start_lasting();
    broker.create_topic(NUMBERED, 3);
    let cluster = quick().start();
    let mut db = cluster.connect();
    let config = json!({"timeout_ms": 1000});
    kafka_sink(&mut db, &broker, config, ", batch_size => 100");
    for round in 0..ROUNDS {
        let before = round * A_ROUND;
        emit_many(&mut db, before + 1..=before + A_ROUND - 100);
        // Nothing is under way: this broker notes a producer's sequence before the records, so that one that is killed in between
        // takes them for duplicates when they come again, acknowledges them, and has none of them, whatever client sends them.
        until_delivered(&mut db, before + A_ROUND - 100);
        broker.kill();
        emit_many(&mut db, before + A_ROUND - 99..=before + A_ROUND);
        if round % 2 == 0 {
            until_status(&mut db, "log", "in trouble", |status| status.attempts >= 1);
        }
        broker.start_again();
    }
    assert_in_order(&mut db, &broker, ROUNDS * A_ROUND);
}

#[test]
fn a_broker_that_is_not_there_is_said_to_be_so() {
    let (mut broker, _cluster, mut db) = with_sink(&[NUMBERED], json!({"timeout_ms": 1000}));
    broker.gate().close();
    emit(&mut db, 1..=3);
    // What the client tells of the broker may come too late for the first attempt; once told, it stays.
    let refused = |status: &Status| {
        let error = status.last_error.as_deref();
        error.is_some_and(|error| error.contains("Connection refused"))
    };
    until_status(&mut db, "log", "in trouble", refused);
    let attempts = status(&mut db, "log").attempts;
    let seen = until_status(&mut db, "log", "in trouble", |status| {
        status.attempts > attempts + 1
    });
    assert!(refused(&seen), "{:?}", seen.last_error);
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    assert!(error.contains("not acknowledged within 1s"), "{error}");
    broker.gate().open();
    until_delivered(&mut db, 3);
    assert_eq!(status(&mut db, "log").dead_letters, 0);
}
