//! Filters and transforms that take their time: other sinks do not wait for them, and nothing is lost or delivered twice over it.

mod scene;
mod workers;

use outbox_tests::{Cluster, Receiver, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, status, until_idle, until_status};
use serde_json::json;
use workers::{another_dispatcher, dispatcher, until_gone};

/// A sink whose filter or transform waits while somebody else holds the advisory lock 7.
fn slow_sink(db: &mut Client, receiver: &Receiver, arguments: &str) {
    db.run(
        "create function gate() returns bool language plpgsql as $$
         begin
             perform pg_advisory_xact_lock_shared(7);
             return true;
         end $$;
         create function through_gate(event outbox.event) returns jsonb language plpgsql as $$
         begin
             perform gate();
             return event.payload;
         end $$",
    );
    http_sink(db, "a_slow", receiver, json!({}), arguments);
}

/// Until a background process waits for the lock.
fn until_waiting(cluster: &Cluster, pid: Option<i32>) {
    let mut db = cluster.connect();
    until("the filter waits", || {
        let waits: bool = db.one(&format!(
            "select exists (select from pg_locks join pg_stat_activity using (pid)
              where locktype = 'advisory' and objid = 7 and not granted and backend_type like 'pg_outbox%' {})",
            pid.map_or(String::new(), |pid| format!("and pid = {pid}"))
        ));
        waits.then_some(())
    });
}

#[test]
fn a_filter_that_waits_holds_up_nobody_else() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (slow, other) = (Receiver::start(), Receiver::start());
    slow_sink(&mut db, &slow, "filter => 'public.gate()', batch_size => 4");
    http_sink(&mut db, "other", &other, json!({}), "");
    emit(&mut db, 1..=5);
    slow.wait_for(5);

    let mut gatekeeper = cluster.connect();
    gatekeeper.run("select pg_advisory_lock(7)");
    emit(&mut db, 6..=15);
    other.wait_for(15);
    emit(&mut db, 16..=20);
    other.wait_for(20);
    // By itself it has longer, but a sink that hangs has to say so.
    let waiting = until_status(&mut db, "a_slow", "said to be late", |status| {
        status.last_error.is_some()
    });
    assert_eq!(
        waiting.last_error.as_deref(),
        Some("filter: it took longer than 30s")
    );
    emit(&mut db, 21..=25);
    other.wait_for(25);

    gatekeeper.run("select pg_advisory_unlock(7)");
    slow.wait_for(25);
    let idle = until_idle(&mut db, "a_slow");
    assert_eq!((idle.delivered, idle.dead_letters), (25, 0));
    assert_eq!(slow.ids(), ids(1..=25));
    assert_eq!(other.ids(), ids(1..=25));
}

#[test]
fn without_a_process_to_be_had_a_slow_transform_is_waited_for() {
    // The launcher, the dispatcher, and the launcher of logical replication.
    let cluster = quick().setting("max_worker_processes", "3").start();
    let mut db = cluster.connect();
    let slow = Receiver::start();
    slow_sink(
        &mut db,
        &slow,
        "transform => 'public.through_gate(outbox.event)'",
    );
    let dispatcher = dispatcher(&cluster, "app");
    let mut gatekeeper = cluster.connect();
    gatekeeper.run("select pg_advisory_lock(7)");
    emit(&mut db, 1..=5);
    until_waiting(&cluster, Some(dispatcher));
    gatekeeper.run("select pg_advisory_unlock(7)");
    slow.wait_for(5);
    let idle = until_idle(&mut db, "a_slow");
    assert_eq!((idle.delivered, idle.dead_letters), (5, 0));
    assert_eq!(slow.ids(), ids(1..=5));
}

/// A function's body that goes on when it is cancelled.
const STUBBORN: &str = "begin loop begin perform pg_sleep(100); exception when query_canceled then null; end; end loop; end";

const STUBBORN_ERROR: &str = "its filter, transform or function took too long and did not end when it was cancelled, so its process was ended";

#[test]
fn a_transform_that_does_not_let_itself_be_cancelled_stops_nobody_else() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (bad, other) = (Receiver::start(), Receiver::start());
    db.run(&format!(
        "create function t(e outbox.event) returns jsonb language plpgsql as $$ {STUBBORN} $$"
    ));
    http_sink(&mut db, "other", &other, json!({}), "");
    let first = dispatcher(&cluster, "app");
    http_sink(
        &mut db,
        "bad",
        &bad,
        json!({}),
        "transform => 'public.t(outbox.event)'",
    );
    emit(&mut db, 1..=5);
    let second = another_dispatcher(&cluster, "app", first);
    let said = until_status(&mut db, "bad", "said to be at fault", |status| {
        status.last_error.is_some()
    });
    assert_eq!(said.last_error.as_deref(), Some(STUBBORN_ERROR));
    assert_eq!(said.state, "error");
    other.wait_for_distinct(5);
    emit(&mut db, 6..=10);
    other.wait_for_distinct(10);
    assert_eq!(status(&mut db, "other").lease_pid, Some(second));

    db.run(
        "create or replace function t(e outbox.event) returns jsonb language sql return e.payload;
         select outbox.resume_sink('bad')",
    );
    // By itself it had longer.
    db.run("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pg_outbox sink bad'");
    let idle = until_idle(&mut db, "bad");
    assert_eq!((idle.delivered, idle.dead_letters), (10, 0));
    assert_eq!(bad.ids(), ids(1..=10));
    assert_eq!(dispatcher(&cluster, "app"), second);
}

#[test]
fn a_function_that_does_not_let_itself_be_cancelled_ends_with_its_process() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(&format!(
        "create table taken (id text);
         create function f(events outbox.event[]) returns void language plpgsql as $$ {STUBBORN} $$"
    ));
    let first = dispatcher(&cluster, "app");
    db.run(
        r#"select outbox.create_sink('bad', 'function', config => '{"function": "f", "timeout_ms": 100}')"#,
    );
    emit(&mut db, 1..=5);
    let said = until_status(&mut db, "bad", "said to be at fault", |status| {
        status.last_error.is_some()
    });
    assert_eq!(said.last_error.as_deref(), Some(STUBBORN_ERROR));
    db.run(
        "create or replace function f(events outbox.event[]) returns void language sql
             as 'insert into public.taken select id from unnest(events)';
         select outbox.resume_sink('bad')",
    );
    let idle = until_idle(&mut db, "bad");
    assert_eq!((idle.delivered, idle.dead_letters), (5, 0));
    assert_eq!(db.all::<String>("select id from taken"), ids(1..=5));
    assert_eq!(dispatcher(&cluster, "app"), first);
}

/// A sink of kind function `f`, which never comes to an end, with 5 events; and its process, which has called it.
fn hanging(cluster: &Cluster, db: &mut Client) -> i32 {
    db.run(&format!(
        "create table taken (id text);
         create function f(events outbox.event[]) returns void language plpgsql as $$ {STUBBORN} $$;
         create function outbox_pid() returns setof int language sql as $$
             select pid from pg_stat_activity where application_name = 'pg_outbox sink f' and wait_event = 'PgSleep' $$"
    ));
    db.run(r#"select outbox.create_sink('f', 'function', config => '{"function": "f"}')"#);
    emit(db, 1..=5);
    let mut admin = cluster.connect();
    until("the function to be called", || {
        admin.all("select outbox_pid()").pop()
    })
}

const MENDED: &str = "create or replace function f(events outbox.event[]) returns void language sql
                          as 'insert into public.taken select id from unnest(events)'";

#[test]
fn a_function_that_hangs_ends_when_its_sink_is_paused_or_altered() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let pid = hanging(&cluster, &mut db);
    // Readers do not wait for it.
    assert_eq!(
        db.all::<String>("select id from outbox.read(max_events => 10)"),
        ids(1..=5)
    );
    db.run("select outbox.alter_sink('f', batch_size => 3)");
    until_gone(&cluster, pid);
    let pid: i32 = until("the function to be called again", || {
        db.all("select outbox_pid()").pop()
    });
    db.run("select outbox.pause_sink('f')");
    until_gone(&cluster, pid);
    assert_eq!(status(&mut db, "f").state, "paused");
    db.run(MENDED);
    db.run("select outbox.resume_sink('f')");
    until_idle(&mut db, "f");
    assert_eq!(db.all::<String>("select id from taken"), ids(1..=5));
}

#[test]
fn a_function_that_hangs_ends_when_its_sink_is_dropped() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let pid = hanging(&cluster, &mut db);
    db.run("select outbox.drop_sink('f')");
    until_gone(&cluster, pid);
}

#[test]
fn a_function_that_hangs_does_not_keep_the_extension_from_being_dropped() {
    let cluster = quick().setting("outbox.poll_interval", "1h").start();
    let mut db = cluster.connect();
    let pid = hanging(&cluster, &mut db);
    db.run("drop extension pg_outbox cascade");
    until_gone(&cluster, pid);
}

#[test]
fn a_function_that_hangs_ends_when_the_dispatcher_has_been_replaced() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let pid = hanging(&cluster, &mut db);
    let first = dispatcher(&cluster, "app");
    db.run(&format!(
        "create function t(e outbox.event) returns jsonb language plpgsql as $$ {STUBBORN} $$"
    ));
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "bad",
        &receiver,
        json!({}),
        "transform => 'public.t(outbox.event)'",
    );
    another_dispatcher(&cluster, "app", first);
    until_gone(&cluster, pid);
    db.run(MENDED);
    db.run("select outbox.alter_sink('f', batch_size => 3)");
    until_idle(&mut db, "f");
    assert_eq!(db.all::<String>("select id from taken"), ids(1..=5));
}
