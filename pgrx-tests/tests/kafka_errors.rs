//! What brokers can answer, from a cluster that answers as the test says: librdkafka's own mock, since no real one fails to order.

mod scene;

use std::collections::HashSet;

use outbox_tests::{Cluster, Sql, records, until};
use postgres::Client;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use scene::{
    assert_clear, emit, ids, ids_without, quick, quoted, status, until_dead, until_idle,
    until_status,
};
use serde_json::json;

const TOPIC: &str = "outbox.test.numbered";
const PARTITIONS: i32 = 2;
const BROKERS: i32 = 3;

type Brokers = MockCluster<'static, DefaultProducerContext>;

/// A cluster of three brokers with a topic, and a cluster of ours with the sink `log`.
fn with_sink() -> (Brokers, Cluster, Client) {
    let brokers = MockCluster::new(BROKERS).expect("a mock cluster starts");
    brokers
        .create_topic(TOPIC, PARTITIONS, BROKERS)
        .expect("a topic can be created");
    let cluster = quick().start();
    let mut db = cluster.connect();
    let config = json!({"brokers": brokers.bootstrap_servers(), "timeout_ms": 4000});
    db.run(&format!(
        "select outbox.create_sink('log', 'kafka', config => {}, batch_size => 20)",
        quoted(&config.to_string())
    ));
    (brokers, cluster, db)
}

/// The ids of everything in the topic, partition by partition.
fn arrived(brokers: &Brokers) -> Vec<String> {
    let records = records(&brokers.bootstrap_servers(), TOPIC);
    records
        .iter()
        .map(|record| record.id().to_owned())
        .collect()
}

#[track_caller]
fn assert_arrived(brokers: &Brokers, expected: &[String]) {
    let arrived: HashSet<_> = arrived(brokers).into_iter().collect();
    assert_eq!(arrived, expected.iter().cloned().collect());
}

fn until_delivered(db: &mut Client, events: i64) {
    until_status(db, "log", "through", |status| status.delivered == events);
    until_idle(db, "log");
}

#[track_caller]
fn trouble(db: &mut Client, says: &str) {
    let seen = until_status(db, "log", says, |status| {
        status
            .last_error
            .as_deref()
            .is_some_and(|error| error.contains(says))
    });
    assert_clear(&seen.last_error.expect("it says why"));
    assert_eq!(seen.dead_letters, 0);
}

/// Runs events past a topic of which brokers say this, for a while.
fn said_of_the_topic(error: RDKafkaRespErr, says: &str) {
    let (brokers, _cluster, mut db) = with_sink();
    brokers
        .topic_error(TOPIC, error)
        .expect("an error can be set");
    for n in 1..=3 {
        emit(&mut db, n..=n);
    }
    trouble(&mut db, says);
    assert_eq!(status(&mut db, "log").delivered, 0);
    let none = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR;
    brokers
        .topic_error(TOPIC, none)
        .expect("an error can be cleared");
    until_delivered(&mut db, 3);
    assert_arrived(&brokers, &ids(1..=3));
}

#[test]
fn a_topic_that_is_not_there_is_an_outage_that_says_so() {
    said_of_the_topic(
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
        "topic \"outbox.test.numbered\" does not exist, and the broker has not created it",
    );
}

#[test]
fn a_topic_that_may_not_be_written_to_is_an_outage_that_says_so() {
    said_of_the_topic(
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        "no permission to write to topic \"outbox.test.numbered\"",
    );
}

#[test]
fn a_topic_that_is_not_there_holds_up_no_other() {
    let (brokers, cluster, mut db) = with_sink();
    cluster.set("outbox.poison_attempts", "1000");
    let error = RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART;
    brokers
        .topic_error("outbox.later", error)
        .expect("an error can be set");
    db.run(
        "select outbox.emit(case n when 4 then 'later' else 'test.numbered' end, '1', source => 'test', id => 'n' || n)
           from generate_series(1, 9) n",
    );
    trouble(&mut db, "topic \"outbox.later\" does not exist");
    until("the others to arrive", || {
        (arrived(&brokers).len() == 8).then_some(())
    });
    let none = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR;
    brokers
        .topic_error("outbox.later", none)
        .expect("an error can be cleared");
    until_delivered(&mut db, 9);
    assert_arrived(&brokers, &ids_without(9, &[4]));
    assert_eq!(status(&mut db, "log").dead_letters, 0);
}

#[test]
fn an_event_that_the_broker_finds_too_large_is_set_aside_and_its_company_is_not() {
    let (brokers, _cluster, mut db) = with_sink();
    let too_large = RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE;
    // A whole batch is refused, and says nothing of any event in it.
    brokers.request_errors(RDKafkaApiKey::Produce, &[too_large; 2]);
    emit(&mut db, 1..=20);
    until_delivered(&mut db, 20);
    assert_eq!(status(&mut db, "log").dead_letters, 0);
    assert_arrived(&brokers, &ids(1..=20));
    // One is refused by itself.
    brokers.request_errors(RDKafkaApiKey::Produce, &[too_large]);
    emit(&mut db, 21..=21);
    let dead = until_dead(&mut db, "log", 1);
    assert_eq!((dead[0].id(), dead[0].attempts), ("n21", 1));
    assert_eq!(
        dead[0].error,
        "larger than topic \"outbox.test.numbered\" takes"
    );
    emit(&mut db, 22..=25);
    until_delivered(&mut db, 24);
    assert_arrived(&brokers, &ids_without(25, &[21]));
}

#[test]
fn errors_that_pass_are_not_even_an_attempt() {
    let (brokers, _cluster, mut db) = with_sink();
    brokers.request_errors(
        RDKafkaApiKey::Produce,
        &[
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
        ],
    );
    emit(&mut db, 1..=20);
    until_delivered(&mut db, 20);
    let mut arrived = arrived(&brokers);
    arrived.sort_by_key(|id| id[1..].parse::<i64>().expect("a number"));
    assert_eq!(arrived, ids(1..=20), "each once");
}

#[test]
fn a_producer_that_the_brokers_have_forgotten_is_replaced() {
    let (brokers, _cluster, mut db) = with_sink();
    emit(&mut db, 1..=5);
    until_delivered(&mut db, 5);
    brokers.request_errors(
        RDKafkaApiKey::Produce,
        &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER],
    );
    emit(&mut db, 6..=20);
    until_delivered(&mut db, 20);
    brokers.request_errors(
        RDKafkaApiKey::Produce,
        &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH],
    );
    emit(&mut db, 21..=30);
    until_delivered(&mut db, 30);
    assert_arrived(&brokers, &ids(1..=30));
    assert_eq!(status(&mut db, "log").dead_letters, 0);
}

#[test]
fn order_survives_leaders_that_change_and_brokers_that_go_down() {
    const EVENTS: i64 = 6_000;
    let (brokers, _cluster, mut db) = with_sink();
    db.run(&format!(
        "select outbox.emit('test.numbered', jsonb_build_object('n', n), subject => (n % 10)::text, source => 'test', id => 'n' || n)
           from generate_series(1, {EVENTS}) n"
    ));
    for round in 1..=6_i32 {
        let broker = round % BROKERS + 1;
        for partition in 0..PARTITIONS {
            let moved = brokers.partition_leader(TOPIC, partition, Some(broker));
            moved.expect("a leader can be moved");
        }
        let down = (round + 1) % BROKERS + 1;
        brokers.broker_down(down).expect("a broker can go down");
        until_status(&mut db, "log", "some more", |status| {
            status.delivered >= EVENTS * i64::from(round) / 8
        });
        brokers.broker_up(down).expect("a broker can come up");
    }
    until_delivered(&mut db, EVENTS);
    let mut latest = [0; 10];
    let mut seen = HashSet::new();
    for id in arrived(&brokers) {
        let n: i64 = id[1..].parse().expect("a number");
        if seen.insert(n) {
            let before = std::mem::replace(&mut latest[(n % 10) as usize], n);
            assert!(before < n, "{n} after {before}");
        }
    }
    assert_eq!(seen.len() as i64, EVENTS);
    assert_eq!(status(&mut db, "log").dead_letters, 0);
}

#[test]
fn brokers_that_are_all_down_are_an_outage() {
    let (brokers, _cluster, mut db) = with_sink();
    emit(&mut db, 1..=3);
    until_delivered(&mut db, 3);
    for broker in 1..=BROKERS {
        brokers.broker_down(broker).expect("a broker can go down");
    }
    emit(&mut db, 4..=6);
    trouble(&mut db, "not acknowledged within 4s");
    for broker in 1..=BROKERS {
        brokers.broker_up(broker).expect("a broker can come up");
    }
    until_delivered(&mut db, 6);
    assert_arrived(&brokers, &ids(1..=6));
}
