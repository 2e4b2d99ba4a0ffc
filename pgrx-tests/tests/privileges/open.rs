//! A transaction that somebody leaves open, whatever it has called or written, holds up no sink but the one that it is about.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use postgres::Client;
use serde_json::json;

use super::abilities;
use super::functions;
use crate::scene::picky::{Picky, events_in};
use crate::scene::{emit, http_sink, quick, until_dead};

/// What is called of each function that a role may be allowed to call.
const CALLS: &[(&str, &str)] = &[
    (
        "ack",
        "outbox.ack('p', (select max(\"position\") from outbox.poll('p')))",
    ),
    (
        "adopt_stream",
        "outbox.adopt_stream('adopted', 'foreign_events')",
    ),
    (
        "alter_capture",
        "outbox.alter_capture('plain', operations => '{insert}')",
    ),
    ("alter_sink", "outbox.alter_sink('crm', batch_size => 7)"),
    (
        "alter_webhook",
        "outbox.alter_webhook((select id from outbox.webhooks), description => 'x')",
    ),
    ("audit", "outbox.audit('a.done', 'thing', '7')"),
    ("backfill", "outbox.backfill('plain')"),
    (
        "backfill_chunk",
        "outbox.backfill_chunk((select id from outbox.backfills))",
    ),
    ("capture", "outbox.capture('other_table')"),
    ("capture_ddl", "outbox.capture_ddl()"),
    ("check_captures", "outbox.check_captures()"),
    ("create_sink", "outbox.create_sink('new', 'pull')"),
    ("create_stream", "outbox.create_stream('another')"),
    (
        "create_webhook",
        "outbox.create_webhook('acme', 'https://example.com/')",
    ),
    ("cursor", "outbox.cursor('reader')"),
    (
        "delete_webhook",
        "outbox.delete_webhook((select id from outbox.webhooks))",
    ),
    (
        "disable_webhook",
        "outbox.disable_webhook((select id from outbox.webhooks))",
    ),
    (
        "discard",
        "outbox.discard(sink, outbox.format_position(txid, seq)) from outbox.dead_letters",
    ),
    ("drop_cursor", "outbox.drop_cursor('reader')"),
    ("drop_sink", "outbox.drop_sink('crm')"),
    ("drop_stream", "outbox.drop_stream('unused')"),
    ("emit", "outbox.emit('x', stream => 'witness')"),
    (
        "enable_webhook",
        "outbox.enable_webhook((select id from outbox.webhooks))",
    ),
    ("format_position", "outbox.format_position('3', 1)"),
    ("grant", "outbox.grant('op', 'read', array['p'])"),
    ("grant_tenant", "outbox.grant_tenant('op', 'globex')"),
    ("is_drawn", "outbox.is_drawn(1)"),
    ("is_role_of", "outbox.is_role_of('op', 'acme')"),
    ("new_id", "outbox.new_id()"),
    ("next_seq", "outbox.next_seq('outbox.events_seq_seq')"),
    ("parse_position", "outbox.parse_position('3:1')"),
    ("pause_capture", "outbox.pause_capture('plain')"),
    ("pause_sink", "outbox.pause_sink('crm')"),
    ("poll", "outbox.poll('p')"),
    ("prune", "outbox.prune()"),
    ("publication_status", "outbox.publication_status()"),
    ("read", "outbox.read()"),
    ("rebase_if_moved", "outbox.rebase_if_moved()"),
    (
        "record_usage",
        "outbox.record_usage('a1', date_trunc('hour', now()), 'm', 1)",
    ),
    ("redeliver", "outbox.redeliver('crm')"),
    ("redeliver_usage", "outbox.redeliver_usage()"),
    (
        "redeliver_webhook",
        "outbox.redeliver_webhook((select id from outbox.webhooks), '-infinity')",
    ),
    ("resume_capture", "outbox.resume_capture('plain')"),
    ("resume_sink", "outbox.resume_sink('crm')"),
    ("revoke", "outbox.revoke('op', 'operate')"),
    ("revoke_tenant", "outbox.revoke_tenant('op', 'acme')"),
    (
        "rotate_webhook_secret",
        "outbox.rotate_webhook_secret((select id from outbox.webhooks))",
    ),
    ("save_cursor", "outbox.save_cursor('reader', '4:4')"),
    ("set_secret", "outbox.set_secret('key', array['b'])"),
    (
        "set_secret_source",
        "outbox.set_secret_source('key', 'env', 'NONE')",
    ),
    ("set_usage_recorder", "outbox.set_usage_recorder(null)"),
    ("sink_status", "outbox.sink_status()"),
    ("start", "outbox.start()"),
    (
        "stop_backfill",
        "outbox.stop_backfill((select id from outbox.backfills))",
    ),
    ("tail", "outbox.tail()"),
    (
        "test_webhook",
        "outbox.test_webhook((select id from outbox.webhooks))",
    ),
    ("tick", "outbox.tick()"),
    ("tick_usage", "outbox.tick_usage()"),
    ("uncapture", "outbox.uncapture('plain')"),
    ("verify_audit", "outbox.verify_audit()"),
    ("webhook_status", "outbox.webhook_status()"),
];

/// It ends the dispatcher, whatever becomes of the transaction.
const STOPS: &str = "stop";

/// What says what is to be delivered where: who locks one of these tables against readers locks the dispatcher out.
const LOOKED_AT: &[&str] = &["clusters", "cursors", "secrets", "sinks", "streams"];

const RETRY_MAX: Duration = Duration::from_millis(50);

struct Scene {
    cluster: Cluster,
    db: Client,
    /// Has set the events 1 and 2 aside, which are queued again and never taken.
    crm: Picky,
    witness: Receiver,
    /// They refuse whatever comes.
    _refusing: [Receiver; 2],
    sent: i64,
}

impl Scene {
    /// Each part of the dispatcher has something to write, again and again.
    fn start() -> Self {
        let cluster = quick()
            .setting("outbox.retry_max", &format!("{}ms", RETRY_MAX.as_millis()))
            .setting("outbox.retention_interval", "100ms")
            .setting("outbox.retention_min_age", "0")
            .setting("outbox.allow_private_networks", "on")
            .setting("outbox.webhook_http", "on")
            .setting("outbox.webhook_ports", "")
            .setting("outbox.webhook_waits", "0.05")
            .start();
        let mut db = cluster.connect();
        db.run(
            "create role op login; create table plain (id int primary key); create table other_table (id int primary key);
             create table foreign_events (id bigint generated always as identity primary key, topic text not null, payload jsonb);
             create table many (id int primary key); insert into many select generate_series(1, 100000);
             select outbox.create_stream('witness'), outbox.create_stream('side'), outbox.create_stream('unused');
             select outbox.set_secret('key', array['a']); select outbox.save_cursor('reader', '3:1');
             select outbox.capture('plain', stream => 'side'), outbox.capture('many', stream => 'side');
             create function bill(outbox.usage_window[]) returns void language plpgsql as
                 $$ begin raise 'no' using errcode = '08000'; end $$;
             select outbox.set_usage_recorder('bill(outbox.usage_window[])');
             select outbox.record_usage('a' || n, date_trunc('hour', now()) - n * interval '1 day', 'm', 1) from generate_series(1, 9) n;
             select outbox.audit('a.done', 'thing', '7')",
        );
        let (crm, keyed) = (Picky::start(), Receiver::start());
        let (witness, hook) = (Receiver::start(), Receiver::start());
        crm.refuses([1, 2]);
        http_sink(&mut db, "crm", &crm.receiver, json!({"secret": "key"}), "");
        db.run("select outbox.create_sink('p', 'pull')");
        emit(&mut db, 1..=3);
        until_dead(&mut db, "crm", 2);
        crm.receiver.reply_with(|request| {
            let picked = events_in(request);
            let refused = |id: &str| picked.iter().any(|event| event["id"] == id);
            Reply::status(if refused("n1") || refused("n2") {
                500
            } else {
                200
            })
        });
        keyed.reply_always(Reply::status(500));
        http_sink(
            &mut db,
            "keyed",
            &keyed,
            json!({}),
            "isolation => 'key', stream => 'side'",
        );
        db.run("select outbox.emit('k', subject => 'k', id => 'k1', stream => 'side')");
        http_sink(&mut db, "w", &witness, json!({}), "stream => 'witness'");
        db.run(&format!(
            "select outbox.create_webhook('acme', '{}')",
            hook.url()
        ));
        hook.reply_always(Reply::status(500));
        db.run("select outbox.emit('h', tenant => 'acme')");
        db.run("select outbox.backfill('many', chunk_size => 1); select outbox.redeliver('crm')");
        Self {
            cluster,
            db,
            crm,
            witness,
            _refusing: [keyed, hook],
            sent: 0,
        }
    }

    fn flows(&mut self) {
        self.sent += 1;
        self.db.run(&format!(
            "select outbox.emit('w', id => 'w{}', stream => 'witness')",
            self.sent
        ));
        self.witness
            .wait_for_distinct(usize::try_from(self.sent).expect("few"));
    }

    /// Leaves a transaction open in which this was done, and sees that others get their events.
    #[track_caller]
    fn open(&mut self, sql: &str) {
        println!("{sql}");
        let tried = self.crm.receiver.requests().len();
        until(&format!("a try of a letter, before {sql}"), || {
            (self.crm.receiver.requests().len() > tried).then_some(())
        });
        let mut session = self.cluster.connect();
        session.run(&format!("begin; {sql}"));
        // Within this time each sink and webhook that fails is tried once more, and what that comes to is to be written.
        let opened = Instant::now();
        while opened.elapsed() < RETRY_MAX * 3 {
            self.flows();
        }
        session.run("rollback");
    }
}

#[test]
fn no_function_holds_up_the_sinks_of_others() {
    let mut scene = Scene::start();
    for privilege in ["emit", "read", "operate", "secrets"] {
        scene
            .db
            .run(&format!("select outbox.grant('op', '{privilege}')"));
    }
    scene.db.run("select outbox.grant_tenant('op', 'acme')");
    let calls = CALLS.iter().copied().collect::<BTreeMap<_, _>>();
    let able = abilities(&mut scene.db, "op");
    let unknown = functions(&able).into_iter();
    let unknown = unknown.filter(|name| *name != STOPS && !calls.contains_key(name));
    assert_eq!(
        unknown.collect::<Vec<_>>(),
        [""; 0],
        "has no entry in CALLS"
    );
    for call in calls.values() {
        scene.open(&format!("select {call}"));
    }
}

#[test]
fn no_row_or_table_that_is_held_holds_up_the_sinks_of_others() {
    let mut scene = Scene::start();
    let tables: Vec<String> = scene.db.all(
        "select relname::text from pg_class where relnamespace = 'outbox'::regnamespace and relkind = 'r' order by 1",
    );
    for table in tables.iter().filter(|table| *table != "witness") {
        if !table.starts_with("audit_") {
            scene.open(&format!("delete from outbox.{table}"));
        }
        scene.open(&format!("select from outbox.{table} for update"));
        if !LOOKED_AT.contains(&table.as_str()) {
            scene.open(&format!("lock table outbox.{table}"));
        }
    }
}
