//! A standby is quiet, can be read, and carries on where its primary was once it is promoted.

mod scene;
mod workers;

use outbox_tests::{Cluster, Mode, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{dead_letters, emit, http_sink, ids, quick, until_dead, until_idle, until_status};
use serde_json::json;
use workers::{admin, dispatcher, find_dispatcher};

/// Waits until a standby shows everything that its primary has committed so far.
fn until_caught_up(primary: &mut Client, standby: &mut Client) {
    let written: String = primary.one("select pg_current_wal_flush_lsn()::text");
    until("the standby to catch up", || {
        standby
            .one::<bool>(&format!(
                "select pg_last_wal_replay_lsn() >= '{written}'::pg_lsn"
            ))
            .then_some(())
    });
}

/// Processes of ours on a server.
fn our_processes(cluster: &Cluster) -> i64 {
    admin(cluster).one("select count(*) from pg_stat_activity where backend_type like 'pg_outbox%'")
}

#[test]
fn a_standby_is_quiet_and_readable_and_carries_on_when_promoted() {
    let mut primary = quick().start();
    let mut db = primary.connect();
    let receiver = Receiver::start();
    receiver.reply_with(|request| {
        if String::from_utf8_lossy(&request.body).contains("\"subject\":\"3\"") {
            Reply::status(400)
        } else {
            Reply::ok()
        }
    });
    http_sink(&mut db, "a", &receiver, json!({}), "");
    db.run("create table taken (id text)");
    db.run("create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select id from unnest(e)'");
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#);
    db.run("select outbox.create_sink('p', 'pull')");
    db.run("select outbox.create_stream('billing')");
    emit(&mut db, 1..=10);
    until_dead(&mut db, "a", 1);
    assert_eq!(
        db.all::<String>("select id from outbox.poll('p', 4)"),
        ids(1..=4)
    );
    db.run("select outbox.ack('p')");
    db.run("select outbox.save_cursor('mine', outbox.tail())");

    // From here on nothing is delivered: what comes now is for the standby to deliver.
    let standby = primary.standby();
    until_idle(&mut db, "f");
    let requests = receiver.requests().len();
    receiver.reply_always(Reply::hang());
    emit(&mut db, 11..=20);
    receiver.wait_for_requests(requests + 1);
    until("the function to have had all", || {
        (db.one::<i64>("select count(*) from taken") == 20).then_some(())
    });
    let mut there = standby.connect();
    until_caught_up(&mut db, &mut there);

    assert_eq!(our_processes(&standby), 0);
    assert_eq!(
        there.all::<String>("select id from outbox.read()"),
        ids(1..=20)
    );
    let after: String = there.one("select outbox.cursor('mine')");
    assert_eq!(
        there.all::<String>(&format!("select id from outbox.read('{after}', 3)")),
        ids(11..=13)
    );
    assert!(
        there
            .one::<Option<String>>("select outbox.tail()")
            .is_some()
    );
    let a = scene::status(&mut there, "a");
    assert_eq!((a.lag_events, a.dead_letters, a.lease_pid), (10, 1, None));
    assert_eq!(a.state, "stopped");
    assert_eq!(
        a.waiting_for.as_deref(),
        Some("the primary, or the promotion of this standby")
    );
    // The save of a cursor is not flushed at once, and comes when it is.
    until("the cursor of f to come over", || {
        (scene::status(&mut there, "f").lag_events == 0).then_some(())
    });
    assert_eq!(scene::status(&mut there, "p").lag_events, 16);
    for (statement, sqlstate) in [
        ("select outbox.emit('x')", "25006"),
        ("select outbox.tick()", "25006"),
        ("select * from outbox.poll('p')", "25006"),
        ("select outbox.prune()", "25006"),
        ("select outbox.save_cursor('mine', '1:1')", "25006"),
        ("select outbox.start()", "55000"),
    ] {
        assert_eq!(there.refused(statement).sqlstate, sqlstate, "{statement}");
    }
    assert_eq!(our_processes(&standby), 0);

    // The primary is gone, all of a sudden.
    primary.stop(Mode::Immediate);
    receiver.clear();
    receiver.reply_always(Reply::ok());
    standby.promote();
    let arrived = receiver.wait_for_distinct(10);
    let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
    assert_eq!(arrived, ids(11..=20));
    emit(&mut there, 21..=25);
    receiver.wait_for_distinct(15);
    until_idle(&mut there, "a");
    until("the function to have had all", || {
        (there.one::<i64>("select count(*) from taken") >= 25).then_some(())
    });
    assert_eq!(
        there.all::<String>("select id from taken"),
        ids(1..=25),
        "each once"
    );
    let mut polled = Vec::<String>::new();
    while polled.len() < 21 {
        polled.extend(there.all("select id from outbox.poll('p')"));
        assert!(there.one::<bool>("select outbox.ack('p')"));
    }
    assert_eq!(polled, ids(5..=25));
    assert_eq!(dead_letters(&mut there, "a")[0].id(), "n3");
    there.run("select outbox.redeliver('a')");
    receiver.wait_for_distinct(16);
    until_status(&mut there, "a", "no dead letter", |status| {
        status.dead_letters == 0
    });
    there.run("select outbox.emit('bill', stream => 'billing')");
    assert_eq!(
        there.one::<i64>("select count(*) from outbox.read(stream => 'billing')"),
        1
    );
}

#[test]
fn a_prepared_transaction_outlives_the_promotion() {
    let mut primary = quick().start();
    let mut db = primary.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    db.run("begin; select outbox.emit('prepared', id => 'n2'); prepare transaction 'two'");
    emit(&mut db, 3..=3);
    receiver.wait_for(2);
    until_idle(&mut db, "a");
    let standby = primary.standby();
    let mut there = standby.connect();
    until_caught_up(&mut db, &mut there);
    primary.stop(Mode::Immediate);
    standby.promote();
    emit(&mut there, 4..=4);
    receiver.wait_for_distinct(3);
    there.run("commit prepared 'two'");
    let arrived = receiver.wait_for_distinct(4);
    let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
    assert_eq!(arrived, ids([1, 3, 4, 2]));
}

#[test]
fn without_preloading_a_promoted_standby_is_started_by_hand() {
    let mut primary = quick().preload(false).start();
    let mut db = primary.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=3);
    let standby = primary.standby();
    let mut there = standby.connect();
    until_caught_up(&mut db, &mut there);
    assert_eq!(there.refused("select outbox.start()").sqlstate, "55000");
    primary.stop(Mode::Immediate);
    standby.promote();
    assert!(find_dispatcher(&standby, "app").is_none());
    assert!(there.one::<bool>("select outbox.start()"));
    dispatcher(&standby, "app");
    let arrived = receiver.wait_for(3);
    let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
    assert_eq!(arrived, ids(1..=3));
}
