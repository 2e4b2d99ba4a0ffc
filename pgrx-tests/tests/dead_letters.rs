//! What is set aside, and what becomes of it: redelivered, refused again, discarded, kept.

mod scene;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use outbox_tests::{Cluster, Receiver, Reply, Request, Sql, until};
use postgres::Client;
use scene::{
    DeadLetter, dead_letters, emit, http_sink, ids, quick, replace_dispatcher, status, until_dead,
    until_idle, until_status,
};
use serde_json::{Value, json};

fn events_in(request: &Request) -> Vec<Value> {
    serde_json::from_slice(&request.body).expect("a batch")
}

/// A receiver that refuses some events for good, and the events that it refuses.
struct Picky {
    receiver: Receiver,
    refused: Arc<Mutex<HashSet<String>>>,
}

impl Picky {
    fn start() -> Self {
        let receiver = Receiver::start();
        let refused = Arc::new(Mutex::new(HashSet::<String>::new()));
        let picky = Self {
            receiver,
            refused: Arc::clone(&refused),
        };
        picky.receiver.reply_with(move |request| {
            let refused = refused.lock().unwrap();
            let events = events_in(request);
            let named: Vec<_> = events
                .iter()
                .filter_map(|event| event["id"].as_str())
                .filter(|id| refused.contains(*id))
                .map(|id| (id, "not wanted here", true))
                .collect();
            Reply::failures(&named)
        });
        picky
    }

    fn refuses(&self, numbers: impl IntoIterator<Item = i64>) {
        *self.refused.lock().unwrap() = ids(numbers).into_iter().collect();
    }
}

/// A cluster with a sink `picky` that has set these events aside, of 1 to `last`.
fn with_dead_letters(last: i64, dead: &[i64]) -> (Cluster, Client, Picky, Vec<DeadLetter>) {
    let cluster = quick().setting("outbox.retention_min_age", "0").start();
    let mut db = cluster.connect();
    let picky = Picky::start();
    picky.refuses(dead.iter().copied());
    http_sink(&mut db, "picky", &picky.receiver, json!({}), "");
    emit(&mut db, 1..=last);
    let letters = until_dead(&mut db, "picky", dead.len());
    until_idle(&mut db, "picky");
    picky.receiver.wait_for((last - dead.len() as i64) as usize);
    (cluster, db, picky, letters)
}

#[test]
fn a_dead_letter_is_the_event_as_it_was_delivered() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_next([Reply::failures(&[(
        "evt_1",
        "no\nsuch  \u{1b}[31mproduct",
        true,
    )])]);
    db.run(
        "create function shape(e outbox.event) returns jsonb language sql as
         $$ select e.payload || jsonb_build_object('shaped', 0.10) $$",
    );
    http_sink(
        &mut db,
        "exact",
        &receiver,
        json!({}),
        "transform => 'shape(outbox.event)'",
    );
    let position: String = db.one(&format!(
        r#"insert into outbox.events (id, topic, source, subject, tenant, payload, headers)
           values ('evt_1', 'order.placed', 'a source/with ü', '7', 'acme', '{{"n": {}}}', '{{"Trace-Id": "x", "n": 1.50}}')
           returning outbox.format_position(txid, seq)"#,
        "1".repeat(100)
    ));
    let dead = until_dead(&mut db, "exact", 1).remove(0);
    let delivered = events_in(&receiver.requests()[0]).remove(0);
    assert_eq!(dead.event, delivered);
    assert_eq!(dead.event["data"]["shaped"].to_string(), "0.10");
    assert_eq!(dead.event["sequence"], json!(position));
    assert_eq!(dead.position, position);
    assert_eq!(
        (dead.error.as_str(), dead.attempts),
        ("no such [31mproduct", 1)
    );
    assert!(db.one::<bool>(
        "select dead_at between now() - interval '10 min' and now() from outbox.dead_letters"
    ));
    assert_eq!(status(&mut db, "exact").dead_letters, 1);

    // Redelivered, it is the same again: it is not shaped twice.
    assert_eq!(db.one::<i64>("select outbox.redeliver('exact')"), 1);
    until_dead(&mut db, "exact", 0);
    let again = events_in(receiver.requests().last().unwrap());
    assert_eq!(again, [delivered]);
    let text = |request: &Request| String::from_utf8(request.body.clone()).unwrap();
    assert!(text(receiver.requests().last().unwrap()).contains(&"1".repeat(100)));
}

#[test]
fn one_is_redelivered_and_the_others_stay() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(10, &[2, 5, 7]);
    picky.refuses([]);
    picky.receiver.clear();
    let position = letters[1].position.replace(':', ".");
    let queued: i64 = db.one(&format!("select outbox.redeliver('picky', '{position}')"));
    assert_eq!(queued, 1);
    let left = until_dead(&mut db, "picky", 2);
    let left: Vec<_> = left
        .iter()
        .map(|letter| (letter.id(), letter.queued))
        .collect();
    assert_eq!(left, [("n2", false), ("n7", false)]);
    assert_eq!(picky.receiver.ids(), ["n5"]);
    let request = &picky.receiver.requests()[0];
    assert_eq!(events_in(request), [letters[1].event.clone()]);
    assert_eq!(request.header("idempotency-key"), Some("n5"));
}

#[test]
fn all_are_redelivered_while_others_flow() {
    let dead: Vec<i64> = (1..=60).filter(|n| n % 2 == 0).collect();
    let (_cluster, mut db, picky, _) = with_dead_letters(60, &dead);
    picky.refuses([]);
    picky.receiver.clear();
    let queued: i64 = db.one("select outbox.redeliver('picky')");
    assert_eq!(queued, 30);
    for n in 61..=90 {
        emit(&mut db, n..=n);
    }
    until_dead(&mut db, "picky", 0);
    picky.receiver.wait_for(60);
    until_idle(&mut db, "picky");
    let arrived = picky.receiver.ids();
    let (old, new): (Vec<_>, Vec<_>) = arrived
        .into_iter()
        .partition(|id| dead.contains(&id[1..].parse().unwrap()));
    assert_eq!(old, ids(dead));
    assert_eq!(new, ids(61..=90));
    assert_eq!(db.one::<i64>("select outbox.redeliver('picky')"), 0);
}

#[test]
fn one_that_is_refused_for_good_again_stays() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(5, &[2, 4]);
    picky.refuses([2]);
    db.run("select outbox.redeliver('picky')");
    let left = until_dead(&mut db, "picky", 1);
    assert_eq!(left[0].id(), "n2");
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "picky")[0].queued).then_some(())
    });
    let left = dead_letters(&mut db, "picky").remove(0);
    assert_eq!((left.attempts, left.error.as_str()), (2, "not wanted here"));
    assert_eq!(left.event, letters[0].event);
    assert_eq!(
        picky.receiver.ids().iter().filter(|id| *id == "n4").count(),
        1
    );
}

/// Answers 500 to every request that holds the event.
fn fail_on(receiver: &Receiver, id: &'static str) {
    receiver.reply_with(move |request| {
        if events_in(request).iter().any(|event| event["id"] == id) {
            Reply::status(500)
        } else {
            Reply::ok()
        }
    });
}

#[test]
fn one_that_fails_again_stays_once_another_has_gone_through() {
    let (_cluster, mut db, picky, _) = with_dead_letters(5, &[2, 4]);
    // Another dead letter shows that the sink is up.
    fail_on(&picky.receiver, "n2");
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 1);
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "picky")[0].queued).then_some(())
    });
    let left = dead_letters(&mut db, "picky").remove(0);
    assert_eq!(
        (left.id(), left.error.as_str()),
        ("n2", "HTTP 500 Internal Server Error")
    );
    assert!(left.attempts > 5, "{left:?}");

    // An event of the stream does so, too.
    let before = left.attempts;
    db.run("select outbox.redeliver('picky')");
    until("more than five attempts", || {
        let letter = dead_letters(&mut db, "picky").remove(0);
        assert!(letter.queued, "nothing shows that the sink is up");
        (letter.attempts > before + 6).then_some(())
    });
    emit(&mut db, 6..=6);
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "picky")[0].queued).then_some(())
    });
    until_idle(&mut db, "picky");
    assert_eq!(picky.receiver.ids().last().unwrap(), "n6");

    // In the end it is taken after all.
    picky.receiver.reply_always(Reply::ok());
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 0);
    assert_eq!(picky.receiver.ids().last().unwrap(), "n2");
}

#[test]
fn an_outage_keeps_them_queued() {
    let (_cluster, mut db, picky, _) = with_dead_letters(40, &(1..=30).collect::<Vec<_>>());
    picky.refuses([]);
    picky.receiver.clear();
    picky.receiver.stop();
    db.run("select outbox.redeliver('picky')");
    until("many attempts", || {
        let letters = dead_letters(&mut db, "picky");
        assert!(letters.iter().all(|letter| letter.queued));
        let attempts: i32 = letters.iter().map(|letter| letter.attempts - 1).sum();
        (attempts >= 40).then_some(())
    });
    replace_dispatcher(&mut db, "picky");
    let letters = dead_letters(&mut db, "picky");
    assert_eq!(letters.len(), 30);
    assert!(
        letters[0].error.contains("Connection refused"),
        "{}",
        letters[0].error
    );
    picky.receiver.start_again();
    until_dead(&mut db, "picky", 0);
    let mut arrived = picky.receiver.ids();
    arrived.sort_by_key(|id| id[1..].parse::<i64>().unwrap());
    assert_eq!(arrived, ids(1..=30), "each once");
}

#[test]
fn they_wait_until_the_stream_flows() {
    let (_cluster, mut db, picky, _) = with_dead_letters(5, &[2, 4]);
    picky.refuses([]);
    picky.receiver.clear();
    picky.receiver.reply_always(Reply::status(503));
    emit(&mut db, 6..=20);
    until_status(&mut db, "picky", "down", |status| status.state == "down");
    db.run("select outbox.redeliver('picky')");
    until_status(&mut db, "picky", "some more attempts", |status| {
        status.attempts >= 15
    });
    let letters = dead_letters(&mut db, "picky");
    assert!(
        letters
            .iter()
            .all(|letter| letter.queued && letter.attempts == 1),
        "{letters:?}"
    );
    picky.receiver.reply_always(Reply::ok());
    until_dead(&mut db, "picky", 0);
    picky.receiver.wait_for_distinct(17);
    until_idle(&mut db, "picky");
}

#[test]
fn a_paused_sink_gets_them_when_it_is_resumed() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(9, &[2, 4, 6]);
    picky.refuses([]);
    picky.receiver.clear();
    db.run("select outbox.pause_sink('picky')");
    until_status(&mut db, "picky", "paused", |status| {
        status.state == "paused" && status.lease_pid.is_none()
    });
    db.run("select outbox.redeliver('picky')");
    // One that is discarded meanwhile is not delivered.
    db.run(&format!(
        "select outbox.discard('picky', '{}')",
        letters[1].position
    ));
    assert!(
        dead_letters(&mut db, "picky")
            .iter()
            .all(|letter| letter.queued)
    );
    db.run("select outbox.resume_sink('picky')");
    until_dead(&mut db, "picky", 0);
    until_idle(&mut db, "picky");
    assert_eq!(picky.receiver.ids(), ["n2", "n6"]);
}

#[test]
fn one_that_is_discarded_while_it_waits_for_its_next_try_is_not_tried_again() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(9, &[2, 4, 6]);
    picky.refuses([]);
    picky.receiver.reply_always(Reply::status(500));
    db.run("select outbox.redeliver('picky')");
    until("tries", || {
        (dead_letters(&mut db, "picky")[0].attempts > 3).then_some(())
    });
    db.run(&format!(
        "select outbox.discard('picky', '{}')",
        letters[0].position
    ));
    // The next failures are those of others.
    until("tries of the next", || {
        (dead_letters(&mut db, "picky")[0].attempts > 3).then_some(())
    });
    picky.receiver.clear();
    picky.receiver.reply_always(Reply::ok());
    until_dead(&mut db, "picky", 0);
    let mut arrived = picky.receiver.ids();
    arrived.sort();
    assert_eq!(arrived, ["n4", "n6"]);
}

#[test]
fn discarding_is_for_good() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(5, &[2, 4]);
    db.run(&format!(
        "select outbox.discard('picky', '{}')",
        letters[0].position
    ));
    let left = dead_letters(&mut db, "picky");
    assert_eq!(left.iter().map(DeadLetter::id).collect::<Vec<_>>(), ["n4"]);
    assert_eq!(status(&mut db, "picky").dead_letters, 1);
    picky.refuses([]);
    picky.receiver.clear();
    assert_eq!(db.one::<i64>("select outbox.redeliver('picky')"), 1);
    until_dead(&mut db, "picky", 0);
    assert_eq!(picky.receiver.ids(), ["n4"]);
}

#[test]
fn what_is_asked_wrongly_is_refused_clearly() {
    let (_cluster, mut db, _picky, letters) = with_dead_letters(5, &[2]);
    let there = letters[0].position.clone();
    let refused = |db: &mut Client, sql: &str, sqlstate: &str, message: &str| {
        let refusal = db.refused(sql);
        assert_eq!(
            (refusal.sqlstate.as_str(), refusal.message.as_str()),
            (sqlstate, message),
            "{sql}"
        );
    };
    for (sql, sqlstate, message) in [
        (
            "select outbox.redeliver('nobody')",
            "42704",
            "sink \"nobody\" does not exist",
        ),
        (
            "select outbox.redeliver(null)",
            "42704",
            "sink null does not exist",
        ),
        (
            "select outbox.redeliver('picky', '9:9')",
            "42704",
            "sink \"picky\" has no dead letter at 9:9",
        ),
        (
            "select outbox.redeliver('picky', 'nine')",
            "22023",
            "position 'nine' is not readable",
        ),
        (
            "select outbox.discard('picky', '9:9')",
            "42704",
            "sink \"picky\" has no dead letter at 9:9",
        ),
        (
            "select outbox.discard('picky', 'nine')",
            "22023",
            "position 'nine' is not readable",
        ),
        (
            "select outbox.discard('picky', null)",
            "22023",
            "discard needs a position",
        ),
    ] {
        refused(&mut db, sql, sqlstate, message);
    }
    let sql = format!("select outbox.discard('nobody', '{there}')");
    refused(
        &mut db,
        &sql,
        "42704",
        &format!("sink \"nobody\" has no dead letter at {there}"),
    );
    assert_eq!(dead_letters(&mut db, "picky"), letters);
    // The letters of a sink that is given up stay, but nobody can deliver them.
    db.run("select outbox.drop_sink('picky')");
    assert_eq!(dead_letters(&mut db, "picky").len(), 1);
    refused(
        &mut db,
        "select outbox.redeliver('picky')",
        "42704",
        "sink \"picky\" does not exist",
    );
    db.run(&format!("select outbox.discard('picky', '{there}')"));
    assert!(dead_letters(&mut db, "picky").is_empty());
}

#[test]
fn retention_takes_the_events_and_never_the_dead_letters() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(20, &[3, 20]);
    until("the events to be pruned", || {
        db.run("select outbox.prune()");
        (db.one::<i64>("select count(*) from outbox.events") == 0).then_some(())
    });
    assert_eq!(dead_letters(&mut db, "picky"), letters);
    picky.refuses([]);
    picky.receiver.clear();
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 0);
    let events: Vec<_> = picky
        .receiver
        .requests()
        .iter()
        .flat_map(|request| events_in(request))
        .collect();
    let buried: Vec<_> = letters.iter().map(|letter| letter.event.clone()).collect();
    assert_eq!(events, buried);
}

#[test]
fn a_redelivery_is_signed_with_what_is_active_then() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let picky = Picky::start();
    picky.refuses([2]);
    db.run("select outbox.set_secret('hook', array['before'])");
    http_sink(
        &mut db,
        "picky",
        &picky.receiver,
        json!({"secret": "hook"}),
        "",
    );
    emit(&mut db, 1..=3);
    until_dead(&mut db, "picky", 1);
    db.run("select outbox.set_secret('hook', array['after'])");
    picky.refuses([]);
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 0);
    let last = picky.receiver.requests().last().cloned().unwrap();
    assert!(last.is_signed_with("after") && !last.is_signed_with("before"));
}

#[test]
fn a_function_gets_the_event_it_failed_on_once_more() {
    for pruned in [false, true] {
        let cluster = quick().setting("outbox.retention_min_age", "0").start();
        let mut db = cluster.connect();
        db.run(
            "create table broken (id text primary key);
             create table taken (event outbox.event);
             insert into broken values ('evt_2'), ('evt_4');
             create function take(events outbox.event[]) returns void language plpgsql as $$
             declare e outbox.event;
             begin
                 foreach e in array events loop
                     insert into taken values (e);
                     if exists (select from broken b where b.id = e.id) then
                         raise exception 'broken';
                     end if;
                 end loop;
             end $$;
             select outbox.create_sink('taker', 'function', config => '{\"function\": \"take\"}')",
        );
        // Some of them are as an application writes them, and not as the envelope would have them.
        db.run(
            r#"insert into outbox.events (id, topic, source, subject, tenant, payload, headers)
               select 'evt_' || n, 'order.placed', 'shop floor', n::text, 'acme', '{"price": 0.10}', '{"Trace-Id": 7}'
                 from generate_series(1, 6) n"#,
        );
        until_dead(&mut db, "taker", 2);
        until_idle(&mut db, "taker");
        // As text: the rows themselves may be gone by then.
        let wanted: String = db.one(
            "select string_agg(row(e.txid, e.seq, e.id, e.topic, e.source, e.subject, e.tenant, e.time, e.payload, e.headers)::text, '; ' order by e.seq)
               from outbox.events e where e.id in ('evt_2', 'evt_4')",
        );
        if pruned {
            until("the events to be pruned", || {
                db.run("select outbox.prune()");
                (db.one::<i64>("select count(*) from outbox.events") == 0).then_some(())
            });
        }
        db.run("delete from taken; delete from broken; select outbox.redeliver('taker')");
        until_dead(&mut db, "taker", 0);
        until_idle(&mut db, "taker");
        let got: String =
            db.one("select string_agg((t.event)::text, '; ' order by (t.event).seq) from taken t");
        if pruned {
            // What the envelope does not tell is lost with the row: the spelling of headers and of the source.
            let wanted = wanted
                .replace("shop floor", "shop%20floor")
                .replace("Trace-Id", "traceid");
            assert_eq!(got.replace('"', ""), wanted.replace('"', ""));
        } else {
            assert_eq!(got, wanted);
        }
    }
}

#[test]
fn a_function_that_fails_again_leaves_nothing_behind() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table taken (id text);
         create sequence calls;
         create function take(events outbox.event[]) returns void language plpgsql as $$
         declare e outbox.event;
         begin
             perform nextval('calls');
             foreach e in array events loop
                 insert into taken values (e.id);
                 if e.id = 'n2' then raise exception 'still broken'; end if;
             end loop;
         end $$;
         select outbox.create_sink('taker', 'function', config => '{\"function\": \"take\"}')",
    );
    emit(&mut db, 1..=5);
    until_dead(&mut db, "taker", 1);
    until_idle(&mut db, "taker");
    let calls: i64 = db.one("select last_value from calls");
    db.run("select outbox.redeliver('taker')");
    until("more calls", || {
        (db.one::<i64>("select last_value from calls") > calls + 6).then_some(())
    });
    emit(&mut db, 6..=6);
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "taker")[0].queued).then_some(())
    });
    until_idle(&mut db, "taker");
    let taken: Vec<String> = db.all("select id from taken order by id");
    assert_eq!(taken, ["n1", "n3", "n4", "n5", "n6"]);
    let letter = dead_letters(&mut db, "taker").remove(0);
    assert_eq!(letter.error, "still broken (SQLSTATE P0001)");
    assert!(letter.attempts > 5 + 5, "{letter:?}");
}
