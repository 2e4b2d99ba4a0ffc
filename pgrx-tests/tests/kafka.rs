//! Kind kafka against a broker that speaks its protocol: what arrives where, read back by a consumer of the tests' own, and what is
//! said when it does not.

mod scene;

use std::collections::HashMap;

use outbox_tests::{Cluster, Kafka, Record, Sql, Tls};
use postgres::Client;
use scene::{
    assert_clear, emit, ids, quick, quoted, replace_dispatcher, status, until_dead, until_idle,
    until_status,
};
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

#[test]
fn the_order_of_each_key_survives_cut_connections() {
    const EVENTS: i64 = 20_000;
    let (mut broker, _cluster, mut db) = with_sink(&[NUMBERED], json!({}));
    db.run("select outbox.alter_sink('log', batch_size => 500)");
    db.run(&format!(
        "select outbox.emit('test.numbered', jsonb_build_object('n', n), subject => (n % 10)::text, source => 'test', id => 'n' || n)
           from generate_series(1, {EVENTS}) n"
    ));
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
    until_delivered(&mut db, EVENTS);
    let mut latest: HashMap<String, i64> = HashMap::new();
    let mut seen = std::collections::HashSet::new();
    for record in broker.records(NUMBERED) {
        let n: i64 = record.id()[1..].parse().expect("a number");
        if seen.insert(n) {
            let key = record.key.expect("a key");
            let before = latest.insert(key.clone(), n).unwrap_or_default();
            assert!(before < n, "key {key}: {n} after {before}");
        }
    }
    assert_eq!(seen.len() as i64, EVENTS);
    assert_eq!(until_idle(&mut db, "log").dead_letters, 0);
}

#[test]
fn a_broker_that_is_not_there_is_said_to_be_so() {
    let (mut broker, _cluster, mut db) = with_sink(&[NUMBERED], json!({"timeout_ms": 1000}));
    broker.gate().close();
    emit(&mut db, 1..=3);
    // What the client tells of the broker may come too late for the first attempt; once told, it stays.
    let refused = |status: &scene::Status| {
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

/// A broker behind TLS, and a sink that trusts its authority, if that is what its certificate says.
fn over_tls(tls: Tls, trusting: bool) -> (Kafka, Cluster, Client) {
    let (broker, ca_file) = Kafka::start_over_tls(tls);
    broker.create_topic(NUMBERED, 3);
    let cluster = quick().start();
    let mut db = cluster.connect();
    let mut config = json!({"timeout_ms": 2000, "properties": {"security.protocol": "SSL"}});
    if trusting {
        config["ca_file"] = json!(ca_file);
    }
    kafka_sink(&mut db, &broker, config, "");
    emit(&mut db, 1..=3);
    (broker, cluster, db)
}

#[test]
fn over_tls_with_a_certificate_that_is_trusted() {
    let (broker, _cluster, mut db) = over_tls(Tls::Good, true);
    until_delivered(&mut db, 3);
    assert_eq!(sorted_ids(&broker.records(NUMBERED)), ids(1..=3));
}

#[test]
fn a_process_that_ends_takes_the_clients_threads_along() {
    // A crash would end our session, and so would an end that takes too long for it.
    let (broker, cluster, mut db) = over_tls(Tls::Good, true);
    for round in 1..=5 {
        until_delivered(&mut db, round * 3);
        replace_dispatcher(&mut db, "log");
        emit(&mut db, round * 3 + 1..=round * 3 + 3);
    }
    until_delivered(&mut db, 18);
    // Nor while a delivery is on its way and stays there.
    broker.hang();
    emit(&mut db, 19..=20);
    until_status(&mut db, "log", "in trouble", |status| status.attempts >= 1);
    replace_dispatcher(&mut db, "log");
    db.run("select outbox.drop_sink('log')");
    let log = cluster.log();
    assert!(
        !log.contains("terminated by signal"),
        "a process has crashed"
    );
    assert!(!log.contains("panic"), "the log tells of a panic");
}

#[test]
fn certificates_that_are_not_trusted() {
    for (tls, trusting) in [
        (Tls::Good, false),
        (Tls::Expired, true),
        (Tls::WrongHost, true),
    ] {
        let (broker, _cluster, mut db) = over_tls(tls, trusting);
        let seen = until_status(&mut db, "log", "in trouble", |status| status.attempts >= 2);
        let error = seen.last_error.expect("it says why");
        assert_clear(&error);
        assert!(error.contains("certificate verify failed"), "{error}");
        assert_eq!(seen.dead_letters, 0);
        assert!(broker.records(NUMBERED).is_empty());
    }
}

#[test]
fn a_login_that_is_refused_is_said_and_its_password_is_not() {
    let broker = Kafka::start_closed();
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('kafka', array['first-4711', 'second-4711'])");
    let properties = json!({
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "nobody",
    });
    let config = json!({"timeout_ms": 3000, "secret": "kafka", "properties": properties});
    kafka_sink(&mut db, &broker, config, "");
    emit(&mut db, 1..=3);
    let seen = until_status(&mut db, "log", "in trouble", |status| status.attempts >= 3);
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    assert!(error.to_lowercase().contains("sasl"), "{error}");
    assert!(!error.contains("4711"), "{error}");
    assert_eq!((seen.delivered, seen.dead_letters), (0, 0));
}
