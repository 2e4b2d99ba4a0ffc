//! Pull sinks: batches that a consumer takes and acknowledges.

mod scene;

use std::collections::HashSet;
use std::sync::Mutex;
use std::thread;

use outbox_tests::{Cluster, Sql, until};
use postgres::{Client, GenericClient};
use scene::status;
use serde_json::{Value, json};

/// A cluster without a dispatcher, which pull sinks do not need, and the sink `p`.
fn scene() -> (Cluster, Client) {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('p', 'pull')");
    (cluster, db)
}

fn emit(db: &mut Client, subjects: std::ops::RangeInclusive<i32>) {
    let (first, last) = subjects.into_inner();
    db.run(&format!(
        "select outbox.emit('t', subject => n::text) from generate_series({first}, {last}) n"
    ));
}

#[track_caller]
fn poll(db: &mut impl GenericClient, max: i32) -> Vec<i32> {
    db.all(&format!("select subject::int from outbox.poll('p', {max})"))
}

#[track_caller]
fn ack(db: &mut impl GenericClient) -> bool {
    db.one("select outbox.ack('p')")
}

fn numbers(range: std::ops::RangeInclusive<i32>) -> Vec<i32> {
    range.collect()
}

const NONE: [i32; 0] = [];

/// Waits until sessions that were closed have ended.
fn until_alone(db: &mut Client) {
    until("other sessions to end", || {
        let others = "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()";
        (db.one::<i64>(others) == 0).then_some(())
    });
}

#[test]
fn a_batch_comes_again_until_it_is_acknowledged() {
    let (_cluster, mut db) = scene();
    assert_eq!(poll(&mut db, 10), NONE);
    assert!(!ack(&mut db), "nothing was handed out");
    emit(&mut db, 1..=25);
    for _ in 0..3 {
        assert_eq!(poll(&mut db, 10), numbers(1..=10));
        // What comes later is not in it.
        emit(&mut db, 100..=100);
    }
    assert!(ack(&mut db));
    assert!(!ack(&mut db), "it is acknowledged once");
    assert_eq!(poll(&mut db, 10), numbers(11..=20));
    assert!(ack(&mut db));
    let rest: Vec<_> = numbers(21..=25);
    assert_eq!(poll(&mut db, 5), rest);
    assert!(ack(&mut db));
    assert_eq!(poll(&mut db, 10), [100, 100, 100]);
    assert!(ack(&mut db));
    assert_eq!(poll(&mut db, 10), NONE);
    emit(&mut db, 1..=250);
    let default: Vec<i32> = db.all("select subject::int from outbox.poll('p')");
    assert_eq!(default, numbers(1..=100), "the default is 100");

    // An acknowledgement is for what was handed out last.
    assert_eq!(poll(&mut db, 7), numbers(1..=7));
    assert!(ack(&mut db));
    assert_eq!(poll(&mut db, 2), [8, 9]);
}

#[test]
fn a_poll_returns_what_read_returns() {
    let (_cluster, mut db) = scene();
    db.run(
        r#"select outbox.emit('a.b', '{"n": 1}', '7', 'shop', 'acme', '{"trace": "x"}', 'mine');
           select outbox.emit('bare')"#,
    );
    let polled: Vec<Value> = db.all("select to_jsonb(p) from outbox.poll('p') p");
    let read: Vec<Value> = db.all("select to_jsonb(r) from outbox.read() r");
    assert_eq!(polled.len(), 2);
    assert_eq!(polled, read);
}

#[test]
fn a_batch_is_acknowledged_in_parts() {
    let (_cluster, mut db) = scene();
    emit(&mut db, 1..=10);
    emit(&mut db, 11..=20);
    let batch: Vec<String> = db.all("select position from outbox.poll('p', 15)");
    let ack = |db: &mut Client, position: &str| -> bool {
        db.one(&format!("select outbox.ack('p', '{position}')"))
    };
    assert!(ack(&mut db, &batch[3]));
    assert_eq!(status(&mut db, "p").delivered, 4);
    assert!(!ack(&mut db, &batch[3]), "it stands there already");
    assert_eq!(poll(&mut db, 15), numbers(5..=19));
    assert!(!ack(&mut db, &batch[1]), "and moves nothing back");
    assert!(ack(&mut db, &batch[11].replace(':', ".")));
    assert_eq!(poll(&mut db, 3), numbers(13..=15));
    // An acknowledged part gives the rest back, also to others.
    assert!(ack(&mut db, &batch[12]));
    assert_eq!(poll(&mut db, 100), numbers(14..=20));
    let last: String = db.one("select outbox.tail()");
    assert!(ack(&mut db, &last));
    assert_eq!(poll(&mut db, 100), NONE);
    assert_eq!(status(&mut db, "p").delivered, 20);
    assert_eq!(status(&mut db, "p").lag_events, 0);

    // What was not handed out is not acknowledged.
    emit(&mut db, 21..=30);
    assert_eq!(poll(&mut db, 5), numbers(21..=25));
    let tail: String = db.one("select outbox.tail()");
    for (position, sqlstate) in [
        (tail.as_str(), "22023"),
        ("9999999:1", "22023"),
        ("garbage", "22023"),
        ("", "22023"),
    ] {
        let refusal = db.refused(&format!("select outbox.ack('p', '{position}')"));
        assert_eq!(refusal.sqlstate, sqlstate, "{position}");
        assert!(refusal.hint.is_some(), "{position}");
    }
    assert_eq!(poll(&mut db, 5), numbers(21..=25));
}

#[test]
fn two_consumers_never_hold_one_batch() {
    let (cluster, mut db) = scene();
    emit(&mut db, 1..=10);
    let mut other = cluster.connect();
    assert_eq!(poll(&mut db, 5), numbers(1..=5));
    assert_eq!(poll(&mut other, 5), NONE);
    assert!(!ack(&mut other), "it is not the other's to acknowledge");
    assert_eq!(poll(&mut db, 5), numbers(1..=5));
    assert!(ack(&mut db));
    // Acknowledged: now the other may.
    assert_eq!(poll(&mut other, 5), numbers(6..=10));
    assert_eq!(poll(&mut db, 5), NONE);
    assert!(!ack(&mut db));

    // A session that ends leaves its batch to whoever polls next, or acknowledges it knowing what it was.
    drop(other);
    until_alone(&mut db);
    assert_eq!(poll(&mut db, 5), numbers(6..=10));
    drop(db);
    let mut db = cluster.connect();
    until_alone(&mut db);
    assert!(ack(&mut db), "from another session");
    assert_eq!(poll(&mut db, 5), NONE);
    // A poll that found nothing holds nothing.
    emit(&mut db, 11..=11);
    assert_eq!(poll(&mut cluster.connect(), 5), [11]);
}

#[test]
fn many_consumers_share_the_work() {
    let (cluster, mut db) = scene();
    let total = 3000;
    let held = Mutex::new(HashSet::new());
    let done = Mutex::new(Vec::<i32>::new());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut db = cluster.connect();
                while done.lock().unwrap().len() < total {
                    let batch = poll(&mut db, 40);
                    if batch.is_empty() {
                        continue;
                    }
                    {
                        let mut held = held.lock().unwrap();
                        assert!(batch.iter().all(|n| held.insert(*n)), "held twice");
                    }
                    done.lock().unwrap().extend(&batch);
                    {
                        let mut held = held.lock().unwrap();
                        batch.iter().for_each(|n| assert!(held.remove(n)));
                    }
                    assert!(ack(&mut db));
                }
            });
        }
        for n in 0..30 {
            emit(&mut db, n * 100 + 1..=n * 100 + 100);
        }
    });
    assert_eq!(
        *done.lock().unwrap(),
        numbers(1..=3000),
        "each once, in order"
    );
}

#[test]
fn in_one_transaction_with_the_consumers_writes_it_is_exactly_once() {
    let (cluster, mut db) = scene();
    db.run("create table mine (n int primary key)");
    emit(&mut db, 1..=200);
    let take = "insert into mine select subject::int from outbox.poll('p', 10)";
    let mut failures = 0;
    while db.one::<i64>("select count(*) from mine") < 200 {
        let mut consumer = cluster.connect();
        consumer.run("begin");
        consumer.run(take);
        failures += 1;
        match failures % 5 {
            // Rolled back before and after the acknowledgement; the session lives on or not.
            1 => consumer.run("rollback"),
            2 => consumer.run("select outbox.ack('p'); rollback"),
            3 => {
                assert_eq!(
                    consumer.refused("select outbox.ack('p'), 1 / 0").sqlstate,
                    "22012"
                );
                // Though its transaction is still there: what failed holds nothing.
                until("the batch to be free", || {
                    db.run("begin");
                    let free = poll(&mut db, 1).len() == 1;
                    db.run("rollback");
                    free.then_some(())
                });
                consumer.run("rollback");
            }
            4 => {
                consumer.run("select outbox.ack('p')");
                drop(consumer);
                until_alone(&mut db);
                continue;
            }
            _ => consumer.run("select outbox.ack('p'); commit"),
        }
        drop(consumer);
        until_alone(&mut db);
    }
    assert_eq!(
        db.all::<i32>("select n from mine order by n"),
        numbers(1..=200)
    );
    assert_eq!(poll(&mut db, 10), NONE);
    assert_eq!(status(&mut db, "p").delivered, 200);
}

#[test]
fn a_savepoint_undoes_what_was_polled_and_acknowledged() {
    let (cluster, mut db) = scene();
    let mut other = cluster.connect();
    emit(&mut db, 1..=10);
    db.run("begin; savepoint s");
    assert_eq!(poll(&mut db, 3), numbers(1..=3));
    db.run("rollback to s");
    assert_eq!(poll(&mut db, 3), numbers(1..=3));
    db.run("savepoint t");
    assert!(ack(&mut db));
    assert_eq!(poll(&mut db, 3), numbers(4..=6));
    assert!(ack(&mut db));
    db.run("rollback to t");
    assert_eq!(poll(&mut db, 4), numbers(1..=4));
    assert!(ack(&mut db));
    assert_eq!(poll(&mut other, 3), NONE, "it is not committed");
    db.run("commit");
    assert_eq!(poll(&mut other, 3), numbers(5..=7));
}

#[test]
fn a_consumer_may_emit_in_the_same_transaction() {
    let (_cluster, mut db) = scene();
    emit(&mut db, 1..=3);
    // Each event makes the next one, up to 100: none is lost, none comes twice, none before its transaction has committed.
    let mut seen = Vec::new();
    while seen.len() < 300 {
        let mut transaction = db.transaction().unwrap();
        let batch = poll(&mut transaction, 2);
        assert!(!batch.is_empty(), "after {}", seen.len());
        for n in &batch {
            if *n < 1000 {
                transaction.run(&format!("select outbox.emit('t', subject => '{}')", n + 10));
            }
        }
        assert!(ack(&mut transaction));
        transaction.commit().unwrap();
        seen.extend(batch);
    }
    let expected: Vec<i32> = (0..100)
        .flat_map(|n| (1..=3).map(move |k| n * 10 + k))
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, expected);
}

#[test]
fn a_kept_snapshot_shows_what_it_showed() {
    let (cluster, mut db) = scene();
    emit(&mut db, 1..=2);
    db.run("begin isolation level repeatable read; select 1");
    emit(&mut cluster.connect(), 3..=4);
    assert_eq!(poll(&mut db, 10), [1, 2]);
    assert!(ack(&mut db));
    assert_eq!(poll(&mut db, 10), NONE);
    db.run("commit");
    assert_eq!(poll(&mut db, 10), [3, 4]);

    // And one that is older than what others have acknowledged since cannot undo that.
    assert!(ack(&mut db));
    emit(&mut db, 5..=5);
    db.run("begin isolation level repeatable read; select 1");
    let mut other = cluster.connect();
    assert_eq!(poll(&mut other, 10), [5]);
    assert!(ack(&mut other));
    let late = db.query("select subject from outbox.poll('p')", &[]);
    match late {
        Ok(rows) => assert_eq!(rows.len(), 0),
        Err(error) => assert_eq!(error.code().unwrap().code(), "40001"),
    }
    db.run("rollback");
    assert_eq!(poll(&mut db, 10), NONE);
}

#[test]
fn batches_of_chosen_and_transformed_events() {
    let (cluster, mut db) = scene();
    db.run(
        "create function public.half(e outbox.event) returns jsonb language sql as
            $$ select case when e.subject::int % 5 = 0 then null else jsonb_build_object('half', e.subject::int / 2) end $$;
         select outbox.drop_sink('p');
         select outbox.create_sink('p', 'pull', topics => '{t}', filter => 'subject::int % 2 = 0', transform => 'half(outbox.event)')",
    );
    emit(&mut db, 1..=100);
    db.run("select outbox.emit('other', subject => 'x') from generate_series(1, 100)");
    emit(&mut db, 101..=130);
    let wanted: Vec<i32> = (1..=130).filter(|n| n % 2 == 0 && n % 5 != 0).collect();
    for _ in 0..2 {
        assert_eq!(poll(&mut db, 10), wanted[..10]);
    }
    let batch: Vec<(String, Value)> = db
        .query("select position, payload from outbox.poll('p', 10)", &[])
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    assert_eq!(batch[0].1, json!({"half": 1}));
    assert!(db.one::<bool>(&format!("select outbox.ack('p', '{}')", batch[4].0)));
    assert_eq!(status(&mut db, "p").delivered, 5);
    let mut seen = wanted[..5].to_vec();
    loop {
        let batch = poll(&mut db, 10);
        if batch.is_empty() {
            break;
        }
        assert_eq!(poll(&mut db, 10), batch);
        assert!(ack(&mut db));
        seen.extend(batch);
    }
    assert_eq!(seen, wanted);
    let status = status(&mut db, "p");
    assert_eq!(
        (status.delivered, status.lag_events),
        (wanted.len() as i64, 0)
    );

    // What nobody wants is passed, held by nobody, and not looked at again.
    db.run("select outbox.emit('other') from generate_series(1, 50)");
    let before: String = db.one("select outbox.cursor('sink:p')");
    assert_eq!(poll(&mut db, 10), NONE);
    assert_ne!(db.one::<String>("select outbox.cursor('sink:p')"), before);
    emit(&mut db, 2..=2);
    assert_eq!(poll(&mut cluster.connect(), 10), [2]);
}

#[test]
fn late_transactions_come_in_pages_too() {
    let (cluster, mut db) = scene();
    let mut late: Vec<_> = (0..3).map(|_| cluster.connect()).collect();
    for (n, session) in late.iter_mut().enumerate() {
        session.run("begin");
        emit(session, n as i32 * 1000..=n as i32 * 1000 + 9);
    }
    emit(&mut db, 1..=1);
    assert_eq!(poll(&mut db, 10), [1]);
    assert!(ack(&mut db));
    for (n, session) in late.iter_mut().enumerate() {
        emit(session, n as i32 * 1000 + 10..=n as i32 * 1000 + 14);
    }
    late[2].run("commit");
    late[0].run("commit");
    emit(&mut db, 2..=6);
    let mut expected: Vec<i32> = numbers(0..=9);
    expected.extend(2000..=2009);
    expected.extend(10..=14);
    expected.extend(2010..=2014);
    expected.extend(2..=6);
    let mut seen = Vec::new();
    for _ in 0..expected.len().div_ceil(4) {
        let batch = poll(&mut db, 4);
        assert_eq!(poll(&mut db, 4), batch);
        seen.extend(batch);
        assert!(ack(&mut db));
    }
    assert_eq!(seen, expected);
    assert_eq!(poll(&mut db, 4), NONE);
    late[1].run("commit");
    assert_eq!(poll(&mut db, 100), numbers(1000..=1014));
}

#[test]
fn polling_says_what_is_wrong() {
    let (_cluster, mut db) = scene();
    db.run(
        "select outbox.create_sink('web', 'http', config => '{\"url\": \"http://127.0.0.1:9/\"}')",
    );
    for (call, sqlstate) in [
        ("poll('nobody')", "42704"),
        ("poll(null)", "42704"),
        ("poll('')", "42704"),
        ("poll('web')", "22023"),
        ("poll('p', 0)", "22023"),
        ("poll('p', -1)", "22023"),
        ("poll('p', null)", "22023"),
        ("ack('nobody')", "42704"),
        ("ack(null)", "42704"),
        ("ack('web')", "22023"),
        ("ack('p', 'garbage')", "22023"),
    ] {
        let refusal = db.refused(&format!("select outbox.{call}"));
        assert_eq!(refusal.sqlstate, sqlstate, "{call}: {refusal:?}");
    }
    // Several in one statement, and none in a read-only transaction.
    emit(&mut db, 1..=3);
    assert_eq!(
        db.refused("begin read only; select outbox.poll('p')")
            .sqlstate,
        "25006"
    );
    db.run("rollback");
    let both =
        "select a.subject::int from outbox.poll('p', 2) a join outbox.poll('p', 2) b using (seq)";
    assert_eq!(db.all::<i32>(both), [1, 2]);
}

#[test]
fn an_event_on_which_the_filter_fails_stops_none_before_it() {
    let (_cluster, mut db) = scene();
    db.run("select outbox.alter_sink('p', filter => '100 / (subject::int - 5) is not null')");
    emit(&mut db, 1..=9);
    assert_eq!(poll(&mut db, 100), numbers(1..=4));
    assert!(ack(&mut db));
    let position: String = db.one("select position from outbox.read() where subject = '5'");
    let refusal = db.refused("select outbox.poll('p')");
    assert_eq!(refusal.sqlstate, "22023");
    assert!(
        refusal.message.contains("\"p\"") && refusal.message.contains("division by zero"),
        "{refusal:?}"
    );
    assert!(refusal.message.contains(&position), "{refusal:?}");
    // Nothing is lost: the filter is mended, and all goes on.
    db.run(
        "select outbox.alter_sink('p', filter => '100 / nullif(subject::int - 5, 0) is not null')",
    );
    assert_eq!(poll(&mut db, 100), numbers(6..=9));
}
