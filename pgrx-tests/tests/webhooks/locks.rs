//! A transaction that a tenant leaves open holds up nobody, and costs no event.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use outbox_tests::{Receiver, Reply, Sql, until};
use postgres::Client;
use serde_json::json;

use super::{emit, sent, started, until_states, webhook};
use crate::scene::{http_sink, ids};

/// How many of a tenant's events have become deliveries in some state.
fn count(db: &mut Client, tenant: &str, state: &str) -> i64 {
    db.one(&format!(
        "select count(*) from outbox.webhook_deliveries where tenant = '{tenant}' and state = '{state}'"
    ))
}

#[track_caller]
fn until_count(db: &mut Client, tenant: &str, state: &str, wanted: i64) {
    until(&format!("{wanted} {state} for {tenant}"), || {
        (count(db, tenant, state) == wanted).then_some(())
    });
}

#[test]
fn a_webhook_that_is_just_being_changed_misses_nothing() {
    let (cluster, mut db) = started();
    let (receiver, other, sink) = (Receiver::start(), Receiver::start(), Receiver::start());
    let id = webhook(&mut db, "acme", &receiver, "");
    webhook(&mut db, "globex", &other, "");
    http_sink(&mut db, "s", &sink, json!({}), "");
    let mut tenant = cluster.connect();
    let mut n = 1;
    for call in [
        format!("alter_webhook('{id}', description => 'x')"),
        format!("rotate_webhook_secret('{id}')"),
        format!("enable_webhook('{id}')"),
        format!("redeliver_webhook('{id}', '-infinity')"),
        format!("test_webhook('{id}')"),
        format!("delete_webhook('{id}')"),
    ] {
        tenant.run(&format!("begin; select outbox.{call}"));
        emit(&mut db, "acme", "a", n..=n);
        emit(&mut db, "globex", "a", n + 1..=n + 1);
        until_count(&mut db, "acme", "delivered", n / 2 + 1);
        until_count(&mut db, "globex", "delivered", n / 2 + 1);
        sink.wait_for_distinct(usize::try_from(n).expect("few") + 1);
        tenant.run("rollback");
        n += 2;
    }
    let reached: Vec<String> = sent(&receiver)
        .into_iter()
        .filter(|id| id.starts_with('n'))
        .collect();
    assert_eq!(reached, ids((1..n).step_by(2)));
}

#[test]
fn what_is_known_of_an_endpoint_is_written_once_its_row_is_free() {
    let (cluster, mut db) = started();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    let id = webhook(&mut db, "acme", &receiver, "");
    webhook(&mut db, "globex", &other, "");
    receiver.reply_next([Reply::status(500), Reply::status(410)]);
    emit(&mut db, "acme", "a", 1..=1);
    until("a failure", || {
        db.one::<bool>(&format!(
            "select failing_since is not null or not enabled from outbox.webhooks where id = '{id}'"
        ))
        .then_some(())
    });
    until_count(&mut db, "acme", "dead", 1);
    db.run(&format!("select outbox.enable_webhook('{id}')"));
    receiver.reply_next([Reply::status(410)]);
    let mut tenant = cluster.connect();
    tenant.run(&format!(
        "begin; select outbox.alter_webhook('{id}', description => 'x')"
    ));
    emit(&mut db, "acme", "a", 2..=2);
    until_count(&mut db, "acme", "dead", 2);
    emit(&mut db, "globex", "a", 3..=3);
    until_count(&mut db, "globex", "delivered", 1);
    tenant.run("commit");
    until("the endpoint to be disabled", || {
        db.one::<Option<String>>(&format!(
            "select disabled_reason from outbox.webhooks where id = '{id}'"
        ))
    });
}

#[test]
fn what_comes_of_an_attempt_is_written_once_its_delivery_is_free() {
    let (cluster, mut db) = started();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    webhook(&mut db, "acme", &receiver, "");
    webhook(&mut db, "globex", &other, "");
    let open = Arc::new(AtomicBool::new(false));
    receiver.reply_with({
        let open = Arc::clone(&open);
        move |_| {
            while !open.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
            Reply::ok()
        }
    });
    emit(&mut db, "acme", "a", 1..=1);
    let delivery: i64 = until("the delivery", || {
        db.one("select min(id) from outbox.webhook_deliveries")
    });
    until("the attempt", || (receiver.connections() > 0).then_some(()));
    let mut tenant = cluster.connect();
    tenant.run(&format!(
        "begin; select outbox.redeliver_webhook({delivery})"
    ));
    open.store(true, Ordering::SeqCst);
    receiver.wait_for_requests(1);
    // Whatever becomes of that one, others go on.
    for n in 2..=4 {
        emit(&mut db, "globex", "a", n..=n);
        until_count(&mut db, "globex", "delivered", n - 1);
    }
    assert_eq!(count(&mut db, "acme", "pending"), 1);
    tenant.run("rollback");
    until_states(&mut db, &["delivered 4"]);
    assert_eq!(
        db.one::<i32>(&format!(
            "select attempts from outbox.webhook_deliveries where id = {delivery}"
        )),
        1
    );
}
