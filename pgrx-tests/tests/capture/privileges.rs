//! Who may capture what, and whose rights what they supply runs with.

use outbox_tests::Sql;

use super::{quiet, short, taken};

#[test]
fn it_takes_rights_on_the_table() {
    let (cluster, mut db) = quiet();
    db.run("create role op login; create role other login; select outbox.grant('op', 'operate')");
    db.run("grant create on schema public to op; create table theirs (id int primary key)");
    let mut op = cluster.connect_as("op");
    op.run("create table mine (id int primary key); select outbox.capture('mine')");
    assert_eq!(
        op.refused("select outbox.capture('theirs')").sqlstate,
        "42501"
    );
    db.run("grant trigger on theirs to op");
    assert_eq!(
        op.refused("select outbox.capture('theirs')").sqlstate,
        "42501"
    );
    db.run("grant select on theirs to op");
    op.run("select outbox.capture('theirs')");
    db.run("revoke all on theirs from op");
    assert_eq!(
        op.refused("select outbox.alter_capture('theirs', payload => 'keys')")
            .sqlstate,
        "42501"
    );
    op.run("select outbox.pause_capture('theirs'), outbox.resume_capture('theirs'), outbox.uncapture('theirs')");
    let mut other = cluster.connect_as("other");
    assert_eq!(
        other.refused("select outbox.capture('mine')").sqlstate,
        "42501"
    );
    assert_eq!(
        other.refused("select outbox.capture_change()").sqlstate,
        "42501"
    );
    // Even its owner cannot hang the triggers where they do not belong.
    assert_eq!(op.refused("create trigger x after insert on mine for each row execute function outbox.capture_change()").sqlstate, "42501");
}

#[test]
fn a_condition_runs_as_the_role_that_supplied_it() {
    let (cluster, mut db) = quiet();
    db.run("create role op login; select outbox.grant('op', 'operate'); grant create on schema public to op; create table said (who text); grant insert on said to op");
    let mut op = cluster.connect_as("op");
    op.run("create table mine (id int primary key)");
    op.run("create function public.tell() returns boolean language plpgsql as $$ begin insert into public.said values (current_user); return true; end $$");
    op.run("select outbox.capture('mine', condition => 'public.tell()')");
    db.run("truncate said; insert into mine values (1)");
    assert_eq!(db.all::<String>("select who from said"), ["op"]);
    assert_eq!(taken(&mut db).len(), 1);
    // Out of which it does not get.
    op.run("create or replace function public.tell() returns boolean language plpgsql as $$ begin set role postgres; return true; end $$");
    assert_eq!(db.refused("insert into mine values (2)").sqlstate, "42501");
    op.run("create or replace function public.tell() returns boolean language plpgsql as $$ begin perform outbox.capture_change(); return true; end $$");
    assert!(
        ["42501", "39P01"].contains(&db.refused("insert into mine values (2)").sqlstate.as_str())
    );
    // Whoever changes it is the one that it runs as from then on.
    db.run("create table theirs (id int primary key); grant select, trigger on theirs to op");
    op.run("select outbox.capture('theirs', condition => 'new.id > 0')");
    db.run("select outbox.alter_capture('theirs', payload => 'keys')");
    assert_eq!(
        db.one::<String>(
            "select owner::text from outbox.captures where relation = 'theirs'::regclass"
        ),
        "op"
    );
    db.run("select outbox.alter_capture('theirs', condition => 'new.id > 1')");
    assert_eq!(
        db.one::<String>(
            "select owner::text from outbox.captures where relation = 'theirs'::regclass"
        ),
        "postgres"
    );
}

#[test]
fn a_role_whose_condition_is_in_force_is_not_dropped() {
    let (cluster, mut db) = quiet();
    db.run("create role op login; select outbox.grant('op', 'operate'); create table t (id int primary key); create table u (id int primary key)");
    db.run("grant select, trigger on t, u to op");
    let mut op = cluster.connect_as("op");
    op.run("select outbox.capture('t', condition => 'new.id > 1'), outbox.capture('u', condition => 'true')");
    db.run("select outbox.revoke('op', 'operate'); revoke all on t, u from op");
    assert_eq!(db.refused("drop role op").sqlstate, "2BP01");
    assert_eq!(
        short(&mut db, "insert into t values (1), (2)"),
        ["insert 2"]
    );
    db.run("select outbox.uncapture('u')");
    assert_eq!(db.refused("drop role op").sqlstate, "2BP01");
    db.run("select outbox.alter_capture('t', condition => 'new.id > 2'); drop role op");
    assert_eq!(short(&mut db, "insert into t values (3)"), ["insert 3"]);
}

#[test]
fn what_a_capture_reads_runs_no_code_of_a_users_type() {
    let (cluster, mut db) = quiet();
    db.run("create role op login; select outbox.grant('op', 'operate'); grant create on schema public to op");
    let mut op = cluster.connect_as("op");
    op.run(
        "create type sly as (n int); create type feel as enum ('good');
         create function leak(sly) returns json language plpgsql as $$ begin create role leaked; return 'null'; end $$;
         create cast (sly as json) with function leak(sly);
         create function leak2(sly) returns text language plpgsql as $$ begin create role leaked; return ''; end $$;
         create cast (sly as text) with function leak2(sly) as implicit;
         create function leak3(feel) returns json language plpgsql as $$ begin create role leaked; return 'null'; end $$;
         create cast (feel as json) with function leak3(feel);
         create domain deep as sly;
         create table t (id feel primary key, a sly, b sly[], c deep, d feel[]);
         select outbox.capture('t', tenant_column => 'a', payload => 'before_after')",
    );
    assert_eq!(short(&mut db, "insert into t values ('good', row(1), array[row(2)]::sly[], row(3), '{good}'); update t set a = row(2); delete from t").len(), 3);
    assert_eq!(
        db.one::<i64>("select count(*) from pg_roles where rolname = 'leaked'"),
        0
    );
}

#[test]
fn a_lock_is_not_waited_for_for_ever() {
    let (cluster, mut db) = quiet();
    db.run("create table t (id int primary key)");
    let mut writer = cluster.connect();
    writer.run("begin; insert into t values (1)");
    db.run("set lock_timeout = '50ms'");
    assert_eq!(db.refused("select outbox.capture('t')").sqlstate, "55P03");
    writer.run("commit");
    db.run("select outbox.capture('t')");
    writer.run("begin; insert into t values (2)");
    db.run("select outbox.pause_capture('t'); select outbox.resume_capture('t'); select outbox.alter_capture('t', payload => 'keys')");
    assert_eq!(db.refused("select outbox.uncapture('t')").sqlstate, "55P03");
    writer.run("rollback");
    db.run("select outbox.uncapture('t')");
}
