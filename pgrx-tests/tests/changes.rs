//! Sinks that are changed, paused, resumed and dropped under way.

mod consumers;
mod scene;

use consumers::{TAKE, called, pull, web};
use outbox_tests::{Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{http_sink, quick, quoted, status, until_idle};
use serde_json::{Value, json};

fn dispatcher(db: &mut Client) -> i32 {
    until("the dispatcher to run", || {
        db.all::<i32>("select pid from pg_stat_activity where backend_type like '%dispatcher%' and datname = current_database() and query not like '% for sink %' order by backend_start limit 1").pop()
    })
}

#[test]
fn a_change_takes_effect_with_the_next_pass() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (one, two) = (Receiver::start(), Receiver::start());
    db.run("create function public.shout(e outbox.event) returns jsonb language sql as $$ select '\"loud\"'::jsonb $$");
    http_sink(&mut db, "web", &one, json!({}), "");
    db.run("select outbox.emit('a')");
    one.wait_for(1);
    let pid = dispatcher(&mut db);

    let url = quoted(&json!({"url": two.url()}).to_string());
    db.run(&format!("select outbox.alter_sink('web', config => {url})"));
    db.run("select outbox.emit('b')");
    assert_eq!(two.wait_for(1)[0].topic, "b");

    let mut count = 1;
    let mut next = |db: &mut Client, change: &str, emit: &str, expected: &[&str]| {
        db.run(&format!("select outbox.alter_sink('web', {change})"));
        db.run(emit);
        count += expected.len();
        let events = two.wait_for(count);
        let topics: Vec<_> = events[events.len() - expected.len()..]
            .iter()
            .map(|event| event.topic.as_str())
            .collect();
        assert_eq!(topics, expected, "{change}");
        assert_eq!(events.len(), count, "{change}");
        // What was passed over counts as had once that is saved.
        until_idle(db, "web");
        events
    };
    let pair = "select outbox.emit('x', tenant => 'acme'); select outbox.emit('y.z')";
    next(&mut db, "topics => '{x}'", pair, &["x"]);
    next(&mut db, "topics => '{y.*}'", pair, &["y.z"]);
    next(&mut db, "topics => '{}'", pair, &["x", "y.z"]);
    next(&mut db, "tenant => 'acme'", pair, &["x"]);
    next(&mut db, "tenant => ''", pair, &["x", "y.z"]);
    next(&mut db, "filter => 'tenant is null'", pair, &["y.z"]);
    next(&mut db, "filter => ''", pair, &["x", "y.z"]);
    let events = next(
        &mut db,
        "transform => 'shout(outbox.event)'",
        pair,
        &["x", "y.z"],
    );
    assert_eq!(events.last().unwrap().data(), json!("loud"));
    let events = next(&mut db, "transform => '-'", pair, &["x", "y.z"]);
    assert_eq!(events.last().unwrap().data_text, None);
    // What is null stays.
    next(&mut db, "topics => '{x}', tenant => 'acme'", pair, &["x"]);
    next(&mut db, "batch_size => 7", pair, &["x"]);
    let row: Value = db.one("select to_jsonb(s) from outbox.sinks s");
    assert_eq!(
        (
            &row["batch_size"],
            &row["tenant"],
            &row["topics"],
            &row["grouping"],
            &row["enabled"]
        ),
        (
            &json!(7),
            &json!("acme"),
            &json!(["x"]),
            &json!("event"),
            &json!(true)
        )
    );
    assert_eq!(dispatcher(&mut db), pid, "nothing was restarted");
    assert_eq!(one.events().len(), 1);
}

#[test]
fn a_change_ends_a_long_wait() {
    let cluster = quick()
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .start();
    let mut db = cluster.connect();
    let (dead, alive) = (Receiver::start(), Receiver::start());
    dead.stop();
    http_sink(&mut db, "web", &dead, json!({}), "");
    db.run("select outbox.emit('a')");
    scene::until_status(&mut db, "web", "waiting", |status| {
        status.next_attempt_in.is_some()
    });
    let url = quoted(&json!({"url": alive.url()}).to_string());
    db.run(&format!("select outbox.alter_sink('web', config => {url})"));
    assert_eq!(alive.wait_for(1)[0].topic, "a");
    until_idle(&mut db, "web");

    // Resuming tries again as well.
    alive.reply_next([Reply::status(503)]);
    db.run("select outbox.emit('b')");
    scene::until_status(&mut db, "web", "waiting", |status| {
        status.next_attempt_in.is_some()
    });
    db.run("select outbox.resume_sink('web')");
    assert_eq!(alive.wait_for(2)[1].topic, "b");
}

#[test]
fn paused_sinks_wait_and_lose_nothing() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    db.run(TAKE);
    http_sink(&mut db, "web", &receiver, json!({}), "");
    http_sink(&mut db, "other", &other, json!({}), "");
    db.run(r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}', enabled => false)"#);
    db.run("select outbox.create_sink('pull', 'pull', enabled => false)");
    db.run("select outbox.emit('1')");
    receiver.wait_for(1);

    db.run("select outbox.pause_sink('web')");
    scene::until_status(&mut db, "web", "paused", |status| {
        status.state == "paused" && status.lease_pid.is_none()
    });
    for n in 2..=4 {
        db.run(&format!("select outbox.emit('{n}')"));
    }
    other.wait_for(4);
    assert_eq!(web(&receiver), ["1"]);
    assert_eq!(called(&mut db), Vec::<String>::new());
    assert_eq!(pull(&mut db, "pull"), Vec::<String>::new());
    assert_eq!(status(&mut db, "web").lag_events, 3);
    let tick: Vec<String> = db.all("select outcome from outbox.tick() where sink in ('web', 'fn')");
    assert_eq!(tick, ["paused", "paused"]);

    db.run("select outbox.resume_sink(sink) from unnest(array['web', 'fn', 'pull']) sink");
    receiver.wait_for(4);
    let all = ["1", "2", "3", "4"];
    assert_eq!(web(&receiver), all);
    until("the function to be called", || {
        (called(&mut db).len() == 4).then_some(())
    });
    assert_eq!(called(&mut db), all);
    assert_eq!(pull(&mut db, "pull"), all);
    assert_eq!(web(&other), all);
    for call in ["pause_sink", "resume_sink", "drop_sink"] {
        for id in ["'nobody'", "null", "''"] {
            let refusal = db.refused(&format!("select outbox.{call}({id})"));
            assert_eq!(refusal.sqlstate, "42704", "{call}({id})");
        }
    }
}

#[test]
fn a_dropped_sink_is_gone_with_its_cursor() {
    let cluster = quick().setting("outbox.retention_min_age", "0").start();
    let mut db = cluster.connect();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    http_sink(&mut db, "web", &receiver, json!({}), "");
    http_sink(&mut db, "other", &other, json!({}), "");
    db.run("select outbox.create_sink('pull', 'pull'); select outbox.emit('1'); select outbox.emit('2')");
    receiver.wait_for(2);
    assert_eq!(
        db.one::<i64>("select outbox.prune()"),
        0,
        "the pull sink has had nothing"
    );
    db.run("select outbox.drop_sink('pull'); select outbox.drop_sink('web')");
    assert_eq!(
        db.all::<String>("select name from outbox.cursors"),
        ["sink:other"]
    );
    assert_eq!(
        db.all::<String>("select sink from outbox.status"),
        ["other"]
    );
    assert_eq!(db.refused("select outbox.poll('pull')").sqlstate, "42704");
    assert_eq!(db.refused("select outbox.tick('web')").sqlstate, "42704");
    db.run("select outbox.emit('3')");
    other.wait_for(3);
    assert_eq!(web(&receiver), ["1", "2"]);

    // The id is free; whoever takes it begins as told, again and again, and never where the last one stood.
    for round in 1..=5 {
        receiver.clear();
        http_sink(&mut db, "web", &receiver, json!({}), "");
        assert_eq!(receiver.wait_for(3).len(), 3, "round {round}");
        db.run("begin; select outbox.drop_sink('web')");
        http_sink(&mut db, "web", &receiver, json!({}), "");
        db.run("commit");
        receiver.wait_for(6);
        assert_eq!(
            web(&receiver),
            ["1", "2", "3", "1", "2", "3"],
            "round {round}"
        );
        db.run("select outbox.drop_sink('web')");
    }
    until_idle(&mut db, "other");
    until("retention to take everything", || {
        db.run("select outbox.prune()");
        (db.one::<i64>("select count(*) from outbox.events") == 0).then_some(())
    });
}

#[test]
fn a_change_that_is_not_committed_stops_nobody() {
    let cluster = quick().start();
    let (mut db, mut open) = (cluster.connect(), cluster.connect());
    let (one, two) = (Receiver::start(), Receiver::start());
    http_sink(&mut db, "one", &one, json!({}), "");
    http_sink(&mut db, "two", &two, json!({}), "");
    db.run(TAKE);
    db.run(r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}')"#);
    db.run("select outbox.emit('1')");
    one.wait_for(1);
    open.run("begin; select outbox.drop_sink('one'); select outbox.drop_sink('fn')");
    for n in 2..=10 {
        db.run(&format!("select outbox.emit('{n}')"));
        two.wait_for(n);
        until("the cursor to be saved", || {
            (status(&mut db, "two").lag_events == 0).then_some(())
        });
    }
    open.run("rollback; begin; select outbox.pause_sink('one'); select outbox.alter_sink('two', batch_size => 3)");
    db.run("select outbox.emit('11')");
    two.wait_for(11);
    open.run("rollback");
    one.wait_for(11);
    until("the function to be called", || {
        (called(&mut db).len() >= 11).then_some(())
    });
    let all: Vec<_> = (1..=11).map(|n| n.to_string()).collect();
    assert_eq!(called(&mut db), all, "each once");
}
