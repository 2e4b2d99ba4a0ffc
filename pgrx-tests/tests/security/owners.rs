//! Whose code a sink runs, who may change it, and what happens when that role loses what it had.

use outbox_tests::{Receiver, Sql};

use super::scene::{quick, status, until_idle, until_status};
use super::{delivers, fails, function_sink, http_sink, with_operators};

#[test]
fn only_who_has_the_owners_rights_changes_the_code() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = Receiver::start();
    let mut op = cluster.connect_as("op");
    op.run(
        "create function op.take(outbox.event[]) returns void language plpgsql as 'begin end';
         create function op.shape(outbox.event) returns jsonb language sql return $1.payload",
    );
    function_sink(&mut op, "function", "op.take", "");
    http_sink(
        &mut op,
        "shaped",
        &receiver,
        ", transform => 'op.shape(outbox.event)'",
    );
    http_sink(
        &mut op,
        "filtered",
        &receiver,
        ", filter => 'current_user = $$op$$'",
    );
    http_sink(&mut op, "plain", &receiver, "");

    let mut other = cluster.connect_as("other");
    other.run(
        "create function other.take(outbox.event[]) returns void language plpgsql as 'begin end';
         create function other.shape(outbox.event) returns jsonb language sql return $1.payload;
         grant usage on schema other to public",
    );
    let elsewhere = "config => '{\"url\": \"http://127.0.0.1:1/\"}'";
    for (sink, change) in [
        ("function", "config => '{\"function\": \"other.take\"}'"),
        ("function", "filter => 'true'"),
        ("shaped", "transform => 'other.shape(outbox.event)'"),
        ("shaped", "transform => 0::regprocedure"),
        ("filtered", "filter => 'true'"),
        ("filtered", "filter => ''"),
        ("plain", "filter => 'true'"),
        ("plain", "transform => 'other.shape(outbox.event)'"),
        // What the code makes with its owner's rights would go where somebody else wants it.
        ("shaped", elsewhere),
        ("filtered", elsewhere),
    ] {
        let refusal = other.refused(&format!("select outbox.alter_sink('{sink}', {change})"));
        assert_eq!(
            refusal.sqlstate, "42501",
            "{sink}: {change}: {}",
            refusal.message
        );
        assert!(refusal.message.contains(sink), "{}", refusal.message);
    }
    // The rest is for all who operate.
    other.run(&format!("select outbox.alter_sink('plain', {elsewhere})"));
    for sink in ["function", "shaped", "filtered", "plain"] {
        other.run(&format!("select outbox.alter_sink('{sink}', batch_size => 3, topics => array['a'], enabled => false)"));
        other.run(&format!(
            "select outbox.pause_sink('{sink}'), outbox.resume_sink('{sink}')"
        ));
    }
    // A member of the owner has its rights, as long as it inherits them.
    db.run("create role member login in role op; create role outsider login noinherit in role op");
    cluster
        .connect_as("member")
        .run("select outbox.alter_sink('shaped', filter => 'topic = $$a$$')");
    let mut outsider = cluster.connect_as("outsider");
    assert_eq!(
        outsider
            .refused("select outbox.alter_sink('shaped', filter => '')")
            .sqlstate,
        "42501"
    );
    let owners: Vec<String> = db.all("select distinct owner::text from outbox.sinks");
    assert_eq!(owners, ["op"]);
}

#[test]
fn what_a_superuser_changes_stays_its_owners() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let mut op = cluster.connect_as("op");
    op.run(
        "create table op.seen (role text);
         create function op.take(outbox.event[]) returns void language sql as 'insert into op.seen values (current_user)';
         create function op.see(outbox.event[]) returns void language sql as 'insert into op.seen values (current_user || $$!$$)'",
    );
    function_sink(&mut op, "sink", "op.take", "");
    db.run("select outbox.alter_sink('sink', config => '{\"function\": \"op.see\"}', filter => 'current_user = $$op$$')");
    db.run("select outbox.emit('a')");
    until_status(&mut db, "sink", "a delivery", |now| now.delivered == 1);
    assert_eq!(op.all::<String>("select role from op.seen"), ["op!"]);
    // It is the owner who must be allowed to run it.
    db.run("create function public.internal(outbox.event[]) returns void language sql as 'select'; revoke execute on function public.internal from public");
    let refusal = db.refused(
        "select outbox.alter_sink('sink', config => '{\"function\": \"public.internal\"}')",
    );
    assert_eq!(refusal.sqlstate, "42501");
    // And it is the owner who must be allowed to read what it reads.
    db.run("select outbox.alter_sink('sink', filter => 'exists (select from public.secret)'), outbox.emit('b')");
    let now = until_status(&mut db, "sink", "an error", |now| now.last_error.is_some());
    let told = now.last_error.unwrap_or_default();
    assert!(
        told.contains("permission denied for table secret"),
        "{told}"
    );
}

#[test]
fn a_sink_stops_when_its_owner_may_not_call_the_function_any_more() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = Receiver::start();
    db.run(
        "create table public.taken (id text); grant insert on public.taken to op;
         create function public.take(outbox.event[]) returns void language sql as 'insert into public.taken select e.id from unnest($1) e';
         create function public.shape(outbox.event) returns jsonb language plpgsql as 'begin return $1.payload; end'",
    );
    let mut op = cluster.connect_as("op");
    function_sink(&mut op, "function", "public.take", "");
    http_sink(
        &mut op,
        "http",
        &receiver,
        ", transform => 'public.shape(outbox.event)'",
    );
    db.run("select outbox.emit('a', '1')");
    receiver.wait_for(1);
    until_idle(&mut db, "function");
    for (lose, regain, error) in [
        (
            "revoke execute on all functions in schema public from public",
            "grant execute on all functions in schema public to public",
            "permission denied for function",
        ),
        (
            "revoke usage on schema public from public",
            "grant usage on schema public to public",
            "permission denied for schema public",
        ),
    ] {
        db.run(lose);
        db.run("select outbox.emit('a', '2')");
        for sink in ["function", "http"] {
            let now = until_status(&mut db, sink, "an error", |now| now.last_error.is_some());
            let told = now.last_error.unwrap_or_default();
            assert!(
                told.contains(error) && told.ends_with("(SQLSTATE 42501)"),
                "{sink}: {told}"
            );
        }
        db.run(regain);
        for sink in ["function", "http"] {
            until_idle(&mut db, sink);
        }
    }
    assert_eq!(db.one::<i64>("select count(*) from public.taken"), 3);
    assert_eq!(receiver.first_arrivals().len(), 3);
    assert_eq!(db.one::<i64>("select count(*) from outbox.dead_letters"), 0);
}

#[test]
fn a_sink_stops_when_its_owner_is_dropped() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = Receiver::start();
    let mut op = cluster.connect_as("op");
    db.run(
        "create function public.take(outbox.event[]) returns void language plpgsql as 'begin end'",
    );
    function_sink(&mut op, "function", "public.take", "");
    http_sink(&mut op, "filtered", &receiver, ", filter => 'true'");
    http_sink(&mut op, "plain", &receiver, "");
    drop(op);
    // While it has the privilege, Postgres refuses.
    assert_eq!(db.refused("drop role op").sqlstate, "2BP01");
    db.run("select outbox.revoke('op', 'operate'); drop schema op; drop role op");
    db.run("select outbox.emit('a')");
    for sink in ["function", "filtered"] {
        let now = until_status(&mut db, sink, "an error", |now| now.last_error.is_some());
        let told = now.last_error.unwrap_or_default();
        assert!(
            told.contains("the role that owns the sink does not exist any more"),
            "{sink}: {told}"
        );
        assert!(
            ["down", "retrying", "error"].contains(&now.state.as_str()),
            "{sink}: {}",
            now.state
        );
        assert_eq!((now.lag_events, now.dead_letters), (1, 0), "{sink}");
    }
    // What has no code needs no owner.
    assert_eq!(until_idle(&mut db, "plain").delivered, 1);
    db.run("select outbox.stop()");
    fails(
        &mut db,
        "function",
        "the role that owns the sink does not exist any more",
    );
    // A superuser can make it good.
    db.run("update outbox.sinks set owner = 'other', version = version + 1");
    delivers(&mut db, "function");
    delivers(&mut db, "filtered");
}

#[test]
fn a_sink_outlives_its_owners_privilege_to_operate() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let mut op = cluster.connect_as("op");
    op.run(
        "create table op.taken (id text);
         create function op.take(outbox.event[]) returns void language sql as 'insert into op.taken select e.id from unnest($1) e'",
    );
    function_sink(&mut op, "sink", "op.take", "");
    db.run("select outbox.revoke('op', 'operate'), outbox.emit('a')");
    // Like a view, it goes on with what its owner may do; only changing it is over.
    assert_eq!(
        until_status(&mut db, "sink", "a delivery", |now| now.delivered == 1).last_error,
        None
    );
    assert_eq!(op.one::<i64>("select count(*) from op.taken"), 1);
    assert_eq!(
        op.refused("select outbox.alter_sink('sink', filter => 'true')")
            .sqlstate,
        "42501"
    );
}

#[test]
fn leases_outlast_what_code_does_to_locks() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = Receiver::start();
    let mut op = cluster.connect_as("op");
    let unlock = "pg_catalog.pg_advisory_unlock_all()::text = $$$$";
    http_sink(
        &mut op,
        "unlocks",
        &receiver,
        &format!(", filter => '{unlock}'"),
    );
    http_sink(&mut op, "beside", &receiver, "");
    let dispatcher = "select pid from pg_stat_activity where backend_type = 'pg_outbox dispatcher'";
    for round in 1..=3 {
        db.run("select outbox.emit('a')");
        receiver.wait_for(2 * round);
        for sink in ["unlocks", "beside"] {
            let holder = until_status(&mut db, sink, "its lease taken", |now| {
                now.lease_pid.is_some()
            })
            .lease_pid;
            assert_eq!(holder, Some(db.one::<i32>(dispatcher)));
            assert_eq!(super::tick(&mut db, sink).0, "leased");
        }
    }
    // So it is for a consumer.
    db.run(&format!(
        "select outbox.create_sink('pulled', 'pull', filter => '{unlock}')"
    ));
    let mut first = cluster.connect();
    assert_eq!(
        first
            .all::<String>("select topic from outbox.poll('pulled')")
            .len(),
        3
    );
    assert_eq!(
        db.all::<String>("select topic from outbox.poll('pulled')")
            .len(),
        0
    );
    assert!(first.one::<bool>("select outbox.ack('pulled')"));
    assert_eq!(status(&mut db, "unlocks").last_error, None);
}
