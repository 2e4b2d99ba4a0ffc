//! Webhooks of tenants: who gets what, what becomes of failures, and where nothing is sent.

#[path = "../scene/mod.rs"]
mod scene;

mod delivering;
mod endpoints;
mod failing;
mod limits;
mod load;
mod locks;
mod removing;
mod status;
mod tenants;

use std::time::Instant;

use outbox_tests::{Cluster, DEADLINE, Receiver, Sql, cluster, until};
use postgres::Client;
use scene::quick;

/// A cluster whose webhooks may go to receivers on this machine, and are retried quickly.
fn builder() -> cluster::Builder {
    quick()
        .setting("outbox.allow_private_networks", "on")
        .setting("outbox.webhook_http", "on")
        .setting("outbox.webhook_ports", "")
        .setting("outbox.webhook_waits", "0.05, 0.1, 0.2")
        .setting("outbox.webhook_attempts", "4")
}

/// Registers an endpoint of a tenant; `arguments` are further ones of `create_webhook`.
#[track_caller]
fn webhook(db: &mut Client, tenant: &str, to: &Receiver, arguments: &str) -> String {
    db.one(&format!(
        "select outbox.create_webhook('{tenant}', '{}'{arguments})",
        to.url()
    ))
}

/// Emits one event of a tenant for each number, in one transaction; event `n` has the id `n<n>`.
#[track_caller]
fn emit(db: &mut Client, tenant: &str, topic: &str, numbers: std::ops::RangeInclusive<i64>) {
    let (first, last) = numbers.into_inner();
    db.run(&format!(
        "select outbox.emit('{topic}', jsonb_build_object('n', n, 'price', 1.50), subject => n::text, tenant => '{tenant}', id => 'n' || n)
           from generate_series({first}, {last}) n"
    ));
}

/// Waits until deliveries are as said: `<state> <how many>`, in order.
#[track_caller]
fn until_states(db: &mut Client, wanted: &[&str]) {
    let start = Instant::now();
    loop {
        let states: Vec<String> = db.all(
            "select state || ' ' || count(*) from outbox.webhook_deliveries group by state order by state",
        );
        if states == wanted {
            return;
        }
        assert!(start.elapsed() < DEADLINE, "{states:?}, not {wanted:?}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Waits until the fan-out has seen everything that is committed.
#[track_caller]
fn until_fanned_out(db: &mut Client) {
    let mark: String = db.one(
        "select outbox.format_position(txid, seq) from outbox.events order by seq desc limit 1",
    );
    until("the fan-out", || {
        db.one::<bool>(&format!(
            "select pg_visible_in_snapshot(split_part('{mark}', ':', 1)::xid8, upto) and at_seq >= split_part('{mark}', ':', 2)::bigint
               from outbox.cursors where name = 'webhooks:outbox'"
        ))
        .then_some(())
    });
}

/// The ids of the events that a receiver has been sent, each once, in order of their numbers.
fn sent(receiver: &Receiver) -> Vec<String> {
    let mut ids: Vec<String> = receiver
        .requests()
        .iter()
        .map(|request| request.header("webhook-id").expect("an id").to_owned())
        .collect();
    ids.sort_by_key(|id| id.trim_start_matches('n').parse::<i64>().unwrap_or(0));
    ids.dedup();
    ids
}

fn started() -> (Cluster, Client) {
    let cluster = builder().start();
    let db = cluster.connect();
    (cluster, db)
}
