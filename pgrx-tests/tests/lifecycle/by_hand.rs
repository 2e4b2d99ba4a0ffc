//! Dispatchers that are stopped and started by hand, with the library preloaded and without.

use outbox_tests::{Receiver, Sql, until};
use serde_json::json;

use super::NEVER;
use crate::scene::{emit, http_sink, quick};
use crate::workers::{
    admin, another_dispatcher, dispatcher, dispatchers, find_dispatcher, terminate, until_quiet,
};

#[test]
fn stopping_by_hand_lasts_until_starting_by_hand() {
    let cluster = quick().setting("outbox.poll_interval", NEVER).start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    db.run("create table taken (seq bigint)");
    db.run("create function take(e outbox.event[]) returns void language sql as 'insert into taken select seq from unnest(e)'");
    http_sink(&mut db, "a", &receiver, json!({}), "");
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#);
    let old = dispatcher(&cluster, "app");
    assert!(!db.one::<bool>("select outbox.start()"), "it runs");
    for _ in 0..3 {
        assert!(db.one::<bool>("select outbox.stop()"));
        assert!(dispatchers(&cluster, "app").is_empty(), "gone at once");
        assert!(!db.one::<bool>("select outbox.stop()"), "none runs");
        assert!(db.one::<bool>("select outbox.start()"));
        dispatcher(&cluster, "app");
    }
    db.run("select outbox.stop()");
    emit(&mut db, 1..=3);
    // Neither a commit, nor a reload, nor what happens elsewhere starts it.
    cluster.createdb("elsewhere");
    dispatcher(&cluster, "elsewhere");
    cluster.set("outbox.batch_size", "7");
    assert!(dispatchers(&cluster, "app").is_empty());
    assert_eq!(receiver.count(), 0);
    assert_eq!(
        crate::scene::status(&mut db, "a").waiting_for.as_deref(),
        Some("a dispatcher: outbox.start, or shared_preload_libraries")
    );
    assert!(db.one::<bool>("select outbox.start()"));
    another_dispatcher(&cluster, "app", old);
    receiver.wait_for(3);
    until("the function", || {
        (db.one::<i64>("select count(*) from taken") == 3).then_some(())
    });
}

#[test]
fn without_preloading_a_dispatcher_is_started_by_hand() {
    let cluster = quick().preload(false).start();
    cluster.connect_to("postgres").run("create database other");
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=1);
    assert_eq!(
        crate::scene::status(&mut db, "a").waiting_for.as_deref(),
        Some("a dispatcher: outbox.start, or shared_preload_libraries")
    );
    assert!(!db.one::<bool>("select outbox.stop()"));
    assert!(db.one::<bool>("select outbox.start()"));
    assert!(!db.one::<bool>("select outbox.start()"));
    receiver.wait_for(1);
    // No commit can wake it; it looks often enough.
    emit(&mut db, 2..=2);
    receiver.wait_for(2);
    db.run("create table taken (seq bigint)");
    db.run("create function take(e outbox.event[]) returns void language sql as 'insert into taken select seq from unnest(e)'");
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#);
    until("the function", || {
        (db.one::<i64>("select count(*) from taken") == 2).then_some(())
    });

    for n in 3..=5 {
        assert!(db.one::<bool>("select outbox.stop()"));
        assert!(dispatchers(&cluster, "app").is_empty());
        emit(&mut db, n..=n);
        assert!(db.one::<bool>("select outbox.start()"));
        receiver.wait_for(usize::try_from(n).unwrap());
    }
    // Nobody keeps a terminated one.
    terminate(&cluster, dispatcher(&cluster, "app"));
    until("no dispatcher", || {
        find_dispatcher(&cluster, "app").is_none().then_some(())
    });
    assert!(db.one::<bool>("select outbox.start()"));

    // It does not stand in the way of those who want the database gone, or the extension.
    db.run("drop extension pg_outbox cascade");
    until_quiet(&cluster, "app");
    db.run("create extension pg_outbox");
    http_sink(&mut db, "a", &receiver, json!({}), "");
    assert!(db.one::<bool>("select outbox.start()"));
    receiver.clear();
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    drop(db);
    let mut admin = admin(&cluster);
    until("the test's own session to end", || {
        admin
            .one::<bool>("select not exists (select from pg_stat_activity where datname = 'app' and backend_type = 'client backend')")
            .then_some(())
    });
    admin.run("drop database other");
    admin.run("drop database app");
}
