//! A sink of each kind, and whether each gets what is in the table.

use outbox_tests::{Cluster, Receiver, Sql, until};
use postgres::Client;
use serde_json::json;

use crate::scene;

/// A cluster whose dispatcher has time, and a sink of each kind. The function keeps the events themselves.
pub struct Scene {
    pub receiver: Receiver,
    pub cluster: Cluster,
}

impl Scene {
    pub fn start() -> Self {
        let cluster = scene::quick()
            .setting("outbox.http_timeout", "2min")
            .start();
        let scene = Self {
            receiver: Receiver::start(),
            cluster,
        };
        create_sinks(&mut scene.cluster.connect(), &scene.receiver);
        scene
    }
}

/// The sinks `web`, `fn` and `pull`.
pub fn create_sinks(db: &mut Client, receiver: &Receiver) {
    db.run(
        "create table seen (n bigint generated always as identity, event outbox.event);
         create function take(events outbox.event[]) returns void language sql as
            'insert into seen (event) select events[n] from generate_subscripts(events, 1) n order by n'",
    );
    scene::http_sink(db, "web", receiver, json!({}), "");
    db.run(
        r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}');
           select outbox.create_sink('pull', 'pull')"#,
    );
}

/// Waits until the function has had as many events, and asserts that they are those of the table, and that a pull consumer and a
/// reader get the same.
#[track_caller]
pub fn same_everywhere(db: &mut Client, count: usize) {
    until("the function to be called", || {
        (db.one::<i64>("select count(*) from seen") >= count as i64).then_some(())
    });
    let columns = "txid, seq, id, topic, source, subject, tenant, time, payload, headers";
    let same = |db: &mut Client, what: &str| -> i64 {
        db.one(&format!(
            "select count(*) from (select {columns} from outbox.events intersect all {what}) both_have"
        ))
    };
    let count = count as i64;
    assert_eq!(same(db, "select (event).* from seen"), count, "function");
    let read = format!("select {columns} from outbox.read(null, 100000)");
    assert_eq!(same(db, &read), count, "read");
    let poll = format!("select {columns} from outbox.poll('pull', 100000)");
    assert_eq!(same(db, &poll), count, "poll");
    assert!(db.one::<bool>("select outbox.ack('pull')"));
}
