//! That nobody gets further than his own rights by way of the extension: not by the code that a sink runs, not by names that he
//! plants, and not by what is shown and logged.

#[path = "../scene/mod.rs"]
mod scene;

mod attempts;
mod deferred;
mod filters;
mod names;
mod owners;
mod shown;
mod unsafe_code;

use outbox_tests::{Cluster, Receiver, Sql};
use postgres::Client;
use scene::quoted;

/// Login roles `op` and `other` that operate and are nobody special, each with a schema of its name, and a table
/// `public.secret` that only superusers may read.
fn with_operators(cluster: &Cluster) -> Client {
    let mut db = cluster.connect();
    for role in ["op", "other"] {
        db.run(&format!(
            "create role {role} login; create schema {role} authorization {role}; select outbox.grant('{role}', 'operate')"
        ));
    }
    db.run("create table public.secret as select 'hunter2' as word");
    db
}

/// Creates a function sink; `arguments` are further ones of `create_sink`.
#[track_caller]
fn function_sink(db: &mut Client, id: &str, function: &str, arguments: &str) {
    db.run(&format!(
        "select outbox.create_sink('{id}', 'function', config => '{{\"function\": \"{function}\"}}'{arguments})"
    ));
}

/// Creates an http sink; `arguments` are further ones of `create_sink`.
#[track_caller]
fn http_sink(db: &mut Client, id: &str, to: &Receiver, arguments: &str) {
    let config = quoted(&format!("{{\"url\": \"{}\"}}", to.url()));
    db.run(&format!(
        "select outbox.create_sink('{id}', 'http', config => {config}{arguments})"
    ));
}

/// What a pass of a sink comes to in this session: outcome, and the error if there is one.
#[track_caller]
fn tick(db: &mut Client, sink: &str) -> (String, Option<String>) {
    let row = db
        .query_one("select outcome, error from outbox.tick($1)", &[&sink])
        .unwrap_or_else(|error| panic!("a tick of {sink}: {error:?}"));
    (row.get(0), row.get(1))
}

/// That a pass of a sink delivers.
#[track_caller]
fn delivers(db: &mut Client, sink: &str) {
    assert_eq!(tick(db, sink), ("delivered".to_owned(), None), "{sink}");
}

/// That a pass of a sink fails, with an error that holds this.
#[track_caller]
fn fails(db: &mut Client, sink: &str, with: &str) {
    let (outcome, error) = tick(db, sink);
    let error = error.unwrap_or_default();
    assert!(
        outcome == "failed" && error.contains(with),
        "{sink}: {outcome}, {error}, not {with}"
    );
}
