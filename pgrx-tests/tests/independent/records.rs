//! What the sink sends to Kafka, read back by the client kafka-python, and by the CloudEvents SDK as an event.

use std::collections::HashMap;
use std::process::Command;

use outbox_tests::{Kafka, Sql, python_libraries};
use serde_json::{Value, json};

use crate::scene::{quick, quoted, until_status};

const READ: &str = include_str!("records.py");

/// All records of these topics, each partition's in order.
#[track_caller]
fn read(broker: &Kafka, topics: &[&str]) -> Vec<Value> {
    let output = Command::new("python3")
        .args(["-c", READ, &broker.brokers()])
        .args(topics)
        .env("PYTHONPATH", python_libraries())
        .output()
        .expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the client fails: {said}");
    let lines = String::from_utf8(output.stdout).expect("JSON is UTF-8");
    let parsed = lines.lines().map(serde_json::from_str);
    parsed.collect::<Result<_, _>>().expect("JSON lines")
}

/// Has sinks in both modes send these events, and returns what each of the topics `binary` and `structured` holds.
fn sent(events: &str, count: i64) -> [Vec<Value>; 2] {
    let broker = Kafka::start();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let modes = ["binary", "structured"];
    for mode in modes {
        broker.create_topic(mode, 3);
        let config = json!({"brokers": broker.brokers(), "mode": mode, "topic": mode});
        let config = quoted(&config.to_string());
        db.run(&format!(
            "select outbox.create_sink('{mode}', 'kafka', config => {config})"
        ));
    }
    db.run(events);
    for mode in modes {
        until_status(&mut db, mode, "through", |status| status.delivered == count);
    }
    modes.map(|mode| read(&broker, &[mode]))
}

#[test]
fn keys_headers_and_values() {
    let [binary, structured] = sent(
        r#"insert into outbox.events (id, topic, source, subject, tenant, "time", payload, headers) values
           ('a "quoted" id', 'order.placed', 'public.orders', 'ü:7', 'acme', '2024-02-29 12:00:00.123456+00',
            '{"n": 12345678901234567890.50, "s": "ü 👍", "deep": [[{"a": null}]]}', '{"X-Trace": "größe"}')"#,
        1,
    );
    let headers = binary[0]["headers"].as_array().expect("headers");
    let position = headers
        .iter()
        .find(|header| header[0] == "ce_sequence")
        .expect("a position")[1]
        .clone();
    let mut expected = vec![
        json!(["content-type", "application/json"]),
        json!(["ce_specversion", "1.0"]),
        json!(["ce_id", "a \"quoted\" id"]),
        json!(["ce_source", "public.orders"]),
        json!(["ce_type", "order.placed"]),
        json!(["ce_subject", "ü:7"]),
        json!(["ce_time", "2024-02-29T12:00:00.123456Z"]),
        json!(["ce_sequence", position]),
        json!(["ce_tenant", "acme"]),
        json!(["ce_xtrace", "größe"]),
    ];
    let mut found = headers.clone();
    let by_name = |header: &Value| header[0].as_str().map(str::to_owned);
    expected.sort_by_key(by_name);
    found.sort_by_key(by_name);
    assert_eq!(found, expected);
    let value = binary[0]["value"].as_str().expect("a value");
    assert!(value.contains("12345678901234567890.50"), "{value}");

    let content_type = json!([["content-type", "application/cloudevents+json"]]);
    assert_eq!(structured[0]["headers"], content_type);
    for record in binary.iter().chain(&structured) {
        assert_eq!(record["key"], json!("ü:7"));
        let event = &record["event"];
        for (name, value) in [
            ("specversion", "1.0"),
            ("id", "a \"quoted\" id"),
            ("type", "order.placed"),
            ("source", "public.orders"),
            ("subject", "ü:7"),
            ("tenant", "acme"),
            ("xtrace", "größe"),
            ("time", "2024-02-29T12:00:00.123456+00:00"),
        ] {
            assert_eq!(event["attributes"][name], value, "{name}");
        }
        assert_eq!(event["data"]["s"], json!("ü 👍"));
        assert_eq!(event["data"]["deep"], json!([[{"a": null}]]));
    }
}

#[test]
fn events_without_a_subject_or_without_data() {
    let [binary, structured] = sent(
        "select outbox.emit('a', '1', source => 's', id => 'no subject');
         select outbox.emit('a', subject => 'k', source => 's', id => 'no data')",
        2,
    );
    for records in [&binary, &structured] {
        let keys: HashMap<_, _> = records
            .iter()
            .map(|record| {
                let id = record["headers"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .find(|header| header[0] == "ce_id")
                    .map_or(&record["event"]["attributes"]["id"], |header| &header[1]);
                (id.as_str().expect("an id"), &record["key"])
            })
            .collect();
        assert_eq!(keys["no subject"], &Value::Null);
        assert_eq!(keys["no data"], &json!("k"));
    }
    let values = |records: &[Value]| records.iter().filter(|r| r["value"].is_null()).count();
    assert_eq!(values(&binary), 1, "what deletes the key");
    assert_eq!(values(&structured), 0, "an event like any other");
}

#[test]
fn each_key_has_one_partition_and_its_order() {
    const EVENTS: i64 = 500;
    let [binary, structured] = sent(
        &format!(
            "select outbox.emit('a', to_jsonb(n), subject => (n % 7)::text, source => 's') from generate_series(1, {EVENTS}) n"
        ),
        EVENTS,
    );
    for records in [&binary, &structured] {
        let mut latest: HashMap<&str, (i64, i64)> = HashMap::new();
        for record in records {
            let key = record["key"].as_str().expect("a key");
            let partition = record["partition"].as_i64().expect("a number");
            let n = record["event"]["data"].as_i64().expect("a number");
            let before = latest.insert(key, (partition, n));
            if let Some((other, before)) = before {
                assert_eq!(partition, other, "key {key}");
                assert!(before < n, "key {key}: {n} after {before}");
            }
        }
        assert_eq!(records.len() as i64, EVENTS);
        assert_eq!(latest.len(), 7);
    }
}
