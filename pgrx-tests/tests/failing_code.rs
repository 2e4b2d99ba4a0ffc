//! Functions, filters and transforms that fail on some events, or on all: what they did before is undone, and each other event
//! has its effect once.

mod scene;

use outbox_tests::{Receiver, Sql};
use postgres::Client;
use scene::{emit, http_sink, ids, ids_without, quick, until_dead, until_idle, until_status};
use serde_json::json;

/// A function that notes each event, and then fails as `fails` says, given `e`, an event.
fn noting_function(db: &mut Client, fails: &str) {
    db.run(&format!(
        "create table seen (id text, call bigint);
         create sequence calls;
         create function take(events outbox.event[]) returns void language plpgsql as $$
         declare
             e outbox.event;
             call bigint := nextval('calls');
         begin
             foreach e in array events loop
                 insert into seen values (e.id, call);
                 {fails}
             end loop;
         end $$"
    ));
}

fn function_sink(db: &mut Client, arguments: &str) {
    db.run(&format!(
        "select outbox.create_sink('taker', 'function', config => '{{\"function\": \"take\"}}'{arguments})"
    ));
}

#[test]
fn a_function_that_raises_on_one_event_has_every_other_effect_once() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    noting_function(
        &mut db,
        "if e.id in ('n7', 'n8') then
             raise exception 'no, not %', 7 using errcode = '22023', detail = 'It is ' || (e.payload ->> 'n');
         end if;",
    );
    function_sink(&mut db, ", batch_size => 16");
    emit(&mut db, 1..=20);
    for n in 21..=30 {
        emit(&mut db, n..=n);
    }
    let dead = until_dead(&mut db, "taker", 2);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.error.as_str(), letter.attempts))
        .collect();
    let error = "no, not 7 (SQLSTATE 22023)";
    assert_eq!(told, [("n7", error, 6 + 5), ("n8", error, 1 + 5)]);
    let idle = until_idle(&mut db, "taker");
    assert_eq!((idle.delivered, idle.lag_events), (28, 0));
    // What the failing calls had noted before they failed is undone, and done once by another call.
    let seen: Vec<String> = db.all("select id from seen order by substr(id, 2)::int");
    assert_eq!(seen, ids_without(30, &[7, 8]));
    let calls: i64 = db.one("select last_value from calls");
    let calls_with_effect: i64 = db.one("select count(distinct call) from seen");
    assert!(calls >= calls_with_effect + 10, "{calls} calls");
    // The dead letter is what an HTTP sink would have been sent.
    assert_eq!(dead[0].event["data"], json!({"n": 7}));
    assert_eq!(dead[0].event["type"], "test.numbered");
    assert_eq!(dead[0].event["sequence"], json!(dead[0].position));
}

#[test]
fn a_function_that_always_raises_is_an_outage() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
    let mut db = cluster.connect();
    noting_function(&mut db, "raise exception 'closed on Sundays';");
    function_sink(&mut db, ", batch_size => 4");
    emit(&mut db, 1..=30);
    until_status(&mut db, "taker", "many attempts", |status| {
        status.attempts >= 25
    });
    let seen = until_status(&mut db, "taker", "down", |status| status.state == "down");
    assert_eq!(
        seen.last_error.as_deref(),
        Some("closed on Sundays (SQLSTATE P0001)")
    );
    assert_eq!((seen.dead_letters, seen.delivered), (0, 0));
    assert_eq!(db.one::<i64>("select count(*) from seen"), 0);
    // Mended in place; nobody has to tell the sink.
    db.run(
        "create or replace function take(events outbox.event[]) returns void language sql as
         $$ insert into seen select e.id from unnest(events) e $$",
    );
    let idle = until_status(&mut db, "taker", "all delivered", |status| {
        status.delivered == 30
    });
    assert_eq!(idle.dead_letters, 0);
    let seen: Vec<String> = db.all("select id from seen order by substr(id, 2)::int");
    assert_eq!(seen, ids(1..=30));
}

#[test]
fn a_function_may_report_on_single_events() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create table tries (id text);
         create function take(events outbox.event[]) returns table (seq bigint, result text, error text)
         language plpgsql as $$
         declare
             e outbox.event;
         begin
             foreach e in array events loop
                 insert into tries values (e.id);
                 if e.id = 'n3' then
                     seq := e.seq; result := 'permanent'; error := 'never'; return next;
                 elsif e.id = 'n5' then
                     seq := e.seq; result := 'failed'; error := 'not now'; return next;
                 else
                     insert into seen values (e.id);
                     seq := e.seq; result := 'taken'; error := null; return next;
                 end if;
             end loop;
         end $$",
    );
    function_sink(&mut db, ", batch_size => 10");
    emit(&mut db, 1..=20);
    let dead = until_dead(&mut db, "taker", 2);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.error.as_str(), letter.attempts))
        .collect();
    assert_eq!(told, [("n3", "never", 1), ("n5", "not now", 5)]);
    assert_eq!(until_idle(&mut db, "taker").delivered, 18);
    let seen: Vec<String> = db.all("select id from seen order by substr(id, 2)::int");
    assert_eq!(seen, ids_without(20, &[3, 5]));
    assert_eq!(
        db.one::<i64>("select count(*) from tries where id = 'n3'"),
        1
    );
}

#[test]
fn a_function_that_releases_every_lock_still_has_its_effects_once() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    noting_function(
        &mut db,
        "perform pg_advisory_unlock_all();
         if e.id = 'n2' then raise exception 'not two'; end if;",
    );
    function_sink(&mut db, ", batch_size => 4");
    emit(&mut db, 1..=20);
    assert_eq!(until_dead(&mut db, "taker", 1)[0].id(), "n2");
    until_idle(&mut db, "taker");
    let seen: Vec<String> = db.all("select id from seen order by substr(id, 2)::int");
    assert_eq!(seen, ids_without(20, &[2]));
}

/// A transform, or a filter, that fails on what is not as expected.
fn shaping(arguments: &str, functions: &str, error: &str) {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(functions);
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "shaped",
        &receiver,
        json!({}),
        &format!("batch_size => 8, {arguments}"),
    );
    db.run(&format!("create table copies (id text); {TAKE_COPIES}"));
    db.run(&format!(
        "select outbox.create_sink('taker', 'function', config => '{{\"function\": \"take\"}}', batch_size => 8, {arguments})"
    ));
    emit(&mut db, 1..=20);
    for sink in ["shaped", "taker"] {
        let dead = until_dead(&mut db, sink, 1);
        assert_eq!((dead[0].id(), dead[0].attempts), ("n7", 5), "{sink}");
        assert_eq!(dead[0].error, error, "{sink}");
        // As far as it came: the payload as it is stored.
        assert_eq!(dead[0].event["data"], json!({"n": 7}), "{sink}");
        assert_eq!(until_idle(&mut db, sink).delivered, 19, "{sink}");
    }
    assert_eq!(receiver.ids(), ids_without(20, &[7]));
    let copies: Vec<String> = db.all("select id from copies order by substr(id, 2)::int");
    assert_eq!(copies, ids_without(20, &[7]));
}

const TAKE_COPIES: &str = "create function take(events outbox.event[]) returns void language sql as
    $$ insert into copies select e.id from unnest(events) e $$";

#[test]
fn a_transform_that_raises_for_one_event() {
    shaping(
        "transform => 'shape(outbox.event)'",
        "create function shape(e outbox.event) returns jsonb language plpgsql as $$
         begin
             if e.id = 'n7' then
                 raise exception 'seven cannot be shaped';
             end if;
             return jsonb_build_object('shaped', e.payload -> 'n');
         end $$",
        "transform: seven cannot be shaped (SQLSTATE P0001)",
    );
}

#[test]
fn a_filter_that_raises_for_one_event() {
    shaping(
        "filter => '100 / ((payload ->> ''n'')::int - 7) is not null'",
        "",
        "filter: division by zero (SQLSTATE 22012)",
    );
}

#[test]
fn a_transform_that_raises_for_every_event_is_an_outage_and_heals_when_it_is_mended() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
    let mut db = cluster.connect();
    db.run(
        "create function shape(e outbox.event) returns jsonb language plpgsql as
         $$ begin raise exception 'not written yet'; end $$",
    );
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "shaped",
        &receiver,
        json!({}),
        "batch_size => 4, transform => 'shape(outbox.event)'",
    );
    emit(&mut db, 1..=30);
    until_status(&mut db, "shaped", "many attempts", |status| {
        status.attempts >= 25
    });
    let seen = until_status(&mut db, "shaped", "down", |status| status.state == "down");
    assert_eq!(
        seen.last_error.as_deref(),
        Some("transform: not written yet (SQLSTATE P0001)")
    );
    assert_eq!((seen.dead_letters, seen.delivered), (0, 0));
    assert_eq!(receiver.requests().len(), 0);
    db.run(
        "create or replace function shape(e outbox.event) returns jsonb language sql as
         $$ select case when (e.payload ->> 'n')::int % 2 = 0 then jsonb_build_object('twice', 2 * (e.payload ->> 'n')::int) end $$",
    );
    receiver.wait_for_distinct(15);
    assert_eq!(until_idle(&mut db, "shaped").dead_letters, 0);
    let data: Vec<_> = receiver
        .first_arrivals()
        .iter()
        .map(|event| event.data())
        .collect();
    let mut doubled: Vec<_> = data
        .iter()
        .map(|data| data["twice"].as_i64().unwrap())
        .collect();
    doubled.sort_unstable();
    assert_eq!(doubled, (1..=15).map(|n| 4 * n).collect::<Vec<_>>());
}

#[test]
fn a_function_that_drops_its_own_sink_has_failed() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table taken (id text);
         create function f(events outbox.event[]) returns void language plpgsql as $$
         begin
             insert into public.taken select id from unnest(events);
             if exists (select from unnest(events) where id = 'n2') then
                 perform outbox.drop_sink('f');
             end if;
         end $$",
    );
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "f"}')"#);
    emit(&mut db, 1..=2);
    let failing = until_status(&mut db, "f", "some attempts", |status| status.attempts >= 3);
    assert_eq!(
        failing.last_error.as_deref(),
        Some("it drops the sink that it is called for (SQLSTATE 55006)")
    );
    // As any other failure that is one event's.
    emit(&mut db, 3..=3);
    let dead = until_dead(&mut db, "f", 1);
    assert_eq!(
        (dead[0].id(), dead[0].error.as_str()),
        (
            "n2",
            "it drops the sink that it is called for (SQLSTATE 55006)"
        )
    );
    until_idle(&mut db, "f");
    assert_eq!(db.all::<String>("select id from taken"), ids([1, 3]));
}
