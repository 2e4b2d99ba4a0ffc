//! Partitioned tables, inheritance, TRUNCATE, and rows that replication applies.

use outbox_tests::Sql;
use postgres::Client;

use super::{Change, after, quiet, short, taken};

/// Operation, subject and partition.
fn placed(changes: &[Change]) -> Vec<String> {
    changes
        .iter()
        .map(|change| {
            assert_eq!(change.source, "public.t");
            let partition = change
                .headers
                .get("partition")
                .and_then(|name| name.as_str());
            format!("{} in {}", change.short(), partition.unwrap_or("-"))
        })
        .collect()
}

fn partitioned(db: &mut Client) {
    db.run(
        "create table t (id int, k text, n int, primary key (id, k)) partition by list (k);
         create table t_a partition of t for values in ('a');
         create table t_b (n int, k text not null, gone int, id int not null);
         alter table t_b drop gone; alter table t attach partition t_b for values in ('b');
         select outbox.capture('t', payload => 'before_after')",
    );
}

#[test]
fn the_root_is_the_source_and_the_partition_an_attribute() {
    let (_cluster, mut db) = quiet();
    partitioned(&mut db);
    assert_eq!(
        placed(&after(
            &mut db,
            "insert into t values (1, 'a', 1), (2, 'b', 2)"
        )),
        ["insert 1:a in public.t_a", "insert 2:b in public.t_b"]
    );
    assert_eq!(
        placed(&after(
            &mut db,
            "insert into t_b values (3, 'b', 3); update t_b set n = 4 where id = 3; delete from t_b where id = 3"
        )),
        [
            "insert 3:b in public.t_b",
            "update 3:b in public.t_b",
            "delete 3:b in public.t_b"
        ]
    );
    // Later ones.
    db.run("create table t_c partition of t for values in ('c') partition by hash (id); create table t_c0 partition of t_c for values with (modulus 1, remainder 0)");
    assert_eq!(
        placed(&after(
            &mut db,
            "insert into t_c0 values (5, 'c', 5); insert into t values (6, 'c', 6); insert into t_c values (7, 'c', 7)"
        )),
        [
            "insert 5:c in public.t_c0",
            "insert 6:c in public.t_c0",
            "insert 7:c in public.t_c0"
        ]
    );
    db.run("create table t_rest (like t including all); insert into t_rest values (9, 'z', 9); alter table t attach partition t_rest default");
    assert_eq!(
        placed(&after(&mut db, "update t_rest set n = 10")),
        ["update 9:z in public.t_rest"]
    );
    // One that leaves takes nothing along.
    db.run("alter table t detach partition t_rest");
    assert_eq!(
        short(&mut db, "insert into t_rest values (10, 'y', 0)"),
        Vec::<String>::new()
    );
    assert_eq!(
        db.one::<i64>("select count(*) from pg_trigger where tgrelid = 't_rest'::regclass"),
        0
    );
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.check_captures()"),
        0
    );
    let refusal = db.refused("select outbox.capture('t_a')");
    assert_eq!(refusal.sqlstate, "42710");
    db.run("select outbox.uncapture('t')");
    assert_eq!(
        db.one::<i64>("select count(*) from pg_trigger where tgname like 'outbox_capture%'"),
        0
    );
}

#[test]
fn all_kinds_of_partitions_are_named() {
    let (_cluster, mut db) = quiet();
    db.run(
        "create schema evil; create type public.mood as enum ('sad', 'ok');
         create function evil.lies(int, int) returns boolean language plpgsql as $$ begin raise 'run as %', current_user; end $$;
         create operator evil.>= (leftarg = int, rightarg = int, function = evil.lies);
         create table t (id int, n int, \"odd name\" mood, wide text) partition by range (n, id);
         create table t_1 partition of t for values from (minvalue, minvalue) to (10, 0) partition by hash (id);
         create table t_1_0 partition of t_1 for values with (modulus 2, remainder 0);
         create table t_1_1 partition of t_1 for values with (modulus 2, remainder 1);
         create table t_2 partition of t for values from (10, 0) to (maxvalue, maxvalue) partition by list (\"odd name\");
         create table t_2_ok partition of t_2 for values in ('ok'); create table t_2_none partition of t_2 default;
         select outbox.capture('t', key => '{id}', columns => '{n}')",
    );
    db.run("set search_path = evil, pg_catalog, public");
    let changes = after(
        &mut db,
        "insert into public.t select n, n, case n % 3 when 0 then 'ok' when 1 then 'sad' end::public.mood from generate_series(1, 30) n",
    );
    assert_eq!(changes.len(), 30);
    for change in changes {
        let id = change.subject.expect("a subject");
        let real: String = db.one(&format!("select 'public.' || relname from public.t t join pg_class c on c.oid = t.tableoid where id operator(pg_catalog.=) {id}"));
        assert_eq!(change.headers["partition"], real, "{id}");
    }
    let changes = after(
        &mut db,
        "update public.t set n = 1, wide = '' where id operator(pg_catalog.=) 30; delete from public.t where id operator(pg_catalog.=) 29",
    );
    assert_eq!(changes[0].short(), "update 30");
    assert!(
        changes[0].headers["partition"]
            .as_str()
            .is_some_and(|name| name.starts_with("public.t_1_"))
    );
    assert_eq!(changes[1].headers["partition"], "public.t_2_none");
    // By an expression: nobody is asked.
    db.run("reset search_path; drop table t; create table t (id int primary key, n int) partition by range (id)");
    db.run("drop table t; create table t (id int, n int) partition by range ((id + 1)); create table t_0 partition of t for values from (0) to (10)");
    db.run("select outbox.capture('t')");
    assert_eq!(
        placed(&after(&mut db, "insert into t values (1, 1)")),
        ["insert 1:1 in -"]
    );
}

#[test]
fn an_update_across_partitions_is_one_update() {
    let (_cluster, mut db) = quiet();
    partitioned(&mut db);
    db.run("insert into t values (1, 'a', 1), (2, 'b', 2), (3, 'a', 3)");
    taken(&mut db);
    let changes = after(
        &mut db,
        "update t set k = case k when 'a' then 'b' else 'a' end, n = n * 10",
    );
    let mut told = changes
        .iter()
        .map(|change| {
            let (before, now) = (&change.payload["before"], &change.payload["after"]);
            assert_eq!(before["id"], now["id"]);
            assert_eq!(before["n"].as_i64().map(|n| n * 10), now["n"].as_i64());
            assert_ne!(before["k"], now["k"]);
            change.short()
        })
        .collect::<Vec<_>>();
    told.sort();
    assert_eq!(told, ["update 1:a", "update 2:b", "update 3:a"]);
}

#[test]
fn a_captured_table_does_not_become_part_of_another() {
    let (_cluster, mut db) = quiet();
    partitioned(&mut db);
    db.run("create table t_z (like t including all); select outbox.capture('t_z')");
    assert_eq!(
        db.refused("alter table t attach partition t_z for values in ('z')")
            .sqlstate,
        "42710"
    );
    db.run(
        "select outbox.uncapture('t_z'); alter table t attach partition t_z for values in ('z')",
    );
    assert_eq!(
        placed(&after(&mut db, "insert into t_z values (1, 'z', 1)")),
        ["insert 1:z in public.t_z"]
    );
}

#[test]
fn a_row_that_does_not_arrive_is_an_error() {
    let (_cluster, mut db) = quiet();
    partitioned(&mut db);
    db.run(
        "insert into t values (1, 'a', 1), (2, 'a', 2);
         create function no() returns trigger language plpgsql as $$ begin return null; end $$;
         create trigger no before insert on t_b for each row execute function no()",
    );
    taken(&mut db);
    assert_eq!(
        db.refused("update t set k = 'b' where id = 1").sqlstate,
        "0A000"
    );
    assert_eq!(
        short(&mut db, "update t set n = 5 where id = 1"),
        ["update 1:a"]
    );
}

#[test]
fn truncate_is_one_event() {
    let (_cluster, mut db) = quiet();
    partitioned(&mut db);
    db.run("select outbox.alter_capture('t', operations => '{insert,truncate}')");
    db.run("insert into t values (1, 'a', 1), (2, 'b', 2)");
    taken(&mut db);
    assert_eq!(placed(&after(&mut db, "truncate t")), ["truncate - in -"]);
    assert_eq!(
        placed(&after(&mut db, "truncate t_a, t_b")),
        ["truncate - in public.t_a", "truncate - in public.t_b"]
    );
    assert_eq!(
        placed(&after(&mut db, "begin; truncate t; truncate t_a; commit")),
        ["truncate - in -", "truncate - in public.t_a"]
    );
    assert_eq!(
        placed(&after(&mut db, "update t set n = 1; truncate t_a")),
        ["truncate - in public.t_a"]
    );
    // One that came to nothing is forgotten.
    db.run("create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$; create trigger z_no before truncate on t_b execute function no()");
    db.run("do $$ begin truncate t; exception when others then null; end $$");
    assert_eq!(
        placed(&after(&mut db, "truncate t_a")),
        ["truncate - in public.t_a"]
    );
}

#[test]
fn children_belong_to_their_parent() {
    let (_cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key, n int); create table t_1 (extra int) inherits (t);
         select outbox.capture('t'); create table t_2 () inherits (t, t_1)",
    );
    let changes = after(
        &mut db,
        "insert into t values (1, 1); insert into t_1 values (2, 2, 2); insert into t_2 values (3, 3)",
    );
    assert_eq!(
        placed(&changes),
        [
            "insert 1 in -",
            "insert 2 in public.t_1",
            "insert 3 in public.t_2"
        ]
    );
    assert_eq!(changes[1].payload.to_string(), r#"{"n":2,"id":2}"#);
    assert_eq!(
        short(&mut db, "update t set n = 7"),
        ["update 1", "update 2", "update 3"]
    );
    assert_eq!(short(&mut db, "delete from t_1"), ["delete 2", "delete 3"]);
    db.run("alter table t_2 no inherit t_1; alter table t_2 no inherit t");
    assert_eq!(
        short(&mut db, "insert into t_2 values (4, 4)"),
        Vec::<String>::new()
    );
}

#[test]
fn rows_that_replication_applies_are_an_option() {
    let (_cluster, mut db) = quiet();
    partitioned(&mut db);
    db.run("set session_replication_role = replica");
    assert_eq!(
        short(&mut db, "insert into t values (1, 'a', 1)"),
        Vec::<String>::new()
    );
    db.run("reset session_replication_role; select outbox.alter_capture('t', replicated => true)");
    assert_eq!(
        short(&mut db, "insert into t values (2, 'a', 1)"),
        ["insert 2:a"]
    );
    db.run("set session_replication_role = replica");
    let changes = after(
        &mut db,
        "insert into t values (3, 'b', 1); update t set n = 2 where id = 3; update t set n = n; delete from t where id = 3",
    );
    assert_eq!(
        placed(&changes),
        [
            "insert 3:b in public.t_b",
            "update 3:b in public.t_b",
            "delete 3:b in public.t_b"
        ]
    );
    assert_eq!(changes[1].payload["after"]["n"], 2);
}

#[test]
fn values_of_many_types_find_their_partitions() {
    let (_cluster, mut db) = quiet();
    db.run("create type mood as enum ('sad', 'ok', 'glad')");
    for (strategy, type_, bounds, values) in [
        (
            "range",
            "timestamptz",
            [
                "from (minvalue) to ('2024-01-01 00:00+02')",
                "from ('2024-01-01 00:00+02') to ('2025-01-01')",
                "default",
            ],
            "('2023-12-31 21:59:59+00'), ('2023-12-31 22:00:00+00'), ('2026-01-01'), (null), ('-infinity')",
        ),
        (
            "range",
            "numeric(10, 2)",
            ["from (-1.50) to (0)", "from (0) to (maxvalue)", "default"],
            "(-1.50), (-1.51), (0), ('NaN'), (null)",
        ),
        (
            "range",
            "text collate \"C\"",
            ["from ('a') to ('b')", "from ('b') to ('ö')", "default"],
            "('a'), ('az'), ('b'), ('öl'), ('B'), ('')",
        ),
        (
            "list",
            "mood",
            ["in ('sad', null)", "in ('ok')", "default"],
            "('sad'), ('ok'), ('glad'), (null)",
        ),
        (
            "list",
            "varchar(9)",
            ["in ('x', 'y')", "in (null)", "default"],
            "('x'), ('y'), ('z'), (null), ('')",
        ),
        (
            "list",
            "boolean",
            ["in (true)", "in (false)", "default"],
            "(true), (false), (null)",
        ),
        (
            "hash",
            "uuid",
            [
                "with (modulus 2, remainder 0)",
                "with (modulus 4, remainder 1)",
                "with (modulus 4, remainder 3)",
            ],
            "('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'), (null), ('b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'), ('c0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12')",
        ),
    ] {
        db.run(&format!("create table t (id int generated always as identity, k {type_}, n int default 0) partition by {strategy} (k)"));
        for (place, bound) in bounds.iter().enumerate() {
            let bound = if *bound == "default" {
                (*bound).to_owned()
            } else {
                format!("for values {bound}")
            };
            db.run(&format!("create table t_{place} partition of t {bound}"));
        }
        db.run("select outbox.capture('t', key => '{id}')");
        db.run(&format!("insert into t (k) values {values}"));
        let placed = "select count(*) = (select count(*) from outbox.events) and bool_and(e.headers ->> 'partition' = 'public.' || t.tableoid::regclass::text)
                        from t left join outbox.events e on e.subject = t.id::text and (e.payload ->> 'n')::int = t.n";
        assert!(db.one::<bool>(placed), "{strategy} {type_}: insert");
        db.run("delete from outbox.events; update t set n = 1");
        assert!(db.one::<bool>(placed), "{strategy} {type_}: update");
        db.run("delete from outbox.events; create table kept as select *, tableoid::regclass::text as part from t; delete from t");
        assert!(
            db.one::<bool>("select count(*) = (select count(*) from kept) and bool_and(e.headers ->> 'partition' = 'public.' || k.part)
                              from kept k join outbox.events e on e.subject = k.id::text"),
            "{strategy} {type_}: delete"
        );
        db.run("drop table t, kept; delete from outbox.events");
    }
}
