//! pg_upgrade from the oldest version that is supported, with something of everything in the cluster.

use std::collections::BTreeMap;
use std::io::Write;

use outbox_tests::{Cluster, Receiver, Reply, Sql, is_installed, major, until};
use postgres::Client;
use serde_json::json;

use crate::scene::{emit, http_sink, ids, quick, quoted, until_idle, until_status};

const OLDEST: u32 = 15;

/// Whether there is something to upgrade from; says so if not, past what the test harness keeps to itself.
fn has_both() -> bool {
    let both = major() > OLDEST && is_installed(OLDEST);
    if !both {
        let why = format!(
            "SKIPPED: no pg_upgrade is tested on {}: it takes a later version, and the extension installed for {OLDEST}, too\n",
            major()
        );
        let _ = std::io::stderr().write_all(why.as_bytes());
    }
    both
}

/// How often each id of a stream is in a table of the database.
#[track_caller]
fn counted(db: &mut Client, table: &str) -> BTreeMap<String, i64> {
    let rows = db
        .query(&format!("select id, count(*) from {table} group by 1"), &[])
        .expect("they can be counted");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[test]
fn from_the_oldest_version() {
    if !has_both() {
        return;
    }
    let receiver = Receiver::start();
    let webhook = Receiver::start();
    let cluster = quick()
        .pg(OLDEST)
        .setting("outbox.allow_private_networks", "on")
        .setting("outbox.webhook_http", "on")
        .setting("outbox.webhook_ports", "")
        .start();
    let elsewhere = Cluster::builder().preload(false).extension(false).start();
    let mut remote = elsewhere.connect();
    remote.run("create table taken (id text, topic text, payload jsonb)");
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('signing', array['topsecret'])");
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({"secret": "signing", "signature": "github"}),
        "batch_size => 5",
    );
    db.run(
        "create table heard (id text);
         create function hear(e outbox.event[]) returns void language sql as 'insert into public.heard select id from unnest(e)';
         create function shape(e outbox.event) returns jsonb language sql as 'select e.payload || ''{\"shaped\": true}''';
         create table billed (key text);
         create function bill(w outbox.usage_window[]) returns void language sql as
             'insert into public.billed select idempotency_key from unnest(w)';
         create role reader;
         select outbox.create_sink('fn', 'function', config => '{\"function\": \"hear\"}');
         select outbox.create_sink('pull', 'pull', transform => 'shape(outbox.event)', filter => 'topic <> ''nothing''');
         select outbox.create_sink('grouped', 'pull', \"grouping\" => 'transaction');
         select outbox.create_stream('billing');
         select outbox.create_sink('bills', 'pull', stream => 'billing');
         select outbox.set_usage_recorder('bill(outbox.usage_window[])');
         select outbox.grant('reader', 'read', array['pull']);
         create table orders (id int primary key, what text);
         insert into orders select n, 'before' from generate_series(1, 30) n;
         select outbox.capture('orders', topic => 'order.changed', condition => 'new.id < 1000');
         select outbox.audit('made', 'order', '1')",
    );
    let config = json!({
        "dsn": elsewhere.url("app"),
        "table": "taken",
    });
    db.run(&format!(
        "select outbox.create_sink('remote', 'postgres', config => {});
         select outbox.create_sink('kafka', 'kafka', config => '{{\"brokers\": \"127.0.0.1:1\"}}', enabled => false);
         select outbox.create_sink('nats', 'nats', config => '{{\"url\": \"nats://127.0.0.1:1\"}}', enabled => false)",
        quoted(&config.to_string())
    ));
    db.run(&format!(
        "select outbox.create_webhook('acme', '{}')",
        webhook.url()
    ));
    emit(&mut db, 1..=20);
    until_idle(&mut db, "web");
    until_idle(&mut db, "fn");
    until_idle(&mut db, "remote");
    for sink in ["pull", "grouped"] {
        db.run(&format!(
            "select count(*) from outbox.poll('{sink}', 13); select outbox.ack('{sink}')"
        ));
    }
    // From here on nobody delivers: what follows is what the upgrade takes with it.
    receiver.reply_always(Reply::status(503));
    webhook.reply_always(Reply::status(503));
    db.run("select outbox.stop()");
    emit(&mut db, 21..=40);
    db.run(
        "insert into orders values (31, 'after');
         select outbox.emit('bill', id => 'b' || n, stream => 'billing') from generate_series(1, 5) n;
         select outbox.emit('hook', tenant => 'acme', id => 'hook');
         select outbox.backfill('orders', chunk_size => 7);
         select outbox.record_usage('vm', '2020-01-01', 'm', 1);
         select outbox.audit('made', 'order', '2')",
    );
    let before = db.one::<String>("select head from outbox.verify_audit()");
    drop(db);

    let sent = receiver.ids();
    receiver.clear();
    receiver.reply_always(Reply::ok());
    webhook.reply_always(Reply::ok());
    let cluster = cluster.upgrade(
        major(),
        &[
            ("outbox.retry_min", "20ms"),
            ("outbox.poll_interval", "1s"),
            ("outbox.allow_private_networks", "on"),
            ("outbox.webhook_http", "on"),
            ("outbox.webhook_ports", ""),
        ],
        || {
            assert_eq!(
                receiver.count() + webhook.count(),
                0,
                "while pg_upgrade ran"
            )
        },
    );
    let mut db = cluster.connect();
    assert_eq!(sent, ids(1..=20));
    emit(&mut db, 41..=50);
    let all = ids(1..=50);

    // Each sink gets what it had not, and no event of the upgrade more than once more.
    until_idle(&mut db, "web");
    let mut heard = BTreeMap::<String, i64>::new();
    for id in receiver.ids() {
        *heard.entry(id).or_default() += 1;
    }
    for id in ids(21..=50) {
        assert_eq!(heard.get(&id), Some(&1), "{id}");
    }
    assert!(heard.values().all(|&count| count == 1), "{heard:?}");
    until_idle(&mut db, "fn");
    until_idle(&mut db, "remote");
    for heard in [counted(&mut db, "heard"), counted(&mut remote, "taken")] {
        for id in &all {
            assert_eq!(heard.get(id), Some(&1), "{id}");
        }
    }
    for (sink, text) in [("pull", "payload ->> 'shaped'"), ("grouped", "'true'")] {
        let mut got = Vec::<String>::new();
        until(&format!("all of {sink}"), || {
            got.extend(db.all::<String>(&format!(
                "select id from outbox.poll('{sink}', 1000) where topic <> 'test.numbered' or {text} = 'true'"
            )));
            db.run(&format!("select outbox.ack('{sink}')"));
            ids(21..=50).iter().all(|id| got.contains(id)).then_some(())
        });
    }
    assert_eq!(
        db.all::<String>("select id from outbox.poll('bills') order by seq"),
        ["b1", "b2", "b3", "b4", "b5"]
    );
    // The backfill goes on, captures capture, and the rest does what it did.
    until("the backfill", || {
        (db.one::<String>("select state from outbox.backfills") == "done").then_some(())
    });
    db.run("update orders set what = 'upgraded' where id = 31");
    assert_eq!(
        db.one::<i64>(
            "select count(*) from outbox.events where topic = 'order.changed' and subject = '31'"
        ),
        3,
        "written, backfilled, changed"
    );
    until("the recorder", || {
        (db.one::<i64>("select count(*) from billed") == 1).then_some(())
    });
    let hooked = webhook.wait_for_distinct(1);
    assert_eq!(hooked[0].id, "hook");
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.check_captures()"),
        0
    );
    let noted = format!("select intact from outbox.verify_audit('{before}')");
    assert!(db.one::<bool>(&noted));
    assert_eq!(
        db.one::<String>("select \"values\"::text from outbox.secrets"),
        "{topsecret}"
    );
    until_status(&mut db, "web", "rest", |now| now.state == "idle");
}
