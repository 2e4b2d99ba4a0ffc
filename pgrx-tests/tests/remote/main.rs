//! Sinks of kind postgres, with another cluster as the destination.

#[path = "../scene/mod.rs"]
mod scene;
#[path = "../workers/mod.rs"]
mod workers;

mod failing;
mod once;
mod rights;
mod shape;

use outbox_tests::{Cluster, Sql, until};
use postgres::Client;
use scene::quoted;
use serde_json::{Value, json};

/// A cluster that knows nothing of the extension, with a table `public.applied` that takes an event any number of times.
pub fn destination() -> Cluster {
    let cluster = Cluster::builder().preload(false).extension(false).start();
    cluster.connect().run(
        "create table applied (
             at bigint generated always as identity, id text, topic text, payload jsonb, subject text, seq bigint)",
    );
    cluster
}

/// Creates a sink that inserts into `applied`. `config` is added; `arguments` are further ones of `create_sink`.
#[track_caller]
pub fn postgres_sink(db: &mut Client, id: &str, to: &Cluster, config: Value, arguments: &str) {
    let mut whole = json!({"dsn": to.url("app"), "table": "applied"});
    let (Value::Object(members), Value::Object(more)) = (&mut whole, config) else {
        panic!("a config is an object");
    };
    members.extend(more);
    members.retain(|_, value| !value.is_null());
    let config = quoted(&whole.to_string());
    let rest = if arguments.is_empty() {
        String::new()
    } else {
        format!(", {arguments}")
    };
    db.run(&format!(
        "select outbox.create_sink('{id}', 'postgres', config => {config}{rest})"
    ));
}

/// What was applied, in order, as often as it was.
pub fn applied(remote: &mut Client) -> Vec<String> {
    remote.all("select id from applied order by at")
}

/// Waits until so many rows are there, and returns what was applied.
#[track_caller]
pub fn until_applied(remote: &mut Client, rows: usize) -> Vec<String> {
    until(&format!("{rows} rows"), || {
        (remote.one::<i64>("select count(*) from applied") >= rows as i64).then_some(())
    });
    applied(remote)
}
