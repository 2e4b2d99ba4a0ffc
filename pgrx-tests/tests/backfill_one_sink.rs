//! Rows that were there before capture, for one sink: it gets all of them, in order against live changes; nobody else gets one.

mod scene;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use outbox_tests::{Cluster, Receiver, Signal, Sql, until};
use postgres::Client;
use scene::{http_sink, quick, until_idle};
use serde_json::{Value, json};

const SNAPSHOT: &str = "outbox.public.t.snapshot";

/// A captured table of so many rows, and none of them an event yet.
fn filled(rows: u32) -> (Cluster, Client) {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(&format!(
        "create table t (id int primary key, n int not null); insert into t select n, 0 from generate_series(1, {rows}) n;
         select outbox.capture('t')"
    ));
    (cluster, db)
}

fn state(db: &mut Client) -> String {
    db.one("select state from outbox.backfill_status order by id desc limit 1")
}

fn until_done(db: &mut Client) {
    until("the backfill is done", || {
        (state(db) == "done").then_some(())
    });
}

/// Everything that a pull sink has for its consumer, as topic and subject; all of it is acknowledged.
fn pulled(db: &mut Client, sink: &str) -> Vec<(String, String)> {
    let mut pulled = Vec::new();
    loop {
        let rows = db
            .query("select topic, subject from outbox.poll($1, 7)", &[&sink])
            .expect("it can be polled");
        db.run(&format!("select outbox.ack('{sink}')"));
        if rows.is_empty() {
            return pulled;
        }
        pulled.extend(rows.iter().map(|row| (row.get(0), row.get(1))));
    }
}

#[test]
fn the_sink_gets_all_and_others_none() {
    let (_cluster, mut db) = filled(50);
    let (chosen, other) = (Receiver::start(), Receiver::start());
    http_sink(&mut db, "chosen", &chosen, json!({}), "");
    http_sink(&mut db, "other", &other, json!({}), "");
    db.run(
        r#"create table taken (topic text, subject text);
           create function take(events outbox.event[]) returns void language sql as 'insert into taken select topic, subject from unnest(events)';
           select outbox.create_sink('by-function', 'function', config => '{"function": "take"}'),
                  outbox.create_sink('by-transaction', 'function', config => '{"function": "take"}', "grouping" => 'transaction'),
                  outbox.create_sink('pulled', 'pull'), outbox.create_sink('pulled-topics', 'pull', topics => '{>}'),
                  outbox.create_webhook('acme', 'https://example.com');
           alter table t add tenant text default 'acme'; select outbox.alter_capture('t', tenant_column => 'tenant')"#,
    );
    db.run("select outbox.backfill('t', 'chosen', chunk_size => 7)");
    until_done(&mut db);
    db.run("update t set n = 1 where id = 50");

    let events = chosen.wait_for(51);
    let topics = events.iter().map(|event| event.topic.as_str());
    assert_eq!(topics.filter(|topic| *topic == SNAPSHOT).count(), 50);
    assert_eq!(events[49].topic, SNAPSHOT);
    assert_eq!(events[50].topic, "outbox.public.t.update");
    let of_update = vec![("outbox.public.t.update".to_owned(), "50".to_owned())];
    assert_eq!(other.wait_for(1)[0].topic, of_update[0].0);
    for sink in ["chosen", "other", "by-function", "by-transaction"] {
        until_idle(&mut db, sink);
    }
    assert_eq!(other.ids().len(), 1);
    assert_eq!(
        db.one::<String>("select string_agg(topic || ' ' || subject, ',') from taken"),
        "outbox.public.t.update 50,outbox.public.t.update 50"
    );
    for sink in ["pulled", "pulled-topics"] {
        assert_eq!(pulled(&mut db, sink), of_update, "{sink}");
    }
    until("the webhook has its event", || {
        db.one::<bool>("select exists (select from outbox.webhook_deliveries)")
            .then_some(())
    });
    assert_eq!(
        db.one::<String>("select string_agg(topic, ',') from outbox.webhook_deliveries"),
        of_update[0].0
    );
    // Readers that keep nothing but a position.
    assert_eq!(
        db.one::<String>("select string_agg(topic, ',') from outbox.read()"),
        of_update[0].0
    );
    // Nobody waits for what is not for him.
    let behind: Vec<String> =
        db.all("select sink || ' ' || lag_events from outbox.status where lag_events > 0 and kind <> 'webhooks'");
    assert_eq!(behind, Vec::<String>::new());
}

#[test]
fn tail_is_what_can_be_read() {
    let (_cluster, mut db) = filled(3);
    db.run("select outbox.create_sink('chosen', 'pull'), outbox.emit('before', subject => 'x')");
    db.run("select outbox.backfill('t', 'chosen')");
    until_done(&mut db);
    assert!(
        db.one::<bool>("select outbox.tail() = (select max(position) from outbox.read()) and count(*) = 1 from outbox.read()")
    );
    assert_eq!(pulled(&mut db, "chosen").len(), 4);
}

#[test]
fn a_pull_consumer_passes_over_many_that_are_for_another_sink() {
    let (_cluster, mut db) = filled(3_000);
    db.run("select outbox.create_sink('chosen', 'pull'), outbox.create_sink('other', 'pull')");
    db.run("select outbox.backfill('t', 'chosen', chunk_size => 500)");
    until_done(&mut db);
    assert_eq!(pulled(&mut db, "other"), vec![]);
    // It keeps nothing back: its cursor is behind all of them.
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.events e, outbox.cursors c where c.name = 'sink:other' and (e.txid, e.seq) > (c.txid, c.seq)"),
        0
    );
    assert_eq!(pulled(&mut db, "chosen").len(), 3_000);
}

#[test]
fn transactions_are_numbered_without_what_is_for_another_sink() {
    let (_cluster, mut db) = filled(3);
    let (chosen, other) = (Receiver::start(), Receiver::start());
    db.run("select outbox.stop()");
    for (id, to) in [("chosen", &chosen), ("other", &other)] {
        http_sink(&mut db, id, to, json!({}), r#""grouping" => 'transaction'"#);
    }
    db.run(
        "select outbox.backfill('t', 'chosen', chunk_size => 2);
         begin; select outbox.emit('first'); select outbox.backfill_chunk(1); select outbox.emit('second'); select outbox.backfill_chunk(1); commit;
         select outbox.start()",
    );
    let places = |receiver: &Receiver, count: usize| {
        let events = receiver.wait_for(count);
        let place = |event: &outbox_tests::Event| {
            format!(
                "{} {}/{}",
                event.topic.rsplit('.').next().unwrap_or_default(),
                event.extensions["transactionindex"],
                event.extensions["transactioncount"]
            )
        };
        events.iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(places(&other, 2), ["first 1/2", "second 2/2"]);
    assert_eq!(
        places(&chosen, 5),
        [
            "first 1/5",
            "snapshot 2/5",
            "snapshot 3/5",
            "second 4/5",
            "snapshot 5/5"
        ]
    );
}

#[test]
fn it_is_ordered_against_what_changes_meanwhile_and_survives_kills() {
    let (cluster, mut db) = filled(2_000);
    let chosen = Receiver::start();
    http_sink(&mut db, "chosen", &chosen, json!({}), "batch_size => 100");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (cluster, stop) = (&cluster, &stop);
        scope.spawn(move || {
            let mut db = cluster.connect();
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                db.run(&format!(
                    "update t set n = n + 1 where id = {}",
                    n * 31 % 2_000 + 1
                ));
            }
        });
        db.run("select outbox.backfill('t', 'chosen', chunk_size => 50)");
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // A crash takes all sessions along.
            until("it has begun", || {
                db.one::<bool>("select chunks >= 5 from outbox.backfill_status")
                    .then_some(())
            });
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(error) = failed {
            std::panic::resume_unwind(error);
        }
    });
    let dispatcher: i32 =
        db.one("select pid from pg_stat_activity where backend_type = 'pg_outbox dispatcher'");
    cluster.kill_backend(dispatcher, Signal::KILL);
    until("the server goes down", || {
        db.batch_execute("select 1").is_err().then_some(())
    });
    cluster.wait_until_it_answers();
    let mut db = cluster.connect();
    db.run("update t set n = n + 1 where id % 3 = 0");
    until_done(&mut db);
    let changes = db.one::<i64>("select count(*) from outbox.events where for_sink is null");
    let changes = usize::try_from(changes).expect("a count");
    let events = chosen.wait_for_distinct(2_000 + changes);

    let mut last = BTreeMap::<String, i64>::new();
    let mut snapshots = 0;
    for event in chosen.first_arrivals() {
        let n = event.data()["n"].as_i64().expect("a number");
        let subject = event.subject.expect("a subject");
        let before = last.insert(subject.clone(), n);
        if event.topic == SNAPSHOT {
            snapshots += 1;
            assert!(
                before.is_none_or(|it| it == n),
                "{subject}: {n} after {before:?}"
            );
        } else {
            assert!(
                before.is_none_or(|it| it + 1 == n),
                "{subject}: {n} after {before:?}"
            );
        }
    }
    assert_eq!(
        (snapshots, last.len()),
        (2_000, 2_000),
        "of {}",
        events.len()
    );
}

#[test]
fn a_poison_event_becomes_a_dead_letter_of_that_sink() {
    let (_cluster, mut db) = filled(5);
    db.run(
        r#"create table taken (subject text);
           create function take(events outbox.event[]) returns void language plpgsql as $$
           begin
               if exists (select from unnest(events) where subject = '3') and not exists (select from taken where subject = 'mended') then
                   raise 'three is too many';
               end if;
               insert into taken select subject from unnest(events);
           end $$;
           select outbox.create_sink('chosen', 'function', config => '{"function": "take"}')"#,
    );
    db.run("select outbox.backfill('t', 'chosen', chunk_size => 2)");
    until("there is a dead letter", || {
        db.one::<bool>("select exists (select from outbox.dead_letters where sink = 'chosen' and event ->> 'subject' = '3')")
            .then_some(())
    });
    db.run("insert into taken values ('mended'); select outbox.redeliver('chosen')");
    until("it is through", || {
        db.one::<bool>(
            "select count(*) = 6 and not exists (select from outbox.dead_letters) from taken",
        )
        .then_some(())
    });
}

#[test]
fn what_cannot_be_done_is_said() {
    let (_cluster, mut db) = filled(1);
    db.run(
        "select outbox.create_stream('billing'); select outbox.create_sink('bills', 'pull', stream => 'billing'), outbox.create_sink('x', 'pull')",
    );
    for (sink, sqlstate, message) in [
        ("nobody", "42704", r#"sink "nobody" does not exist"#),
        ("", "42704", r#"sink "" does not exist"#),
        (
            "bills",
            "22023",
            r#"sink "bills" does not read the stream of table public.t"#,
        ),
    ] {
        let refusal = db.refused(&format!("select outbox.backfill('t', sink => '{sink}')"));
        assert_eq!(
            (refusal.sqlstate.as_str(), refusal.message.as_str()),
            (sqlstate, message)
        );
    }
}

/// How a backfill ended: its state, and why.
fn ended(db: &mut Client) -> (String, Option<String>) {
    let row = db
        .query_one("select state, error from outbox.backfill_status", &[])
        .expect("a backfill");
    (row.get(0), row.get(1))
}

#[test]
fn one_that_cannot_go_on_ends_and_says_why() {
    for (what, why) in [
        (
            "select outbox.drop_sink('chosen')",
            r#"sink "chosen" was dropped"#,
        ),
        // Another one of its name is another one.
        (
            "select outbox.drop_sink('chosen'), outbox.create_sink('chosen', 'pull')",
            r#"sink "chosen" was dropped"#,
        ),
        (
            "select outbox.uncapture('t')",
            "its table is not captured any more",
        ),
        (
            "select outbox.create_stream('billing'); select outbox.alter_capture('t', stream => 'billing')",
            r#"sink "chosen" does not read stream "billing", into which the table is captured now"#,
        ),
    ] {
        let (_cluster, mut db) = filled(20_000);
        // It waits for its sink, and so is in the middle.
        db.run("select outbox.create_sink('chosen', 'pull'), outbox.backfill('t', 'chosen')");
        until("it waits", || {
            db.one::<bool>("select rows > 10000 from outbox.backfill_status")
                .then_some(())
        });
        db.run(what);
        until(what, || (ended(&mut db).0 != "running").then_some(()));
        assert_eq!(ended(&mut db), ("stopped".to_owned(), Some(why.to_owned())));
        if what.contains("create_sink") {
            assert_eq!(pulled(&mut db, "chosen"), vec![]);
        }
    }
}

#[test]
fn nobody_who_may_emit_can_write_to_one_sink() {
    let (cluster, mut db) = filled(1);
    db.run("create role app login; select outbox.grant('app', 'emit')");
    let mut app = cluster.connect_as("app");
    let refusal = app.refused("insert into outbox.events (topic, for_sink) values ('x', 1)");
    assert_eq!(refusal.sqlstate, "42501");
    app.run(
        r#"set outbox.headers = '{"for_sink": 1}'; insert into outbox.events (topic) values ('x')"#,
    );
    assert_eq!(
        db.one::<Value>("select headers from outbox.read()"),
        json!({"for_sink": 1})
    );
}

#[test]
fn it_waits_for_its_own_sink_alone_and_says_so() {
    let (_cluster, mut db) = filled(30_000);
    db.run(
        "select outbox.create_sink('nobody', 'pull');
         select outbox.emit('early') from generate_series(1, 11000)",
    );
    db.run(
        "select outbox.create_sink('mine', 'pull', start => 'tail');
         select outbox.backfill('t', 'mine', chunk_size => 1000)",
    );
    let waits = |db: &mut Client| {
        until("it waits", || {
            db.one::<Option<String>>(
                "select error from outbox.backfill_status order by id desc limit 1",
            )
        })
    };
    assert_eq!(
        waits(&mut db),
        r#"it waits until sink "mine" has taken more of what is undelivered"#
    );
    let mut taken = 0;
    until("all of it is taken", || {
        taken += db
            .query("select from outbox.poll('mine', 5000)", &[])
            .expect("it can be polled")
            .len();
        db.run("select outbox.ack('mine')");
        (state(&mut db) == "done" && taken == 30_000).then_some(())
    });
    assert_eq!(
        db.one::<Option<String>>("select error from outbox.backfill_status"),
        None
    );
    // All of the stream gets this one.
    db.run("select outbox.backfill('t')");
    assert_eq!(
        waits(&mut db),
        r#"it waits until sink "nobody" has taken more of what is undelivered"#
    );
}
