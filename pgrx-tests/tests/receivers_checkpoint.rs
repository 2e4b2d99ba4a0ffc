//! `checkpoint_url`: a receiver that remembers itself how far it has come, in the transaction in which it takes events.

mod scene;
mod workers;

use std::sync::{Arc, Mutex};

use outbox_tests::{Mode, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::{Value, json};
use workers::kill_dispatcher;

/// A receiver that keeps what it was told last, and tells it when it is asked.
fn remembering() -> (Receiver, Arc<Mutex<Value>>) {
    let receiver = Receiver::start();
    let kept = Arc::new(Mutex::new(Value::Null));
    let script = Arc::clone(&kept);
    receiver.reply_with(move |request| {
        let mut kept = script.lock().unwrap();
        if request.method == "GET" {
            assert_eq!(request.path, "/at");
            return Reply::ok().body(json!({"position": *kept}).to_string());
        }
        if let Some(told) = request.header("outbox-checkpoint") {
            *kept = json!(told);
        }
        Reply::ok()
    });
    (receiver, kept)
}

fn sink(db: &mut Client, receiver: &Receiver, arguments: &str) {
    let url = receiver.url();
    let origin = url
        .match_indices('/')
        .nth(2)
        .map_or(url.len(), |(at, _)| at);
    let checkpoint = json!({"checkpoint_url": format!("{}/at", &url[..origin])});
    http_sink(db, "w", receiver, checkpoint, arguments);
}

/// Puts the cursor back to where `remembered` has it, while nobody delivers.
fn put_back(db: &mut Client) {
    db.run("select outbox.pause_sink('w')");
    until_status(db, "w", "no holder of its lease", |status| {
        status.lease_pid.is_none()
    });
    db.run(
        "delete from outbox.cursors where name = 'sink:w';
         insert into outbox.cursors select * from remembered;
         select outbox.resume_sink('w')",
    );
}

#[test]
fn what_the_receiver_has_is_not_sent_again() {
    let (receiver, _) = remembering();
    let cluster = quick().start();
    let mut db = cluster.connect();
    sink(&mut db, &receiver, "batch_size => 10");
    db.run("create table remembered as select * from outbox.cursors where name = 'sink:w'");
    emit(&mut db, 1..=25);
    receiver.wait_for(25);
    until_idle(&mut db, "w");
    // Nothing can be saved, and then the dispatcher is killed.
    let mut holder = cluster.connect();
    let mut held = holder.transaction().unwrap();
    held.run("select from outbox.cursors where name = 'sink:w' for update");
    emit(&mut db, 26..=40);
    receiver.wait_for(35);
    kill_dispatcher(&cluster, "app");
    drop(held);
    let mut db = cluster.connect();
    receiver.wait_for(40);
    until_idle(&mut db, "w");
    assert_eq!(receiver.ids(), ids(1..=40));

    // An old cursor; and an event that was open all the time, below everything that the receiver has.
    put_back(&mut db);
    until_status(&mut db, "w", "all passed over", |status| {
        status.delivered == 40 && status.lag_events == 0
    });
    let mut other = cluster.connect();
    let mut open = other.transaction().unwrap();
    open.run("select outbox.emit('test.late', '{}', id => 'late')");
    emit(&mut db, 41..=50);
    receiver.wait_for(50);
    until_idle(&mut db, "w");
    put_back(&mut db);
    open.commit().unwrap();
    receiver.wait_for(51);
    until_idle(&mut db, "w");
    let expected: Vec<_> = ids(1..=50).into_iter().chain(["late".to_owned()]).collect();
    assert_eq!(receiver.ids(), expected);
}

#[test]
fn without_an_answer_nothing_is_sent() {
    let (receiver, kept) = remembering();
    receiver.reply_with(|request| match request.method.as_str() {
        "GET" => Reply::status(500),
        _ => panic!("an event was sent"),
    });
    let cluster = quick().start();
    let mut db = cluster.connect();
    sink(&mut db, &receiver, "batch_size => 10");
    emit(&mut db, 1..=3);
    for (reply, says) in [
        (
            Reply::status(500),
            "not sent: \"checkpoint_url\": HTTP 500 Internal Server Error",
        ),
        (
            Reply::status(204),
            "not sent: \"checkpoint_url\": HTTP 204 No Content",
        ),
        (
            Reply::ok().body("[]"),
            "not sent: the answer of \"checkpoint_url\" holds no \"position\"",
        ),
        (
            Reply::ok().body("x"),
            "not sent: the answer of \"checkpoint_url\" is not JSON",
        ),
        (
            Reply::ok().body(r#"{"position": "731:12"}"#),
            "not sent: the answer of \"checkpoint_url\" holds a \"position\" that no sink has given out",
        ),
    ] {
        receiver.reply_always(reply);
        let failing = until_status(&mut db, "w", says, |status| {
            status.last_error.as_deref() == Some(says) && status.attempts > 6
        });
        assert_eq!(failing.dead_letters, 0);
    }
    assert!(
        receiver
            .requests()
            .iter()
            .all(|request| request.method == "GET")
    );
    // What another sink was told counts for nothing.
    *kept.lock().unwrap() = json!(
        "2/00000000-0000-0000-0000-000000000000/7/b/900:900:/900:900:/99/99/0123456789abcdef"
    );
    let answer = json!({"position": *kept.lock().unwrap()}).to_string();
    receiver.reply_with(move |request| match request.method.as_str() {
        "GET" => Reply::ok().body(answer.clone()),
        _ => Reply::ok(),
    });
    receiver.wait_for(3);
    until_idle(&mut db, "w");
    assert_eq!(receiver.ids(), ids(1..=3));
}

#[test]
fn a_request_that_got_no_answer_is_asked_for() {
    let (receiver, kept) = remembering();
    let taken = Arc::clone(&kept);
    let cluster = quick().start();
    let mut db = cluster.connect();
    // It takes the first request, and its answer is lost.
    let lost = Mutex::new(false);
    receiver.reply_with(move |request| {
        let mut kept = taken.lock().unwrap();
        if request.method == "GET" {
            return Reply::ok().body(json!({"position": *kept}).to_string());
        }
        *kept = json!(request.header("outbox-checkpoint"));
        match std::mem::replace(&mut *lost.lock().unwrap(), true) {
            false => Reply::reset(),
            true => Reply::ok(),
        }
    });
    sink(&mut db, &receiver, "batch_size => 10");
    emit(&mut db, 1..=10);
    until_status(&mut db, "w", "all delivered", |status| {
        status.delivered == 10
    });
    let posts = receiver
        .requests()
        .iter()
        .filter(|request| request.method == "POST")
        .count();
    assert_eq!(posts, 1);
    until("it to be idle", || {
        (receiver
            .requests()
            .iter()
            .filter(|request| request.method == "GET")
            .count()
            >= 2)
            .then_some(())
    });
}

#[test]
fn transactions_whose_events_are_numbered_in_turn_are_not_cut() {
    let (receiver, kept) = remembering();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let whole = "\"grouping\" => 'transaction', batch_size => 2, enabled => false";
    sink(&mut db, &receiver, whole);
    // The second one ends first in numbers, and so it comes first; the first one has a smaller number than any of it.
    let (mut one, mut two) = (cluster.connect(), cluster.connect());
    let mut first = one.transaction().unwrap();
    let mut second = two.transaction().unwrap();
    for (transaction, id) in [(1, "a1"), (2, "b1"), (2, "b2"), (1, "a2")] {
        let emitter = if transaction == 1 {
            &mut first
        } else {
            &mut second
        };
        emitter.run(&format!(
            "select outbox.emit('test.turn', '{{}}', id => '{id}')"
        ));
    }
    first.commit().unwrap();
    second.commit().unwrap();
    // The receiver takes one transaction, and of the other one only hears; nothing is saved, and the dispatcher is killed.
    let taken = Arc::clone(&kept);
    receiver.reply_with(move |request| {
        let mut kept = taken.lock().unwrap();
        match request.method.as_str() {
            "GET" => Reply::ok().body(json!({"position": *kept}).to_string()),
            _ if kept.is_null() => {
                *kept = json!(request.header("outbox-checkpoint"));
                Reply::ok()
            }
            _ => Reply::hang(),
        }
    });
    let mut holder = cluster.connect();
    let mut held = holder.transaction().unwrap();
    held.run("select from outbox.cursors where name = 'sink:w' for update");
    db.run("select outbox.resume_sink('w')");
    receiver.wait_for(2);
    kill_dispatcher(&cluster, "app");
    drop(held);
    let taken = Arc::clone(&kept);
    receiver.reply_with(move |request| match request.method.as_str() {
        "GET" => Reply::ok().body(json!({"position": *taken.lock().unwrap()}).to_string()),
        _ => Reply::ok(),
    });
    let mut db = cluster.connect();
    until_status(&mut db, "w", "all delivered", |status| {
        status.delivered == 4
    });
    let first_arrivals: Vec<_> = receiver
        .first_arrivals()
        .into_iter()
        .map(|event| event.id)
        .collect();
    assert_eq!(first_arrivals, ["b1", "b2", "a1", "a2"]);
}

/// Ids that no other history gives its events.
fn emit_named(db: &mut Client, history: &str, events: i64) -> Vec<String> {
    db.all(&format!(
        "select outbox.emit('test.named', '{{}}', id => '{history}' || n, subject => n::text) from generate_series(1, {events}) n"
    ))
}

/// Those of `events` that a receiver has.
fn of_these(receiver: &Receiver, events: &[String]) -> usize {
    let arrived = receiver.first_arrivals();
    let is_one = |id: &String| arrived.iter().any(|event| event.id == *id);
    events.iter().filter(|id| is_one(id)).count()
}

fn until_all_of(receiver: &Receiver, events: &[String]) {
    until("all of a history to arrive", || {
        (of_these(receiver, events) == events.len()).then_some(())
    });
}

#[test]
fn after_an_older_copy_of_the_folder_nothing_is_passed_over() {
    let (receiver, _) = remembering();
    let mut cluster = quick().start();
    let mut db = cluster.connect();
    sink(&mut db, &receiver, "batch_size => 10");
    let common = emit_named(&mut db, "common", 50);
    until_all_of(&receiver, &common);
    until_idle(&mut db, "w");
    cluster.stop(Mode::Fast);
    let mut older = cluster.copy();
    cluster.start_again();
    let mut db = cluster.connect();
    let lost = emit_named(&mut db, "lost", 60);
    until_all_of(&receiver, &lost);
    until_idle(&mut db, "w");
    cluster.stop(Mode::Immediate);
    drop(cluster);

    // The receiver is ahead of this one; the same numbers and transaction ids are given out again.
    older.start_again();
    let mut db = older.connect();
    let new = emit_named(&mut db, "new", 100);
    until_all_of(&receiver, &new);
    until_idle(&mut db, "w");
    assert!(
        older
            .log()
            .contains("has come to an event that this database does not hold")
    );
    // From then on it is this history's receiver.
    let requests = receiver.count();
    older.stop(Mode::Fast);
    older.start_again();
    let mut db = older.connect();
    let more = emit_named(&mut db, "more", 5);
    until_all_of(&receiver, &more);
    until_idle(&mut db, "w");
    assert_eq!(receiver.count(), requests + 5, "nothing came again");
}

#[test]
fn a_clone_and_its_original_both_deliver() {
    let (receiver, _) = remembering();
    let mut cluster = quick().start();
    let mut db = cluster.connect();
    sink(&mut db, &receiver, "batch_size => 10");
    let common = emit_named(&mut db, "common", 20);
    until_all_of(&receiver, &common);
    until_idle(&mut db, "w");
    cluster.stop(Mode::Fast);
    let mut clone = cluster.copy();
    cluster.start_again();
    let mut db = cluster.connect();
    let first = emit_named(&mut db, "original", 40);
    until_all_of(&receiver, &first);
    clone.start_again();
    let mut there = clone.connect();
    for round in 1..=3 {
        let in_clone = emit_named(&mut there, &format!("clone {round}, "), 30);
        let in_original = emit_named(&mut db, &format!("original {round}, "), 10);
        until_all_of(&receiver, &in_clone);
        until_all_of(&receiver, &in_original);
        // The one is asked where the other one has been.
        kill_dispatcher(&clone, "app");
        kill_dispatcher(&cluster, "app");
        (db, there) = (cluster.connect(), clone.connect());
    }
}

/// The last that it had may not have come over to the standby; then what that writes is another history.
#[test]
fn a_standby_that_lost_commits_delivers_what_it_has_instead() {
    let (receiver, _) = remembering();
    let mut primary = quick().start();
    let mut db = primary.connect();
    sink(&mut db, &receiver, "batch_size => 10");
    let common = emit_named(&mut db, "common", 20);
    until_all_of(&receiver, &common);
    let standby = primary.standby();
    let mut there = standby.connect();
    there.run("alter system set primary_conninfo = ''");
    there.run("select pg_reload_conf()");
    until("the standby to be cut off", || {
        (db.one::<i64>("select count(*) from pg_stat_replication") == 0).then_some(())
    });
    let lost = emit_named(&mut db, "lost", 60);
    until_all_of(&receiver, &lost);
    primary.stop(Mode::Immediate);
    standby.promote();
    let new = emit_named(&mut there, "new", 100);
    until_all_of(&receiver, &new);
    until_idle(&mut there, "w");
}

/// One that had everything goes on as if nothing had been.
#[test]
fn a_promoted_standby_sends_nothing_again_that_the_receiver_has() {
    let (receiver, _) = remembering();
    let mut primary = quick().start();
    let mut db = primary.connect();
    sink(&mut db, &receiver, "batch_size => 10");
    emit(&mut db, 1..=20);
    receiver.wait_for(20);
    until_idle(&mut db, "w");
    let standby = primary.standby();
    // What comes now is delivered, and not saved.
    let mut holder = primary.connect();
    let mut held = holder.transaction().unwrap();
    held.run("select from outbox.cursors where name = 'sink:w' for update");
    emit(&mut db, 21..=30);
    receiver.wait_for(30);
    let written: String = db.one("select pg_current_wal_flush_lsn()::text");
    let mut there = standby.connect();
    until("the standby to catch up", || {
        let caught_up = format!("select pg_last_wal_replay_lsn() >= '{written}'::pg_lsn");
        there.one::<bool>(&caught_up).then_some(())
    });
    drop(held);
    primary.stop(Mode::Immediate);
    standby.promote();
    emit(&mut there, 31..=35);
    receiver.wait_for(35);
    until_idle(&mut there, "w");
    assert_eq!(receiver.ids(), ids(1..=35));
}
