//! Receivers that fail now and then, in the ways that matter.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_tests::{Receiver, Reply, Request};
use serde_json::Value;

use crate::dice::Dice;

/// What a receiver has taken responsibility for: versions by subject, each event where it was first.
#[derive(Default)]
pub struct Arrivals {
    pub seen: HashSet<String>,
    pub by_subject: BTreeMap<String, Vec<i64>>,
    pub again: u64,
}

impl Arrivals {
    fn take(&mut self, request: &Request) {
        let events: Vec<Value> = serde_json::from_slice(&request.body).expect("a batch");
        for event in events {
            let id = event["id"].as_str().expect("an id").to_owned();
            if !self.seen.insert(id) {
                self.again += 1;
                continue;
            }
            let subject = event["subject"].as_str().expect("a subject").to_owned();
            let version = event["data"]["version"].as_i64().expect("a version");
            self.by_subject.entry(subject).or_default().push(version);
        }
    }
}

/// A receiver that now and then refuses, and now and then takes events and never says so.
pub fn unreliable(dice: Dice, pace: Duration) -> (Receiver, Arc<Mutex<Arrivals>>) {
    let receiver = Receiver::start();
    let arrivals = Arc::new(Mutex::new(Arrivals::default()));
    let (taken, dice) = (Arc::clone(&arrivals), Mutex::new(dice));
    receiver.reply_with(move |request| {
        let fate = {
            let mut dice = dice.lock().unwrap();
            dice.pause(pace);
            dice.below(100)
        };
        match fate {
            0..3 => Reply::status(500),
            3..5 => Reply::reset(),
            5 => Reply::status(429).header("retry-after", "0"),
            6 => Reply::hang(),
            7 => Reply::raw("HTTP/1.1 2"),
            fate => {
                taken.lock().unwrap().take(request);
                match fate {
                    8 => Reply::reset(),
                    9 => Reply::close(),
                    _ => Reply::ok(),
                }
            }
        }
    });
    (receiver, arrivals)
}
