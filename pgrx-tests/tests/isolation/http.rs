//! Webhooks, one event a request or in batches.

use outbox_tests::{Receiver, Reply};
use serde_json::json;

use super::scene::{dead_letters, http_sink, quick, until_idle, until_status};
use super::{Moody, emit, emit_of, ids_in, parked, until_parked};

const SINGLE: &str = "isolation => 'key'";

#[test]
fn a_failing_event_holds_only_the_later_ones_of_its_key() {
    let cluster = quick().setting("outbox.retry_max", "100ms").start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a2");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        SINGLE,
    );
    emit(&mut db, "a1 b1 a2 b2 a3 c1 a4");
    moody.takes("a1 b1 b2 c1");
    until_parked(&mut db, "keys", "a2 a3 a4");
    let status = until_status(&mut db, "keys", "three behind", |status| {
        status.attempts >= 3 && status.lag_events == 3
    });
    assert_eq!((&*status.state, status.delivered), ("retrying", 4));
    assert_eq!(
        status.last_error.as_deref(),
        Some("HTTP 500 Internal Server Error")
    );
    let waiting = status.waiting_for.unwrap();
    assert!(
        waiting.starts_with("the destination, to take 3 parked events"),
        "{waiting}"
    );

    // What comes later of the key waits, too; the cursor moves on.
    emit(&mut db, "a5 b3 d1");
    moody.takes("b3 d1");
    until_parked(&mut db, "keys", "a2 a3 a4 a5");
    moody.refuses("");
    moody.takes("a2 a3 a4 a5");
    let idle = until_idle(&mut db, "keys");
    assert_eq!(
        (idle.delivered, idle.lag_events, idle.dead_letters),
        (10, 0, 0)
    );
    assert_eq!(moody.taken("a"), "a1 a2 a3 a4 a5");
    assert_eq!(moody.taken("b"), "b1 b2 b3");
    assert_eq!(parked(&mut db, "keys"), "");
    // And then it is a key like any other.
    emit(&mut db, "a6 b4");
    moody.takes("a6 b4");
    assert_eq!(until_idle(&mut db, "keys").delivered, 12);
    for id in ["a3", "a4", "a5", "b1", "c1"] {
        assert_eq!(moody.tries(id), 1, "{id} was not tried for others' sake");
    }
}

#[test]
fn the_key_is_the_source_and_the_subject() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        SINGLE,
    );
    emit_of(&mut db, "public.orders", "a1");
    emit_of(&mut db, "public.customers", "a2 a3");
    emit_of(&mut db, "public.orders", "a4");
    moody.takes("a2 a3");
    until_parked(&mut db, "keys", "a1 a4");
    moody.refuses("");
    moody.takes("a1 a4");
    until_idle(&mut db, "keys");
    assert_eq!(moody.taken("a"), "a2 a3 a1 a4");
}

#[test]
fn events_without_a_subject_hold_nobody() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("-1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        SINGLE,
    );
    emit(&mut db, "-1 -2 -3");
    moody.takes("-2 -3");
    until_parked(&mut db, "keys", "-1");
    moody.refuses("");
    moody.takes("-1");
    assert_eq!(until_idle(&mut db, "keys").delivered, 3);
}

#[test]
fn batches_are_searched_for_what_fails() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a2 c1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({}),
        "isolation => 'key', batch_size => 16",
    );
    emit(&mut db, "a1 b1 a2 b2 a3 c1 a4 b3 c2 d1 d2");
    moody.takes("a1 b1 b2 b3 d1 d2");
    until_parked(&mut db, "keys", "a2 a3 c1 a4 c2");
    moody.refuses("c1");
    moody.takes("a2 a3 a4");
    moody.refuses("");
    moody.takes("c1 c2");
    assert_eq!(until_idle(&mut db, "keys").delivered, 11);
    for (subject, all) in [("a", "a1 a2 a3 a4"), ("b", "b1 b2 b3"), ("c", "c1 c2")] {
        assert_eq!(moody.taken(subject), all);
    }
}

#[test]
fn failures_that_an_answer_names_are_parked() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let tries = std::sync::atomic::AtomicU32::new(0);
    receiver.reply_with(move |request| {
        let ids = ids_in(request);
        let mut named = Vec::new();
        if ids.iter().any(|id| id == "a1")
            && tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 3
        {
            // One that keeps the order of a key does not take what is behind.
            named.push(("a1", "busy", false));
            named.extend(
                ids.iter()
                    .any(|id| id == "a2")
                    .then_some(("a2", "behind a1", false)),
            );
        }
        named.extend(
            ids.iter()
                .any(|id| id == "b1")
                .then_some(("b1", "unheard of", true)),
        );
        Reply::failures(&named)
    });
    http_sink(&mut db, "keys", &receiver, json!({}), SINGLE);
    emit(&mut db, "a1 b1 a2 b2 c1");
    receiver.wait_for_distinct(4);
    let idle = until_idle(&mut db, "keys");
    assert_eq!((idle.delivered, idle.dead_letters), (4, 1));
    let dead = dead_letters(&mut db, "keys");
    assert_eq!((dead[0].id(), dead[0].attempts), ("b1", 1));
    assert_eq!(super::of_subject(&receiver.ids(), "a"), "a1 a2");
}

#[test]
fn an_outage_parks_nothing_and_kills_nothing() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
    let mut db = cluster.connect();
    for (sink, config) in [("single", json!({"mode": "single"})), ("batch", json!({}))] {
        let receiver = Receiver::start();
        receiver.stop();
        http_sink(
            &mut db,
            sink,
            &receiver,
            config,
            "isolation => 'key', batch_size => 8, start => 'tail'",
        );
        for n in 1..=20 {
            emit(&mut db, &format!("a{n} b{n} c{n}"));
        }
        let down = until_status(&mut db, sink, "many attempts", |status| {
            status.attempts >= 20 && status.state == "down"
        });
        assert_eq!(
            (down.delivered, down.dead_letters, down.lag_events),
            (0, 0, 60)
        );
        assert_eq!(parked(&mut db, sink), "");
        receiver.start_again();
        receiver.wait_for_distinct(60);
        let idle = until_idle(&mut db, sink);
        assert_eq!(idle.dead_letters, 0);
        for subject in ["a", "b", "c"] {
            let all = (1..=20)
                .map(|n| format!("{subject}{n}"))
                .collect::<Vec<_>>();
            let first: Vec<_> = receiver
                .first_arrivals()
                .into_iter()
                .map(|event| event.id)
                .collect();
            assert_eq!(super::of_subject(&first, subject), all.join(" "));
        }
    }
}

#[test]
fn what_was_not_sent_has_not_failed() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    // Isolated by batch: a1 alone is at fault, and a2 and a3 were never sent before it was decided on.
    http_sink(
        &mut db,
        "web",
        &moody.receiver,
        json!({"mode": "single"}),
        "",
    );
    emit(&mut db, "b1 a1 a2 a3 c1 d1");
    moody.takes("b1 c1 d1");
    emit(&mut db, "e1");
    let dead = super::scene::until_dead(&mut db, "web", 1);
    assert_eq!((dead[0].id(), dead[0].attempts), ("a1", 5));
    until_idle(&mut db, "web");
    assert_eq!(moody.taken("a"), "a2 a3");
    for id in ["a2", "a3", "b1", "c1", "d1", "e1"] {
        assert_eq!(moody.tries(id), 1, "{id}");
    }
}
