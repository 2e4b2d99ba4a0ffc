//! The extension is dropped, and made again, while its processes are at work.

use std::thread;

use outbox_tests::{Receiver, Reply, Sql, until};
use serde_json::json;

use super::expect_in_order;
use crate::scene::{emit, http_sink, ids, quick, until_idle};
use crate::workers::{admin, dispatcher, until_quiet};

#[test]
fn the_extension_is_dropped_while_its_sinks_are_busy_and_made_again() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("create table taken (id text)");
    let with_sinks = |db: &mut postgres::Client, receiver: &Receiver| {
        db.run("create function take(e outbox.event[]) returns void language sql as 'insert into taken select id from unnest(e)'");
        http_sink(db, "a", receiver, json!({}), "batch_size => 2");
        db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}', batch_size => 2)"#);
    };
    let mut receivers = Vec::new();
    for round in 0..4 {
        let receiver = Receiver::start();
        with_sinks(&mut db, &receiver);
        emit(&mut db, 1..=400);
        receiver.wait_for(20);
        if round % 2 == 0 {
            db.run("drop extension pg_outbox cascade");
            db.run("create extension pg_outbox");
        } else {
            // The dispatcher never sees the database without it.
            db.run("begin; drop extension pg_outbox cascade; create extension pg_outbox; commit");
        }
        db.run("truncate taken");
        receivers.push(receiver);
    }
    let receiver = Receiver::start();
    with_sinks(&mut db, &receiver);
    let had: Vec<_> = receivers.iter().map(Receiver::count).collect();
    emit(&mut db, 1..=100);
    expect_in_order(&receiver, &ids(1..=100));
    until("the function to have had all", || {
        (db.one::<i64>("select count(distinct id) from taken") == 100).then_some(())
    });
    until_idle(&mut db, "f");
    assert_eq!(db.one::<i64>("select count(*) from taken"), 100);
    let now: Vec<_> = receivers.iter().map(Receiver::count).collect();
    assert_eq!(had, now, "sinks that are gone get nothing");
}

#[test]
fn the_extension_is_dropped_while_a_receiver_hangs() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    receiver.reply_always(Reply::hang());
    http_sink(
        &mut db,
        "a",
        &receiver,
        json!({"timeout_ms": 3_600_000}),
        "",
    );
    emit(&mut db, 1..=10);
    receiver.wait_for_requests(1);
    db.run("drop extension pg_outbox");
    until_quiet(&cluster, "app");
    db.run("create extension pg_outbox");
    http_sink(&mut db, "a", &other, json!({}), "");
    emit(&mut db, 1..=10);
    expect_in_order(&other, &ids(1..=10));
}

#[test]
fn an_unfinished_drop_only_makes_it_wait() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    until_idle(&mut db, "a");
    let pid = dispatcher(&cluster, "app");
    let mut dropping = cluster.connect();
    let mut writing = cluster.connect();
    writing.run("begin; select outbox.emit('x', id => 'n2')");
    // Waits for the writer, with the extension locked.
    thread::scope(|scope| {
        let drop = scope.spawn(move || {
            dropping.run("begin; drop extension pg_outbox; rollback");
        });
        until("the drop to wait", || {
            admin(&cluster)
                .one::<bool>("select exists (select from pg_locks where not granted)")
                .then_some(())
        });
        writing.run("commit");
        drop.join().unwrap();
    });
    receiver.wait_for(2);
    emit(&mut db, 3..=3);
    expect_in_order(&receiver, &ids(1..=3));
    assert_eq!(dispatcher(&cluster, "app"), pid);
}
