//! One process delivers to a sink at a time; whoever takes over goes on where the last one has got to.

mod scene;
mod workers;

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use outbox_tests::{Cluster, Receiver, Reply, Signal, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, replace_dispatcher, status, until_idle, until_status};
use serde_json::json;
use workers::{admin, another_dispatcher, dispatcher, dispatchers, terminate, until_gone};

fn outcomes(db: &mut Client) -> Vec<String> {
    db.all("select concat_ws('|', sink, delivered, outcome) from outbox.tick() order by sink")
}

/// A table and a function sink that notes in it what it was given.
fn noting_sink(db: &mut Client, id: &str, extra: &str) {
    db.run(&format!(
        "create table noted_by_{id} (id text);
         create function note_{id}(e outbox.event[]) returns void language plpgsql as $$
         begin
             insert into public.noted_by_{id} select id from unnest(e);
             {extra}
         end $$;"
    ));
    db.run(&format!(
        r#"select outbox.create_sink('{id}', 'function', config => '{{"function": "note_{id}"}}', batch_size => 5)"#
    ));
}

/// Waits until a noting sink has had all of these events, and says whether each came once, and in order.
#[track_caller]
fn expect_noted(db: &mut Client, id: &str, wanted: &[String]) {
    let count = format!("select count(distinct id) from noted_by_{id}");
    until(&format!("{id} to have noted all"), || {
        (db.one::<i64>(&count) >= wanted.len() as i64).then_some(())
    });
    let noted: Vec<String> = db.all(&format!("select id from noted_by_{id}"));
    assert_eq!(noted, wanted, "what {id} has noted");
}

#[test]
fn a_tick_leaves_to_the_dispatcher_what_is_the_dispatchers() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::hang());
    http_sink(
        &mut db,
        "a",
        &receiver,
        json!({"timeout_ms": 3_600_000}),
        "",
    );
    noting_sink(&mut db, "f", "");
    db.run("select outbox.create_sink('p', 'pull')");
    http_sink(&mut db, "q", &receiver, json!({}), "enabled => false");
    emit(&mut db, 1..=3);
    receiver.wait_for_requests(1);
    expect_noted(&mut db, "f", &ids(1..=3));
    until("a process for the function", || {
        (dispatchers(&cluster, "app").len() == 2).then_some(())
    });
    let expected = ["a|0|leased", "f|0|leased", "p|0|pull", "q|0|paused"];
    assert_eq!(outcomes(&mut db), expected);
    assert_eq!(receiver.requests().len(), 1, "nothing is delivered twice");
    let holders: Vec<Option<i32>> = db.all("select lease_pid from outbox.status order by sink");
    assert_eq!(holders[0], Some(dispatcher(&cluster, "app")));
    assert!(dispatchers(&cluster, "app").contains(&holders[1].unwrap()));
    assert_eq!(holders[2..], [None, None]);
}

#[test]
fn of_two_sessions_that_tick_one_delivers() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    noting_sink(&mut db, "f", "");
    emit(&mut db, 1..=3);
    let mut first = cluster.connect();
    let mut second = cluster.connect();
    first.run("begin");
    assert_eq!(outcomes(&mut first), ["a|3|delivered", "f|3|delivered"]);
    // What the first has delivered is not committed yet: whoever delivered now would do so again.
    assert_eq!(outcomes(&mut second), ["a|0|leased", "f|0|leased"]);
    first.run("commit");
    assert_eq!(outcomes(&mut second), ["a|0|idle", "f|0|idle"]);
    assert_eq!(receiver.count(), 3);
    expect_noted(&mut db, "f", &ids(1..=3));

    // What is rolled back has not been delivered.
    emit(&mut db, 4..=5);
    first.run("begin");
    assert_eq!(outcomes(&mut first), ["a|2|delivered", "f|2|delivered"]);
    first.run("rollback");
    assert_eq!(outcomes(&mut second), ["a|2|delivered", "f|2|delivered"]);
    assert_eq!(receiver.ids(), ids([1, 2, 3, 4, 5, 4, 5]));
    expect_noted(&mut db, "f", &ids(1..=5));

    // Nor has what a session was about to deliver when it was ended.
    emit(&mut db, 6..=6);
    receiver.reply_next([Reply::hang()]);
    let requests = receiver.requests().len();
    let pid: i32 = first.one("select pg_backend_pid()");
    thread::scope(|scope| {
        let ticking = scope.spawn(|| first.simple_query("select outbox.tick('a')").is_err());
        receiver.wait_for_requests(requests + 1);
        assert_eq!(outcomes(&mut second)[0], "a|0|leased");
        terminate(&cluster, pid);
        assert!(ticking.join().unwrap());
    });
    until_gone(&cluster, pid);
    assert_eq!(outcomes(&mut second)[0], "a|1|delivered");

    // Nor when it is cancelled; then its session goes on.
    emit(&mut db, 7..=7);
    receiver.reply_next([Reply::hang()]);
    let requests = receiver.requests().len();
    let pid: i32 = second.one("select pg_backend_pid()");
    thread::scope(|scope| {
        let ticking = scope.spawn(|| second.refused("select outbox.tick('a')").sqlstate);
        receiver.wait_for_requests(requests + 1);
        admin(&cluster).run(&format!("select pg_cancel_backend({pid})"));
        assert_eq!(ticking.join().unwrap(), "57014");
    });
    assert_eq!(outcomes(&mut db)[0], "a|1|delivered");
    assert_eq!(outcomes(&mut second)[0], "a|0|idle");
}

#[test]
fn what_a_holder_was_delivering_when_it_was_ended_is_delivered_by_the_next() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "a",
        &receiver,
        json!({"timeout_ms": 3_600_000}),
        "batch_size => 5",
    );
    let mut n = 0;
    for signal in [Signal::TERM, Signal::KILL, Signal::TERM] {
        receiver.reply_next([Reply::ok(), Reply::hang()]);
        let requests = receiver.requests().len();
        emit(&mut db, n + 1..=n + 12);
        n += 12;
        receiver.wait_for_requests(requests + 2);
        let old = dispatcher(&cluster, "app");
        cluster.kill_backend(old, signal);
        if signal == Signal::KILL {
            until("the session to be lost", || {
                db.simple_query("").is_err().then_some(())
            });
            cluster.wait_until_it_answers();
            db = cluster.connect();
        }
        another_dispatcher(&cluster, "app", old);
        let arrived = receiver.wait_for_distinct(usize::try_from(n).unwrap());
        let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
        assert_eq!(arrived, ids(1..=n));
        let lease = until_idle(&mut db, "a").lease_pid;
        assert_eq!(lease, Some(dispatcher(&cluster, "app")));
    }
}

#[test]
fn what_a_function_did_when_its_process_was_ended_is_undone_and_done_again() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    // Sleeps once in a while, after it has done its work.
    db.run("create sequence calls");
    noting_sink(
        &mut db,
        "f",
        "if nextval('public.calls') % 3 = 2 then perform pg_sleep(3600); end if;",
    );
    let sleeper =
        "select pid from pg_stat_activity where wait_event = 'PgSleep' and datname = 'app'";
    emit(&mut db, 1..=40);
    for signal in [Signal::TERM, Signal::KILL, Signal::TERM] {
        let pid: i32 = until("the function to sleep", || {
            admin(&cluster).all(sleeper).pop()
        });
        cluster.kill_backend(pid, signal);
        if signal == Signal::KILL {
            until("the session to be lost", || {
                db.simple_query("").is_err().then_some(())
            });
            cluster.wait_until_it_answers();
            db = cluster.connect();
        } else {
            until_gone(&cluster, pid);
        }
    }
    db.run("create or replace function note_f(e outbox.event[]) returns void language sql as 'insert into public.noted_by_f select id from unnest(e)'");
    if let Some(pid) = admin(&cluster).all::<i32>(sleeper).pop() {
        terminate(&cluster, pid);
    }
    expect_noted(&mut db, "f", &ids(1..=40));
    until_idle(&mut db, "f");
}

#[test]
fn a_slow_function_delays_nobody_else() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    noting_sink(&mut db, "slow", "perform pg_sleep(3600);");
    noting_sink(&mut db, "quick", "");
    for n in 1..=20 {
        emit(&mut db, n..=n);
        receiver.wait_for(usize::try_from(n).unwrap());
    }
    expect_noted(&mut db, "quick", &ids(1..=20));
    // The dispatcher itself is at nobody's mercy either, whatever comes.
    emit(&mut db, 21..=21);
    terminate(&cluster, dispatcher(&cluster, "app"));
    receiver.wait_for_distinct(21);
    noting_sink(&mut db, "late", "");
    expect_noted(&mut db, "late", &ids(1..=21));
    assert_eq!(db.one::<i64>("select count(*) from noted_by_slow"), 0);
    // Whoever drops its sink does not wait for the call.
    let sleeper =
        "select pid from pg_stat_activity where wait_event = 'PgSleep' and datname = 'app'";
    let pid: i32 = until("the next process for it to sleep", || {
        admin(&cluster).all(sleeper).pop()
    });
    db.run("select outbox.drop_sink('slow')");
    until_gone(&cluster, pid);
    until("the process for it to be gone", || {
        (dispatchers(&cluster, "app").len() == 3).then_some(())
    });
}

#[test]
fn without_a_worker_slot_the_dispatcher_calls_the_functions() {
    // PostgreSQL's launcher, ours, and one dispatcher.
    let cluster = quick()
        .setting("max_worker_processes", "3")
        .setting("outbox.poll_interval", "1h")
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    noting_sink(&mut db, "f", "");
    noting_sink(&mut db, "g", "");
    for n in 1..=10 {
        emit(&mut db, n..=n);
        expect_noted(&mut db, "f", &ids(1..=n));
        expect_noted(&mut db, "g", &ids(1..=n));
        receiver.wait_for(usize::try_from(n).unwrap());
    }
    assert_eq!(dispatchers(&cluster, "app").len(), 1);
    // A backlog, and one that fails among them.
    db.run("create table bad (id text)");
    noting_sink(
        &mut db,
        "h",
        "if exists (select from unnest(e) x join public.bad using (id)) then raise 'bad one'; end if;",
    );
    db.run("insert into bad values ('n55')");
    emit(&mut db, 11..=100);
    expect_noted(&mut db, "f", &ids(1..=100));
    receiver.wait_for(100);
    until_status(&mut db, "h", "its dead letter", |status| {
        status.dead_letters == 1
    });
    expect_noted(&mut db, "h", &ids((1..=100).filter(|&n| n != 55)));
}

#[test]
fn functions_leave_worker_slots_to_other_databases() {
    let cluster = quick().setting("max_worker_processes", "8").start();
    let mut db = cluster.connect();
    let names = ["f1", "f2", "f3", "f4", "f5", "f6"];
    for name in names {
        noting_sink(&mut db, name, "");
    }
    emit(&mut db, 1..=5);
    for name in names {
        expect_noted(&mut db, name, &ids(1..=5));
    }
    // Half of the slots, and one for the dispatcher, which calls the functions that are left.
    until("as many processes as there may be", || {
        (dispatchers(&cluster, "app").len() == 5).then_some(())
    });
    let main = dispatcher(&cluster, "app");
    until("the dispatcher to hold the others", || {
        let here = names.map(|name| status(&mut db, name).lease_pid == Some(main));
        (here.iter().filter(|here| **here).count() == 2).then_some(())
    });
    cluster.createdb("second");
    let mut second = cluster.connect_to("second");
    noting_sink(&mut second, "f", "");
    emit(&mut second, 1..=3);
    expect_noted(&mut second, "f", &ids(1..=3));
    assert_eq!(dispatchers(&cluster, "second").len(), 1);
}

#[test]
fn a_function_that_releases_every_lock_harms_nobody() {
    // With a process of its own, and in the dispatcher of all sinks.
    for slots in ["32", "3"] {
        let cluster = quick().setting("max_worker_processes", slots).start();
        let mut db = cluster.connect();
        let receiver = Receiver::start();
        http_sink(&mut db, "a", &receiver, json!({}), "");
        noting_sink(&mut db, "f", "perform pg_advisory_unlock_all();");
        noting_sink(&mut db, "g", "");
        let pid = dispatcher(&cluster, "app");
        for n in 1..=5 {
            emit(&mut db, n..=n);
        }
        receiver.wait_for_distinct(5);
        expect_noted(&mut db, "f", &ids(1..=5));
        expect_noted(&mut db, "g", &ids(1..=5));
        for sink in ["a", "f", "g"] {
            assert!(until_idle(&mut db, sink).lease_pid.is_some());
        }
        assert_eq!(status(&mut db, "a").lease_pid, Some(pid));
        assert_eq!(dispatcher(&cluster, "app"), pid);
    }
}

#[test]
fn while_a_function_has_released_its_lease_somebody_else_delivers_and_nothing_is_done_twice() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("create table hold (release boolean)");
    noting_sink(
        &mut db,
        "f",
        "if pg_backend_pid() <> (select pid from public.rival) then
             perform pg_advisory_unlock_all();
             while exists (select from public.hold) loop perform pg_sleep(0.01); end loop;
         end if;",
    );
    let mut rival = cluster.connect();
    db.run(&format!(
        "create table rival as select {} as pid",
        rival.one::<i32>("select pg_backend_pid()")
    ));
    db.run("insert into hold values (false)");
    emit(&mut db, 1..=3);
    until("the function to wait, without its lease", || {
        let waits = db.one::<bool>("select exists (select from pg_stat_activity where wait_event = 'PgSleep' and datname = 'app')");
        (waits && status(&mut db, "f").lease_pid.is_none()).then_some(())
    });
    assert_eq!(outcomes(&mut rival), ["f|3|delivered"]);
    db.run("delete from hold");
    emit(&mut db, 4..=5);
    expect_noted(&mut db, "f", &ids(1..=5));
    until_idle(&mut db, "f");
}

#[test]
fn a_filter_that_releases_every_lock_harms_nobody() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let filter = "filter => 'pg_advisory_unlock_all() is not null'";
    http_sink(&mut db, "b", &other, json!({}), filter);
    for n in 1..=20 {
        emit(&mut db, n..=n);
        receiver.wait_for_distinct(usize::try_from(n).unwrap());
    }
    other.wait_for_distinct(20);
    for sink in ["a", "b"] {
        until_status(&mut db, sink, "nothing left, under a lease", |status| {
            status.lag_events == 0 && status.lease_pid.is_some()
        });
    }
}

#[test]
fn holders_that_come_and_go_lose_nothing() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 7");
    noting_sink(&mut db, "f", "");
    let count = AtomicU32::new(0);
    receiver.reply_with(move |_| {
        let n = count.fetch_add(1, Ordering::Relaxed);
        if n % 5 == 4 {
            Reply::status(500)
        } else {
            Reply::ok()
        }
    });
    let last = 400;
    thread::scope(|scope| {
        let ticking = scope.spawn(|| {
            // The session may be the one that is ended.
            let mut db = cluster.connect();
            for _ in 0..60 {
                if db.simple_query("select outbox.tick()").is_err() {
                    db = cluster.connect();
                }
            }
        });
        for n in 1..=last / 20 {
            emit(&mut db, n * 20 - 19..=n * 20);
            if n % 5 == 0 {
                replace_dispatcher(&mut db, "a");
            }
        }
        ticking.join().unwrap();
    });
    let arrived = receiver.wait_for_distinct(usize::try_from(last).unwrap());
    let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
    assert_eq!(arrived, ids(1..=last));
    expect_noted(&mut db, "f", &ids(1..=last));
}

/// What a statement sees is as old as the statement. Between its beginning and the moment in which it takes the lease, somebody else
/// may have come further than it sees.
#[test]
fn a_statement_that_is_older_than_its_lease_skips_nothing() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('p', 'pull')");
    noting_sink(&mut db, "f", "");
    emit(&mut db, 1..=3);
    db.run("select pg_advisory_lock(7)");
    let mut first = cluster.connect();
    let waits = "select exists (select from pg_locks where locktype = 'advisory' and not granted)";
    thread::scope(|scope| {
        let polling = scope.spawn(|| {
            cluster.connect().all::<String>(
                "select p.id from (select pg_advisory_lock_shared(7)) l, lateral outbox.poll('p', 100) p",
            )
        });
        let ticking = scope.spawn(|| {
            cluster.connect().one::<String>(
                "select concat_ws('|', t.delivered, t.outcome) from (select pg_advisory_lock_shared(7)) l, lateral outbox.tick('f') t",
            )
        });
        until("both to have begun", || {
            (db.one::<bool>(waits)
                && db.one::<i64>("select count(*) from pg_locks where not granted") == 2)
                .then_some(())
        });
        // New events, and a holder that stops in the middle of them.
        emit(&mut first, 4..=40);
        assert_eq!(
            first.all::<String>("select id from outbox.poll('p', 30)"),
            ids(1..=30)
        );
        assert!(first.one::<bool>("select outbox.ack('p')"));
        assert_eq!(outcomes(&mut first)[0], "f|20|delivered");
        db.run("select pg_advisory_unlock(7)");
        assert_eq!(polling.join().unwrap(), ids(31..=40));
        assert_eq!(ticking.join().unwrap(), "20|delivered");
    });
    expect_noted(&mut db, "f", &ids(1..=40));
}
