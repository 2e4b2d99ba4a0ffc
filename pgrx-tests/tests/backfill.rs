//! Rows that were there before capture, as events: all of them, once, and never after a change that they do not contain.

mod scene;
mod workers;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use outbox_tests::{Cluster, Receiver, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, quick};
use serde_json::{Value, json};
use workers::dispatcher;

/// Topic, subject, payload and headers of the events so far, in order of seq.
fn events(db: &mut Client) -> Vec<(String, Option<String>, Value, Value)> {
    db.query(
        "select topic, subject, coalesce(payload, 'null'), coalesce(headers, 'null') from outbox.events order by seq",
        &[],
    )
    .expect("events can be read")
    .iter()
    .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
    .collect()
}

fn until_done(db: &mut Client) {
    until("the backfill is done", || {
        db.one::<bool>("select bool_and(state = 'done') from outbox.backfill_status")
            .then_some(())
    });
}

fn filled(rows: u32) -> (Cluster, Client) {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(&format!(
        "create table gone_first (x int); create table t (old int, k text, id int, n int not null, primary key (k, id)); alter table t drop old;
         insert into t select case when n % 2 = 0 then 'a' else 'b''\\' end, n, n from generate_series(1, {rows}) n;
         select outbox.capture('t')"
    ));
    (cluster, db)
}

#[test]
fn every_row_once_in_chunks() {
    let (_cluster, mut db) = filled(25);
    db.run("select outbox.backfill('t', chunk_size => 4)");
    until_done(&mut db);
    let all = events(&mut db);
    assert_eq!(all.len(), 25);
    let mut subjects = all
        .iter()
        .filter_map(|event| event.1.clone())
        .collect::<Vec<_>>();
    subjects.sort();
    subjects.dedup();
    assert_eq!(subjects.len(), 25);
    for (place, (topic, _, payload, headers)) in all.iter().enumerate() {
        assert_eq!(topic, "outbox.public.t.snapshot");
        assert_eq!(payload["n"], payload["id"]);
        assert_eq!(headers["chunk"], place / 4 + 1);
        assert_eq!(headers["last"], place == 24);
    }
    let (chunks, rows): (i64, i64) = {
        let row = db
            .query_one("select chunks, rows from outbox.backfill_status", &[])
            .expect("a row");
        (row.get(0), row.get(1))
    };
    assert_eq!((chunks, rows), (7, 25));
}

#[test]
fn a_condition_and_nothing_at_all() {
    let (_cluster, mut db) = filled(10);
    db.run("select outbox.backfill('t', condition => 'new.n between 3 and 4', chunk_size => 5)");
    until_done(&mut db);
    let all = events(&mut db);
    assert_eq!(all.iter().filter(|event| event.1.is_some()).count(), 2);
    assert_eq!(
        all.iter().filter(|event| event.3["last"] == true).count(),
        1
    );
    assert_eq!(
        all.last().map(|event| event.3["last"].clone()),
        Some(Value::Bool(true))
    );
    db.run("delete from outbox.events; create table empty (id int primary key); select outbox.capture('empty'), outbox.backfill('empty')");
    until_done(&mut db);
    let all = events(&mut db);
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].1.as_ref(), &all[0].2), (None, &Value::Null));
}

#[test]
fn bad_arguments() {
    let (_cluster, mut db) = filled(1);
    db.run(
        "create table u (id int); create table v (id int primary key); select outbox.capture('u')",
    );
    for (arguments, sqlstate) in [
        ("'u'", "22023"),
        ("'v'", "42704"),
        ("'t', chunk_size => 0", "22023"),
        ("'t', condition => 'new.nope'", "22023"),
        ("'t', condition => 'true) or (true'", "22023"),
        ("'t', sink => 'x'", "42704"),
    ] {
        let refusal = db.refused(&format!("select outbox.backfill({arguments})"));
        assert_eq!(
            refusal.sqlstate, sqlstate,
            "{arguments}: {}",
            refusal.message
        );
    }
    assert_eq!(db.one::<i64>("select count(*) from outbox.backfills"), 0);
}

#[test]
fn it_is_ordered_against_what_changes_meanwhile() {
    let (cluster, mut db) = filled(2_000);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for writer in 0..2 {
            let (cluster, stop) = (&cluster, &stop);
            scope.spawn(move || {
                let mut db = cluster.connect();
                let mut n = writer;
                while !stop.load(Ordering::Relaxed) {
                    n += 7;
                    let id = n * 31 % 2_000 + 1;
                    db.run(&format!("begin; update t set n = n + 1 where id = {id}; update t set n = n + 1 where id = {}; commit", id % 2_000 + 1));
                }
            });
        }
        db.run("select outbox.backfill('t', chunk_size => 50)");
        // Deadlocks are possible, and chunks that meet one are tried again.
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| until_done(&mut db)));
        stop.store(true, Ordering::Relaxed);
        if let Err(error) = failed {
            std::panic::resume_unwind(error);
        }
    });
    let mut last = BTreeMap::<String, i64>::new();
    let mut snapshots = 0;
    for (topic, subject, payload, _) in events(&mut db) {
        let subject = subject.expect("a subject");
        let n = payload["n"].as_i64().expect("a number");
        if topic.ends_with("snapshot") {
            snapshots += 1;
            assert!(
                last.get(&subject).is_none_or(|&before| before == n),
                "{subject}: {n} after {last:?}"
            );
        } else {
            assert!(
                last.get(&subject).is_none_or(|&before| before + 1 == n),
                "{subject}: {n}"
            );
        }
        last.insert(subject, n);
    }
    assert_eq!(snapshots, 2_000);
    assert_eq!(last.len(), 2_000);
}

#[test]
fn it_goes_on_when_the_table_changes_its_shape() {
    let (_cluster, mut db) = filled(20_000);
    db.run("select outbox.create_sink('slow', 'pull'), outbox.backfill('t', chunk_size => 1000)");
    until("it waits", || {
        db.one::<bool>("select rows > 10000 from outbox.backfill_status")
            .then_some(())
    });
    db.run("alter table t rename id to number; alter table t rename to u; alter table u add late int default 7, alter number type bigint");
    until("it is read", || {
        db.run("select outbox.poll('slow', 5000); select outbox.ack('slow')");
        db.one::<bool>("select state = 'done' from outbox.backfill_status")
            .then_some(())
    });
    assert!(db.one::<bool>(
        "select count(*) = 20000 and count(distinct subject) = 20000 and count(*) filter (where payload ->> 'late' = '7') between 1 and 10000
           from outbox.events where topic like '%.snapshot'"
    ));
}

#[test]
fn it_is_carried_on_after_a_crash_and_waits_for_slow_sinks() {
    let (mut cluster, mut db) = filled(30_000);
    db.run("select outbox.create_sink('slow', 'pull'), outbox.backfill('t', chunk_size => 1000)");
    until("it waits", || {
        db.one::<bool>("select rows > 10000 and updated_at < clock_timestamp() - interval '1 second' from outbox.backfill_status")
            .then_some(())
    });
    assert!(db.one::<i64>("select count(*) from outbox.events") < 15_000);
    drop(db);
    cluster.stop(outbox_tests::Mode::Immediate);
    cluster.start_again();
    let mut db = cluster.connect();
    until("it is read", || {
        db.run("select outbox.poll('slow', 5000); select outbox.ack('slow')");
        db.one::<bool>("select state = 'done' from outbox.backfill_status")
            .then_some(())
    });
    assert_eq!(
        db.one::<i64>(
            "select count(distinct subject) from outbox.events where topic like '%snapshot'"
        ),
        30_000
    );
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.events where topic like '%snapshot'"),
        30_000
    );
}

/// Conditions that wait while somebody else holds the advisory lock 7, that take an hour, and that never come to an end, for one row
/// each.
const CONDITIONS: &str = "
    create function waits(n int) returns bool language plpgsql as $$
    begin
        if n = 5 then
            perform pg_advisory_xact_lock_shared(7);
        end if;
        return true;
    end $$;
    create function sleeps(n int) returns bool language plpgsql as $$
    begin
        if n = 18 then
            perform pg_sleep(3600);
        end if;
        return true;
    end $$;
    create function hangs(n int) returns bool language plpgsql as $$
    begin
        if n = 1 then
            loop begin perform pg_sleep(100); exception when query_canceled then null; end; end loop;
        end if;
        return true;
    end $$";

/// Until the backfill is not running any more; why it is not.
fn until_stopped(db: &mut Client) -> Option<String> {
    until("the backfill is stopped", || {
        db.one::<bool>("select state = 'stopped' from outbox.backfill_status")
            .then_some(())
    });
    db.one("select error from outbox.backfill_status")
}

#[test]
fn a_condition_that_takes_its_time_holds_up_sinks_and_writers_for_a_while_only() {
    let (_cluster, mut db) = filled(20);
    db.run(CONDITIONS);
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "a",
        &receiver,
        json!({}),
        "topics => '{test.numbered}'",
    );
    db.run("select outbox.backfill('t', condition => 'public.sleeps(new.n)', chunk_size => 8)");
    // Rows are taken in the order of (k, id): those with an even number first.
    let why = until("it is said to be late", || {
        db.one::<Option<String>>("select error from outbox.backfill_status")
    });
    assert!(why.ends_with("took longer than 5s"), "{why}");
    emit(&mut db, 1..=3);
    receiver.wait_for(3);
    db.run("update t set n = n where n = 18");
    assert_eq!(
        until_stopped(&mut db).as_deref(),
        Some("a single row took longer than 5s, 3 times")
    );
    // What comes before that row has been taken, and no more.
    let taken = events(&mut db)
        .into_iter()
        .filter(|event| event.0 == "outbox.public.t.snapshot");
    let taken = taken.map(|event| event.2["n"].as_i64().unwrap_or(0));
    assert_eq!(taken.collect::<Vec<_>>(), [2, 4, 6, 8, 10, 12, 14, 16]);
}

#[test]
fn a_condition_that_does_not_let_itself_be_cancelled_stops_its_backfill() {
    let (cluster, mut db) = filled(3);
    db.run(CONDITIONS);
    let first = dispatcher(&cluster, "app");
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    db.run("select outbox.backfill('t', condition => 'public.hangs(new.n)')");
    assert_eq!(
        until_stopped(&mut db).as_deref(),
        Some(
            "its condition took too long and did not end when it was cancelled, so the process that ran it was ended"
        )
    );
    emit(&mut db, 1..=3);
    receiver.wait_for_distinct(3);
    assert_ne!(dispatcher(&cluster, "app"), first);
}

#[test]
fn whoever_stops_one_does_not_wait_for_its_chunk() {
    let (cluster, mut db) = filled(20);
    db.run(CONDITIONS);
    db.run("select outbox.stop()");
    let id: i64 = db.one("select outbox.backfill('t', condition => 'public.waits(new.n)')");
    let mut gatekeeper = cluster.connect();
    gatekeeper.run("select pg_advisory_lock(7)");
    thread::scope(|scope| {
        let mut session = cluster.connect();
        let chunk = scope.spawn(move || {
            session
                .query_one(&format!("select outbox.backfill_chunk({id})"), &[])
                .map(|row| row.get::<_, String>(0))
        });
        until("the chunk waits", || {
            db.one::<bool>(
                "select exists (select from pg_locks where locktype = 'advisory' and objid = 7 and not granted)",
            )
            .then_some(())
        });
        db.run(&format!("select outbox.stop_backfill({id})"));
        gatekeeper.run("select pg_advisory_unlock(7)");
        let error = chunk
            .join()
            .expect("the thread ends")
            .expect_err("it is given up");
        let error = error.as_db_error().expect("the server says so");
        assert_eq!(error.message(), format!("backfill {id} has been stopped"));
        assert_eq!(error.code().code(), "55000");
    });
    assert_eq!(events(&mut db), []);
}

#[test]
fn a_row_whose_key_grows_while_its_chunk_waits_is_in_a_later_one() {
    for moving in [3, 5, 8, 10, 17, 18] {
        let (cluster, mut db) = filled(18);
        let mut writer = cluster.connect();
        writer.run(&format!("begin; update t set id = 500 where id = {moving}"));
        db.run("select outbox.backfill('t', chunk_size => 5)");
        until("the chunk to wait for the row", || {
            db.one::<bool>("select exists (select from pg_locks where not granted and locktype = 'transactionid')")
                .then_some(())
        });
        writer.run("commit");
        until_done(&mut db);
        let mut snapshots = events(&mut db)
            .into_iter()
            .filter(|event| event.0 == "outbox.public.t.snapshot")
            .map(|event| event.2["id"].as_i64().expect("a key"))
            .collect::<Vec<_>>();
        snapshots.sort();
        let expected = (1..=18).filter(|id| *id != moving).chain([500]);
        assert_eq!(snapshots, expected.collect::<Vec<_>>(), "{moving}");
    }
}
