//! Sinks that are isolated by key: an event that fails parks itself and the later ones of its (source, subject), and all others
//! flow on.

#[path = "../scene/mod.rs"]
mod scene;

mod altering;
mod functions;
mod http;
mod lasting;
mod poison;
mod remote;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use outbox_tests::{DEADLINE, Receiver, Reply, Request, Sql};
use postgres::Client;
use serde_json::Value;

/// Emits events in one transaction: `a1 b1` are two with these ids, of the subjects `a` and `b`. `-1` has none.
#[track_caller]
fn emit_of(db: &mut Client, source: &str, ids: &str) {
    db.run(&format!(
        "select outbox.emit('test.keyed', to_jsonb(id), subject => nullif(left(id, 1), '-'), source => '{source}', id => id)
           from regexp_split_to_table('{ids}', ' ') id"
    ));
}

#[track_caller]
fn emit(db: &mut Client, ids: &str) {
    emit_of(db, "test", ids);
}

/// The ids of what is parked for a sink, in order.
#[track_caller]
fn parked(db: &mut Client, sink: &str) -> String {
    db.one(&format!(
        "select coalesce(string_agg(e.id, ' ' order by p.number), '')
           from outbox.parked p join outbox.events e using (txid, seq) where p.sink = '{sink}'"
    ))
}

#[track_caller]
fn until_parked(db: &mut Client, sink: &str, ids: &str) {
    let start = std::time::Instant::now();
    loop {
        let now = parked(db, sink);
        if now == ids {
            return;
        }
        assert!(
            start.elapsed() < DEADLINE,
            "parked is {now:?} and never {ids:?}"
        );
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Those of these ids that are of one subject, in order.
fn of_subject(ids: &[String], subject: &str) -> String {
    let of_it = ids.iter().filter(|id| id.starts_with(subject));
    of_it.cloned().collect::<Vec<_>>().join(" ")
}

/// A receiver that refuses what it is told to, with status 500 for the whole request.
struct Moody {
    receiver: Receiver,
    refused: Arc<Mutex<HashSet<String>>>,
}

impl Moody {
    fn start() -> Self {
        let receiver = Receiver::start();
        let refused = Arc::new(Mutex::new(HashSet::<String>::new()));
        let moody = Self {
            receiver,
            refused: Arc::clone(&refused),
        };
        moody.receiver.reply_with(move |request| {
            let refused = refused.lock().unwrap();
            match ids_in(request).iter().any(|id| refused.contains(id)) {
                true => Reply::status(500),
                false => Reply::ok(),
            }
        });
        moody
    }

    fn refuses(&self, ids: &str) {
        let ids = ids.split_whitespace().map(str::to_owned);
        *self.refused.lock().unwrap() = ids.collect();
    }

    /// Waits until it has taken these, at least once.
    #[track_caller]
    fn takes(&self, ids: &str) {
        let wanted = ids.split(' ').collect::<Vec<_>>();
        outbox_tests::until(&format!("{ids} to arrive"), || {
            let there = self.receiver.ids();
            let all = wanted.iter().all(|id| there.iter().any(|one| one == id));
            all.then_some(())
        });
    }

    /// What it has taken of a subject, in order.
    fn taken(&self, subject: &str) -> String {
        of_subject(&self.receiver.ids(), subject)
    }

    /// How often it was sent an event.
    fn tries(&self, id: &str) -> usize {
        let requests = self.receiver.requests();
        let with_it = requests.iter();
        let with_it = with_it.filter(|request| ids_in(request).iter().any(|one| one == id));
        with_it.count()
    }
}

/// The ids of the events in a request, which holds one or a batch.
fn ids_in(request: &Request) -> Vec<String> {
    let body: Value = serde_json::from_slice(&request.body).expect("JSON");
    let events = match body {
        Value::Array(events) => events,
        event => vec![event],
    };
    let ids = events.iter().filter_map(|event| event["id"].as_str());
    ids.map(str::to_owned).collect()
}
