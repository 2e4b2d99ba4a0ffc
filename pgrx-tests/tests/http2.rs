//! Kind http over HTTP/2, with an endpoint that offers it: batches and single requests, and what may go wrong.

mod scene;

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};

use outbox_tests::{Cluster, DEADLINE, Receiver, Reply, Sql};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::{Value, json};

/// An endpoint that offers HTTP/2, and a cluster with the sink `w` to it.
fn with_sink(config: Value, arguments: &str) -> (Receiver, Cluster, Client) {
    let receiver = Receiver::builder().http2().start();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let mut whole = json!({"ca_file": receiver.ca_file()});
    for (key, value) in config.as_object().expect("a config is an object") {
        whole[key] = value.clone();
    }
    http_sink(&mut db, "w", &receiver, whole, arguments);
    (receiver, cluster, db)
}

#[track_caller]
fn assert_all_by_http2(receiver: &Receiver) {
    assert!(receiver.requests().iter().all(|request| request.http2));
}

#[test]
fn batches_arrive_in_order_on_one_connection() {
    let (receiver, _cluster, mut db) = with_sink(json!({}), "batch_size => 20");
    for part in 0..20 {
        emit(&mut db, part * 100 + 1..=part * 100 + 100);
    }
    receiver.wait_for(2000);
    assert_eq!(receiver.ids(), ids(1..=2000));
    assert_all_by_http2(&receiver);
    assert!(receiver.requests().len() >= 100);
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn signatures_are_of_the_bytes_that_arrive() {
    let (receiver, _cluster, mut db) = with_sink(
        json!({"secret": "hook", "signature": "github"}),
        "enabled => false",
    );
    db.run("select outbox.set_secret('hook', array['first', 'second'])");
    db.run("select outbox.resume_sink('w')");
    emit(&mut db, 1..=50);
    receiver.wait_for(50);
    for request in receiver.requests() {
        assert!(request.is_signed_with("first") && request.is_signed_with("second"));
        assert!(!request.is_signed_with("third"));
        assert!(request.header("idempotency-key").is_some());
    }
}

#[test]
fn single_requests_share_a_connection_and_keep_the_order_of_each_key() {
    let single = json!({"mode": "single", "concurrency": 16});
    let (receiver, _cluster, mut db) = with_sink(single, "batch_size => 200");
    db.run(
        "select outbox.emit('test.numbered', jsonb_build_object('n', n), subject => (n % 30)::text, source => 'test', id => 'n' || n)
           from generate_series(1, 2000) n",
    );
    let mut latest: HashMap<String, i64> = HashMap::new();
    for event in receiver.wait_for(2000) {
        let n: i64 = event.id[1..].parse().expect("a number");
        let key = event.subject.expect("a subject");
        let before = latest.insert(key.clone(), n).unwrap_or_default();
        assert!(before < n, "key {key}: {n} after {before}");
    }
    assert_eq!(receiver.count(), 2000, "each arrives once");
    assert_all_by_http2(&receiver);
    assert_eq!(receiver.requests().len(), 2000);
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn single_requests_are_under_way_together() {
    const AT_ONCE: usize = 5;
    let single = json!({"mode": "single", "concurrency": AT_ONCE, "timeout_ms": 100_000});
    let (receiver, _cluster, mut db) = with_sink(single, "");
    // The first one of all finds out whether anybody is there.
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    let under_way = Arc::new((Mutex::new(0), Condvar::new()));
    receiver.reply_with(move |_| {
        let (count, changed) = &*under_way;
        let mut count = count.lock().expect("nobody panics with it");
        *count += 1;
        changed.notify_all();
        // Nobody is answered before all are there.
        let (_count, late) = changed
            .wait_timeout_while(count, DEADLINE, |count| *count < AT_ONCE)
            .expect("nobody panics with it");
        Reply::status(if late.timed_out() { 500 } else { 200 })
    });
    emit(&mut db, 2..=1 + AT_ONCE as i64);
    receiver.wait_for(1 + AT_ONCE);
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn failures_that_are_reported_and_requests_that_fail() {
    for config in [json!({}), json!({"mode": "single"})] {
        let (receiver, _cluster, mut db) = with_sink(config, "");
        emit(&mut db, 1..=5);
        receiver.wait_for(5);
        receiver.reply_next([
            Reply::failures(&[("n6", "not now", false)]),
            Reply::status(503),
            // The stream is reset.
            Reply::close(),
        ]);
        emit(&mut db, 6..=40);
        assert_eq!(receiver.wait_for_distinct(40).len(), 40);
        assert_eq!(until_idle(&mut db, "w").dead_letters, 0);
        assert_all_by_http2(&receiver);
    }
}

#[test]
fn an_endpoint_that_hangs_or_goes_away_gets_everything_once_it_is_back() {
    let config = json!({"timeout_ms": 500});
    let (receiver, _cluster, mut db) = with_sink(config, "batch_size => 10");
    emit(&mut db, 1..=20);
    receiver.wait_for(20);
    receiver.reply_next([Reply::hang(), Reply::hang()]);
    emit(&mut db, 21..=40);
    receiver.wait_for_distinct(40);
    for round in 2..5 {
        receiver.stop();
        emit(&mut db, round * 20 + 1..=round * 20 + 20);
        until_status(&mut db, "w", "in trouble", |status| {
            status.last_error.is_some()
        });
        receiver.start_again();
        receiver.wait_for_distinct((round * 20 + 20) as usize);
    }
    let arrived: Vec<_> = receiver
        .first_arrivals()
        .into_iter()
        .map(|event| event.id)
        .collect();
    assert_eq!(arrived, ids(1..=100));
    assert_eq!(until_idle(&mut db, "w").dead_letters, 0);
    assert_all_by_http2(&receiver);
}
