//! Captured tables change their shape.

use outbox_tests::Sql;

use super::{after, payload, quiet, short, taken};

#[test]
fn what_can_go_on_does() {
    let (cluster, mut db) = quiet();
    db.run("create table t (id int primary key, a text, b int, secret text)");
    db.run("select outbox.capture('t', columns => '{a,b}', redact => '{secret}', tenant_column => 'a')");
    let mut other = cluster.connect();
    other.run("insert into t values (1, 'x', 1)");
    db.run("alter table t rename a to \"A\"; alter table t rename id to key; alter table t add c int default 5; alter table t alter b type bigint; alter table t drop secret");
    other.run("insert into t values (2, 'y', 5000000000)");
    let changes = taken(&mut db);
    assert_eq!(
        changes[1].payload.to_string(),
        r#"{"A":"y","b":5000000000,"key":2}"#
    );
    assert_eq!(changes[1].tenant.as_deref(), Some("y"));
    db.run("create schema s; alter table t rename to u; alter table u set schema s; alter schema s rename to z");
    other.run("update z.u set b = 7 where key = 2");
    let changes = taken(&mut db);
    assert_eq!(changes[0].topic, "outbox.z.u.update");
    assert_eq!(changes[0].source, "z.u");
    db.run("alter table z.u drop constraint t_pkey; alter table z.u add primary key (b)");
    other.run("delete from z.u where b = 7");
    assert_eq!(taken(&mut db)[0].subject.as_deref(), Some("7"));
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.check_captures()"),
        0
    );
    db.run("drop table z.u");
    assert_eq!(db.one::<i64>("select count(*) from outbox.captures"), 0);
}

#[test]
fn what_cannot_go_on_is_refused_at_once() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (id int primary key, a text, b int); create function public.f(int) returns boolean language sql as 'select true'");
    db.run("select outbox.capture('t', columns => '{a}', tenant_column => 'b')");
    for sql in ["alter table t drop a", "alter table t drop b"] {
        let refusal = db.refused(sql);
        assert_eq!(refusal.sqlstate, "2BP01", "{}", refusal.message);
        assert!(refusal.hint.is_some());
    }
    db.run("select outbox.alter_capture('t', condition => 'new.b > 0 and public.f(new.b)', columns => '{}', tenant_column => '')");
    for sql in [
        "alter table t rename b to c",
        "alter table t drop b",
        "alter table t alter b type text",
        "drop function public.f(int)",
        "alter function public.f(int) rename to g",
    ] {
        let refusal = db.refused(sql);
        assert_eq!(refusal.sqlstate, "2BP01", "{sql}: {}", refusal.message);
        assert!(refusal.detail.is_some());
    }
    assert_eq!(
        short(&mut db, "insert into t values (1, 'x', 1)"),
        ["insert 1"]
    );
    db.run("alter table t drop a; create index on t (b); create table other (id int); drop table other");
    assert_eq!(
        payload(&mut db, "insert into t values (2, 2)").to_string(),
        r#"{"b":2,"id":2}"#
    );
}

#[test]
fn a_trigger_that_is_missing_shows() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (id int primary key); select outbox.capture('t')");
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.check_captures()"),
        0
    );
    db.run("drop trigger outbox_capture_insert on t; alter table t disable trigger outbox_capture_update; select outbox.pause_capture('t')");
    let problems: Vec<String> =
        db.all("select relation::text || ': ' || problem from outbox.check_captures()");
    assert_eq!(
        problems,
        [
            "t: it is paused",
            "t: trigger outbox_capture_update is disabled"
        ]
    );
    db.run("drop trigger outbox_capture_begin on t");
    let problems: Vec<String> = db.all("select problem from outbox.check_captures()");
    assert!(
        problems.contains(&"trigger outbox_capture_begin is missing".to_owned()),
        "{problems:?}"
    );
}

#[test]
fn within_one_transaction() {
    let (_cluster, mut db) = quiet();
    let changes = after(
        &mut db,
        "begin; create table t (id int primary key, a int); select outbox.capture('t'); insert into t values (1, 1);
         alter table t add b int default 3; insert into t values (2, 2);
         select outbox.alter_capture('t', payload => 'keys'); insert into t values (3, 3);
         select outbox.pause_capture('t'); insert into t values (4, 4); commit",
    );
    let payloads = changes
        .iter()
        .map(|change| change.payload.to_string())
        .collect::<Vec<_>>();
    assert_eq!(
        payloads,
        [
            r#"{"a":1,"id":1}"#,
            r#"{"a":2,"b":3,"id":2}"#,
            r#"{"id":3}"#
        ]
    );
    // What is rolled back has not been.
    db.run("select outbox.resume_capture('t')");
    db.run("begin; alter table t rename a to z; select outbox.alter_capture('t', payload => 'full'); rollback");
    assert_eq!(
        payload(&mut db, "insert into t values (5, 5)").to_string(),
        r#"{"id":5}"#
    );
}

#[test]
fn the_extension_can_go() {
    let (_cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key); select outbox.capture('t'); insert into t values (1)",
    );
    assert_eq!(db.refused("drop extension pg_outbox").sqlstate, "2BP01");
    db.run("drop extension pg_outbox cascade; insert into t values (2)");
    db.run("create extension pg_outbox; select outbox.stop(); insert into t values (3); select outbox.capture('t')");
    assert_eq!(short(&mut db, "insert into t values (4)"), ["insert 4"]);
}

#[test]
fn changes_of_the_shape_are_events_where_asked_for() {
    let (_cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key) partition by range (id); create table other (id int);
         select outbox.capture('t', replicated => true), outbox.capture_ddl()",
    );
    let told = |db: &mut postgres::Client, sql: &str| {
        let changes = after(db, sql);
        changes
            .iter()
            .map(|change| format!("{} {} {}", change.topic, change.source, change.payload))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        told(
            &mut db,
            "alter table t add secret_column text default 'x'; alter table other add x int"
        ),
        [r#"outbox.public.t.alter public.t {"kind":"alter","table":"t","schema":"public"}"#]
    );
    assert_eq!(
        told(
            &mut db,
            "create table t_1 partition of t for values from (0) to (10)"
        ),
        [
            r#"outbox.public.t_1.create public.t_1 {"kind":"create","table":"t_1","schema":"public"}"#
        ]
    );
    assert_eq!(
        told(&mut db, "drop table t_1; drop table other"),
        [r#"outbox.public.t_1.drop public.t_1 {"kind":"drop","table":"t_1","schema":"public"}"#]
    );
    assert_eq!(
        told(&mut db, "drop table t"),
        [r#"outbox.public.t.drop public.t {"kind":"drop","table":"t","schema":"public"}"#]
    );
    db.run("create table t (id int primary key); select outbox.capture('t'), outbox.capture_ddl(false)");
    assert_eq!(
        told(&mut db, "alter table t add x int"),
        Vec::<String>::new()
    );
}
