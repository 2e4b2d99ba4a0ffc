//! What a destination is not to see, it does not get, whatever its kind. What becomes of dead letters is tested with kind postgres.

mod scene;

use outbox_tests::{Kafka, Nats, Receiver, Sql};
use scene::{quick, quoted, until_status};
use serde_json::{Value, json};

#[test]
fn what_is_redacted_leaves_by_no_way() {
    let (batch, single) = (Receiver::start(), Receiver::start());
    let nats = Nats::start();
    nats.create_stream("ALL", &["order.>"]);
    let kafka = Kafka::start();
    let topics = ["binary", "structured"];
    for topic in topics {
        kafka.create_topic(topic, 1);
    }
    let cluster = quick().start();
    let mut db = cluster.connect();
    let sinks = [
        ("batch", "http", json!({"url": batch.url()})),
        (
            "single",
            "http",
            json!({"url": single.url(), "mode": "single"}),
        ),
        ("nats", "nats", json!({"url": nats.url()})),
        (
            "binary",
            "kafka",
            json!({"brokers": kafka.brokers(), "topic": "binary"}),
        ),
        (
            "structured",
            "kafka",
            json!({"brokers": kafka.brokers(), "topic": "structured", "mode": "structured"}),
        ),
    ];
    for (sink, kind, mut config) in sinks.clone() {
        config["redact"] = json!(["customer.email", "cards[].number"]);
        let config = quoted(&config.to_string());
        db.run(&format!(
            "select outbox.create_sink('{sink}', '{kind}', config => {config})"
        ));
    }
    db.run(
        r#"select outbox.emit('order.placed', '{"customer": {"email": "me@example.com", "id": 7.50}, "cards": [{"number": "4711"}, {"x": 1}]}')"#,
    );
    for (sink, ..) in &sinks {
        until_status(&mut db, sink, "through", |status| status.delivered == 1);
    }
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).expect("JSON");
    let stored = nats.stored("ALL");
    let [binary, structured] = topics.map(|topic| {
        let record = kafka.records(topic).remove(0);
        parsed(&record.value.expect("a value"))
    });
    // In jsonb's own order, and with each digit.
    let expected = r#"{"cards":[{"number":null},{"x":1}],"customer":{"id":7.50,"email":null}}"#;
    for (sink, arrived) in [
        ("batch", &batch.events()[0].data()),
        ("single", &single.events()[0].data()),
        ("nats", &parsed(&stored[0].payload)["data"]),
        ("binary", &binary),
        ("structured", &structured["data"]),
    ] {
        assert_eq!(arrived.to_string(), expected, "{sink}");
    }
}
