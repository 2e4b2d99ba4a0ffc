//! Kind kafka against a broker that speaks its protocol: what arrives where, read back by a consumer of the tests' own, and what is
//! said when it does not.

#[path = "../scene/mod.rs"]
mod scene;

mod access;
mod order;

use std::collections::HashMap;

use outbox_tests::{Cluster, Kafka, Record, Sql};
use postgres::Client;
use scene::{emit, ids, quick, quoted, until_dead, until_idle, until_status};
use serde_json::{Value, json};

const NUMBERED: &str = "outbox.test.numbered";

fn kafka_sink(db: &mut Client, to: &Kafka, config: Value, arguments: &str) {
    let mut whole = json!({"brokers": to.brokers(), "timeout_ms": 5000});
    for (key, value) in config.as_object().expect("a config is an object") {
        whole[key] = value.clone();
    }
    let config = quoted(&whole.to_string());
    db.run(&format!(
        "select outbox.create_sink('log', 'kafka', config => {config} {arguments})"
    ));
}

/// A broker with these topics, and a cluster with the sink `log`.
fn with_sink(topics: &[&str], config: Value) -> (Kafka, Cluster, Client) {
    let broker = Kafka::start();
    for topic in topics {
        broker.create_topic(topic, 3);
    }
    let cluster = quick().start();
    let mut db = cluster.connect();
    kafka_sink(&mut db, &broker, config, "");
    (broker, cluster, db)
}

fn until_delivered(db: &mut Client, events: i64) {
    until_status(db, "log", "through", |status| status.delivered == events);
}

fn sorted_ids(records: &[Record]) -> Vec<String> {
    let mut ids: Vec<_> = records
        .iter()
        .map(|record| record.id().to_owned())
        .collect();
    ids.sort_by_key(|id| id[1..].parse::<i64>().unwrap_or_default());
    ids
}

#[test]
fn an_event_is_a_record_with_its_attributes_as_headers() {
    let (broker, _cluster, mut db) = with_sink(&["outbox.public.orders"], json!({}));
    db.run(
        r#"select outbox.emit('order.placed', '{"total": 10.50}', subject => '7', source => 'public.orders',
               tenant => 'acme', headers => '{"X-Trace": "größe", "n": 1.50}', id => 'evt 1')"#,
    );
    until_delivered(&mut db, 1);
    let record = broker.records("outbox.public.orders").remove(0);
    assert_eq!(record.key.as_deref(), Some("7"));
    assert_eq!(record.value.as_deref(), Some(&br#"{"total": 10.50}"#[..]));
    let position: String = db.one("select outbox.format_position(txid, seq) from outbox.events");
    for (name, value) in [
        ("content-type", "application/json"),
        ("ce_specversion", "1.0"),
        ("ce_id", "evt 1"),
        ("ce_source", "public.orders"),
        ("ce_type", "order.placed"),
        ("ce_subject", "7"),
        ("ce_tenant", "acme"),
        ("ce_sequence", &position),
        ("ce_xtrace", "größe"),
        ("ce_n", "1.50"),
    ] {
        assert_eq!(record.headers[name], value, "{name}");
    }
    assert!(record.headers["ce_time"].ends_with('Z'));
    assert_eq!(record.headers.len(), 11);
}

#[test]
fn an_event_without_data_deletes_its_key() {
    let (broker, _cluster, mut db) = with_sink(&["outbox.public.orders"], json!({}));
    db.run("select outbox.emit('order.deleted', subject => '7', source => 'public.orders', id => 'n1')");
    until_delivered(&mut db, 1);
    let record = broker.records("outbox.public.orders").remove(0);
    assert_eq!((record.id(), record.key.as_deref()), ("n1", Some("7")));
    assert_eq!(record.value, None);
    assert!(!record.headers.contains_key("content-type"));
}

#[test]
fn structured_mode_sends_the_whole_event() {
    let (broker, _cluster, mut db) =
        with_sink(&["outbox.public.orders"], json!({"mode": "structured"}));
    db.run(r#"select outbox.emit('order.placed', '{"total": 10.50}', subject => '7', source => 'public.orders', id => 'n1')"#);
    until_delivered(&mut db, 1);
    let record = broker.records("outbox.public.orders").remove(0);
    assert_eq!(record.headers.len(), 1);
    assert_eq!(
        record.headers["content-type"],
        "application/cloudevents+json"
    );
    let value = String::from_utf8(record.value.expect("a value")).expect("JSON is UTF-8");
    assert!(value.contains(r#""data":{"total": 10.50}"#), "{value}");
    let event: Value = serde_json::from_str(&value).expect("JSON");
    assert_eq!(
        (event["id"].as_str(), event["type"].as_str()),
        (Some("n1"), Some("order.placed"))
    );
}

#[test]
fn each_table_has_its_topic_and_each_key_its_partition() {
    let topics = [
        "outbox.public.orders",
        "outbox.public.Order_Lines",
        "outbox.invoice.paid",
    ];
    let (broker, _cluster, mut db) = with_sink(&topics, json!({}));
    db.run(
        r#"select outbox.emit('outbox.public.orders.update', jsonb_build_object('n', n), subject => (n % 5)::text,
                   source => 'public.orders', id => 'n' || n) from generate_series(1, 50) n;
           select outbox.emit('x', '1', subject => '1', source => 'public."Order Lines"', id => 'n51');
           select outbox.emit('invoice.paid', '1', subject => '1', source => 'billing', id => 'n52')"#,
    );
    until_delivered(&mut db, 52);
    let orders = broker.records(topics[0]);
    assert_eq!(sorted_ids(&orders), ids(1..=50));
    let mut partitions: HashMap<String, i32> = HashMap::new();
    let mut last: HashMap<String, i64> = HashMap::new();
    for record in &orders {
        let key = record.key.clone().expect("a key");
        let partition = *partitions.entry(key.clone()).or_insert(record.partition);
        assert_eq!(partition, record.partition, "key {key}");
        let n: i64 = record.id()[1..].parse().expect("a number");
        assert!(
            last.insert(key.clone(), n).unwrap_or_default() < n,
            "key {key}"
        );
    }
    assert_eq!(sorted_ids(&broker.records(topics[1])), ["n51"]);
    assert_eq!(sorted_ids(&broker.records(topics[2])), ["n52"]);
}

#[test]
fn the_prefix_is_a_setting_and_is_read_again() {
    let (broker, cluster, mut db) = with_sink(&[NUMBERED, "cdc.test.numbered"], json!({}));
    emit(&mut db, 1..=2);
    until_delivered(&mut db, 2);
    cluster.set("outbox.topic_prefix", "cdc");
    // The dispatcher reads it with its next look.
    let mut last = 2;
    while broker.records("cdc.test.numbered").is_empty() {
        last += 1;
        emit(&mut db, last..=last);
        until_delivered(&mut db, last);
    }
    let mut records = broker.records(NUMBERED);
    records.extend(broker.records("cdc.test.numbered"));
    assert_eq!(sorted_ids(&records), ids(1..=last));
}

#[test]
fn a_template_makes_the_topic() {
    let (broker, _cluster, mut db) =
        with_sink(&["acme-orders"], json!({"topic": "{tenant}-{table}"}));
    db.run(
        "select outbox.emit('a', '1', source => 'public.orders', tenant => 'acme', id => 'n1');
         select outbox.emit('a', '1', source => 'public.orders', id => 'n2');
         select outbox.emit('a', '1', source => 'public.orders', tenant => 'acme', id => 'n3')",
    );
    let dead = until_dead(&mut db, "log", 1);
    assert_eq!(dead[0].id(), "n2");
    assert_eq!(
        dead[0].error,
        "no topic \"{tenant}-{table}\": the event has no {tenant}"
    );
    until_idle(&mut db, "log");
    assert_eq!(sorted_ids(&broker.records("acme-orders")), ["n1", "n3"]);
}
