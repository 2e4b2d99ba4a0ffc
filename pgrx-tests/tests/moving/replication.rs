//! A table of the extension is published and subscribed to: its rows are foreign, and the subscriber's own come to no harm.

use outbox_tests::{Cluster, Sql, until};
use postgres::Client;

use crate::scene::{emit, ids, quick};

fn publisher() -> Cluster {
    quick().setting("wal_level", "logical").start()
}

/// Publishes and subscribes: from database `app` to database `copy`.
fn subscribe(cluster: &Cluster, publication: &str) {
    let mut from = cluster.connect();
    from.run(&format!("create publication p for {publication}"));
    // The slot is made beforehand: within one cluster, CREATE SUBSCRIPTION would wait for itself.
    from.run("select pg_create_logical_replication_slot('s', 'pgoutput')");
    cluster.connect_to("copy").run(&format!(
        "create subscription s connection '{}' publication p with (create_slot = false, slot_name = 's')",
        cluster.url("app")
    ));
}

/// Waits until the subscriber has all that the publisher has committed.
#[track_caller]
fn until_applied(cluster: &Cluster) {
    let mut from = cluster.connect();
    let upto: String = from.one("select pg_current_wal_lsn()::text");
    let mut to = cluster.connect_to("copy");
    until("tables to be copied", || {
        (to.one::<i64>("select count(*) from pg_subscription_rel where srsubstate <> 'r'") == 0)
            .then_some(())
    });
    let passed = format!(
        "select confirmed_flush_lsn >= '{upto}' from pg_replication_slots where slot_name = 's'"
    );
    until("changes to be applied", || {
        from.one::<bool>(&passed).then_some(())
    });
}

#[track_caller]
fn pulled(db: &mut Client, sink: &str) -> Vec<String> {
    let ids = db.all(&format!("select id from outbox.poll('{sink}', 1000)"));
    db.run(&format!("select outbox.ack('{sink}')"));
    ids
}

#[track_caller]
fn sorted(mut ids: Vec<String>) -> Vec<String> {
    ids.sort();
    ids
}

#[test]
fn rows_of_another_database_become_events_of_this_one() {
    let cluster = publisher();
    cluster.createdb("copy");
    let (mut from, mut to) = (cluster.connect(), cluster.connect_to("copy"));
    for db in [&mut from, &mut to] {
        db.run("select outbox.create_sink('pull', 'pull')");
        db.run(
            "create table heard (id text);
             create function hear(e outbox.event[]) returns void language sql as 'insert into public.heard select id from unnest(e)';
             select outbox.create_sink('hear', 'function', config => '{\"function\": \"public.hear\"}')",
        );
    }
    emit(&mut from, 1..=20);
    from.run("insert into outbox.events (topic, id) values ('x', null)");
    from.run("insert into outbox.events (topic, id, for_sink) values ('x', 'private', 1)");
    // The one without an id has the one here that it has there.
    let derived: String = from.one("select id from outbox.read(null, 1000) where topic = 'x'");
    from.run("select outbox.audit('done', 'thing', n::text, id => 'a' || n) from generate_series(1, 3) n");
    to.run("select outbox.emit('own', id => 'own' || n) from generate_series(1, 12) n");
    to.run("select outbox.audit('done', 'thing', id => 'own')");
    subscribe(&cluster, "table outbox.events, outbox.audit_events");
    until_applied(&cluster);

    // Its own go in, before and after, and whatever happens over there.
    to.run("select outbox.emit('own', id => 'own' || n) from generate_series(13, 40) n");
    to.run("select outbox.audit('done', 'thing', id => 'own2')");
    emit(&mut from, 21..=30);
    from.run("select outbox.audit('done', 'thing', 'x', id => 'a4')");
    from.run("update outbox.events set topic = 'changed' where seq <= 5");
    from.run("delete from outbox.events where seq between 3 and 22");
    until_applied(&cluster);

    let mut wanted = ids(1..=30);
    wanted.extend((1..=40).map(|n| format!("own{n}")));
    wanted.push(derived);
    assert_eq!(sorted(pulled(&mut to, "pull")), sorted(wanted));
    assert_eq!(
        to.one::<i64>("select count(*) from outbox.events where topic = 'changed'"),
        0
    );
    // Everybody gets the same, and nobody waits for anything.
    until("the function to hear all", || {
        (to.one::<i64>("select count(distinct id) from heard") == 71).then_some(())
    });
    assert_eq!(to.one::<i64>("select count(*) from heard"), 71);
    assert_eq!(
        to.one::<i64>("select count(*) from outbox.read(null, 1000)"),
        71
    );
    // Records of an audit trail are sealed where they have come to.
    until("the records to be sealed", || {
        (to.one::<i64>("select count(*) from outbox.audit_chain") == 7).then_some(())
    });
    assert!(to.one::<bool>("select intact from outbox.verify_audit()"));
}

#[test]
fn how_things_stand_in_another_database_is_left_out() {
    let cluster = publisher();
    cluster.createdb("copy");
    let (mut from, mut to) = (cluster.connect(), cluster.connect_to("copy"));
    from.run("create table plain (id int primary key, what text)");
    to.run("create table plain (id int primary key, what text)");
    for db in [&mut from, &mut to] {
        db.run("select outbox.create_sink('pull', 'pull')");
        db.run("select outbox.create_stream('billing')");
        db.run("select outbox.capture('plain', replicated => true)");
    }
    from.run(
        "select outbox.create_sink('theirs', 'pull'), outbox.set_secret('s', array['topsecret'])",
    );
    emit(&mut from, 1..=10);
    assert_eq!(pulled(&mut from, "pull").len(), 10);
    to.run("select outbox.emit('own', id => 'own' || n) from generate_series(1, 3) n");
    let state = "select string_agg(t::text, ' ') from (
        select (c.*)::text as t from outbox.clusters c union all select (s.*)::text from outbox.streams s
        union all select s.id || s.number from outbox.sinks s union all select c.name || c.window_no || c.txid || c.seq from outbox.cursors c
        union all select name from outbox.secrets order by 1) x";
    let before: String = to.one(state);
    subscribe(&cluster, "all tables");
    until_applied(&cluster);
    // All that changes over there.
    emit(&mut from, 11..=20);
    assert_eq!(pulled(&mut from, "pull").len(), 10);
    from.run("insert into plain values (1, 'a'), (2, 'b')");
    from.run("select outbox.emit('bill', id => 'bill', stream => 'billing')");
    from.run("select outbox.record_usage('vm', '2020-01-01', 'm', 1)");
    from.run("select outbox.drop_sink('theirs'), outbox.set_secret('s', null)");
    until_applied(&cluster);
    assert_eq!(to.one::<String>(state), before);
    assert_eq!(
        to.one::<i64>("select count(*) from outbox.usage_windows"),
        0
    );
    // 3 of its own, 20 and the two rows' of over there, and the rows' that are captured here.
    assert_eq!(pulled(&mut to, "pull").len(), 3 + 20 + 2 + 2);
    assert!(
        cluster
            .log()
            .contains("what logical replication brings for table outbox.cursors is left out")
    );
}

#[test]
fn an_own_event_outlives_a_truncate_elsewhere() {
    let cluster = publisher();
    cluster.createdb("copy");
    let (mut from, mut to) = (cluster.connect(), cluster.connect_to("copy"));
    emit(&mut from, 1..=3);
    to.run("select outbox.emit('own', id => 'own')");
    subscribe(&cluster, "table outbox.events");
    until_applied(&cluster);
    from.run("truncate outbox.events");
    until("the subscriber to refuse", || {
        cluster
            .log()
            .contains("table outbox.events is not truncated by logical replication")
            .then_some(())
    });
    to.run("alter subscription s disable");
    assert_eq!(to.one::<i64>("select count(*) from outbox.events"), 4);
}

#[test]
fn what_triggers_of_the_subscriber_write_is_its_own() {
    let cluster = publisher();
    cluster.createdb("copy");
    let (mut from, mut to) = (cluster.connect(), cluster.connect_to("copy"));
    from.run("create table plain (id int primary key)");
    to.run(
        "create table plain (id int primary key);
         create function note() returns trigger language plpgsql as $$ begin
             perform outbox.emit('note', id => 'note' || new.id);
             perform outbox.record_usage('vm', '2020-01-01', 'm', 1);
             return null;
         end $$;
         create trigger note after insert on plain for each row execute function note();
         alter table plain enable always trigger note;
         select outbox.create_sink('pull', 'pull')",
    );
    subscribe(&cluster, "table plain");
    from.run("insert into plain values (1), (2)");
    until_applied(&cluster);
    assert_eq!(sorted(pulled(&mut to, "pull")), ["note1", "note2"]);
    assert_eq!(
        to.one::<i64>("select quantity::bigint from outbox.usage_windows"),
        2
    );
}

#[test]
fn a_restore_that_keeps_triggers_off_keeps_positions() {
    let cluster = Cluster::start();
    let mut db = cluster.connect();
    db.run(
        "set session_replication_role = replica;
         insert into outbox.events (txid, seq, topic) overriding system value values ('5', 77, 'x');
         update outbox.events set topic = 'y';
         insert into outbox.parked (sink, txid, seq, time) values ('s', '5', 77, now())",
    );
    assert_eq!(
        db.one::<String>("select concat_ws(' ', txid, seq, topic) from outbox.events"),
        "5 77 y"
    );
    assert_eq!(db.one::<i64>("select count(*) from outbox.parked"), 1);
    db.run("delete from outbox.events");
    assert_eq!(db.one::<i64>("select count(*) from outbox.events"), 0);
}

#[test]
fn every_table_may_be_published() {
    let cluster = publisher();
    let mut db = cluster.connect();
    db.run("select outbox.create_stream('billing')");
    let without: Vec<String> = db.all(
        "select c.oid::regclass::text from pg_class c
          where c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'p')
            and not (c.relreplident = 'f'
                     or c.relreplident = 'd' and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and i.indimmediate))",
    );
    assert_eq!(without, Vec::<String>::new());
    let unguarded: Vec<String> = db.all(
        "select c.oid::regclass::text from pg_class c
          where c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'p')
            and (select count(*) from pg_trigger t where t.tgrelid = c.oid and t.tgname like 'outbox_replicated%' and t.tgenabled = 'R') <> 2",
    );
    assert_eq!(unguarded, Vec::<String>::new());
    // Re-basing updates and deletes.
    db.run("create publication p for all tables");
    emit(&mut db, 1..=5);
    db.run("select outbox.create_sink('pull', 'pull')");
    assert_eq!(pulled(&mut db, "pull").len(), 5);
    emit(&mut db, 6..=8);
    db.run("insert into outbox.clusters (system_identifier) values (1)");
    let again = pulled(&mut db, "pull");
    assert!(ids(6..=8).iter().all(|id| again.contains(id)), "{again:?}");
    assert_eq!(db.one::<i64>("select count(*) from outbox.clusters"), 1);
}
