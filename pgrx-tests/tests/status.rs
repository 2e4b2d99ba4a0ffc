//! `outbox.status`: in which state a sink is, how much waits, and for what.

mod scene;
mod workers;

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, status, until_idle, until_status};
use serde_json::json;
use workers::{dispatcher, until_quiet};

fn noting_sink(db: &mut Client, id: &str) {
    db.run(&format!(
        "create table if not exists noted (sink text, id text);
         create function note_{id}(e outbox.event[]) returns void language sql as
            $$ insert into public.noted select '{id}', id from unnest(e) $$;"
    ));
    db.run(&format!(
        r#"select outbox.create_sink('{id}', 'function', config => '{{"function": "note_{id}"}}')"#
    ));
}

/// What a sink's status says of what it waits for.
#[track_caller]
fn until_waits_for(db: &mut Client, sink: &str, what: &str) {
    until_status(db, sink, &format!("waiting for {what}"), |status| {
        status
            .waiting_for
            .as_ref()
            .is_some_and(|waits| waits.starts_with(what))
    });
}

#[test]
fn a_sink_goes_through_its_states() {
    let cluster = quick()
        .setting("outbox.retry_min", "300ms")
        .setting("outbox.retry_max", "300ms")
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let at_first = until_idle(&mut db, "a");
    assert_eq!((at_first.lag_events, at_first.delivered), (0, 0));
    assert_eq!(at_first.waiting_for, None);
    assert_eq!(at_first.lease_pid, Some(dispatcher(&cluster, "app")));
    assert!(db.one::<bool>(
        "select last_delivery_at is null and next_attempt_at is null and lag_seconds = 0 from outbox.status"
    ));

    receiver.reply_always(Reply::hang());
    emit(&mut db, 1..=3);
    let requests = receiver.wait_for_requests(1).len();
    let busy = until_status(&mut db, "a", "flowing", |status| status.state == "flowing");
    assert_eq!(busy.lag_events, 3);
    assert_eq!(busy.waiting_for.as_deref(), Some("the destination"));
    assert!(db.one::<bool>("select lag_seconds > 0 from outbox.status"));
    assert_eq!(receiver.requests().len(), requests);

    receiver.reply_always(Reply::status(503));
    receiver.stop();
    receiver.start_again();
    // What was in flight has failed in another way, and a batch is searched without a wait.
    until_status(&mut db, "a", "retrying", |status| {
        let error = status.last_error.as_deref().unwrap_or_default();
        let waits = status.next_attempt_in.is_some() && status.attempts > 0;
        status.state == "retrying" && waits && error.contains("503")
    });
    until_waits_for(&mut db, "a", "the destination, until 20");
    let down = until_status(&mut db, "a", "down", |status| status.state == "down");
    assert_eq!((down.lag_events, down.dead_letters), (3, 0));
    assert!(down.attempts >= 5);
    until_waits_for(&mut db, "a", "the destination, until 20");

    db.run("select outbox.pause_sink('a')");
    let paused = until_status(&mut db, "a", "paused", |status| {
        status.state == "paused" && status.lease_pid.is_none()
    });
    assert_eq!(paused.waiting_for.as_deref(), Some("outbox.resume_sink"));
    assert_eq!(paused.lag_events, 3);
    receiver.reply_always(Reply::ok());
    db.run("select outbox.resume_sink('a')");
    receiver.wait_for_distinct(3);
    let well = until_idle(&mut db, "a");
    assert_eq!((well.lag_events, well.delivered, well.attempts), (0, 3, 0));
    assert_eq!(well.next_attempt_in, None);
    assert!(
        db.one::<bool>("select last_delivery_at > now() - interval '5 min' from outbox.status")
    );

    db.run("select outbox.stop()");
    let stopped = status(&mut db, "a");
    assert_eq!(stopped.state, "stopped");
    assert_eq!((stopped.lease_pid, stopped.waiting_for), (None, None));
    emit(&mut db, 4..=4);
    until_waits_for(&mut db, "a", "a dispatcher: outbox.start");
    // That it was failing is known, and that nobody tries again, too.
    db.run("select outbox.start()");
    receiver.reply_always(Reply::status(500));
    emit(&mut db, 5..=5);
    until_status(&mut db, "a", "trouble", |status| status.attempts > 0);
    db.run("select outbox.stop()");
    let stopped = status(&mut db, "a");
    assert!(["retrying", "down"].contains(&stopped.state.as_str()));
    until_waits_for(&mut db, "a", "a dispatcher: outbox.start");
    cluster.set("outbox.databases", "another, third");
    until_waits_for(
        &mut db,
        "a",
        "a place in outbox.databases, which does not name this database",
    );
    cluster.set("outbox.enabled", "off");
    until_waits_for(&mut db, "a", "outbox.enabled, which is off");
}

#[test]
fn a_pull_sink_waits_for_its_consumer() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('p', 'pull')");
    let p = status(&mut db, "p");
    assert_eq!((p.state.as_str(), p.waiting_for), ("idle", None));
    emit(&mut db, 1..=5);
    let p = status(&mut db, "p");
    assert_eq!((p.state.as_str(), p.lag_events), ("idle", 5));
    assert_eq!(p.waiting_for.as_deref(), Some("a consumer"));
    let mut consumer = cluster.connect();
    let pid: i32 = consumer.one("select pg_backend_pid()");
    consumer.run("select outbox.poll('p', 3)");
    let p = status(&mut db, "p");
    assert_eq!((p.state.as_str(), p.lag_events), ("polled", 5));
    assert_eq!(p.lease_pid, Some(pid));
    assert_eq!(
        p.waiting_for,
        Some(format!("outbox.ack by the session with pid {pid}"))
    );
    consumer.run("select outbox.ack('p')");
    let p = status(&mut db, "p");
    assert_eq!(
        (p.state.as_str(), p.lag_events, p.delivered, p.lease_pid),
        ("idle", 2, 3, None)
    );
    db.run("select outbox.pause_sink('p')");
    assert_eq!(status(&mut db, "p").state, "paused");
}

#[test]
fn it_names_the_transaction_that_may_still_bring_events() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "");
    let mut writer = cluster.connect();
    let pid: i32 = writer.one("select pg_backend_pid()");
    writer.run("begin; select outbox.emit('held')");
    let xid: String = writer.one("select pg_current_xact_id()::text");
    emit(&mut db, 1..=3);
    receiver.wait_for(3);
    until_idle(&mut db, "a");
    let now = format!("transaction {xid} of pid {pid}, idle in transaction, open since 20");
    until_waits_for(&mut db, "a", &now);
    // Another one that is younger, and one in another database, change nothing.
    let mut younger = cluster.connect();
    younger.run("begin; select pg_current_xact_id()");
    let mut elsewhere = cluster.connect_to("postgres");
    elsewhere.run("begin; select pg_current_xact_id()");
    until_waits_for(&mut db, "a", &now);
    writer.run("prepare transaction 'it''s late'");
    younger.run("rollback");
    until_waits_for(
        &mut db,
        "a",
        &format!("prepared transaction 'it''s late' ({xid}) of 20"),
    );
    // The older one counts.
    younger.run("begin; select pg_current_xact_id()");
    until_waits_for(&mut db, "a", "prepared transaction 'it''s late'");
    db.run("commit prepared 'it''s late'");
    younger.run("rollback");
    receiver.wait_for(4);
    assert_eq!(until_idle(&mut db, "a").waiting_for, None);
}

#[test]
fn a_sink_whose_code_is_gone_stops_alone_and_says_so() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receivers: Vec<_> = (0..4).map(|_| Receiver::start()).collect();
    db.run(
        "create function wanted(topic text) returns boolean language sql as $$ select topic <> 'no' $$;
         create function mended(e outbox.event) returns jsonb language sql as $$ select e.payload || '{\"mended\": true}' $$;
         create role departing;
         select outbox.grant('departing', 'operate');",
    );
    http_sink(&mut db, "healthy", &receivers[0], json!({}), "");
    http_sink(
        &mut db,
        "filtered",
        &receivers[1],
        json!({}),
        "filter => 'public.wanted(topic)'",
    );
    http_sink(
        &mut db,
        "transformed",
        &receivers[2],
        json!({}),
        "transform => 'mended(outbox.event)'",
    );
    noting_sink(&mut db, "function");
    // Two that are somebody else's.
    db.run("grant insert, select on noted to departing");
    db.run("create function note_owned(e outbox.event[]) returns void language sql as $$ insert into public.noted select 'owned', id from unnest(e) $$");
    db.run("set role departing");
    db.run(
        r#"select outbox.create_sink('owned', 'function', config => '{"function": "note_owned"}')"#,
    );
    http_sink(
        &mut db,
        "owned_filter",
        &receivers[3],
        json!({}),
        "filter => 'topic <> ''no'''",
    );
    db.run("reset role");
    let noted = |db: &mut Client, sink: &str| -> Vec<String> {
        db.all(&format!("select id from noted where sink = '{sink}'"))
    };
    emit(&mut db, 1..=3);
    for receiver in &receivers {
        receiver.wait_for(3);
    }
    for sink in ["function", "owned"] {
        until("the function", || {
            (noted(&mut db, sink) == ids(1..=3)).then_some(())
        });
    }

    // While they are at work.
    db.run("drop function wanted; drop function mended; drop function note_function; drop function note_owned;");
    db.run("select outbox.revoke('departing', 'operate'); drop owned by departing; drop role departing");
    emit(&mut db, 4..=6);
    receivers[0].wait_for(6);
    let sinks = [
        "filtered",
        "transformed",
        "function",
        "owned",
        "owned_filter",
    ];
    for (sink, says) in sinks.into_iter().zip([
        "function public.wanted(text) does not exist",
        "its transform does not exist any more",
        "its function does not exist any more",
        "",
        "the role that owns the sink does not exist any more",
    ]) {
        let told = until_status(&mut db, sink, "error", |status| status.state == "error");
        let error = told.last_error.clone().unwrap_or_default();
        assert!(error.contains(says), "{sink}: {error}");
        assert_eq!((told.lag_events, told.dead_letters), (3, 0), "{told:?}");
        assert_eq!(told.lease_pid, None);
        until_waits_for(&mut db, sink, "outbox.alter_sink, or until 20");
    }
    emit(&mut db, 7..=7);
    receivers[0].wait_for(7);
    until_idle(&mut db, "healthy");
    // It is still so for whoever comes next.
    let old = dispatcher(&cluster, "app");
    workers::terminate(&cluster, old);
    workers::another_dispatcher(&cluster, "app", old);
    emit(&mut db, 8..=8);
    receivers[0].wait_for_distinct(8);
    for sink in sinks {
        until_status(&mut db, sink, "error", |status| {
            status.state == "error" && status.lag_events == 5
        });
    }

    // Mended, each in its way.
    db.run("select outbox.alter_sink('filtered', filter => 'topic <> ''no''')");
    db.run("create function other(e outbox.event) returns jsonb language sql as $$ select e.payload $$");
    db.run("select outbox.alter_sink('transformed', transform => 'other(outbox.event)')");
    db.run("create function note_again(e outbox.event[]) returns void language sql as $$ insert into public.noted select 'function', id from unnest(e) $$");
    db.run(r#"select outbox.alter_sink('function', config => '{"function": "note_again"}')"#);
    db.run("create function note_other(e outbox.event[]) returns void language sql as $$ insert into public.noted select 'owned', id from unnest(e) $$");
    db.run(r#"select outbox.alter_sink('owned', config => '{"function": "note_other"}')"#);
    db.run("select outbox.alter_sink('owned_filter', filter => '')");
    for receiver in &receivers[1..] {
        let arrived = receiver.wait_for_distinct(8);
        let arrived: Vec<_> = arrived.into_iter().map(|event| event.id).collect();
        assert_eq!(arrived, ids(1..=8));
    }
    for sink in ["function", "owned"] {
        until("the function", || {
            (noted(&mut db, sink) == ids(1..=8)).then_some(())
        });
    }
    for sink in sinks {
        until_idle(&mut db, sink);
    }
}

/// Where a stream and its sinks stand, with nobody to change it.
fn quiet_cluster() -> (Cluster, Client) {
    let cluster = quick().setting("autovacuum", "off").start();
    let mut db = cluster.connect();
    db.run("select outbox.stop()");
    until_quiet(&cluster, "app");
    (cluster, db)
}

#[test]
fn the_lag_is_exact_up_to_a_thousand() {
    let (cluster, mut db) = quiet_cluster();
    for grouping in ["event", "transaction"] {
        let kind = format!("'pull', \"grouping\" => '{grouping}'");
        db.run(&format!("select outbox.create_sink('{grouping}', {kind})"));
    }
    let lags = |db: &mut Client| -> (i64, i64) {
        (
            status(db, "event").lag_events,
            status(db, "transaction").lag_events,
        )
    };
    assert_eq!(lags(&mut db), (0, 0));
    emit(&mut db, 1..=10);
    assert_eq!(lags(&mut db), (10, 10));
    // One that has not committed does not count, and counts once when it has.
    let mut late = cluster.connect();
    late.run("begin; select outbox.emit('late', id => 'late1')");
    emit(&mut db, 11..=20);
    assert_eq!(lags(&mut db), (20, 20));
    for sink in ["event", "transaction"] {
        // In the middle of a window, with events before and behind the mark that belong to the next one.
        let got: Vec<String> = db.all(&format!("select id from outbox.poll('{sink}', 10)"));
        assert_eq!(got, ids(1..=10));
        db.run(&format!("select outbox.ack('{sink}')"));
    }
    assert_eq!(lags(&mut db), (10, 10));
    late.run("select outbox.emit('late', id => 'late2'); commit");
    assert_eq!(lags(&mut db), (12, 12));
    for (taken, left) in [(10, 2), (2, 0)] {
        for sink in ["event", "transaction"] {
            let count: i64 = db.one(&format!("select count(*) from outbox.poll('{sink}', 10)"));
            assert_eq!(count, taken);
            db.run(&format!("select outbox.ack('{sink}')"));
        }
        assert_eq!(lags(&mut db), (left, left));
    }

    // Transactions that overlap, in the middle of one of which the sink stops.
    let mut other = cluster.connect();
    db.run("begin");
    other.run("begin");
    for _ in 0..5 {
        db.run("select outbox.emit('one')");
        other.run("select outbox.emit('two')");
    }
    other.run("commit");
    db.run("select outbox.emit('one'); commit");
    assert_eq!(lags(&mut db), (11, 11));
    for sink in ["event", "transaction"] {
        let got: Vec<String> = db.all(&format!("select position from outbox.poll('{sink}', 5)"));
        assert_eq!(got.len(), 5);
        db.run(&format!("select outbox.ack('{sink}', '{}')", got[2]));
    }
    assert_eq!(lags(&mut db), (8, 8));

    // Up to a thousand to the event; beyond that, by the numbers.
    emit(&mut db, 1..=992);
    assert_eq!(lags(&mut db), (1000, 1000));
    for (more, all) in [(1, 1001), (8000, 9001)] {
        emit(&mut db, 1001..=1000 + more);
        let (event, transaction) = lags(&mut db);
        for lag in [event, transaction] {
            assert!((all - lag).abs() < 20 && lag > 1000, "{lag}, not {all}");
        }
    }
    for sink in ["event", "transaction"] {
        while db.one::<i64>(&format!("select count(*) from outbox.poll('{sink}', 5000)")) > 0 {
            db.run(&format!("select outbox.ack('{sink}')"));
        }
    }
    assert_eq!(lags(&mut db), (0, 0));
    // Counted from where it begins.
    db.run("select outbox.create_sink('tail', 'pull', start => 'tail')");
    assert_eq!(status(&mut db, "tail").lag_events, 0);
    emit(&mut db, 20_001..=22_500);
    assert_eq!(status(&mut db, "tail").lag_events, 2500);
    db.run("select outbox.create_sink('origin', 'pull')");
    let from_origin = status(&mut db, "origin").lag_events;
    let all: i64 = db.one("select count(*) from outbox.events");
    assert!(
        (all..all + 20).contains(&from_origin),
        "{from_origin} of {all}"
    );
}

/// The most blocks that one run of the status touches, in whatever mood the sinks are.
fn blocks_touched(db: &mut Client) -> i64 {
    let mut most = 0;
    // The first runs read catalogs.
    for run in 0..3 {
        let plan: serde_json::Value = db
            .one("explain (analyze, buffers, timing off, format json) select * from outbox.status");
        let plan = &plan[0]["Plan"];
        let touched = plan["Shared Hit Blocks"].as_i64().unwrap()
            + plan["Shared Read Blocks"].as_i64().unwrap();
        if run > 0 {
            most = most.max(touched);
        }
    }
    most
}

#[test]
fn it_costs_the_same_whatever_the_stream_holds() {
    let (cluster, mut db) = quiet_cluster();
    db.run(
        "select outbox.create_sink('behind', 'pull');
         select outbox.create_sink('behind_by_transaction', 'pull', \"grouping\" => 'transaction');
         select outbox.create_sink('midway', 'pull');
         select outbox.create_sink('midway_by_transaction', 'pull', \"grouping\" => 'transaction');
         select outbox.create_sink('through', 'pull')",
    );
    let fill = |db: &mut Client, count: i64| {
        db.run(&format!(
            "insert into outbox.events (topic, payload) select 'bulk', '{{}}' from generate_series(1, {count})"
        ));
    };
    let take = |db: &mut Client, sink: &str, count: i64| {
        let taken: i64 = db.one(&format!(
            "select count(*) from outbox.poll('{sink}', {count})"
        ));
        assert_eq!(taken, count);
        assert!(db.one::<bool>(&format!("select outbox.ack('{sink}')")));
    };
    // A transaction that has been open all the time, so that no window's floor can move.
    let mut held = cluster.connect();
    held.run("begin; select outbox.emit('held')");
    fill(&mut db, 2_000);
    for sink in ["midway", "midway_by_transaction"] {
        take(&mut db, sink, 900);
    }
    take(&mut db, "through", 2_000);
    let small = blocks_touched(&mut db);
    for _ in 0..4 {
        fill(&mut db, 25_000);
    }
    for sink in ["midway", "midway_by_transaction"] {
        for count in [1_100, 25_000, 25_000, 500] {
            take(&mut db, sink, count);
        }
    }
    for _ in 0..4 {
        take(&mut db, "through", 25_000);
    }
    fill(&mut db, 5_000);
    let large = blocks_touched(&mut db);
    assert!(
        large < small * 2 + 500,
        "{small} blocks with 2,000 events, {large} with 107,000"
    );
    for (sink, lag) in [
        ("behind", 107_000),
        ("behind_by_transaction", 107_000),
        ("midway", 54_500),
        ("midway_by_transaction", 54_500),
        ("through", 5_000),
    ] {
        let estimate = status(&mut db, sink).lag_events;
        assert!((estimate - lag).abs() < 50, "{sink}: {estimate}, not {lag}");
    }
}
