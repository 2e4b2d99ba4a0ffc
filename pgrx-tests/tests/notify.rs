//! `NOTIFY outbox`: clients that listen instead of polling.

mod scene;

use std::time::Duration;

use outbox_tests::{Cluster, DEADLINE, Receiver, Sql, until};
use postgres::Client;
use postgres::fallible_iterator::FallibleIterator;
use scene::{http_sink, quick};
use serde_json::json;

/// A session that listens, and one that does not.
fn scene() -> (Cluster, Client, Client) {
    let cluster = quick().start();
    let (mut listener, db) = (cluster.connect(), cluster.connect());
    listener.run("listen outbox");
    (cluster, listener, db)
}

/// The payload of the next notification.
#[track_caller]
fn next(listener: &mut Client) -> String {
    let mut notifications = listener.notifications();
    let next = notifications.timeout_iter(DEADLINE).next().unwrap();
    let next = next.expect("a notification");
    assert_eq!(next.channel(), "outbox");
    next.payload().to_owned()
}

/// Waits until that was notified.
#[track_caller]
fn until_notified(listener: &mut Client, payload: &str) {
    while next(listener) != payload {}
}

fn position(db: &mut Client, table: &str) -> String {
    db.one(&format!(
        "select outbox.format_position(txid, seq) from {table} order by seq desc limit 1"
    ))
}

#[test]
fn whoever_listens_is_told() {
    let (_cluster, mut listener, mut db) = scene();
    db.run("select outbox.create_stream('billing')");
    for _ in 0..5 {
        db.run("select outbox.emit('a') from generate_series(1, 10)");
        let end = position(&mut db, "outbox.events");
        until_notified(&mut listener, &format!("outbox {end}"));
        db.run("insert into outbox.billing (topic) values ('b')");
        let end = position(&mut db, "outbox.billing");
        until_notified(&mut listener, &format!("billing {end}"));
    }
}

#[test]
fn a_burst_is_told_in_few_words() {
    let (_cluster, mut listener, mut db) = scene();
    for n in 1..=500 {
        db.run(&format!("select outbox.emit('a', subject => '{n}')"));
    }
    let end = format!("outbox {}", position(&mut db, "outbox.events"));
    let mut told = vec![next(&mut listener)];
    while *told.last().unwrap() != end {
        told.push(next(&mut listener));
    }
    assert!(told.len() < 500, "{}", told.len());
    told.dedup();
    let count = told.len();
    told.sort_unstable();
    told.dedup();
    assert_eq!(told.len(), count, "each once");
}

#[test]
fn a_pull_consumer_is_told_while_an_older_transaction_is_open() {
    let (cluster, mut listener, mut db) = scene();
    db.run("select outbox.create_sink('p', 'pull')");
    let mut open = cluster.connect();
    open.run("begin; select outbox.emit('late')");
    db.run("select outbox.emit('early')");
    let early = position(&mut db, "outbox.events");
    until_notified(&mut listener, &format!("outbox {early}"));
    let poll = "select topic from outbox.poll('p')";
    assert_eq!(db.all::<String>(poll), ["early"]);
    assert!(db.one::<bool>("select outbox.ack('p')"));

    // The late one has the smaller number and the smaller id: it is told all the same.
    let late: String = open
        .one("select outbox.format_position(txid, seq) from outbox.events order by seq limit 1");
    open.run("commit");
    until_notified(&mut listener, &format!("outbox {late}"));
    assert_eq!(db.all::<String>(poll), ["late"]);
}

#[test]
fn a_reader_of_pairs_is_told_once_it_can_read() {
    let (cluster, mut listener, mut db) = scene();
    let mut open = cluster.connect();
    open.run("begin; select pg_current_xact_id()");
    db.run("select outbox.emit('a')");
    let end = format!("outbox {}", position(&mut db, "outbox.events"));
    until_notified(&mut listener, &end);
    let read = "select topic from outbox.read()";
    assert_eq!(db.all::<String>(read), Vec::<String>::new());
    // What held it back writes no event and takes no further id.
    open.run("commit");
    until_notified(&mut listener, &end);
    assert_eq!(db.all::<String>(read), ["a"]);
}

#[test]
fn nobody_is_told_of_what_was_undone() {
    let (_cluster, mut listener, mut db) = scene();
    db.run("create table t (n int)");
    for _ in 0..10 {
        db.run("begin; select outbox.emit('undone'); rollback");
        db.run("insert into t values (1)");
        db.run("begin; savepoint s; select outbox.emit('undone'); rollback to s; commit");
    }
    db.run("select outbox.emit('a')");
    let end = position(&mut db, "outbox.events");
    assert_eq!(next(&mut listener), format!("outbox {end}"));
}

#[test]
fn it_can_be_switched_off() {
    let cluster = quick().setting("outbox.notify", "off").start();
    let (mut listener, mut db) = (cluster.connect(), cluster.connect());
    listener.run("listen outbox");
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "");
    for n in 1..=10 {
        db.run("select outbox.emit('quiet')");
        receiver.wait_for(n);
    }
    db.run("notify outbox, 'mine'");
    assert_eq!(next(&mut listener), "mine");
    cluster.set("outbox.notify", "on");
    let mut count = 10;
    // The first to be told may be the last that was quiet, of which nobody has been told yet.
    until("a loud one to be told", || {
        db.run("select outbox.emit('loud')");
        count += 1;
        receiver.wait_for(count);
        let mut notifications = listener.notifications();
        let told = notifications
            .timeout_iter(Duration::from_millis(50))
            .next()
            .unwrap()?;
        let loud: Vec<String> = db.all(
            "select 'outbox ' || outbox.format_position(txid, seq) from outbox.events where topic = 'loud'",
        );
        loud.iter()
            .any(|position| position == told.payload())
            .then_some(())
    });
}

#[test]
fn listeners_hear_of_what_was_written_while_no_dispatcher_ran() {
    let (_cluster, mut listener, mut db) = scene();
    db.run("select outbox.emit('a')");
    next(&mut listener);
    assert!(db.one::<bool>("select outbox.stop()"));
    until("the dispatcher to end", || {
        let running =
            "select count(*) from pg_stat_activity where backend_type like 'pg_outbox dispatcher%'";
        (db.one::<i64>(running) == 0).then_some(())
    });
    db.run("select outbox.emit('b')");
    let end = position(&mut db, "outbox.events");
    db.run("select outbox.start()");
    until_notified(&mut listener, &format!("outbox {end}"));
}
