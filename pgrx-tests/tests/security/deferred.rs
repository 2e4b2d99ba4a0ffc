//! Deferred triggers and constraints: whose rights they run with, and that a function's tables may have them.

use outbox_tests::Sql;

use super::scene::{quick, until_idle, until_status};
use super::{delivers, fails, function_sink, with_operators};

#[test]
fn what_the_caller_of_tick_has_deferred_runs_with_its_own_rights() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("select outbox.stop()");
    db.run("create role third login; select outbox.grant('third', 'operate')");
    let mut op = cluster.connect_as("op");
    op.run("create function op.take(outbox.event[]) returns void language plpgsql as 'begin end'");
    function_sink(&mut op, "sink", "op.take", "");
    db.run("create table public.ran (role text); grant insert on public.ran to public");
    let mut other = cluster.connect_as("other");
    other.run(
        "create table other.pit (n int);
         create function other.pit() returns trigger language plpgsql as $$
             begin insert into public.ran values (current_user); return null; end $$;
         create constraint trigger pit after insert on other.pit deferrable initially deferred for each row execute function other.pit();
         grant usage on schema other to third; grant insert on other.pit to third",
    );
    for role in ["other", "third", "postgres"] {
        db.run("select outbox.emit('a')");
        let mut session = cluster.connect_as(role);
        session.run("begin; insert into other.pit values (1)");
        delivers(&mut session, "sink");
        session.run("commit");
    }
    assert_eq!(
        db.all::<String>("select role from public.ran"),
        ["other", "third", "postgres"]
    );

    // A constraint of its own that is broken is its own error, not the sink's.
    other.run(
        "create table other.parent (n int primary key);
         create table other.child (n int references other.parent deferrable initially deferred)",
    );
    other.run("begin; insert into other.child values (1)");
    assert_eq!(
        other.refused("select outbox.tick('sink')").sqlstate,
        "23503"
    );
    other.run("rollback");
}

#[test]
fn what_a_consumer_has_deferred_waits_for_its_commit() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("create role consumer login; create schema consumer authorization consumer");
    let mut op = cluster.connect_as("op");
    op.run("create function op.shape(outbox.event) returns jsonb language plpgsql as $$ begin return to_jsonb(current_user::text); end $$");
    op.run("select outbox.create_sink('pulled', 'pull', filter => 'current_user = $$op$$', transform => 'op.shape(outbox.event)')");
    db.run("select outbox.grant('consumer', 'read', array['pulled']), outbox.emit('a')");
    let mut consumer = cluster.connect_as("consumer");
    consumer.run(
        "create table consumer.parent (n int primary key);
         create table consumer.child (n int references consumer.parent deferrable initially deferred);
         create table consumer.ran (role text);
         create function consumer.run() returns trigger language plpgsql as $$
             begin insert into consumer.ran values (current_user); return null; end $$;
         create constraint trigger run after insert on consumer.child deferrable initially deferred
             for each row execute function consumer.run()",
    );
    consumer.run("begin; insert into consumer.child values (1)");
    assert_eq!(
        consumer.all::<String>("select payload #>> '{}' from outbox.poll('pulled')"),
        ["op"]
    );
    assert_eq!(
        consumer.all::<String>("select role from consumer.ran"),
        Vec::<String>::new()
    );
    consumer.run("insert into consumer.parent values (1)");
    assert!(consumer.one::<bool>("select outbox.ack('pulled')"));
    consumer.run("commit");
    assert_eq!(
        consumer.all::<String>("select role from consumer.ran"),
        ["consumer"]
    );
}

#[test]
fn a_function_writes_to_tables_with_deferrable_constraints() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let mut op = cluster.connect_as("op");
    op.run(
        "create table op.parent (n int primary key, o int unique deferrable initially deferred);
         create table op.child (n int unique deferrable initially deferred references op.parent deferrable initially deferred,
                                m int constraint known references op.parent (n) deferrable initially immediate);
         create table op.log (what text);
         create function op.log() returns trigger language plpgsql as $$
             begin insert into op.log values (current_user || ' ' || new.n); return null; end $$;
         create constraint trigger log after insert on op.child deferrable initially deferred for each row execute function op.log();
         create function op.take(outbox.event[]) returns void language plpgsql as $$
         begin
             insert into op.parent select (e.payload ->> 'parent')::int from unnest($1) e where e.payload ? 'parent';
             insert into op.child select (e.payload ->> 'child')::int, (e.payload ->> 'child')::int
               from unnest($1) e where e.payload ? 'child';
         end $$",
    );
    function_sink(&mut op, "sink", "op.take", "");
    for n in 1..=3 {
        db.run(&format!("select outbox.emit('a', jsonb_build_object('parent', {n})), outbox.emit('b', jsonb_build_object('child', {n}))"));
    }
    assert_eq!(until_idle(&mut db, "sink").delivered, 6);
    assert_eq!(
        db.all::<i32>("select n from op.child order by n"),
        [1, 2, 3]
    );
    assert_eq!(
        db.all::<String>("select what from op.log order by 1"),
        ["op 1", "op 2", "op 3"]
    );

    // What breaks a constraint is undone, told and tried again; the cursor stays before it, and the constraint is not
    // broken in the meantime.
    db.run("select outbox.emit('b', '{\"child\": 9}')");
    let broken = until_status(&mut db, "sink", "an error", |now| now.last_error.is_some());
    let error = broken.last_error.unwrap_or_default();
    assert!(
        error.contains("violates foreign key constraint") && error.ends_with("(SQLSTATE 23503)"),
        "{error}"
    );
    assert_eq!(
        db.one::<i64>("select count(*) from op.child where n = 9"),
        0
    );
    op.run("insert into op.parent values (9)");
    assert_eq!(until_idle(&mut db, "sink").delivered, 7);
    assert_eq!(
        db.one::<i64>("select count(*) from op.child where n = 9"),
        1
    );

    // By hand it is the same.
    db.run("select outbox.stop(), outbox.emit('b', '{\"child\": 10}')");
    fails(&mut db, "sink", "(SQLSTATE 23503)");
    op.run("insert into op.parent values (10)");
    delivers(&mut db, "sink");
    assert_eq!(
        db.one::<i64>("select count(*) from op.child where n = 10"),
        1
    );
}
