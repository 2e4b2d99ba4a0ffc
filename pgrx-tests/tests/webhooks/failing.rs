//! What becomes of deliveries that fail, and of endpoints.

use std::time::SystemTime;

use outbox_tests::{Receiver, Reply, Sql, until};
use postgres::Client;

use super::{builder, emit, sent, started, until_states, webhook};
use crate::scene::ids;

/// The seconds between the attempts at an event.
fn waits(receiver: &Receiver, id: &str) -> Vec<f64> {
    let times = receiver.requests().into_iter();
    let times = times.filter(|request| request.header("webhook-id") == Some(id));
    let times = times.map(|request| request.at).collect::<Vec<_>>();
    let between = |pair: &[SystemTime]| pair[1].duration_since(pair[0]).expect("in order");
    times
        .windows(2)
        .map(|pair| between(pair).as_secs_f64())
        .collect()
}

/// A column of the only webhook.
#[track_caller]
fn said(db: &mut Client, column: &str) -> Option<String> {
    db.one(&format!("select {column}::text from outbox.webhooks"))
}

#[test]
fn a_failing_delivery_is_tried_by_the_schedule_and_then_dead() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::status(503));
    let id = webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=2);
    until_states(&mut db, &["dead 2"]);
    let attempts: Vec<String> = db.all(
        "select concat_ws(' ', d.event_id, a.attempt, a.status, a.error) from outbox.webhook_attempts a
           join outbox.webhook_deliveries d on d.id = a.delivery order by 1",
    );
    let expected: Vec<String> = ["n1", "n2"]
        .iter()
        .flat_map(|id| (1..=4).map(move |n| format!("{id} {n} 503 HTTP 503 Service Unavailable")))
        .collect();
    assert_eq!(attempts, expected);
    // As they came in: what is on record was written a little later.
    for id in ["n1", "n2"] {
        for (seconds, wait) in waits(&receiver, id).into_iter().zip([0.05, 0.1, 0.2]) {
            assert!(seconds >= wait * 0.9 - 0.002, "{id}: {seconds}, not {wait}");
        }
    }
    assert!(said(&mut db, "failing_since").is_some());

    // Once more, now that it is up: one, and then all that are dead.
    receiver.reply_always(Reply::ok());
    let one: i64 = db.one("select id from outbox.webhook_deliveries where event_id = 'n1'");
    db.run(&format!("select outbox.redeliver_webhook({one})"));
    until_states(&mut db, &["dead 1", "delivered 1"]);
    assert_eq!(
        db.one::<i64>(&format!(
            "select outbox.redeliver_webhook('{id}', now() + interval '1 hour')"
        )),
        0
    );
    assert_eq!(
        db.one::<i64>(&format!(
            "select outbox.redeliver_webhook('{id}', now() - interval '1 hour')"
        )),
        1
    );
    until_states(&mut db, &["delivered 2"]);
    assert_eq!(said(&mut db, "failing_since"), None);
    let last: i32 = db.one("select max(attempt) from outbox.webhook_attempts");
    assert_eq!(last, 5, "what was tried before is still told");
}

#[test]
fn retry_after_is_honoured() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    receiver.reply_next([Reply::status(429).header("retry-after", "2")]);
    webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=1);
    receiver.wait_for_requests(1);
    // What comes meanwhile waits as well.
    emit(&mut db, "acme", "a", 2..=3);
    until_states(&mut db, &["delivered 3"]);
    assert!(waits(&receiver, "n1")[0] >= 1.99);
    let first = receiver.requests()[0].at;
    for request in &receiver.requests()[1..] {
        let since = request.at.duration_since(first).expect("later");
        assert!(since.as_secs_f64() >= 1.99);
    }
}

/// However many wait to be tried again, and however long.
#[test]
fn what_is_new_goes_out_at_once_when_the_endpoint_is_back() {
    let cluster = builder().setting("outbox.webhook_waits", "3600").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::status(503));
    webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=50);
    until("all to have failed once", || {
        db.one::<bool>("select count(*) = 50 from outbox.webhook_deliveries where attempts = 1")
            .then_some(())
    });
    receiver.reply_always(Reply::ok());
    emit(&mut db, "acme", "a", 51..=53);
    until_states(&mut db, &["delivered 3", "pending 50"]);
}

#[test]
fn an_endpoint_that_wants_no_more_is_disabled() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    receiver.reply_next([Reply::status(410)]);
    let id = webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=1);
    until("the endpoint to be disabled", || {
        said(&mut db, "disabled_reason")
    });
    assert_eq!(
        said(&mut db, "disabled_reason").as_deref(),
        Some("the endpoint answered 410 Gone")
    );
    assert_eq!(said(&mut db, "enabled").as_deref(), Some("false"));
    emit(&mut db, "acme", "a", 2..=3);
    super::until_fanned_out(&mut db);
    until_states(&mut db, &["dead 1"]);
    db.run(&format!("select outbox.enable_webhook('{id}')"));
    emit(&mut db, "acme", "a", 4..=4);
    until_states(&mut db, &["dead 1", "delivered 1"]);
    assert_eq!(sent(&receiver), ids([1, 4]));
}

#[test]
fn an_endpoint_that_only_fails_for_long_is_disabled_and_says_why() {
    let cluster = builder()
        .setting("outbox.webhook_disable_after", "1")
        .setting("outbox.webhook_attempts", "100")
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::redirect("http://127.0.0.1:1/"));
    let id = webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=1);
    let reason = until("the endpoint to be disabled", || {
        said(&mut db, "disabled_reason")
    });
    assert!(
        reason.starts_with("every attempt has failed since 2"),
        "{reason}"
    );
    // What is pending stays so, and goes on when it is enabled again.
    until_states(&mut db, &["pending 1"]);
    receiver.reply_always(Reply::ok());
    db.run(&format!("select outbox.enable_webhook('{id}')"));
    until_states(&mut db, &["delivered 1"]);
    db.run(&format!("select outbox.disable_webhook('{id}')"));
    assert_eq!(said(&mut db, "disabled_reason").as_deref(), Some("by hand"));
}

#[test]
fn finished_deliveries_go_after_a_while() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=3);
    until_states(&mut db, &["delivered 3"]);
    db.run("update outbox.webhook_deliveries set finished_at = now() - interval '91 days' where event_id <> 'n3'");
    db.run("select outbox.prune()");
    until_states(&mut db, &["delivered 1"]);
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.webhook_attempts"),
        1
    );
}

#[test]
fn what_is_deleted_or_changed_meanwhile_is_heeded() {
    let (_cluster, mut db) = started();
    let (first, second) = (Receiver::start(), Receiver::start());
    first.reply_always(Reply::status(500));
    let id = webhook(&mut db, "acme", &first, "");
    let gone = webhook(&mut db, "acme", &first, "");
    emit(&mut db, "acme", "a", 1..=1);
    first.wait_for_requests(2);
    db.run(&format!("select outbox.delete_webhook('{gone}')"));
    db.run(&format!(
        "select outbox.alter_webhook('{id}', url => '{}', topics => '{{b}}')",
        second.url()
    ));
    until_states(&mut db, &["delivered 1"]);
    assert_eq!(sent(&second), ids([1]));
    emit(&mut db, "acme", "a", 2..=2);
    emit(&mut db, "acme", "b", 3..=3);
    until_states(&mut db, &["delivered 2"]);
    db.run(&format!(
        "select outbox.alter_webhook('{id}', topics => '{{}}')"
    ));
    emit(&mut db, "acme", "a", 4..=4);
    until_states(&mut db, &["delivered 3"]);
    assert_eq!(sent(&second), ids([1, 3, 4]));
}
