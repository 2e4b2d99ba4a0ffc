//! Events that a sink, though well, never takes: each is set aside after it was told apart from an outage, and all others get
//! through, once.

mod scene;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use outbox_tests::{Receiver, Reply, Request, Signal, Sql, until};
use postgres::Client;
use scene::{
    dead_letters, emit, http_sink, ids, ids_without, quick, replace_dispatcher, status, until_dead,
    until_idle, until_status,
};
use serde_json::{Value, json};

const HTTP_500: &str = "HTTP 500 Internal Server Error";

/// The ids of the events in a request, in order.
fn ids_in(request: &Request) -> Vec<String> {
    let events: Vec<Value> = serde_json::from_slice(&request.body).expect("a batch");
    events
        .iter()
        .map(|event| event["id"].as_str().expect("an id").to_owned())
        .collect()
}

/// How often each event was in a request.
fn handed_over(receiver: &Receiver) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for request in receiver.requests() {
        for id in ids_in(&request) {
            *counts.entry(id).or_default() += 1;
        }
    }
    counts
}

/// Answers 500 to every request that holds one of these events.
fn refuse(receiver: &Receiver, poison: impl IntoIterator<Item = i64>) {
    let poison = ids(poison);
    receiver.reply_with(move |request| {
        if ids_in(request).iter().any(|id| poison.contains(id)) {
            Reply::status(500)
        } else {
            Reply::ok()
        }
    });
}

/// Runs 30 events past a receiver that refuses some of them, in batches of that size.
fn set_aside(poison: &[i64], batch_size: u32) {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    refuse(&receiver, poison.iter().copied());
    emit(&mut db, 1..=30);
    http_sink(
        &mut db,
        "picky",
        &receiver,
        json!({}),
        &format!("batch_size => {batch_size}"),
    );
    let dead = until_dead(&mut db, "picky", poison.len());
    let idle = until_idle(&mut db, "picky");
    assert_eq!(idle.delivered, 30 - poison.len() as i64);
    assert_eq!((idle.attempts, idle.lag_events), (0, 0));
    assert_eq!(
        receiver.ids(),
        ids_without(30, poison),
        "each once, and in order"
    );

    let found: Vec<_> = dead.iter().map(|letter| letter.id().to_owned()).collect();
    assert_eq!(found, ids(poison.iter().copied()));
    for (letter, n) in dead.iter().zip(poison) {
        // Side by side they look like an outage, and have to fail as often once it is over.
        let most = 5 + poison.len() as i32 - 1 + 5;
        assert!((5..=most).contains(&letter.attempts), "{letter:?}");
        assert_eq!(letter.error, HTTP_500);
        assert_eq!(letter.event["data"], json!({"n": n}));
        let told = format!(
            "ERROR:  pg_outbox: sink \"picky\": event {} dead-lettered after {} attempts",
            letter.position, letter.attempts
        );
        assert!(cluster.log().contains(&told), "{told}");
        assert!(!letter.queued);
    }
}

#[test]
fn one_in_the_middle_of_a_batch() {
    set_aside(&[7], 16);
}

#[test]
fn the_first_and_one_later() {
    set_aside(&[1, 20], 16);
}

#[test]
fn two_side_by_side() {
    set_aside(&[7, 8], 16);
}

#[test]
fn five_side_by_side() {
    set_aside(&[7, 8, 9, 10, 11], 16);
}

#[test]
fn five_side_by_side_one_by_one() {
    set_aside(&[1, 2, 3, 4, 5], 1);
}

#[test]
fn every_second_one() {
    set_aside(&[2, 4, 6, 8, 10, 12], 4);
}

#[test]
fn the_last_one_waits_for_a_neighbour() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    refuse(&receiver, [5]);
    http_sink(&mut db, "picky", &receiver, json!({}), "");
    emit(&mut db, 1..=5);
    let waiting = until_status(&mut db, "picky", "more than five attempts", |status| {
        status.attempts >= 9
    });
    assert_eq!(
        (waiting.dead_letters, waiting.lag_events, waiting.delivered),
        (0, 1, 4)
    );
    assert_eq!(waiting.state, "retrying");
    assert_eq!(waiting.last_error.as_deref(), Some(HTTP_500));

    emit(&mut db, 6..=6);
    let dead = until_dead(&mut db, "picky", 1);
    assert_eq!(dead[0].id(), "n5");
    let lone = receiver
        .requests()
        .iter()
        .filter(|request| ids_in(request) == ["n5"])
        .count();
    // The last failure, after the neighbour went through, decided and was not counted.
    assert_eq!(dead[0].attempts as usize, lone - 1);
    until_idle(&mut db, "picky");
    assert_eq!(receiver.ids(), ids_without(6, &[5]));
}

#[test]
fn a_last_one_that_is_taken_at_last_is_no_poison() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    refuse(&receiver, [1]);
    http_sink(&mut db, "picky", &receiver, json!({}), "");
    emit(&mut db, 1..=1);
    until_status(&mut db, "picky", "many attempts", |status| {
        status.attempts >= 9
    });
    receiver.reply_always(Reply::ok());
    receiver.wait_for(1);
    assert_eq!(until_idle(&mut db, "picky").dead_letters, 0);
}

#[test]
fn an_outage_that_begins_with_the_neighbour_test_dead_letters_nothing() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let (down, failures) = (Arc::new(AtomicBool::new(false)), AtomicU32::new(0));
    let outage = Arc::clone(&down);
    receiver.reply_with(move |request| {
        let events = ids_in(request);
        // Alone for the fifth time: the next request is the test.
        if events == ["n3"] && failures.fetch_add(1, Ordering::SeqCst) == 4 {
            outage.store(true, Ordering::SeqCst);
        }
        if outage.load(Ordering::SeqCst) {
            Reply::status(503)
        } else if events.iter().any(|id| id == "n3") {
            Reply::status(500)
        } else {
            Reply::ok()
        }
    });
    emit(&mut db, 1..=40);
    http_sink(&mut db, "both", &receiver, json!({}), "batch_size => 8");
    until_status(
        &mut db,
        "both",
        "more tests than there are neighbours",
        |status| status.attempts >= 25,
    );
    let seen = until_status(&mut db, "both", "down", |status| status.state == "down");
    assert_eq!((seen.dead_letters, seen.delivered), (0, 2));
    assert_eq!(
        seen.last_error.as_deref(),
        Some("HTTP 503 Service Unavailable")
    );

    down.store(false, Ordering::SeqCst);
    let dead = until_dead(&mut db, "both", 1);
    assert_eq!((dead[0].id(), dead[0].error.as_str()), ("n3", HTTP_500));
    until_idle(&mut db, "both");
    receiver.wait_for_distinct(39);
    let mut arrived = receiver.ids();
    // The neighbour of the last test was early.
    arrived.sort_by_key(|id| id[1..].parse::<i64>().unwrap());
    assert_eq!(arrived, ids_without(40, &[3]), "each once");
}

#[test]
fn an_outage_that_meets_only_good_events_dead_letters_nothing() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.stop();
    http_sink(&mut db, "down", &receiver, json!({}), "batch_size => 8");
    for n in 1..=40 {
        emit(&mut db, n..=n);
    }
    until_status(&mut db, "down", "forty attempts", |status| {
        status.attempts >= 40
    });
    receiver.start_again();
    receiver.wait_for_distinct(40);
    assert_eq!(until_idle(&mut db, "down").dead_letters, 0);
    assert!(dead_letters(&mut db, "down").is_empty());
}

#[test]
fn a_failure_that_the_answer_calls_permanent_needs_no_second_try() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_next([Reply::failures(&[
        ("n3", "no such product", true),
        ("n8", "out of range", true),
    ])]);
    emit(&mut db, 1..=10);
    http_sink(&mut db, "partial", &receiver, json!({}), "");
    let dead = until_dead(&mut db, "partial", 2);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.error.as_str(), letter.attempts))
        .collect();
    assert_eq!(
        told,
        [("n3", "no such product", 1), ("n8", "out of range", 1)]
    );
    assert_eq!(until_idle(&mut db, "partial").delivered, 8);
    assert_eq!(receiver.ids(), ids_without(10, &[3, 8]));
    assert_eq!(receiver.requests().len(), 1);
}

#[test]
fn what_the_answer_names_is_tried_again_and_nothing_else_is() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let failures = AtomicU32::new(0);
    receiver.reply_with(move |request| {
        let events = ids_in(request);
        if events.iter().any(|id| id == "n4") && failures.fetch_add(1, Ordering::SeqCst) < 3 {
            Reply::failures(&[("n4", "locked, try later", false)])
        } else {
            Reply::ok()
        }
    });
    emit(&mut db, 1..=20);
    http_sink(&mut db, "partial", &receiver, json!({}), "batch_size => 10");
    receiver.wait_for_distinct(20);
    let idle = until_idle(&mut db, "partial");
    assert_eq!((idle.delivered, idle.dead_letters), (20, 0));
    let handed = handed_over(&receiver);
    for id in ids(1..=20) {
        assert_eq!(handed[&id], if id == "n4" { 4 } else { 1 }, "{id}");
    }
}

#[test]
fn what_the_answer_names_again_and_again_is_poison() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_with(|request| {
        let events = ids_in(request);
        let named: Vec<_> = ["n4", "n5", "n12"]
            .into_iter()
            .filter(|id| events.iter().any(|event| event == id))
            .map(|id| (id, "busy", false))
            .collect();
        Reply::failures(&named)
    });
    emit(&mut db, 1..=20);
    http_sink(&mut db, "partial", &receiver, json!({}), "batch_size => 10");
    let dead = until_dead(&mut db, "partial", 3);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.error.as_str(), letter.attempts))
        .collect();
    assert_eq!(
        told,
        [("n4", "busy", 5), ("n5", "busy", 5), ("n12", "busy", 5)]
    );
    assert_eq!(until_idle(&mut db, "partial").delivered, 17);
    let handed = handed_over(&receiver);
    for id in ids_without(20, &[4, 5, 12]) {
        assert_eq!(handed[&id], 1, "{id}");
    }
}

#[test]
fn a_whole_transaction_is_set_aside_together() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    refuse(&receiver, [5]);
    http_sink(
        &mut db,
        "whole",
        &receiver,
        json!({}),
        "\"grouping\" => 'transaction', batch_size => 10",
    );
    for first in [1, 4, 7, 10] {
        emit(&mut db, first..=first + 2);
    }
    let dead = until_dead(&mut db, "whole", 3);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.attempts))
        .collect();
    assert_eq!(told, [("n4", 5), ("n5", 5), ("n6", 5)]);
    until_idle(&mut db, "whole");
    assert_eq!(receiver.ids(), ids_without(12, &[4, 5, 6]));
}

#[test]
fn attempts_survive_the_dispatcher_and_the_server() {
    let cluster = quick()
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    refuse(&receiver, [1]);
    http_sink(&mut db, "picky", &receiver, json!({}), "");
    emit(&mut db, 1..=5);
    let lone = || {
        receiver
            .requests()
            .iter()
            .filter(|request| ids_in(request) == ["n1"])
            .count()
    };
    let attempts = |db: &mut Client, attempts: i32| {
        let what = format!("{attempts} attempts");
        // Before it waits, it searches for the one that fails.
        let seen = until_status(db, "picky", &what, |status| {
            let waits = status
                .next_attempt_in
                .is_some_and(|seconds| seconds > 600.0);
            status.attempts == attempts && waits
        });
        assert_eq!(seen.last_error.as_deref(), Some(HTTP_500));
        assert_eq!(lone(), attempts as usize);
    };
    attempts(&mut db, 1);
    replace_dispatcher(&mut db, "picky");
    attempts(&mut db, 1);
    db.run("select outbox.resume_sink('picky')");
    attempts(&mut db, 2);
    // What the dispatcher saved last need not be on disk yet; a commit that waits for the disk takes it along.
    db.run("create table flushed ()");
    let pid = status(&mut db, "picky").lease_pid.unwrap();
    cluster.kill_backend(pid, Signal::KILL);
    until("the session to be lost", || {
        db.simple_query("").is_err().then_some(())
    });
    cluster.wait_until_it_answers();
    let mut db = cluster.connect();
    until_status(&mut db, "picky", "a new holder", |status| {
        status.lease_pid.is_some()
    });
    attempts(&mut db, 2);
    for n in 3..=4 {
        db.run("select outbox.resume_sink('picky')");
        attempts(&mut db, n);
    }
    assert!(dead_letters(&mut db, "picky").is_empty());
    db.run("select outbox.resume_sink('picky')");
    let dead = until_dead(&mut db, "picky", 1);
    assert_eq!((dead[0].id(), dead[0].attempts), ("n1", 5));
    until_idle(&mut db, "picky");
    assert_eq!(receiver.ids(), ids_without(5, &[1]));
    assert_eq!(lone(), 6, "five attempts, and the one that decided");
}

#[test]
fn poison_of_one_sink_is_no_matter_of_another() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receivers = [Receiver::start(), Receiver::start()];
    refuse(&receivers[0], [3]);
    refuse(&receivers[1], [4]);
    http_sink(&mut db, "left", &receivers[0], json!({}), "");
    http_sink(&mut db, "right", &receivers[1], json!({}), "");
    emit(&mut db, 1..=10);
    assert_eq!(until_dead(&mut db, "left", 1)[0].id(), "n3");
    assert_eq!(until_dead(&mut db, "right", 1)[0].id(), "n4");
    until_idle(&mut db, "left");
    until_idle(&mut db, "right");
    assert_eq!(receivers[0].ids(), ids_without(10, &[3]));
    assert_eq!(receivers[1].ids(), ids_without(10, &[4]));
}

#[test]
fn fewer_attempts_can_be_asked_for() {
    let cluster = quick().setting("outbox.poison_attempts", "2").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    refuse(&receiver, [3]);
    http_sink(&mut db, "picky", &receiver, json!({}), "");
    emit(&mut db, 1..=10);
    assert_eq!(until_dead(&mut db, "picky", 1)[0].attempts, 2);
    until_idle(&mut db, "picky");
    // And changed while it runs.
    cluster.set("outbox.poison_attempts", "7");
    refuse(&receiver, [13]);
    emit(&mut db, 11..=20);
    assert_eq!(until_dead(&mut db, "picky", 2)[1].attempts, 7);
    until_idle(&mut db, "picky");
    assert_eq!(receiver.ids(), ids_without(20, &[3, 13]));
}

#[test]
fn trouble_is_told_from_the_first_failure_on_and_so_is_its_end() {
    let cluster = quick().setting("outbox.retry_min", "200ms").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    // A batch that fails slowly is searched for long, without a wait in between.
    receiver.reply_always(Reply::hang());
    http_sink(&mut db, "w", &receiver, json!({"timeout_ms": 1_500}), "");
    emit(&mut db, 1..=32);
    let first = receiver.wait_for_requests(2).len();
    let told = until_status(&mut db, "w", "trouble", |status| status.state != "flowing");
    assert_eq!(told.state, "retrying");
    assert!(told.attempts >= 1 && told.last_error.is_some(), "{told:?}");
    assert!(first < 5, "the search goes on: {first} requests");
    receiver.reply_always(Reply::ok());
    until_idle(&mut db, "w");
    let log = cluster.log();
    for part in [
        "WARNING:  pg_outbox: sink \"w\" is retrying, attempts: ",
        "WARNING:  pg_outbox: sink \"w\" is in good order again, attempts before: ",
    ] {
        assert_eq!(log.matches(part).count(), 1, "{part}: {log}");
    }

    // What is given up is an error in the log.
    receiver.reply_with(
        |request| match request.body.windows(4).any(|part| part == b"\"n40") {
            true => Reply::status(500),
            false => Reply::ok(),
        },
    );
    emit(&mut db, 40..=42);
    let dead = until_dead(&mut db, "w", 1);
    let position = dead[0].position.clone();
    let line = format!("ERROR:  pg_outbox: sink \"w\": event {position} dead-lettered after");
    outbox_tests::until("the log to say so", || {
        cluster.log().contains(&line).then_some(())
    });
}

#[test]
fn a_letter_that_cannot_be_written_for_now_is_written_whole_later() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table disk_full (is_so bool);
         insert into disk_full values (true);
         create function refuse() returns trigger language plpgsql as $$
         begin
             if new.event ? 'data' and exists (select from public.disk_full) then
                 raise exception 'could not extend file' using errcode = 'disk_full';
             end if;
             return new;
         end $$;
         create trigger refuse before insert on outbox.dead_letters for each row execute function refuse()",
    );
    let receiver = Receiver::start();
    refuse(&receiver, [2]);
    http_sink(&mut db, "picky", &receiver, json!({}), "");
    emit(&mut db, 1..=8);
    until_status(&mut db, "picky", "trouble with its letters", |status| {
        status.dead_letters > 0
            || status
                .last_error
                .as_deref()
                .is_some_and(|error| error.contains("53100"))
    });
    db.run("truncate disk_full");
    let dead = until_dead(&mut db, "picky", 1);
    assert_eq!(dead[0].event["data"], json!({"n": 2}));
    until_idle(&mut db, "picky");
    receiver.wait_for_distinct(7);
}

#[test]
fn an_event_whose_text_is_ten_thousand_times_as_large_as_it_is_stored_is_its_own_trouble() {
    let cluster = quick().setting("outbox.poison_attempts", "1").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "");
    // Numbers of 131,072 digits, of which one is stored.
    db.run(
        "begin;
         select outbox.emit('test', id => 'n1');
         select outbox.emit('test', jsonb_agg(1e131071), id => 'n2') from generate_series(1, 8300);
         select outbox.emit('test', id => 'n3');
         commit",
    );
    receiver.wait_for_distinct(2);
    let dead = until_dead(&mut db, "web", 1);
    assert_eq!(dead[0].id(), "n2");
    assert!(dead[0].error.contains("too large"), "{dead:?}");
    until_idle(&mut db, "web");
    assert_eq!(receiver.ids(), ids_without(3, &[2]));
}
