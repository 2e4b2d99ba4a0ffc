//! What a function may give back, how long it may take, and what becomes of its effects.

mod ahead;
#[path = "../scene/mod.rs"]
mod scene;

use outbox_tests::Sql;
use postgres::Client;
use scene::{emit, ids, ids_without, quick, status, until_dead, until_idle, until_status};

pub(crate) fn sink(db: &mut Client, config: &str, arguments: &str) {
    db.run(&format!(
        "select outbox.create_sink('taker', 'function', config => '{config}'{arguments})"
    ));
}

pub(crate) fn seen(db: &mut Client) -> Vec<String> {
    db.all("select id from seen order by substr(id, 2)::int")
}

#[test]
fn every_result_means_what_it_says() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create table tries (id text);
         create function take(events outbox.event[]) returns table (seq bigint, result text, error text) language plpgsql as $$
         declare
             e outbox.event;
         begin
             foreach e in array events loop
                 insert into tries values (e.id);
                 seq := e.seq;
                 error := null;
                 result := case e.id when 'n2' then 'duplicate' when 'n3' then 'permanent' when 'n5' then 'rejected'
                                     when 'n7' then 'failed' else 'recorded' end;
                 if e.id = 'n3' then error := 'of another age'; end if;
                 -- One that is behind another, and so is not tried for now.
                 if e.id = 'n9' and cardinality(events) > 1 then result := 'skipped'; end if;
                 if result in ('recorded', 'duplicate') then insert into seen values (e.id); end if;
                 -- Of some nothing is said, and of one that was not handed over something is.
                 if e.id <> 'n4' then return next; end if;
             end loop;
             seq := -1; result := 'permanent'; error := 'who is it?';
             return next;
         end $$",
    );
    sink(&mut db, r#"{"function": "take"}"#, ", batch_size => 10");
    emit(&mut db, 1..=20);
    let dead = until_dead(&mut db, "taker", 3);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.error.as_str(), letter.attempts))
        .collect();
    let unexplained = "reported as failed, without a reason";
    assert_eq!(
        told,
        [
            ("n3", "of another age", 1),
            ("n5", unexplained, 1),
            ("n7", unexplained, 5)
        ]
    );
    assert_eq!(until_idle(&mut db, "taker").delivered, 17);
    assert_eq!(seen(&mut db), ids_without(20, &[3, 5, 7]));
    assert_eq!(
        db.one::<i64>("select count(*) from tries where id = 'n4'"),
        1
    );
}

#[test]
fn rows_may_be_of_a_named_type_and_may_say_more() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create type report as (seq int, result text, note text, error text);
         create function take(events outbox.event[]) returns setof report language sql as $$
             insert into seen select e.id from unnest(events) e where e.id <> 'n2';
             select row(e.seq, case e.id when 'n2' then 'rejected' else 'recorded' end, 'a note', null)::report from unnest(events) e
         $$",
    );
    sink(&mut db, r#"{"function": "take"}"#, "");
    emit(&mut db, 1..=5);
    assert_eq!(until_dead(&mut db, "taker", 1)[0].id(), "n2");
    assert_eq!(until_idle(&mut db, "taker").delivered, 4);
    assert_eq!(seen(&mut db), ids_without(5, &[2]));
}

#[test]
fn what_else_a_function_may_return_is_refused() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    for (name, returns, body) in [
        ("number", "int", "select 1"),
        ("truth", "boolean", "select true"),
        ("many", "setof text", "select ''x''"),
        ("nothings", "setof void", "select"),
        (
            "short",
            "table (seq bigint, error text)",
            "select 1::bigint, ''x''",
        ),
        (
            "odd",
            "table (seq text, result text, error text)",
            "select ''1'', ''x'', ''y''",
        ),
        ("unnamed", "record", "select 1, 2"),
    ] {
        db.run(&format!(
            "create function {name}(outbox.event[]) returns {returns} language sql as '{body}'"
        ));
        let refused = db.refused(&format!(
            "select outbox.create_sink('x', 'function', config => '{{\"function\": \"{name}\"}}')"
        ));
        assert_eq!(refused.sqlstate, "22023", "{name}");
        assert!(refused.message.contains(name), "{refused:?}");
        assert!(refused.detail.is_some());
        let hint = refused.hint.unwrap();
        assert!(
            hint.contains("returns table (seq bigint, result text, error text)"),
            "{hint}"
        );
    }
}

#[test]
fn an_exception_undoes_the_batch_that_it_is_raised_in_and_only_that() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create function take(events outbox.event[]) returns table (seq bigint, result text, error text) language plpgsql as $$
         begin
             insert into seen select e.id from unnest(events) e;
             if exists (select from unnest(events) e where e.id = 'n12') and not exists (select from seen s where s.id = 'mended') then
                 raise exception 'not yet';
             end if;
         end $$",
    );
    sink(&mut db, r#"{"function": "take"}"#, ", batch_size => 4");
    emit(&mut db, 1..=12);
    until_status(&mut db, "taker", "attempts", |status| status.attempts >= 3);
    assert_eq!(seen(&mut db), ids(1..=11));
    assert_eq!(status(&mut db, "taker").delivered, 11);
    db.run("insert into seen values ('mended')");
    until_idle(&mut db, "taker");
    db.run("delete from seen where id = 'mended'");
    assert_eq!(seen(&mut db), ids(1..=12));
}

#[test]
fn a_call_that_takes_too_long_is_cancelled_and_undone() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create table slow (id text);
         insert into slow values ('n3');
         create function take(events outbox.event[]) returns void language plpgsql as $$
         declare
             e outbox.event;
         begin
             foreach e in array events loop
                 insert into seen values (e.id);
                 if exists (select from slow s where s.id = e.id) then
                     perform pg_sleep(3600);
                 end if;
             end loop;
         end $$",
    );
    sink(
        &mut db,
        r#"{"function": "take", "timeout_ms": 200}"#,
        ", batch_size => 8",
    );
    emit(&mut db, 1..=5);
    let seen_status = until_status(&mut db, "taker", "two attempts", |status| {
        status.attempts >= 2
    });
    assert_eq!(
        seen_status.last_error.as_deref(),
        Some("it took longer than timeout_ms, 200 ms")
    );
    assert_eq!(seen(&mut db), ids(1..=2));
    // It is an event like any other that fails: with others going through, it is set aside.
    let dead = until_dead(&mut db, "taker", 1);
    assert_eq!(dead[0].id(), "n3");
    until_idle(&mut db, "taker");
    assert_eq!(seen(&mut db), ids_without(5, &[3]));

    // Also while it waits for a lock, and also by hand.
    db.run("delete from slow; truncate seen; select outbox.stop()");
    let mut other = cluster.connect();
    other.run("begin; lock table seen in access exclusive mode");
    emit(&mut db, 6..=6);
    db.run("set statement_timeout = '30s'");
    let error = outbox_tests::until("the lease", || {
        let outcome: String = db.one("select outcome from outbox.tick('taker')");
        (outcome != "leased").then(|| {
            assert_eq!(outcome, "failed");
            db.one::<String>("select error from outbox.tick('taker')")
        })
    });
    assert_eq!(error, "it took longer than timeout_ms, 200 ms");
    other.run("rollback");
    assert_eq!(
        db.one::<i64>("select delivered from outbox.tick('taker')"),
        1
    );
    assert_eq!(seen(&mut db), ids(6..=6));
}

#[test]
fn a_call_in_time_is_not_cancelled_later() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create function take(events outbox.event[]) returns void language plpgsql as $$
         begin
             insert into seen select e.id from unnest(events) e;
             perform pg_sleep(0.05);
         end $$",
    );
    sink(
        &mut db,
        r#"{"function": "take", "timeout_ms": 1000}"#,
        ", batch_size => 1",
    );
    emit(&mut db, 1..=40);
    let idle = until_status(&mut db, "taker", "all delivered", |status| {
        status.delivered == 40
    });
    assert_eq!(idle.dead_letters, 0);
    assert_eq!(seen(&mut db), ids(1..=40));
    assert!(!cluster.log().contains("canceling statement"));
}

#[test]
fn a_session_that_is_cancelled_by_its_user_still_is() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create function take(events outbox.event[]) returns void language sql as 'select pg_sleep(3600)';
         select outbox.stop()",
    );
    sink(
        &mut db,
        r#"{"function": "take", "timeout_ms": 3600000}"#,
        "",
    );
    emit(&mut db, 1..=1);
    db.run("set statement_timeout = '300ms'");
    let refused = db.refused("select * from outbox.tick('taker')");
    assert_eq!(refused.sqlstate, "57014");
    assert!(refused.message.contains("statement timeout"), "{refused:?}");
}
