//! What runs with the extension's rights runs nobody's code: each of these would make whoever tries a superuser.

use outbox_tests::{Cluster, Sql};
use postgres::Client;

use super::{quiet, taken};

/// A role `op` that operates, has a schema of its own, and a function that makes it a superuser where the caller can.
fn scene() -> (Cluster, Client, Client) {
    let (cluster, mut db) = quiet();
    db.run("create role op login; select outbox.grant('op', 'operate'); create schema op authorization op; grant create on schema public to op");
    let mut op = cluster.connect_as("op");
    op.run(
        "create function op.try() returns void language plpgsql as $$
         begin
             if (select r.rolsuper from pg_catalog.pg_roles r where r.rolname operator(pg_catalog.=) current_user) then
                 alter role op superuser;
             end if;
         end $$",
    );
    (cluster, db, op)
}

#[track_caller]
fn nobody_rose(db: &mut Client) {
    let rose: bool = db.one("select rolsuper from pg_roles where rolname = 'op'");
    assert!(!rose, "op is a superuser");
}

/// Operators of a schema that stands before pg_catalog in the path.
const OPERATORS: &str = "
    create function op.eq(xid8, xid8) returns boolean language plpgsql as $$ begin perform op.try(); return $1 operator(pg_catalog.=) $2; end $$;
    create operator op.= (leftarg = xid8, rightarg = xid8, function = op.eq);
    create function op.eq(bigint, bigint) returns boolean language plpgsql as $$ begin perform op.try(); return $1 operator(pg_catalog.=) $2; end $$;
    create operator op.= (leftarg = bigint, rightarg = bigint, function = op.eq);
    create function op.gt(bigint, bigint) returns boolean language plpgsql as $$ begin perform op.try(); return $1 operator(pg_catalog.>) $2; end $$;
    create operator op.> (leftarg = bigint, rightarg = bigint, function = op.gt);
    create function op.le(bigint, bigint) returns boolean language plpgsql as $$ begin perform op.try(); return $1 operator(pg_catalog.<=) $2; end $$;
    create operator op.<= (leftarg = bigint, rightarg = bigint, function = op.le);
    create function op.plus(bigint, bigint) returns bigint language plpgsql as $$ begin perform op.try(); return $1 operator(pg_catalog.+) $2; end $$;
    create operator op.+ (leftarg = bigint, rightarg = bigint, function = op.plus);";

#[test]
fn operators_of_a_writers_path() {
    let (_cluster, mut db, mut op) = scene();
    db.run(
        "create table t (id int primary key, v int); insert into t values (1, 0), (2, 0);
         create table keyless (v int);
         grant select, insert, update on t, keyless to op;
         select outbox.capture('t'), outbox.capture('keyless')",
    );
    op.run(OPERATORS);
    // A change in the middle of a statement has the events of the statement moved behind its own.
    op.run("create function op.nested(i int) returns int language plpgsql as $$ begin update public.t set v = 10 where id operator(pg_catalog.=) 2; return i; end $$");
    op.run("set search_path = op, pg_catalog");
    op.run("update public.t set v = op.nested(5) where id operator(pg_catalog.=) 1");
    op.run("insert into public.keyless values (1)");
    nobody_rose(&mut db);
    assert_eq!(taken(&mut db).len(), 3);
}

/// What a role can have run by those who write events.
const ATTACHED: [(&str, &str); 6] = [
    (
        "create index i on outbox.events (op.code(topic))",
        "drop index outbox.i",
    ),
    (
        "create index i on outbox.events (topic) where op.code(topic) <> 'x'",
        "drop index outbox.i",
    ),
    (
        "alter table outbox.events add constraint c check (op.code(topic) <> 'x')",
        "alter table outbox.events drop constraint c",
    ),
    (
        "alter table outbox.events add x text, alter x set default op.code('x')",
        "alter table outbox.events drop x",
    ),
    (
        "create trigger a before insert on outbox.events for each row execute function op.fire()",
        "drop trigger a on outbox.events",
    ),
    (
        "create rule r as on insert to outbox.events do also select op.code(new.topic)",
        "drop rule r on outbox.events",
    ),
];

#[test]
fn code_of_another_role_on_a_streams_table() {
    let (_cluster, mut db, mut op) = scene();
    op.run("create function op.code(text) returns text language plpgsql immutable as $$ begin perform op.try(); return $1; end $$;
            create function op.fire() returns trigger language plpgsql as $$ begin perform op.try(); return new; end $$");
    db.run("create table t (id int primary key); grant insert on t to op; create table keyless (id int); grant insert on keyless to op");
    for (attach, detach) in ATTACHED {
        // Before anything is captured there is nothing to refuse.
        db.run(attach);
        let refusal = db.refused("select outbox.capture('t'); insert into t values (1)");
        assert_eq!(refusal.sqlstate, "42501", "{attach}: {}", refusal.message);
        assert!(refusal.hint.is_some());
        nobody_rose(&mut db);
        db.run(detach);
        db.run("select outbox.capture('t'), outbox.capture('keyless')");
        let refusal = db.refused(attach);
        assert_eq!(refusal.sqlstate, "42501", "{attach}: {}", refusal.message);
        // It comes in where triggers of events are off.
        db.run(&format!(
            "set session_replication_role = replica; {attach}; reset session_replication_role"
        ));
        for table in ["t", "keyless"] {
            let refusal = op.refused(&format!("insert into public.{table} values (1)"));
            assert_eq!(refusal.sqlstate, "42501", "{attach}: {}", refusal.message);
        }
        nobody_rose(&mut db);
        // The owner's own code runs as the owner, and where names are looked up is not the writer's to say.
        db.run("alter table outbox.events owner to op; grant usage on schema outbox to op");
        db.run("select outbox.grant('op', 'emit')");
        op.run("set search_path = op, pg_catalog; insert into public.t values (2)");
        op.run("insert into public.keyless values (2); reset search_path");
        db.run("insert into t values (3); insert into keyless values (3)");
        nobody_rose(&mut db);
        assert_eq!(taken(&mut db).len(), 4, "{attach}");
        db.run("select outbox.uncapture('t'), outbox.uncapture('keyless'); delete from t");
        db.run(&format!(
            "{detach}; alter table outbox.events owner to postgres"
        ));
    }
}

#[test]
fn operators_of_who_takes_a_chunk_of_a_backfill() {
    let (_cluster, mut db, mut op) = scene();
    op.run(OPERATORS);
    op.run("create table public.mine (id bigint primary key); insert into public.mine values (1), (2), (3); select outbox.capture('public.mine')");
    let id: i64 = op.one("select outbox.backfill('public.mine', chunk_size => 2)");
    op.run("set search_path = op, pg_catalog");
    op.run(&format!("select outbox.backfill_chunk({id})"));
    op.run(&format!("select outbox.backfill_chunk({id})"));
    nobody_rose(&mut db);
    assert_eq!(taken(&mut db).len(), 3);
}

#[test]
fn casts_of_an_adopted_tables_types() {
    let (_cluster, mut db, mut op) = scene();
    op.run(
        "create type op.et as enum ('2026-01-02 03:04:05+00');
         create function op.cast(op.et) returns timestamptz language plpgsql as $$ begin perform op.try(); return now(); end $$",
    );
    // To own one side of a cast is enough.
    op.run("create cast (op.et as timestamptz) with function op.cast(op.et)");
    op.run("create table public.ad (id text, topic text, ts op.et, payload jsonb)");
    op.run(r#"select outbox.adopt_stream('ads', 'public.ad', '{"time": "ts"}')"#);
    op.run("insert into public.ad values ('4', 't', '2026-01-02 03:04:05+00', '{}')");
    nobody_rose(&mut db);
    let time: String = db.one(r#"select ("time" at time zone 'UTC')::text from outbox.ads"#);
    assert_eq!(time, "2026-01-02 03:04:05");
}

#[test]
fn checks_of_domains() {
    let (_cluster, mut db, mut op) = scene();
    op.run(
        "create function op.fits(int) returns boolean language plpgsql as $$ begin perform op.try(); return true; end $$;
         create domain op.inner as int check (op.fits(value));
         create domain op.dom as op.inner check (op.fits(value));
         create table public.keyed (k op.inner primary key); insert into public.keyed select generate_series(1, 50);
         create table public.parted (k op.dom, v int, primary key (k)) partition by list (k);
         create table public.parted_1 partition of public.parted for values in (1);
         create table public.parted_2 partition of public.parted for values in (2)",
    );
    op.run("select outbox.capture('public.keyed'), outbox.capture('public.parted')");
    let id: i64 = op.one("select outbox.backfill('public.keyed', chunk_size => 10)");
    for _ in 0..6 {
        db.run(&format!("select outbox.backfill_chunk({id})"));
    }
    op.run("insert into public.parted values (1, 1), (2, 2)");
    nobody_rose(&mut db);
    assert_eq!(taken(&mut db).len(), 52);
}

#[test]
fn a_backfill_shows_no_row_that_row_security_hides() {
    let (_cluster, mut db, mut op) = scene();
    db.run(
        "create table ruled (id int primary key, who text); insert into ruled values (1, 'bob'), (2, 'op');
         alter table ruled enable row level security; create policy own on ruled using (who = current_user);
         grant select, trigger on ruled to op",
    );
    op.run("select outbox.capture('ruled')");
    let refused = op.refused("select outbox.backfill('ruled')");
    assert_eq!(refused.sqlstate, "42501");
    assert!(refused.hint.is_some_and(|hint| hint.contains("BYPASSRLS")));
    db.run("select outbox.backfill('ruled')");
    // Who owns a table sees all of it, unless it says otherwise.
    op.run("create table public.own (id int primary key); alter table public.own enable row level security; select outbox.capture('public.own')");
    op.run("select outbox.backfill('public.own')");
    op.run("select outbox.stop_backfill(max(id)) from outbox.backfill_status; alter table public.own force row level security");
    assert_eq!(
        op.refused("select outbox.backfill('public.own')").sqlstate,
        "42501"
    );
}
