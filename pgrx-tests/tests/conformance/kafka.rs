//! A broker with a topic.

use outbox_tests::{Kafka, Sql};
use postgres::Client;
use serde_json::{Value, json};

use crate::destination::{Destination, Repeats};

const SECRET: &str = "sasl-password-4711";

pub struct Broker(Kafka);

impl Destination for Broker {
    const KIND: &'static str = "kafka";
    const REPEATS: Repeats = Repeats::Shown;
    const ONE_ORDER: bool = false;

    fn start() -> Self {
        let broker = Kafka::start();
        broker.create_topic("outbox.test.numbered", 3);
        Self(broker)
    }

    fn prepare(&mut self, db: &mut Client) {
        db.run(&format!(
            "select outbox.set_secret('conformance', array['{SECRET}'])"
        ));
    }

    fn config(&self) -> Value {
        json!({
            "brokers": self.0.brokers(), "secret": "conformance", "timeout_ms": 2000,
            "properties": {"message.max.bytes": "65536"},
        })
    }

    fn bad_configs(&self) -> Vec<Value> {
        let with =
            |name: &str, value: &str| json!({"brokers": "localhost", "properties": {name: value}});
        vec![
            json!({"brokers": "kafka://localhost"}),
            json!({"brokers": "localhost", "topic": "a b"}),
            json!({"brokers": "localhost", "topic": "{nothing}"}),
            json!({"brokers": "localhost", "mode": "plain"}),
            json!({"brokers": "localhost", "secret_property": "sasl.password"}),
            json!({"brokers": "localhost", "ca_file": "ca.pem"}),
            with("acks", "1"),
            with("enable.idempotence", "false"),
            with("bootstrap.servers", "elsewhere"),
            with("sasl.password", SECRET),
            with("plugin.library.paths", "x.so"),
            with("linger.ms", "fast"),
            with("no.such.property", "1"),
            with("max.in.flight.requests.per.connection", "6"),
        ]
    }

    fn secrets(&self) -> Vec<&'static str> {
        vec![SECRET]
    }

    fn arrived(&mut self, _db: &mut Client) -> Vec<String> {
        let records = self.0.records("outbox.test.numbered");
        records
            .iter()
            .map(|record| record.id().to_owned())
            .collect()
    }

    fn go_down(&mut self, _db: &mut Client) {
        self.0.gate().close();
    }

    fn come_up(&mut self, _db: &mut Client) {
        self.0.gate().open();
    }

    fn hang(&mut self) {
        self.0.gate().stick(true);
    }

    fn resume(&mut self) {
        self.0.gate().stick(false);
    }

    fn poison_topic(&self) -> String {
        "x".repeat(250)
    }
}
