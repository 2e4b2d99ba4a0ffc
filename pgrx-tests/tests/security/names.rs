//! Names that somebody plants so that others come upon them.

use outbox_tests::{Cluster, Receiver, Sql};
use postgres::Client;

use super::scene::{quick, quoted, until_status};
use super::{delivers, function_sink, http_sink, with_operators};

#[test]
fn temporary_objects_of_the_session_do_not_get_into_a_functions_way() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("select outbox.stop()");
    let mut op = cluster.connect_as("op");
    // Written as functions often are, with names that are looked up.
    op.run(
        "create table op.orders as select 'real' as name;
         create domain op.amount as int;
         create table op.taken (name text);
         create function op.take(outbox.event[]) returns void language plpgsql as $$
             begin insert into taken select o.name from orders o where 1::amount = 1; end $$;
         create function op.shape(outbox.event) returns jsonb language plpgsql as $$
             begin return (select to_jsonb(o.name) from orders o where 1::amount = 1); end $$",
    );
    function_sink(&mut op, "function", "op.take", "");
    op.run("select outbox.create_sink('pulled', 'pull', transform => 'op.shape(outbox.event)')");
    db.run("select outbox.emit('a'), outbox.grant('other', 'read', array['pulled'])");

    let mut other = cluster.connect_as("other");
    other.run(
        "create table other.caught (by text); grant insert on other.caught to public; grant usage on schema other to public;
         create function other.catch() returns text language plpgsql as $$
             begin insert into other.caught values (current_user); return 'false'; end $$;
         grant execute on function other.catch() to public;
         create temp view orders as select other.catch() as name;
         create domain pg_temp.amount as int check (other.catch() is null);
         create temp table taken (name text);
         grant select, insert on orders, taken to public",
    );
    delivers(&mut other, "function");
    assert_eq!(
        other.all::<String>("select payload #>> '{}' from outbox.poll('pulled')"),
        ["real"]
    );
    assert_eq!(op.all::<String>("select name from op.taken"), ["real"]);
    assert_eq!(
        other.all::<String>("select by from other.caught"),
        Vec::<String>::new()
    );
}

/// Functions and operators that statements of the extension use, as everybody could make them.
fn plant(cluster: &Cluster, schema: &str) {
    let mut db = cluster.connect();
    // Functions that fit the arguments better than those of pg_catalog do, or just as well and come first in the path.
    for arguments in [
        "concat_ws(text, text, text, text, text)",
        "format(text, text)",
        "format(text, text, text)",
        "md5(text)",
        "clock_timestamp()",
        "now()",
        "pg_current_xact_id()",
        "pg_current_snapshot()",
        "pg_snapshot_xmin(pg_snapshot)",
        "pg_snapshot_xmax(pg_snapshot)",
        "pg_visible_in_snapshot(xid8, pg_snapshot)",
        "pg_notify(text, text)",
        "has_function_privilege(oid, text, text)",
        "pg_has_role(oid, regrole, text)",
        "quote_literal(text)",
        "length(text)",
        "regexp_match(text, text)",
        "to_regclass(text)",
        "to_regprocedure(text)",
        "current_setting(text, boolean)",
        "set_config(text, text, boolean)",
        "aclexplode(aclitem[])",
        "max(bigint)",
        "count(bigint)",
        "new_id()",
        "event_id(text, text, xid8, bigint, timestamptz)",
    ] {
        db.run(&format!(
            "create function {schema}.{arguments} returns text language plpgsql volatile as $$
                 begin raise exception 'caught % in {arguments}', current_user; end $$"
        ));
    }
    for (operator, kinds) in [
        ("=", ["text", "bigint", "xid8", "oid"].as_slice()),
        ("<>", &["text", "xid8"]),
        ("<", &["bigint", "xid8"]),
        (">", &["bigint", "xid8", "numeric"]),
        ("<=", &["bigint", "xid8"]),
        (">=", &["bigint", "xid8"]),
        ("||", &["text"]),
        ("~", &["text"]),
        ("~~", &["text"]),
        ("+", &["bigint"]),
        ("-", &["bigint"]),
    ] {
        for kind in kinds {
            db.run(&format!(
                "create or replace function {schema}.caught({kind}, {kind}) returns boolean language plpgsql as $$
                     begin raise exception 'caught % in an operator', current_user; end $$;
                 create operator {schema}.{operator} (leftarg = {kind}, rightarg = {kind}, function = {schema}.caught)"
            ));
        }
    }
    for table in [
        "events",
        "sinks",
        "cursors",
        "streams",
        "dead_letters",
        "sink_health",
        "secrets",
        "clusters",
        "sink_grants",
        "pg_class",
        "pg_proc",
        "pg_locks",
    ] {
        db.run(&format!(
            "create view {schema}.{table} as select {schema}.new_id() as id"
        ));
    }
    for kind in [
        "event",
        "xid8",
        "jsonb",
        "pg_snapshot",
        "timestamptz",
        "regclass",
        "regrole",
    ] {
        db.run(&format!(
            "create domain {schema}.{kind} as text check (value = 'caught')"
        ));
    }
    db.run(&format!("grant usage on schema {schema} to public"));
}

#[test]
fn the_path_of_a_caller_leads_nowhere() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("create schema evil");
    plant(&cluster, "evil");
    db.run(
        "create role app login; create role reader login; create role limited login;
         select outbox.grant('app', 'emit'), outbox.grant('reader', 'read')",
    );
    let lead = "set search_path = evil, pg_catalog, outbox, pg_temp";
    let receiver = Receiver::start();

    let mut op = cluster.connect_as("op");
    op.run(
        "create function op.take(outbox.event[]) returns void language plpgsql as 'begin end';
         create function op.shape(outbox.event) returns jsonb language plpgsql as 'begin return $1.payload; end'",
    );
    op.run(lead);
    op.run("select outbox.create_stream('billing')");
    function_sink(&mut op, "function", "op.take", "");
    let arguments = ", filter => 'topic like $$a%$$ and (payload ->> $$n$$)::numeric > 0', transform => 'op.shape(outbox.event)', topics => array['>'], start => 'tail'";
    http_sink(&mut op, "http", &receiver, arguments);
    op.run("select outbox.create_sink('pulled', 'pull', filter => 'topic <> $$x$$'), outbox.create_sink('all', 'pull', start => '1:1')");
    op.run("select outbox.alter_sink('http', filter => 'topic ~~ $$a%$$', batch_size => 7)");
    op.run("select outbox.pause_sink('function'), outbox.resume_sink('function')");
    db.run("select outbox.grant('limited', 'read', array['pulled'])");

    let mut app = cluster.connect_as("app");
    app.run(lead);
    app.run("set outbox.tenant = 'acme'; set outbox.headers = '{\"a\": 1}'");
    app.run("select outbox.emit('a.b'::text, '{\"n\": 1}')");
    app.run("select outbox.emit('a.c'::text, stream => 'billing')");
    app.run("insert into outbox.events (topic, id) values ('a.d', null)");
    receiver.wait_for(1);

    let mut reader = cluster.connect_as("reader");
    reader.run(lead);
    assert_eq!(
        reader.all::<String>("select topic::pg_catalog.text from outbox.read()"),
        ["a.b", "a.d"]
    );
    let tail: String = reader.one("select outbox.tail()");
    for sql in [
        format!("select outbox.save_cursor('c', {})", quoted(&tail)),
        "select outbox.cursor('c')".into(),
        "select outbox.drop_cursor('c')".into(),
        "select outbox.parse_position('1:2')".into(),
        "select outbox.format_position('1', 2)".into(),
        "select from outbox.poll('all')".into(),
        format!("select outbox.ack('all', {})", quoted(&tail)),
    ] {
        reader.run(&sql);
    }
    let mut limited = cluster.connect_as("limited");
    limited.run(lead);
    limited.run("select from outbox.poll('pulled')");
    limited.run("select outbox.ack('pulled')");

    op.run("select outbox.stop()");
    app.run("select outbox.emit('a.e'::text, '{\"n\": 2}')");
    op.run("select from outbox.tick()");
    op.run("table outbox.status");
    op.run("select outbox.prune(), outbox.redeliver('http')");
    assert_eq!(receiver.wait_for_distinct(2)[1].topic, "a.e");

    let mut keeper = cluster.connect();
    keeper.run(lead);
    keeper.run("select outbox.set_secret('s', array['v'])");
    keeper.run("create role late; select outbox.grant('late', 'operate'), outbox.revoke('late', 'operate')");
    keeper.run("select outbox.drop_sink('http'), outbox.drop_sink('function'), outbox.drop_stream('billing')");
    assert!(!cluster.log().contains("caught"), "{}", cluster.log());
}

#[test]
fn what_stood_in_public_before_is_not_taken_in() {
    let cluster = quick().extension(false).start();
    plant(&cluster, "public");
    let mut db = cluster.connect();
    // As whoever may create in public would have it.
    db.run("set search_path = public; create extension pg_outbox");
    let taken_in: Vec<String> = db.all(
        "select distinct pg_catalog.pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid) from pg_catalog.pg_depend d
           cross join lateral pg_catalog.pg_identify_object(d.refclassid, d.refobjid, d.refobjsubid) i
           cross join lateral pg_catalog.pg_identify_object(d.classid, d.objid, d.objsubid) o
          where i.schema operator(pg_catalog.=) 'public' and o.schema operator(pg_catalog.=) 'outbox'",
    );
    assert_eq!(taken_in, Vec::<String>::new());
    db.run("set search_path = pg_catalog");
    db.run("insert into outbox.events (topic, id) values ('a', null)");
    assert_eq!(
        db.all::<String>("select topic from outbox.read() where id like 'evt\\_%'"),
        ["a"]
    );
}

#[test]
fn a_schema_that_is_somebody_elses_is_not_moved_into() {
    let cluster = quick().extension(false).start();
    let mut db = cluster.connect();
    db.run("create role someone; create schema outbox authorization someone");
    assert_eq!(db.refused("create extension pg_outbox").sqlstate, "42P06");
}

#[test]
fn operators_in_public_do_not_get_into_a_filter() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    // Fits better than what the filter means, and would be found by a session.
    db.run(
        "grant create on schema public to other;
         create table public.caught (by text); grant insert on public.caught to public",
    );
    let mut other = cluster.connect_as("other");
    other.run(
        "create function public.catch(numeric, int) returns boolean language plpgsql as $$
             begin insert into public.caught values (current_user); return false; end $$;
         create operator public.> (leftarg = numeric, rightarg = int, function = public.catch)",
    );
    let mut op = cluster.connect_as("op");
    op.run("create function op.shape(outbox.event) returns jsonb language sql return $1.payload");
    op.run(
        "select outbox.create_sink('plain', 'pull', filter => '(payload ->> $$n$$)::numeric > 1'),
                outbox.create_sink('shaped', 'pull', filter => '(payload ->> $$n$$)::numeric > 1', transform => 'op.shape(outbox.event)')",
    );
    db.run("select outbox.emit('a', jsonb_build_object('n', n)) from generate_series(1, 3) n");
    for sink in ["plain", "shaped"] {
        let numbers: Vec<i32> = db.all(&format!(
            "select (payload ->> 'n')::int from outbox.poll('{sink}')"
        ));
        assert_eq!(numbers, [2, 3], "{sink}");
    }
    assert_eq!(
        db.all::<String>("select by from public.caught"),
        Vec::<String>::new()
    );
}

#[test]
fn a_plan_made_for_one_role_is_not_run_for_another() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    // It says that it is immutable, so that its value is worked out when the plan is made.
    db.run("create function public.me() returns text language plpgsql immutable as 'begin return current_user; end'");
    for role in ["op", "other"] {
        cluster.connect_as(role).run(&format!(
            "select outbox.create_sink('of_{role}', 'pull', filter => 'topic = public.me()')"
        ));
    }
    db.run("select outbox.emit('op'), outbox.emit('other')");
    // As a dispatcher has it.
    db.run("set plan_cache_mode = force_generic_plan");
    for role in ["op", "other"] {
        let topics: Vec<String> = db.all(&format!("select topic from outbox.poll('of_{role}')"));
        assert_eq!(topics, [role]);
    }
}

#[test]
fn a_function_is_called_and_not_its_name() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("create schema common; grant create, usage on schema common to op, other");
    let receiver = Receiver::start();
    let mut op = cluster.connect_as("op");
    op.run(
        "create table op.log (what text);
         create function common.take(outbox.event[]) returns void language sql as
             $$ insert into op.log values ('taken') $$;
         create function common.shape(outbox.event) returns jsonb language plpgsql as
             $$ begin return '\"shaped\"'::jsonb; end $$",
    );
    function_sink(&mut op, "function", "common.take", "");
    http_sink(
        &mut op,
        "http",
        &receiver,
        ", transform => 'common.shape(outbox.event)'",
    );
    let works = |db: &mut Client, times: usize| {
        db.run("select outbox.emit('a')");
        let taken = until_status(db, "function", "a delivery", |now| {
            now.delivered == times as i64
        });
        assert_eq!(taken.last_error, None);
        assert_eq!(
            db.all::<String>("select what from op.log"),
            vec!["taken"; times]
        );
        let arrived = receiver.wait_for(times);
        assert_eq!(arrived[times - 1].data(), "shaped");
    };
    works(&mut db, 1);
    // The names come to be somebody else's.
    op.run("alter function common.take rename to \"Taken \"\"or\"\" not\"; alter function common.shape rename to shaped");
    cluster.connect_as("other").run(
        "create function common.take(outbox.event[]) returns void language plpgsql as
             $$ begin raise exception 'caught %', current_user; end $$;
         create function common.shape(outbox.event) returns jsonb language plpgsql as
             $$ begin raise exception 'caught %', current_user; end $$",
    );
    works(&mut db, 2);
    op.run("drop function common.\"Taken \"\"or\"\" not\", common.shaped");
    db.run("select outbox.emit('a')");
    for (sink, what) in [("function", "function"), ("http", "transform")] {
        let now = until_status(&mut db, sink, "an error", |now| now.last_error.is_some());
        let told = now.last_error.unwrap_or_default();
        assert_eq!(
            told,
            format!("its {what} does not exist any more"),
            "{sink}"
        );
    }
}
