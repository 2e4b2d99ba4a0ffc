//! Deliveries to a real receiver on the loopback.

mod checkpoint;
mod failures;
mod signatures;
mod single;
mod success;
mod trust;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::receiver::{Received, Receiver, Reply};
use crate::dispatch::{Outcome, Refusal};
use crate::envelope::{Event, Position};
use crate::sinks::{Batch, Came, Client, Defaults, Secrets, parse};

/// The event `evt_<n>`, of a key of its own.
pub(in crate::sinks) fn event(n: u32) -> Event {
    Event {
        position: Position {
            txid: 700,
            seq: n.into(),
        },
        id: format!("evt_{n}"),
        topic: "order.placed".into(),
        source: Some("public.orders".into()),
        subject: Some(n.to_string()),
        tenant: None,
        time: 0,
        payload: Some(r#"{"total": 10.50}"#.into()),
        headers: None,
        part: None,
        is_record: false,
    }
}

/// `evt_1` to `evt_<count>`.
pub(super) fn events(count: u32) -> Vec<Arc<Event>> {
    (1..=count).map(|n| Arc::new(event(n))).collect()
}

fn batch(count: u32) -> Batch {
    Batch {
        events: events(count),
        ..Batch::default()
    }
}

fn secrets(values: &[&str]) -> Secrets {
    Secrets::new(values.iter().map(|value| value.to_string()))
}

/// A client and the runtime that it lives in.
struct Sender {
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Sender {
    /// To `url`, with more of a `config`.
    fn new(url: &str, more: Value) -> Self {
        Self::try_new(url, more).unwrap()
    }

    fn try_new(url: &str, mut config: Value) -> Result<Self, String> {
        config["url"] = url.into();
        let defaults = Defaults {
            http_timeout: Duration::from_secs(60),
            topic_prefix: "outbox".into(),
        };
        let config = parse("http", &config).unwrap();
        Ok(Self {
            client: Client::open(&config, &defaults)?,
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap(),
        })
    }

    fn deliver(&self, batch: &Batch) -> Outcome {
        match self.came(batch) {
            Came::To(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn came(&self, batch: &Batch) -> Came {
        self.runtime.block_on(self.client.deliver(batch))
    }

    /// The refusal of a delivery that fails as a whole.
    fn refused(&self, batch: &Batch) -> Refusal {
        match self.deliver(batch) {
            Outcome::Failed(refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }
}

/// A URL where nobody listens.
fn nowhere() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}/", listener.local_addr().unwrap())
}

fn no_config() -> Value {
    json!({})
}
