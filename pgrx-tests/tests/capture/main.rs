//! Captured tables: every change becomes an event, exactly, in order, whoever makes it and in whatever way.

#[path = "../scene/mod.rs"]
mod scene;

mod ddl;
mod direct;
mod memory;
mod numbers;
mod order;
mod others_code;
mod partitions;
mod payloads;
mod privileges;
mod restore;
mod settings;
mod stale;
mod types;
mod writers;

use outbox_tests::{Cluster, Sql};
use postgres::Client;
use serde_json::Value;

/// What a captured change came to.
#[derive(Debug, Clone, PartialEq)]
struct Change {
    topic: String,
    source: String,
    subject: Option<String>,
    tenant: Option<String>,
    payload: Value,
    headers: Value,
}

impl Change {
    /// The last segment of the topic.
    fn operation(&self) -> &str {
        self.topic.rsplit('.').next().unwrap_or_default()
    }

    /// Operation and subject, as in `update 7`.
    fn short(&self) -> String {
        format!(
            "{} {}",
            self.operation(),
            self.subject.as_deref().unwrap_or("-")
        )
    }
}

/// A cluster whose dispatcher is stopped, for nothing here is delivered.
fn quiet() -> (Cluster, Client) {
    let cluster = scene::quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.stop()");
    (cluster, db)
}

/// The events so far, in the order of their numbers, which are then removed.
#[track_caller]
fn taken(db: &mut Client) -> Vec<Change> {
    let rows = db
        .query(
            r#"with gone as (delete from outbox.events returning *)
               select topic, coalesce(source, ''), subject, tenant, coalesce(payload, 'null'), coalesce(headers, 'null') from gone order by seq"#,
            &[],
        )
        .expect("events can be taken");
    rows.iter()
        .map(|row| Change {
            topic: row.get(0),
            source: row.get(1),
            subject: row.get(2),
            tenant: row.get(3),
            payload: row.get(4),
            headers: row.get(5),
        })
        .collect()
}

/// What one statement, or several, came to.
#[track_caller]
fn after(db: &mut Client, sql: &str) -> Vec<Change> {
    db.run(sql);
    taken(db)
}

/// The same, as in `update 7`.
#[track_caller]
fn short(db: &mut Client, sql: &str) -> Vec<String> {
    after(db, sql).iter().map(Change::short).collect()
}

/// The payload of the only event.
#[track_caller]
fn payload(db: &mut Client, sql: &str) -> Value {
    let changes = after(db, sql);
    assert_eq!(changes.len(), 1, "{sql}: {changes:?}");
    changes.into_iter().next().expect("there is one").payload
}
