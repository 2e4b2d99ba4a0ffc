//! A receiver that refuses some events for good, and a sink that has set them aside.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use outbox_tests::{Cluster, Receiver, Reply, Request};
use postgres::Client;
use serde_json::{Value, json};

use super::{DeadLetter, emit, http_sink, ids, quick, until_dead, until_idle};

pub fn events_in(request: &Request) -> Vec<Value> {
    serde_json::from_slice(&request.body).expect("a batch")
}

/// A receiver that refuses some events for good, and the events that it refuses.
pub struct Picky {
    pub receiver: Receiver,
    refused: Arc<Mutex<HashSet<String>>>,
}

impl Picky {
    pub fn start() -> Self {
        let receiver = Receiver::start();
        let refused = Arc::new(Mutex::new(HashSet::<String>::new()));
        let picky = Self {
            receiver,
            refused: Arc::clone(&refused),
        };
        picky.receiver.reply_with(move |request| {
            let refused = refused.lock().unwrap();
            let events = events_in(request);
            let named: Vec<_> = events
                .iter()
                .filter_map(|event| event["id"].as_str())
                .filter(|id| refused.contains(*id))
                .map(|id| (id, "not wanted here", true))
                .collect();
            Reply::failures(&named)
        });
        picky
    }

    pub fn refuses(&self, numbers: impl IntoIterator<Item = i64>) {
        *self.refused.lock().unwrap() = ids(numbers).into_iter().collect();
    }
}

/// A cluster with a sink `picky` that has set these events aside, of 1 to `last`.
pub fn with_dead_letters(last: i64, dead: &[i64]) -> (Cluster, Client, Picky, Vec<DeadLetter>) {
    let cluster = quick().setting("outbox.retention_min_age", "0").start();
    let mut db = cluster.connect();
    let picky = Picky::start();
    picky.refuses(dead.iter().copied());
    http_sink(&mut db, "picky", &picky.receiver, json!({}), "");
    emit(&mut db, 1..=last);
    let letters = until_dead(&mut db, "picky", dead.len());
    until_idle(&mut db, "picky");
    picky.receiver.wait_for((last - dead.len() as i64) as usize);
    (cluster, db, picky, letters)
}
