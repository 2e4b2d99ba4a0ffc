//! Filters and transforms that take their time: other sinks do not wait for them, and nothing is lost or delivered twice over it.

mod scene;
mod workers;

use outbox_tests::{Cluster, Receiver, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::json;
use workers::dispatcher;

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
