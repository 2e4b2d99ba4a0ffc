//! What an endpoint, a function and a pull consumer have had so far, by topic.

use outbox_tests::{Receiver, Sql};
use postgres::Client;

/// A function sink's function that writes topics down, in order.
pub const TAKE: &str = "create table seen (n bigint generated always as identity, topic text, payload jsonb, event outbox.event);
    create function take(events outbox.event[]) returns void language sql as
        'insert into seen (topic, payload, event) select events[n].topic, events[n].payload, events[n] from generate_subscripts(events, 1) n order by n'";

/// Everything a pull sink has, acknowledged.
pub fn pull(db: &mut Client, sink: &str) -> Vec<String> {
    let mut topics = Vec::new();
    loop {
        let batch: Vec<String> = db.all(&format!("select topic from outbox.poll('{sink}', 7)"));
        if batch.is_empty() {
            return topics;
        }
        assert!(db.one::<bool>(&format!("select outbox.ack('{sink}')")));
        topics.extend(batch);
    }
}

/// The topics that an endpoint has had.
pub fn web(receiver: &Receiver) -> Vec<String> {
    let topics = receiver.events().into_iter().map(|event| event.topic);
    topics.collect()
}

/// The topics that the function has written down.
pub fn called(db: &mut Client) -> Vec<String> {
    db.all("select topic from seen order by n")
}
