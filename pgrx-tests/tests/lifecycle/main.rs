//! The extension's processes: that they come, go and come back when they should, and that nothing is lost by it.

#[path = "../scene/mod.rs"]
mod scene;
#[path = "../workers/mod.rs"]
mod workers;

mod by_hand;
mod dropping;

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::Duration;

use outbox_tests::{Cluster, Receiver, Reply, Signal, Sql, until};
use scene::{emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::json;
use workers::{
    admin, another_dispatcher, dispatcher, dispatchers, find_dispatcher, launcher, terminate,
    until_gone, until_quiet, until_resting,
};

/// Nothing arrives in time unless a commit, or whatever else happens, wakes somebody.
const NEVER: &str = "1h";

/// Writes events, each in a transaction of its own, until told to stop; returns how many were committed.
fn write_on(cluster: &Cluster, stop: &AtomicBool, written: &AtomicI64) {
    let mut db = cluster.connect();
    while !stop.load(Ordering::Relaxed) {
        let n = written.load(Ordering::Relaxed) + 1;
        emit(&mut db, n..=n);
        written.store(n, Ordering::Relaxed);
    }
}

/// Runs `body` while another session writes events, and returns the ids of what that one has committed.
fn while_writing(cluster: &Cluster, body: impl FnOnce()) -> Vec<String> {
    let (stop, written) = (AtomicBool::new(false), AtomicI64::new(0));
    thread::scope(|scope| {
        let writer = scope.spawn(|| write_on(cluster, &stop, &written));
        until("the first events", || {
            (written.load(Ordering::Relaxed) > 20).then_some(())
        });
        body();
        let before = written.load(Ordering::Relaxed);
        until("more events", || {
            (written.load(Ordering::Relaxed) > before + 20).then_some(())
        });
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    ids(1..=written.into_inner())
}

/// Waits until a receiver has had every one of these events, in this order.
#[track_caller]
fn expect_in_order(receiver: &Receiver, wanted: &[String]) {
    let arrived = receiver.wait_for_distinct(wanted.len());
    let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
    assert_eq!(arrived, wanted);
}

#[test]
fn a_commit_wakes_the_dispatcher() {
    let cluster = quick().setting("outbox.poll_interval", NEVER).start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    for n in 1..=20 {
        emit(&mut db, n..=n);
        receiver.wait_for(usize::try_from(n).unwrap());
    }
    // Nor need it be emit that writes.
    db.run("insert into outbox.events (topic, id) values ('direct', 'direct')");
    db.run("copy outbox.events (topic) from program 'echo copied'");
    let events = receiver.wait_for(22);
    assert_eq!(events[20].id, "direct");
    assert_eq!(events[21].topic, "copied");

    // Neither a savepoint that is rolled back nor one that is not keeps the commit from waking.
    db.run("begin; savepoint s; select outbox.emit('no'); rollback to s; select outbox.emit('yes'); commit");
    assert_eq!(receiver.wait_for(23)[22].topic, "yes");
    db.run("begin; savepoint s; select outbox.emit('yes'); release s; commit");
    receiver.wait_for(24);
    // What a change of a sink brings does not wait either.
    let other = Receiver::start();
    http_sink(&mut db, "b", &other, json!({}), "");
    other.wait_for(24);
    db.run("select outbox.pause_sink('b')");
    until_status(&mut db, "b", "paused", |status| status.state == "paused");
    emit(&mut db, 21..=21);
    receiver.wait_for(25);
    db.run("select outbox.resume_sink('b')");
    other.wait_for(25);
}

#[test]
fn what_a_prepared_transaction_wrote_arrives_with_the_poll() {
    let cluster = quick().setting("outbox.poll_interval", "200ms").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    // Whatever else there is to write has been written, and nothing else happens in this cluster: no transaction id is given out that
    // could tell the dispatcher that there is something to look for.
    for n in 2..=4 {
        until_resting(&cluster, dispatcher(&cluster, "app"));
        db.run(&format!(
            "begin; select outbox.emit('prepared', id => 'n{n}'); prepare transaction 'p{n}'"
        ));
        until_resting(&cluster, dispatcher(&cluster, "app"));
        db.run(&format!("commit prepared 'p{n}'"));
        receiver.wait_for(n);
    }
    db.run("begin; select outbox.emit('prepared', id => 'n5'); prepare transaction 'p5'");
    db.run("rollback prepared 'p5'");
    emit(&mut db, 6..=6);
    expect_in_order(&receiver, &ids([1, 2, 3, 4, 6]));
}

#[test]
fn a_dispatcher_that_is_cancelled_goes_on() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 3");
    let pid = dispatcher(&cluster, "app");
    let launcher = launcher(&cluster);
    let cancel = |pid| admin(&cluster).run(&format!("select pg_cancel_backend({pid})"));
    until_resting(&cluster, pid);
    cancel(pid);
    cancel(launcher);
    let wanted = while_writing(&cluster, || {
        for _ in 0..30 {
            cancel(pid);
            cancel(launcher);
        }
    });
    expect_in_order(&receiver, &wanted);
    assert_eq!(until_idle(&mut db, "a").lease_pid, Some(pid));
    assert_eq!(find_dispatcher(&cluster, "app"), Some(pid));
    assert_eq!(workers::launcher(&cluster), launcher);

    // While it waits for a lock, too: it gives up, and tries again.
    let mut locker = cluster.connect();
    locker.run("begin; lock table outbox.cursors in access exclusive mode");
    receiver.clear();
    emit(&mut db, 1_000_000..=1_000_000);
    until("it to wait for the lock", || {
        admin(&cluster)
            .one::<bool>(&format!(
                "select exists (select from pg_locks where pid = {pid} and not granted)"
            ))
            .then_some(())
    });
    cancel(pid);
    locker.run("commit");
    receiver.wait_for(1);
    assert_eq!(find_dispatcher(&cluster, "app"), Some(pid));
}

#[test]
fn a_dispatcher_that_is_terminated_is_replaced() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 3");
    let wanted = while_writing(&cluster, || {
        let old = dispatcher(&cluster, "app");
        terminate(&cluster, old);
        another_dispatcher(&cluster, "app", old);
    });
    expect_in_order(&receiver, &wanted);

    // One that waits for a lock goes at once, too.
    let old = dispatcher(&cluster, "app");
    let mut locker = cluster.connect();
    locker.run("begin; lock table outbox.cursors in access exclusive mode");
    emit(&mut db, 1_000_000..=1_000_000);
    until("it to wait for the lock", || {
        admin(&cluster)
            .one::<bool>(&format!(
                "select exists (select from pg_locks where pid = {old} and not granted)"
            ))
            .then_some(())
    });
    terminate(&cluster, old);
    until_gone(&cluster, old);
    locker.run("commit");
    receiver.wait_for_distinct(wanted.len() + 1);
    another_dispatcher(&cluster, "app", old);
}

#[test]
fn a_launcher_that_is_terminated_is_replaced_and_finds_its_dispatchers() {
    let cluster = quick().setting("outbox.poll_interval", NEVER).start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let old = launcher(&cluster);
    let served_by = dispatcher(&cluster, "app");
    terminate(&cluster, old);
    until_gone(&cluster, old);
    let new = launcher(&cluster);
    assert_ne!(new, old);
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    // A database that comes now is found, and the dispatcher of the old one is looked after as before.
    cluster.createdb("later");
    dispatcher(&cluster, "later");
    let still = dispatcher(&cluster, "app");
    assert_eq!(still, served_by, "deliveries went on meanwhile");
    terminate(&cluster, still);
    another_dispatcher(&cluster, "app", still);
    emit(&mut db, 2..=2);
    receiver.wait_for_distinct(2);
    // It can still be told to stop.
    cluster.set("outbox.databases", "later");
    until_quiet(&cluster, "app");
    dispatcher(&cluster, "later");
}

#[test]
fn after_a_crash_of_the_server_everything_arrives() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 3");
    emit(&mut db, 1..=100);
    let hang = AtomicBool::new(false);
    receiver.reply_with(move |_| {
        if hang.swap(true, Ordering::Relaxed) {
            Reply::ok()
        } else {
            Reply::hang()
        }
    });
    let pid = dispatcher(&cluster, "app");
    emit(&mut db, 101..=200);
    cluster.kill_backend(pid, Signal::KILL);
    until("the session to be lost", || {
        db.simple_query("").is_err().then_some(())
    });
    cluster.wait_until_it_answers();
    let mut db = cluster.connect();
    emit(&mut db, 201..=300);
    expect_in_order(&receiver, &ids(1..=300));
    until_idle(&mut db, "a");
}

#[test]
fn settings_are_read_again() {
    let cluster = quick().setting("outbox.batch_size", "5").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let sizes = || -> Vec<usize> {
        let requests = receiver.requests();
        let sizes = requests.iter().map(|request| {
            let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
            body.as_array().unwrap().len()
        });
        sizes.collect()
    };
    emit(&mut db, 1..=20);
    receiver.wait_for(20);
    assert_eq!(sizes(), [5, 5, 5, 5]);

    receiver.clear();
    cluster.set("outbox.batch_size", "10");
    until("the setting to arrive", || {
        (db.one::<String>("show outbox.batch_size") == "10").then_some(())
    });
    // The dispatcher gets the signal as this session does; give it a delivery to have taken it.
    until("larger batches", || {
        receiver.clear();
        emit(&mut db, 1..=20);
        receiver.wait_for(20);
        (sizes() == [10, 10]).then_some(())
    });

    // Off: nobody delivers. On again: everything does.
    cluster.set("outbox.enabled", "off");
    until_quiet(&cluster, "app");
    receiver.clear();
    emit(&mut db, 21..=40);
    until_status(&mut db, "a", "stopped", |status| status.state == "stopped");
    let refused = db.refused("select outbox.start()");
    assert_eq!(refused.sqlstate, "55000");
    cluster.set("outbox.enabled", "on");
    expect_in_order(&receiver, &ids(21..=40));

    // The same for one database among several.
    cluster.set("outbox.databases", "another, postgres");
    until_quiet(&cluster, "app");
    assert_eq!(db.refused("select outbox.start()").sqlstate, "55000");
    receiver.clear();
    emit(&mut db, 41..=60);
    cluster.set("outbox.databases", "another, app");
    expect_in_order(&receiver, &ids(41..=60));

    // A time-out that is changed holds for the next delivery.
    receiver.reply_next([Reply::hang()]);
    cluster.set("outbox.http_timeout", "300ms");
    until("the setting to arrive", || {
        (db.one::<String>("show outbox.http_timeout") == "300ms").then_some(())
    });
    receiver.clear();
    emit(&mut db, 61..=80);
    expect_in_order(&receiver, &ids(61..=80));
}

#[test]
fn retries_and_polls_follow_the_settings_as_they_change() {
    let cluster = quick()
        .setting("outbox.retry_min", NEVER)
        .setting("outbox.retry_max", NEVER)
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_next([Reply::status(503)]);
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 1");
    emit(&mut db, 1..=1);
    until_status(&mut db, "a", "waiting for its next try", |status| {
        status.next_attempt_in.is_some_and(|left| left > 1800.0)
    });
    cluster.set("outbox.retry_min", "20ms");
    cluster.set("outbox.retry_max", "20ms");
    // What has been decided stays; but a sink that is resumed is tried at once, and by the new settings.
    receiver.reply_next(vec![Reply::status(503); 6]);
    db.run("select outbox.resume_sink('a')");
    receiver.wait_for(1);
    until_idle(&mut db, "a");
}

#[test]
fn the_activity_view_tells_what_the_workers_do() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let mut admin = admin(&cluster);
    let told = |admin: &mut postgres::Client, pid: i32| -> String {
        admin.one(&format!(
            "select concat_ws('|', backend_type, datname, application_name, state, query) from pg_stat_activity where pid = {pid}"
        ))
    };
    let pid = launcher(&cluster);
    until("the launcher to tell what it does", || {
        let told = told(&mut admin, pid);
        (told == "pg_outbox launcher|pg_outbox launcher|idle|keeping dispatchers in 1 database")
            .then_some(())
    });
    db.run(
        "create function slow(outbox.event[]) returns void language plpgsql as 'begin perform pg_sleep(3600); end'",
    );
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "");
    db.run(r#"select outbox.create_sink('slow', 'function', config => '{"function": "slow"}')"#);
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    let main = dispatcher(&cluster, "app");
    until("the dispatcher to tell that it has nothing to do", || {
        told(&mut admin, main)
            .starts_with("pg_outbox dispatcher|app|pg_outbox dispatcher|idle|")
            .then_some(())
    });
    let helper = until("a process for the function", || {
        dispatchers(&cluster, "app")
            .into_iter()
            .find(|&pid| pid != main)
    });
    until("the other one to tell that it calls the function", || {
        (told(&mut admin, helper)
            == "pg_outbox dispatcher|app|pg_outbox sink slow|active|calling functions")
            .then_some(())
    });
}

#[test]
fn an_idle_database_stays_idle() {
    let cluster = quick()
        .setting("autovacuum", "off")
        .setting("outbox.poll_interval", "50ms")
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    db.run("create table taken (seq bigint)");
    db.run("create function take(e outbox.event[]) returns void language sql as 'insert into taken select seq from unnest(e)'");
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#);
    emit(&mut db, 1..=5);
    receiver.wait_for(5);
    until_idle(&mut db, "a");
    until_idle(&mut db, "f");
    drop(db);
    let pids = dispatchers(&cluster, "app");
    assert_eq!(pids.len(), 2);
    for &pid in &pids {
        until_resting(&cluster, pid);
    }
    // Polls go by without a transaction, once what the last one left behind is looked at.
    let mut admin = admin(&cluster);
    let xacts = |db: &mut postgres::Client| -> i64 {
        db.one("select xact_commit + xact_rollback from pg_stat_database where datname = 'app'")
    };
    until("polls without a transaction", || {
        let before = xacts(&mut admin);
        thread::sleep(Duration::from_secs(2));
        (xacts(&mut admin) == before).then_some(())
    });
}

#[test]
fn whoever_holds_the_table_of_one_stream_stops_nobody_else() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    db.run("select outbox.create_stream('billing'), outbox.create_stream('going')");
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let bills = Receiver::start();
    http_sink(&mut db, "b", &bills, json!({}), "stream => 'billing'");
    db.run("create table taken (id text)");
    db.run("create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select id from unnest(e)'");
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}', stream => 'billing')"#);
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    db.run("select outbox.emit('bill', id => 'b1', stream => 'billing')");
    bills.wait_for(1);
    let mut holder = cluster.connect();
    for statement in [
        "lock table outbox.billing in access exclusive mode",
        "alter table outbox.billing set (fillfactor = 90)",
        "select outbox.drop_stream('going')",
    ] {
        let n = i64::try_from(receiver.count()).unwrap() + 1;
        db.run("select outbox.emit('bill', stream => 'billing')");
        holder.run(&format!("begin; {statement}"));
        for n in n..n + 10 {
            emit(&mut db, n..=n);
            receiver.wait_for(usize::try_from(n).unwrap());
        }
        holder.run("rollback");
    }
    bills.wait_for(4);
    until("the function to have had all", || {
        (db.one::<i64>("select count(*) from taken") == 4).then_some(())
    });
}
