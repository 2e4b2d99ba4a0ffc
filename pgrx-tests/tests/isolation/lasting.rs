//! What is parked outlasts processes, servers, retention and dumps.

use outbox_tests::{Cluster, Mode, Reply, Signal, Sql, until};
use serde_json::json;

use super::scene::{http_sink, quick, replace_dispatcher, status, until_idle, until_status};
use super::{Moody, emit, parked, until_parked};

/// Retries so seldom that only what is asked for is tried.
fn patient() -> Cluster {
    quick()
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .start()
}

#[test]
fn restarts_lose_nothing_and_reorder_nothing() {
    let mut cluster = patient();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b1 a2 a3");
    moody.takes("b1");
    until_parked(&mut db, "keys", "a1 a2 a3");
    let attempts = |db: &mut postgres::Client, attempts: i32| {
        let seen = until_status(db, "keys", "attempts", |status| status.attempts == attempts);
        assert!(
            seen.next_attempt_in.is_some_and(|seconds| seconds > 600.0),
            "{seen:?}"
        );
        assert_eq!(moody.tries("a1"), attempts as usize);
    };
    attempts(&mut db, 1);
    replace_dispatcher(&mut db, "keys");
    emit(&mut db, "a4 b2");
    moody.takes("b2");
    until_parked(&mut db, "keys", "a1 a2 a3 a4");
    attempts(&mut db, 1);
    db.run("select outbox.resume_sink('keys')");
    attempts(&mut db, 2);

    // A process is killed, and with it all of them.
    db.run("create table flushed ()");
    let pid = status(&mut db, "keys").lease_pid.unwrap();
    cluster.kill_backend(pid, Signal::KILL);
    until("the session to be lost", || {
        db.simple_query("").is_err().then_some(())
    });
    cluster.wait_until_it_answers();
    let mut db = cluster.connect();
    emit(&mut db, "a5 b3");
    moody.takes("b3");
    until_parked(&mut db, "keys", "a1 a2 a3 a4 a5");
    attempts(&mut db, 2);

    // And the server, between two saves.
    db.run("create table flushed_again ()");
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    let mut db = cluster.connect();
    emit(&mut db, "a6 b4");
    moody.takes("b4");
    until_parked(&mut db, "keys", "a1 a2 a3 a4 a5 a6");
    attempts(&mut db, 2);
    moody.refuses("");
    db.run("select outbox.resume_sink('keys')");
    moody.takes("a6");
    until_idle(&mut db, "keys");
    assert_eq!(moody.taken("a"), "a1 a2 a3 a4 a5 a6");
    assert_eq!(status(&mut db, "keys").dead_letters, 0);
}

#[test]
fn what_is_read_behind_an_event_that_is_parked_at_once_is_not_passed_over() {
    let cluster = patient();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single", "timeout_ms": 600_000}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b0 a2");
    until_parked(&mut db, "keys", "a1 a2");
    let requests = moody.receiver.requests().len();
    moody.receiver.reply_always(Reply::hang());
    emit(&mut db, "a3 b1");
    until_parked(&mut db, "keys", "a1 a2 a3");
    moody.receiver.wait_for_requests(requests + 1);
    db.run("create table flushed ()");
    let pid = status(&mut db, "keys").lease_pid.unwrap();
    cluster.kill_backend(pid, Signal::KILL);
    until("the session to be lost", || {
        db.simple_query("").is_err().then_some(())
    });
    moody.receiver.reply_always(Reply::ok());
    cluster.wait_until_it_answers();
    moody.takes("b1");
}

#[test]
fn a_server_that_stops_in_the_middle_of_everything_keeps_each_key_in_order() {
    let mut cluster = quick().setting("outbox.retry_max", "50ms").start();
    let moody = Moody::start();
    {
        let mut db = cluster.connect();
        moody.refuses("a2 b5 c1");
        http_sink(
            &mut db,
            "keys",
            &moody.receiver,
            json!({"mode": "single"}),
            "isolation => 'key'",
        );
        for n in 1..=4 {
            emit(&mut db, &format!("a{n} b{n} c{n} d{n}"));
        }
        moody.takes("d4");
    }
    for n in 5..=8 {
        cluster.stop(Mode::Immediate);
        cluster.start_again();
        let mut db = cluster.connect();
        emit(&mut db, &format!("a{n} b{n} c{n} d{n}"));
        moody.takes(&format!("d{n}"));
    }
    moody.refuses("");
    let mut db = cluster.connect();
    moody.receiver.wait_for_distinct(32);
    until_idle(&mut db, "keys");
    let first: Vec<_> = moody
        .receiver
        .first_arrivals()
        .into_iter()
        .map(|event| event.id)
        .collect();
    for key in ["a", "b", "c", "d"] {
        let all = (1..=8).map(|n| format!("{key}{n}")).collect::<Vec<_>>();
        assert_eq!(super::of_subject(&first, key), all.join(" "));
    }
    assert_eq!(status(&mut db, "keys").dead_letters, 0);
}

#[test]
fn retention_keeps_what_is_parked() {
    let cluster = quick()
        .setting("outbox.retention_min_age", "0")
        .setting("outbox.retention_interval", "1h")
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a2");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b1 a2 b2 a3 b3");
    moody.takes("b3");
    until_parked(&mut db, "keys", "a2 a3");
    let stored =
        |db: &mut postgres::Client| db.all::<String>("select id from outbox.events order by seq");
    let prune_to = |db: &mut postgres::Client, left: &[&str]| {
        until("retention", || {
            db.run("select outbox.prune()");
            (stored(db) == left).then_some(())
        });
    };
    prune_to(&mut db, &["a2", "a3"]);
    emit(&mut db, "b4");
    moody.takes("b4");
    prune_to(&mut db, &["a2", "a3"]);
    moody.refuses("");
    db.run("select outbox.resume_sink('keys')");
    moody.takes("a2 a3");
    until_idle(&mut db, "keys");
    prune_to(&mut db, &[]);
    assert_eq!(moody.taken("a"), "a1 a2 a3");
}

#[test]
fn a_dump_takes_along_what_is_parked() {
    let from = patient();
    let mut db = from.connect();
    let moody = Moody::start();
    moody.refuses("a2");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b1");
    emit(&mut db, "a2 b2 a3");
    moody.takes("b2");
    until_parked(&mut db, "keys", "a2 a3");
    db.run("select outbox.stop()");
    let dump = from.dump("app");
    moody.receiver.clear();
    moody.refuses("");
    for into in [
        quick().extension(false).apart().start(),
        quick().extension(false).start(),
    ] {
        into.restore("restored", &dump);
        let mut db = into.connect_to("restored");
        moody.takes("a2 a3");
        until_idle(&mut db, "keys");
        assert_eq!(parked(&mut db, "keys"), "");
        assert_eq!(moody.taken("a"), "a2 a3", "and not what came before");
        emit(&mut db, "a4 b3");
        moody.takes("a4 b3");
        assert_eq!(moody.taken("a"), "a2 a3 a4");
        moody.receiver.clear();
    }
}
