//! An endpoint, in both modes of kind http.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use outbox_tests::{Receiver, Reply, Request, Sql};
use postgres::Client;
use serde_json::{Value, json};

use crate::destination::{Destination, Repeats};

const SECRET: &str = "signing-secret-4711";
const POISON: &str = "test.poison";
const LATER: &str = "test.later";
/// The largest body that it takes, of a batch of good events and of any good event.
const LIMIT: usize = 64 * 1024;

/// An endpoint that is open to some events, and from a moment on to more.
struct Endpoint {
    receiver: Receiver,
    welcomes: Arc<AtomicBool>,
}

impl Endpoint {
    fn start() -> Self {
        let endpoint = Self {
            receiver: Receiver::start(),
            welcomes: Arc::default(),
        };
        endpoint.answer();
        endpoint
    }

    fn answer(&self) {
        let welcomes = Arc::clone(&self.welcomes);
        self.receiver.reply_with(move |request| {
            if request.body.len() > LIMIT {
                return Reply::status(413);
            }
            let events = events(request);
            let failures: Vec<_> = events
                .iter()
                .filter_map(|event| {
                    let id = event["id"].as_str()?;
                    match event["type"].as_str()? {
                        POISON => Some((id, "never", true)),
                        LATER if !welcomes.load(Ordering::SeqCst) => Some((id, "not yet", false)),
                        _ => None,
                    }
                })
                .collect();
            Reply::failures(&failures)
        });
    }

    fn config(&self, mode: &str) -> Value {
        json!({
            "url": self.receiver.url(), "mode": mode, "secret": "conformance", "timeout_ms": 1000,
        })
    }
}

fn events(request: &Request) -> Vec<Value> {
    match serde_json::from_slice(&request.body).expect("JSON") {
        Value::Array(events) => events,
        event => vec![event],
    }
}

macro_rules! endpoint {
    ($name:ident, $mode:literal, one_order: $one_order:literal) => {
        pub struct $name(Endpoint);

        impl Destination for $name {
            const KIND: &'static str = "http";
            const REPEATS: Repeats = Repeats::Shown;
            const ONE_ORDER: bool = $one_order;

            fn start() -> Self {
                Self(Endpoint::start())
            }

            fn prepare(&mut self, db: &mut Client) {
                db.run(&format!("select outbox.set_secret('conformance', array['{SECRET}'])"));
            }

            fn config(&self) -> Value {
                self.0.config($mode)
            }

            fn bad_configs(&self) -> Vec<Value> {
                vec![
                    json!({"url": "ftp://example.com"}),
                    json!({"url": "http://example.com", "mode": "double"}),
                    json!({"url": "http://example.com", "timeout_ms": 0}),
                    json!({"url": "http://example.com", "secret": ""}),
                    json!({"url": "http://example.com", "headers": {"content-type": "x"}}),
                ]
            }

            fn secrets(&self) -> Vec<&'static str> {
                vec![SECRET]
            }

            fn arrived(&mut self, _db: &mut Client) -> Vec<String> {
                self.0.receiver.ids()
            }

            fn go_down(&mut self, _db: &mut Client) {
                self.0.receiver.stop();
            }

            fn come_up(&mut self, _db: &mut Client) {
                self.0.receiver.start_again();
            }

            fn hang(&mut self) {
                self.0.receiver.reply_always(Reply::hang());
            }

            fn resume(&mut self) {
                self.0.answer();
            }

            fn poison_topic(&self) -> String {
                POISON.to_owned()
            }

            fn unwelcome_topic(&self) -> String {
                LATER.to_owned()
            }

            fn welcome(&mut self, _db: &mut Client) {
                self.0.welcomes.store(true, Ordering::SeqCst);
            }
        }
    };
}

endpoint!(Batch, "batch", one_order: true);
endpoint!(Single, "single", one_order: false);
