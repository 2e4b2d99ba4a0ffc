//! Databases that come, go, are renamed and copied, with busy sinks in them: the extension's processes stand in nobody's way, and what
//! is left of a database goes on delivering.

mod scene;
mod workers;

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::json;
use workers::{
    admin, another_dispatcher, dispatcher, dispatchers, find_dispatcher, terminate, until_quiet,
};

/// What keeps a database's dispatcher at it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Busy {
    /// One delivery after the other, without an end in sight.
    Delivering,
    /// A receiver that never answers.
    Hanging,
    /// A function that never returns, in a process of its own.
    Calling,
}

/// A database whose sinks have something to do for longer than the test lasts, and no session in it but the dispatcher's.
fn busy_database(cluster: &Cluster, name: &str, busy: Busy) -> Receiver {
    cluster.createdb(name);
    let mut db = cluster.connect_to(name);
    let receiver = Receiver::start();
    match busy {
        Busy::Delivering => {
            http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 1");
            emit(&mut db, 1..=20_000);
            receiver.wait_for(10);
        }
        Busy::Hanging => {
            receiver.reply_always(Reply::hang());
            let config = json!({"timeout_ms": 3_600_000});
            http_sink(&mut db, "a", &receiver, config, "");
            emit(&mut db, 1..=10);
            receiver.wait_for_requests(1);
        }
        Busy::Calling => {
            db.run("create function sleep(outbox.event[]) returns void language sql as 'select pg_sleep(3600)'");
            db.run(
                r#"select outbox.create_sink('f', 'function', config => '{"function": "sleep"}')"#,
            );
            emit(&mut db, 1..=10);
            until("the function to be called", || {
                db.one::<bool>("select exists (select from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database())")
                    .then_some(())
            });
        }
    }
    receiver
}

/// The test's own sessions take a moment to end.
fn until_nobody_is_in(cluster: &Cluster, database: &str) {
    let mut admin = admin(cluster);
    let query = format!(
        "select not exists (select from pg_stat_activity where datname = '{database}' and backend_type = 'client backend')"
    );
    until("the test's own sessions to end", || {
        admin.one::<bool>(&query).then_some(())
    });
}

/// Whether the server has said something that it should not.
fn assert_quiet_log(cluster: &Cluster) {
    let log = cluster.log();
    for line in log.lines() {
        let bad = ["FATAL", "PANIC", "WARNING", "terminated by signal"];
        let expected = [
            // A function that runs is not asked.
            "terminating background worker \"pg_outbox dispatcher\" due to administrator command",
            // What destinations do is another matter.
            ", see outbox.status",
            " is in good order again",
        ];
        assert!(
            !bad.iter().any(|word| line.contains(word))
                || expected.iter().any(|part| line.contains(part)),
            "{line}"
        );
    }
}

#[test]
fn every_database_with_the_extension_has_a_dispatcher_of_its_own() {
    let cluster = quick().start();
    admin(&cluster).run("create database plain");
    cluster.createdb("second");
    let mut pids = Vec::new();
    let mut receivers = Vec::new();
    for (n, name) in ["app", "second"].into_iter().enumerate() {
        let receiver = Receiver::start();
        let mut db = cluster.connect_to(name);
        http_sink(&mut db, "a", &receiver, json!({}), "");
        let first = 10 * n as i64;
        emit(&mut db, first..=first + 5);
        receiver.wait_for(6);
        assert_eq!(receiver.ids(), ids(first..=first + 5));
        pids.push(dispatcher(&cluster, name));
        receivers.push(receiver);
    }
    assert_ne!(pids[0], pids[1]);
    until_quiet(&cluster, "plain");
    until_quiet(&cluster, "postgres");
    until_quiet(&cluster, "template1");

    // One more, where there was none.
    let mut db = cluster.connect_to("plain");
    db.run("create extension pg_outbox");
    dispatcher(&cluster, "plain");
    db.run("drop extension pg_outbox");
    until_quiet(&cluster, "plain");
    db.run("begin; create extension pg_outbox; rollback");
    db.run("create extension pg_outbox");
    dispatcher(&cluster, "plain");
    // The trouble of one is not that of another.
    terminate(&cluster, pids[0]);
    another_dispatcher(&cluster, "app", pids[0]);
    assert_eq!(find_dispatcher(&cluster, "second"), Some(pids[1]));
}

#[test]
fn a_busy_database_is_dropped() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let bystander = Receiver::start();
    http_sink(&mut db, "a", &bystander, json!({}), "");
    let pid = dispatcher(&cluster, "app");
    let mut n = 0;
    for busy in [Busy::Delivering, Busy::Hanging, Busy::Calling] {
        for how in ["", " with (force)"] {
            let receiver = busy_database(&cluster, "busy", busy);
            until_nobody_is_in(&cluster, "busy");
            n += 1;
            emit(&mut db, n..=n);
            admin(&cluster).run(&format!("drop database busy{how}"));
            bystander.wait_for(usize::try_from(n).unwrap());
            drop(receiver);
        }
    }
    assert_eq!(dispatcher(&cluster, "app"), pid);
    assert_quiet_log(&cluster);
}

#[test]
fn another_database_is_dropped_while_sinks_are_busy() {
    let cluster = quick().start();
    for busy in [Busy::Delivering, Busy::Hanging, Busy::Calling] {
        let name = format!("{busy:?}").to_lowercase();
        let receiver = busy_database(&cluster, &name, busy);
        let pids = dispatchers(&cluster, &name);
        for n in 0..3 {
            // With and without the extension.
            admin(&cluster).run(&format!("create database other{n}"));
            if n > 0 {
                let mut other = cluster.connect_to(&format!("other{n}"));
                other.run("create extension pg_outbox");
                dispatcher(&cluster, &format!("other{n}"));
            }
            until_nobody_is_in(&cluster, &format!("other{n}"));
            let force = if n == 2 { " with (force)" } else { "" };
            admin(&cluster).run(&format!("drop database other{n}{force}"));
        }
        assert_eq!(dispatchers(&cluster, &name), pids, "{busy:?}");
        drop(receiver);
    }
    assert_quiet_log(&cluster);
}

#[test]
fn a_busy_database_is_renamed() {
    let cluster = quick().start();
    cluster.createdb("before");
    let mut db = cluster.connect_to("before");
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 5");
    db.run("create table taken (seq bigint)");
    db.run("create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select seq from unnest(e)'");
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "take"}', batch_size => 5)"#);
    emit(&mut db, 1..=3000);
    receiver.wait_for(10);
    drop(db);
    let names = ["before", "between", "after", "at_last"];
    for pair in names.windows(2) {
        until_nobody_is_in(&cluster, pair[0]);
        admin(&cluster).run(&format!("alter database {} rename to {}", pair[0], pair[1]));
    }
    let mut db = cluster.connect_to("at_last");
    emit(&mut db, 3001..=3010);
    let arrived = receiver.wait_for_distinct(3010);
    let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
    assert_eq!(arrived, ids(1..=3010));
    until("the function to have had all", || {
        (db.one::<i64>("select count(*) from taken") >= 3010).then_some(())
    });
    assert!(db.one::<bool>("select count(*) = 3010 and count(distinct seq) = 3010 from taken"));

    // The setting goes by the name.
    cluster.set("outbox.databases", "before");
    until_quiet(&cluster, "at_last");
    drop(db);
    until_nobody_is_in(&cluster, "at_last");
    admin(&cluster).run("alter database at_last rename to before");
    dispatcher(&cluster, "before");
}

#[test]
fn a_rename_that_somebody_else_prevents_leaves_the_dispatcher_at_work() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let refused = admin(&cluster).refused("alter database app rename to other");
    assert_eq!(refused.sqlstate, "55006");
    emit(&mut db, 1..=3);
    receiver.wait_for(3);
}

#[test]
fn a_copy_of_a_busy_database_delivers_what_the_original_had_left() {
    let cluster = quick().start();
    cluster.createdb("original");
    let mut db = cluster.connect_to("original");
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 5");
    db.run("select outbox.create_sink('p', 'pull')");
    emit(&mut db, 1..=20);
    receiver.wait_for(20);
    until_idle(&mut db, "a");
    assert_eq!(
        db.all::<String>("select id from outbox.poll('p', 10)"),
        ids(1..=10)
    );
    assert!(db.one::<bool>("select outbox.ack('p')"));
    // From here on it cannot deliver, but has some in hand.
    receiver.reply_always(Reply::status(503));
    emit(&mut db, 21..=60);
    receiver.wait_for_requests(6);
    drop(db);
    until_nobody_is_in(&cluster, "original");
    admin(&cluster).run("create database copy template original");
    admin(&cluster).run("create database again template original strategy file_copy");
    receiver.clear();
    receiver.reply_always(Reply::ok());
    dispatcher(&cluster, "copy");
    dispatcher(&cluster, "again");

    // Three databases deliver the same events now, each once.
    receiver.wait_for(120);
    let sources = ["original", "copy", "again"];
    for name in sources {
        let mut db = cluster.connect_to(name);
        until_idle(&mut db, "a");
        assert_eq!(
            db.all::<String>("select id from outbox.poll('p', 10)"),
            ids(11..=20),
            "{name}"
        );
    }
    let mut counts = std::collections::BTreeMap::new();
    for id in receiver.ids() {
        *counts.entry(id).or_insert(0) += 1;
    }
    assert!(counts.values().all(|&count| count == 3), "{counts:?}");
    assert_eq!(counts.len(), 40);

    // And what is new in one is new in that one alone.
    receiver.clear();
    let write = |name: &str, n: i64| emit(&mut cluster.connect_to(name), n..=n);
    write("copy", 1001);
    write("original", 1002);
    write("again", 1003);
    let mut arrived: Vec<_> = receiver.wait_for(3).into_iter().map(|e| e.id).collect();
    arrived.sort();
    assert_eq!(arrived, ids(1001..=1003));
    until_nobody_is_in(&cluster, "copy");
    admin(&cluster).run("drop database copy");
}

#[test]
fn databases_come_and_go_by_the_dozen() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let deliver = |db: &mut Client, n: i64| {
        http_sink(db, "a", &receiver, json!({}), "");
        emit(db, n..=n);
    };
    for n in 1..=12 {
        admin(&cluster).run(&format!("create database d{n}"));
        if n % 3 == 0 {
            let mut db = cluster.connect_to(&format!("d{n}"));
            db.run("create extension pg_outbox");
            deliver(&mut db, n);
            receiver.wait_for(usize::try_from(n / 3).unwrap());
        }
        until_nobody_is_in(&cluster, &format!("d{n}"));
        admin(&cluster).run(&format!("drop database d{n}"));
    }
    assert_eq!(receiver.ids(), ids([3, 6, 9, 12]));
    assert_quiet_log(&cluster);
}

#[test]
fn with_few_worker_slots_every_database_gets_its_turn() {
    // Two are taken by the launchers, PostgreSQL's own and ours: one is left for three databases, and each new one is looked into.
    let cluster = quick().setting("max_worker_processes", "3").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    admin(&cluster).run("create database plain");
    cluster.createdb("second");
    let mut second = cluster.connect_to("second");
    let other = Receiver::start();
    http_sink(&mut second, "a", &other, json!({}), "");
    emit(&mut second, 2..=2);
    until("word of it in the log", || {
        cluster
            .log()
            .contains("no worker slot for the dispatcher of database")
            .then_some(())
    });
    db.run("select outbox.stop()");
    other.wait_for(1);

    // After a restart it is all to do again: four databases are to be looked into, one at a time.
    second.run("select outbox.stop()");
    emit(&mut db, 3..=3);
    let mut cluster = cluster;
    drop((db, second));
    cluster.stop(outbox_tests::Mode::Fast);
    cluster.start_again();
    until("one of the two", || {
        (receiver.count() == 2 || find_dispatcher(&cluster, "second").is_some()).then_some(())
    });
}

#[test]
fn where_databases_outnumber_worker_slots_all_of_them_are_served() {
    // Two slots are the launchers'.
    let cluster = quick().setting("max_worker_processes", "8").start();
    let names: Vec<String> = (1..=12).map(|n| format!("d{n}")).collect();
    let mut sessions = Vec::new();
    for name in &names {
        cluster.createdb(name);
        let mut db = cluster.connect_to(name);
        db.run(
            r#"create table got (id text);
               create function take(e outbox.event[]) returns void language sql as 'insert into got select x.id from unnest(e) x';
               select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#,
        );
        sessions.push(db);
    }
    for round in 1..=2 {
        for db in &mut sessions {
            emit(db, round..=round);
        }
        for (db, name) in sessions.iter_mut().zip(&names) {
            until(&format!("event {round} of {name}"), || {
                let got: Vec<String> = db.all("select id from got order by id");
                (got == ids(1..=round)).then_some(())
            });
        }
    }
}

#[test]
fn want_of_a_worker_slot_is_called_by_its_name() {
    // With two there is none but the launchers'; with one there is none for ours.
    for slots in ["1", "2"] {
        let cluster = quick().setting("max_worker_processes", slots).start();
        let mut db = cluster.connect();
        http_sink(&mut db, "a", &Receiver::start(), json!({}), "");
        emit(&mut db, 1..=1);
        until_status(&mut db, "a", "what it waits for", |status| {
            status.waiting_for.as_deref() == Some("a worker slot: max_worker_processes is too low")
        });
        let refusal = db.refused("select outbox.start()");
        assert_eq!(refusal.sqlstate, "53400");
        let hint = refusal.hint.expect("it says what to do");
        assert!(hint.contains("max_worker_processes"), "{hint}");
        let log = cluster.log();
        assert!(slots == "1" || log.contains("of database \"app\": raise max_worker_processes"));
        assert!(log.contains("max_worker_processes"));
    }
}
