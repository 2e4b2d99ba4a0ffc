//! Which events go where, in what form.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use outbox_tests::{Mode, Receiver, Sql, until};
use serde_json::Value;
use sha2::Sha256;

use super::{emit, sent, started, until_fanned_out, until_states, webhook};
use crate::scene::ids;

const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

#[test]
fn each_tenants_endpoints_get_its_events_of_their_topics_from_then_on() {
    let (_cluster, mut db) = started();
    let (all, orders, other) = (Receiver::start(), Receiver::start(), Receiver::start());
    emit(&mut db, "acme", "order.placed", 1..=3);
    webhook(&mut db, "acme", &all, "");
    emit(&mut db, "acme", "order.placed", 4..=5);
    webhook(&mut db, "acme", &orders, ", topics => '{order.*}'");
    webhook(&mut db, "globex", &other, "");
    emit(&mut db, "acme", "invoice.sent", 6..=7);
    emit(&mut db, "acme", "order.placed", 8..=9);
    emit(&mut db, "globex", "order.placed", 10..=12);
    emit(&mut db, "initech", "order.placed", 13..=14);
    db.run("select outbox.emit('order.placed')");
    until_fanned_out(&mut db);
    until_states(&mut db, &["delivered 11"]);
    assert_eq!(sent(&all), ids(4..=9));
    assert_eq!(sent(&orders), ids(8..=9));
    assert_eq!(sent(&other), ids(10..=12));
}

#[test]
fn a_stream_of_its_own_has_webhooks_of_its_own() {
    let (_cluster, mut db) = started();
    let (billing, events) = (Receiver::start(), Receiver::start());
    db.run("select outbox.create_stream('billing')");
    let id = webhook(&mut db, "acme", &billing, ", stream => 'billing'");
    webhook(&mut db, "acme", &events, "");
    emit(&mut db, "acme", "a", 1..=2);
    db.run("select outbox.emit('invoice.sent', tenant => 'acme', id => 'n3', stream => 'billing')");
    until_states(&mut db, &["delivered 3"]);
    assert_eq!(sent(&billing), ids([3]));
    assert_eq!(sent(&events), ids([1, 2]));
    let rows: Vec<String> =
        db.all("select concat_ws(' ', sink, stream) from outbox.status order by sink");
    assert_eq!(
        rows,
        [
            "webhooks:*",
            "webhooks:billing billing",
            "webhooks:outbox outbox"
        ]
    );
    assert_eq!(
        db.refused("select outbox.drop_stream('billing')").sqlstate,
        "2BP01"
    );
    db.run(&format!("select outbox.delete_webhook('{id}')"));
    db.run("select outbox.drop_stream('billing')");
    until("its cursor to go", || {
        let rows: Vec<String> = db.all("select name from outbox.cursors");
        (rows == ["webhooks:outbox"]).then_some(())
    });
    emit(&mut db, "acme", "a", 4..=4);
    events.wait_for_requests(3);
}

/// What one tenant writes must not keep the others from getting theirs.
#[test]
fn odd_events_stop_nobody() {
    let (_cluster, mut db) = started();
    let (odd, other) = (Receiver::start(), Receiver::start());
    webhook(&mut db, "acme", &odd, "");
    webhook(&mut db, "globex", &other, "");
    db.run(
        "insert into outbox.events (tenant, topic, id, time, payload, headers, subject) values
            ('acme', 'a', 'n1', 'infinity', null, null, null),
            ('acme', 'a', 'n2', '-infinity', '1e400', null, ''),
            ('acme', 'a', 'n3', '290000-01-01', '\"x\"', '{\"id\": \"mine\", \"A b\": {\"c\": null}}', E'\\t\\n'),
            ('acme', E'tøpic ☃\\n', 'n4', now(), to_jsonb(repeat('☃', 400000)), '[1, 2]', repeat('s', 9000)),
            ('acme', 'a', E'n5\\r\\nx-evil: 1', now(), '{}', null, null),
            ('acme', 'a', 'n6☃', now(), '{}', null, null),
            ('acme', 'a', '', now(), '{}', null, null),
            ('acme', 'a', null, now(), '{}', null, null)",
    );
    emit(&mut db, "globex", "a", 10..=12);
    until_states(&mut db, &["delivered 11"]);
    assert_eq!(sent(&other), ids(10..=12));
    let names: Vec<String> = sent(&odd);
    assert_eq!(names.len(), 8);
    // As in requests of sinks: percent-encoded.
    for name in ["n4", "n5%0D%0Ax-evil:%201", "n6%E2%98%83", ""] {
        assert!(names.iter().any(|sent| sent == name), "{name}: {names:?}");
    }
    for request in odd.requests() {
        assert!(request.header("x-evil").is_none());
        let event: Value = serde_json::from_slice(&request.body).expect("JSON");
        assert_eq!(event["specversion"], "1.0");
    }
}

#[test]
fn a_request_is_a_signed_cloudevent() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    webhook(
        &mut db,
        "acme",
        &receiver,
        &format!(", secret => '{SECRET}'"),
    );
    emit(&mut db, "acme", "order.placed", 1..=1);
    let request = &receiver.wait_for_requests(1)[0];
    assert_eq!(
        request.header("content-type"),
        Some("application/cloudevents+json")
    );
    let event: Value = serde_json::from_slice(&request.body).expect("JSON");
    assert_eq!(event["id"], "n1");
    assert_eq!(event["type"], "order.placed");
    assert_eq!(event["tenant"], "acme");
    assert_eq!(event["data"].to_string(), r#"{"n":1,"price":1.50}"#);
    assert!(signed_with(request, SECRET));
    until_states(&mut db, &["delivered 1"]);
    let attempt: String = db.one(
        "select concat_ws(' ', a.attempt, a.status, a.error, d.attempts, a.tenant) from outbox.webhook_attempts a
           join outbox.webhook_deliveries d on d.id = a.delivery",
    );
    assert_eq!(attempt, "1 200 1 acme");
}

/// Whether one of a request's signatures is made with that secret.
fn signed_with(request: &outbox_tests::Request, secret: &str) -> bool {
    let key = BASE64_STANDARD
        .decode(secret.trim_start_matches("whsec_"))
        .expect("base64");
    let header = |name| request.header(name).expect("a header");
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("a key");
    mac.update(format!("{}.{}.", header("webhook-id"), header("webhook-timestamp")).as_bytes());
    mac.update(&request.body);
    let signature = format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()));
    header("webhook-signature")
        .split(' ')
        .any(|one| one == signature)
}

#[test]
fn old_and_new_secrets_overlap_for_as_long_as_said() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    let id = webhook(
        &mut db,
        "acme",
        &receiver,
        &format!(", secret => '{SECRET}'"),
    );
    let second: String = db.one(&format!("select outbox.rotate_webhook_secret('{id}')"));
    assert!(second.starts_with("whsec_") && second != SECRET);
    emit(&mut db, "acme", "a", 1..=1);
    let request = receiver.wait_for_requests(1).remove(0);
    assert!(signed_with(&request, SECRET) && signed_with(&request, &second));
    let third: String = db.one(&format!(
        "select outbox.rotate_webhook_secret('{id}', overlap => '0')"
    ));
    emit(&mut db, "acme", "a", 2..=2);
    let request = receiver.wait_for_requests(2).remove(1);
    assert!(signed_with(&request, &third));
    assert!(!signed_with(&request, SECRET) && !signed_with(&request, &second));
    for (arguments, sqlstate) in [
        ("'none'".to_owned(), "42704"),
        (format!("'{id}', 'short'"), "22023"),
        (format!("'{id}', overlap => '-1 s'"), "22023"),
        (format!("'{id}', overlap => null"), "22023"),
    ] {
        let refusal = db.refused(&format!("select outbox.rotate_webhook_secret({arguments})"));
        assert_eq!(refusal.sqlstate, sqlstate, "{arguments}");
    }
}

#[test]
fn nothing_is_lost_or_pruned_unseen_while_no_dispatcher_runs() {
    let (mut cluster, mut db) = started();
    cluster.set("outbox.retention_min_age", "0");
    let receiver = Receiver::start();
    let id = webhook(&mut db, "acme", &receiver, "");
    db.run("select outbox.create_sink('other', 'pull')");
    db.run("select outbox.stop()");
    emit(&mut db, "acme", "a", 1..=700);
    db.run("select outbox.poll('other', 1000); select outbox.ack('other')");
    assert_eq!(db.one::<i64>("select outbox.prune()"), 0);
    db.run("select outbox.start()");
    until_states(&mut db, &["delivered 700"]);
    assert_eq!(sent(&receiver), ids(1..=700));
    // Through a crash as well.
    emit(&mut db, "acme", "a", 701..=900);
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    let mut db = cluster.connect();
    until_states(&mut db, &["delivered 900"]);
    assert_eq!(sent(&receiver), ids(1..=900));
    assert!(db.one::<i64>("select outbox.prune()") > 0);
    // The last one gone, nothing is held back any more.
    db.run("select outbox.drop_sink('other')");
    db.run(&format!("select outbox.delete_webhook('{id}')"));
    until("nothing to be left", || {
        let left: i64 = db.one(
            "select (select count(*) from outbox.cursors) + (select count(*) from outbox.webhook_deliveries)
                  + (select count(*) from outbox.webhook_attempts) + (select count(*) from outbox.webhook_secrets)",
        );
        (left == 0).then_some(())
    });
}

#[test]
fn a_restored_database_goes_on_where_it_was() {
    let (cluster, mut db) = started();
    let receiver = Receiver::start();
    webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=5);
    until_states(&mut db, &["delivered 5"]);
    db.run("select outbox.stop()");
    emit(&mut db, "acme", "a", 6..=9);
    cluster.restore("restored", &cluster.dump("app"));
    let mut restored = cluster.connect_to("restored");
    emit(&mut restored, "acme", "a", 10..=12);
    until_states(&mut restored, &["delivered 12"]);
    assert_eq!(sent(&receiver), ids(1..=12));
}

#[test]
fn a_promoted_standby_goes_on_where_its_primary_was() {
    let (mut primary, mut db) = started();
    let receiver = Receiver::start();
    webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=3);
    until_states(&mut db, &["delivered 3"]);
    db.run("select outbox.stop()");
    emit(&mut db, "acme", "a", 4..=6);
    let standby = primary.standby();
    let mut there = standby.connect();
    until("the standby to catch up", || {
        there
            .one::<bool>("select count(*) = 6 from outbox.events")
            .then_some(())
    });
    let told: Vec<String> = there.all(
        "select concat_ws(' ', sink, lag_events, delivered, waiting_for) from outbox.status order by 1",
    );
    let waits = "the primary, or the promotion of this standby";
    assert_eq!(
        told,
        [
            format!("webhooks:* 0 3 {waits}"),
            format!("webhooks:outbox 3 3 {waits}")
        ]
    );
    primary.stop(Mode::Immediate);
    standby.promote();
    until_states(&mut there, &["delivered 6"]);
    assert_eq!(sent(&receiver), ids(1..=6));
}
