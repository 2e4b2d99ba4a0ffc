//! What is set aside: what is kept of it, and how it is given up for good.

mod scene;

use outbox_tests::{Receiver, Reply, Request, Sql, until};
use postgres::Client;
use scene::picky::{events_in, with_dead_letters};
use scene::{DeadLetter, dead_letters, http_sink, quick, status, until_dead};
use serde_json::json;

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
