//! A NATS server with a stream, and from a moment on with two.

use async_nats::ConnectOptions;
use outbox_tests::{Nats, Sql};
use postgres::Client;
use serde_json::{Value, json};

use crate::destination::{Destination, Repeats};

const TOKEN: &str = "server-token-4711";

pub struct JetStream {
    server: Nats,
    welcomes: bool,
}

impl Destination for JetStream {
    const KIND: &'static str = "nats";
    /// Within the stream's duplicate window.
    const REPEATS: Repeats = Repeats::Recognised;
    const ONE_ORDER: bool = true;

    fn start() -> Self {
        let configuration = format!("max_payload: 65536\nauthorization {{ token: \"{TOKEN}\" }}");
        let server = Nats::start_with(&configuration, &[], || {
            ConnectOptions::with_token(TOKEN.to_owned())
        });
        server.create_stream("EVENTS", &["test.>"]);
        Self {
            server,
            welcomes: false,
        }
    }

    fn prepare(&mut self, db: &mut Client) {
        db.run(&format!(
            "select outbox.set_secret('conformance', array['{TOKEN}'])"
        ));
    }

    fn config(&self) -> Value {
        json!({
            "url": self.server.url(), "auth": "token", "secret": "conformance", "timeout_ms": 1000,
        })
    }

    fn bad_configs(&self) -> Vec<Value> {
        let url = "nats://127.0.0.1";
        vec![
            json!({"url": "http://127.0.0.1"}),
            json!({"url": "nats://user:password@127.0.0.1"}),
            json!({"url": url, "subject": "a b"}),
            json!({"url": url, "subject": "{nothing}"}),
            json!({"url": url, "subject": "a.>"}),
            json!({"url": url, "stream": "a.b"}),
            json!({"url": url, "secret": "conformance"}),
            json!({"url": url, "auth": "token"}),
            json!({"url": url, "auth": "spell", "secret": "conformance"}),
            json!({"url": url, "ca_file": "/etc/ca.pem"}),
            json!({"url": url, "timeout_ms": "1s"}),
        ]
    }

    fn secrets(&self) -> Vec<&'static str> {
        vec![TOKEN]
    }

    fn arrived(&mut self, _db: &mut Client) -> Vec<String> {
        let mut stored = self.server.stored("EVENTS");
        if self.welcomes {
            stored.extend(self.server.stored("LATER"));
        }
        stored
            .iter()
            .map(|message| message.id().to_owned())
            .collect()
    }

    fn go_down(&mut self, _db: &mut Client) {
        self.server.stop();
    }

    fn come_up(&mut self, _db: &mut Client) {
        self.server.start_again();
    }

    fn hang(&mut self) {
        self.server.hang();
    }

    fn resume(&mut self) {
        self.server.resume();
    }

    fn poison_topic(&self) -> String {
        "test.no subject".to_owned()
    }

    fn unwelcome_topic(&self) -> String {
        "later.welcome".to_owned()
    }

    fn welcome(&mut self, _db: &mut Client) {
        self.server.create_stream("LATER", &["later.>"]);
        self.welcomes = true;
    }
}
