//! Dump and restore: into the same cluster, and into one whose transaction ids have nothing to do with the old ones. What was not
//! delivered is delivered, nothing is skipped, what is new arrives.

mod scene;
mod workers;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;

use outbox_tests::{Cluster, Receiver, Reply, Sql, cluster, until};
use postgres::Client;
use scene::{
    dead_letters, emit, http_sink, ids, quick, status, until_dead, until_idle, until_status,
};
use serde_json::json;
use workers::{dispatcher, until_quiet, until_resting};

/// Takes a batch of a pull sink and acknowledges it.
#[track_caller]
fn pull(db: &mut Client, sink: &str, count: i64) -> Vec<String> {
    let taken = db.all(&format!("select id from outbox.poll('{sink}', {count})"));
    db.run(&format!("select outbox.ack('{sink}')"));
    taken
}

/// Everything that a pull sink has left.
#[track_caller]
fn pull_all(db: &mut Client, sink: &str) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let taken = pull(db, sink, 100);
        if taken.is_empty() {
            return all;
        }
        all.extend(taken);
    }
}

/// Uses up transaction ids.
fn burn_ids(db: &mut Client, count: u32) {
    db.run(&format!(
        "do $$ begin for i in 1..{count} loop perform pg_current_xact_id(); commit; end loop; end $$"
    ));
}

/// A database with something of everything in it, and nobody at work any more: events 1 to 40, of which 21 to 40 have not been
/// delivered to `web`.
fn filled(cluster: &Cluster, receiver: &Receiver) -> Client {
    let mut db = cluster.connect();
    receiver.reply_with(|request| {
        if String::from_utf8_lossy(&request.body).contains("\"subject\":\"3\"") {
            Reply::status(400)
        } else {
            Reply::ok()
        }
    });
    http_sink(&mut db, "web", receiver, json!({}), "batch_size => 5");
    db.run(
        "create table taken (id text);
         create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select id from unnest(e)';
         create function mend(e outbox.event) returns jsonb language sql as 'select e.payload';
         create role reader;
         select outbox.set_secret('signing', array['topsecret']);
         select outbox.create_sink('function', 'function', config => '{\"function\": \"take\"}');
         select outbox.create_sink('midway', 'pull');
         select outbox.create_sink('handed', 'pull');
         select outbox.create_sink('grouped', 'pull', \"grouping\" => 'transaction');
         select outbox.create_sink('through', 'pull');
         select outbox.create_sink('settings', 'pull', topics => array['a.*', 'b.>'], tenant => 't', filter => 'seq > 0',
             transform => 'mend(outbox.event)', batch_size => 7, enabled => false);
         select outbox.grant('reader', 'read', array['midway']);
         select outbox.create_stream('billing');
         select outbox.create_sink('bills', 'pull', stream => 'billing');",
    );
    for n in 0..4 {
        emit(&mut db, 5 * n + 1..=5 * n + 5);
    }
    until_dead(&mut db, "web", 1);
    until_idle(&mut db, "web");
    until("the function", || {
        (db.one::<i64>("select count(*) from taken") == 20).then_some(())
    });
    db.run("select outbox.stop()");
    receiver.clear();
    receiver.reply_always(Reply::ok());
    // The last with an id that is derived, not stored.
    emit(&mut db, 21..=39);
    db.run("insert into outbox.events (topic, id, subject) values ('test.numbered', null, '40')");
    db.run("select outbox.emit('bill', id => 'b' || n, stream => 'billing') from generate_series(1, 5) n");
    db.run("select outbox.tick('function')");

    for sink in ["midway", "handed"] {
        assert_eq!(pull(&mut db, sink, 12), ids(1..=12));
    }
    assert_eq!(
        db.all::<String>("select id from outbox.poll('handed', 10)"),
        ids(13..=22)
    );
    assert_eq!(pull(&mut db, "grouped", 10), ids(1..=10));
    assert_eq!(pull_all(&mut db, "through").len(), 40);
    assert_eq!(pull(&mut db, "bills", 2), ["b1", "b2"]);
    let twelfth: String =
        db.one("select position from outbox.read(max_events => 12) order by seq desc limit 1");
    db.run(&format!("select outbox.save_cursor('mine', '{twelfth}')"));
    db
}

/// What belongs to a database whatever cluster it is in.
fn lasting(db: &mut Client) -> Vec<String> {
    db.all(
        "select concat_ws('|', 'sink', k.id, k.kind, k.config, k.stream, k.start, k.topics, k.tenant, k.filter, k.transform, k.function,
                          k.batch_size, k.\"grouping\", k.enabled, k.owner, k.number) from outbox.sinks k
         union all
         select concat_ws('|', 'event', seq, topic, subject, \"time\", payload) from outbox.events
         union all
         select concat_ws('|', 'dead', sink, event, error, attempts) from outbox.dead_letters
         union all
         select concat_ws('|', 'stream', name, relation, sequence, builtin) from outbox.streams
         union all
         select concat_ws('|', 'grant', sink, role) from outbox.sink_grants
         order by 1",
    )
}

/// The id that an event without a stored one has.
fn derived_id(db: &mut Client) -> String {
    db.one("select id from outbox.read(max_events => 1000) where subject = '40'")
}

/// Whether what was filled is delivered as it should be, in a database into which it was restored; with more events than it held.
#[track_caller]
fn expect_undelivered(db: &mut Client, receiver: &Receiver, fortieth: &str, more: &[String]) {
    let from = |first: i64| -> Vec<String> {
        let mut wanted = ids(first..=39);
        wanted.push(fortieth.to_owned());
        wanted.extend_from_slice(more);
        wanted
    };
    receiver.wait_for_distinct(from(21).len());
    until_idle(db, "web");
    assert_eq!(receiver.ids(), from(21));
    let after: String = db.one("select outbox.cursor('mine')");
    let read: Vec<String> = db.all(&format!("select id from outbox.read('{after}', 1000)"));
    assert_eq!(read, from(13));
    for (sink, first) in [("midway", 13), ("handed", 13), ("grouped", 11)] {
        assert_eq!(pull_all(db, sink), from(first), "{sink}");
    }
    assert_eq!(pull_all(db, "through"), more);
    // All written in one transaction, whose id may be taken for one of this cluster: then they come once more.
    assert!(pull_all(db, "bills").ends_with(&["b3", "b4", "b5"].map(str::to_owned)));
    let wanted = 40 + more.len() as i64;
    until("the function", || {
        (db.one::<i64>("select count(distinct id) from taken") >= wanted).then_some(())
    });
    assert_eq!(db.one::<i64>("select count(*) from taken"), wanted);

    assert_eq!(dead_letters(db, "web")[0].id(), "n3");
    db.run("select outbox.redeliver('web')");
    until_status(db, "web", "no dead letter", |status| {
        status.dead_letters == 0
    });
    assert_eq!(receiver.ids().last().unwrap(), "n3");
    // Numbers go on where they were.
    assert!(db.one::<bool>(
        "select max(seq) filter (where topic = 'later') > max(seq) filter (where topic <> 'later') from outbox.events"
    ));
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.clusters where system_identifier = (select system_identifier from pg_control_system())"),
        db.one::<i64>("select count(*) from outbox.clusters")
    );
}

/// Writes two events of no one's table, and returns their ids.
fn write_later(db: &mut Client, first: i64) -> Vec<String> {
    db.run(&format!(
        "select outbox.emit('later', id => 'n' || n) from generate_series({first}, {}) n",
        first + 1
    ));
    ids(first..=first + 1)
}

/// A way to get a database out of one cluster and into another.
type Way = fn(&Cluster, &Cluster, &str);

fn by_psql(from: &Cluster, into: &Cluster, name: &str) {
    into.restore(name, &from.dump("app"));
}

fn finish(mut command: Command) -> Vec<u8> {
    let output = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    output.stdout
}

fn by_pg_restore_with(from: &Cluster, into: &Cluster, name: &str, options: &[&str]) {
    let file = into.socket_folder().join("dump");
    let mut dump = from.program("pg_dump");
    dump.args(["-Fc", "-f"]).arg(&file).arg("app");
    finish(dump);
    workers::admin(into).run(&format!("create database {name} template template0"));
    let mut restore = into.program("pg_restore");
    restore.args(["--exit-on-error", "-d", name]).args(options);
    finish({
        restore.arg(&file);
        restore
    });
}

fn by_pg_restore(from: &Cluster, into: &Cluster, name: &str) {
    by_pg_restore_with(from, into, name, &[]);
}

fn by_pg_restore_in_parallel(from: &Cluster, into: &Cluster, name: &str) {
    by_pg_restore_with(from, into, name, &["-j", "3"]);
}

fn by_pg_restore_at_once(from: &Cluster, into: &Cluster, name: &str) {
    by_pg_restore_with(from, into, name, &["--single-transaction"]);
}

/// A cluster without the extension to restore into.
fn target() -> cluster::Builder {
    quick().extension(false)
}

/// Restores into a cluster with a dispatcher that is at work all the time.
#[track_caller]
fn expect_restored(
    from: &Cluster,
    source: &mut Client,
    receiver: &Receiver,
    into: &Cluster,
    way: Way,
) {
    if !std::ptr::eq(from, into) {
        workers::admin(into).run("create role reader");
    }
    let fortieth = derived_id(source);
    let before = lasting(source);
    way(from, into, "restored");
    let mut db = into.connect_to("restored");
    dispatcher(into, "restored");
    receiver.wait_for_distinct(20);
    assert_eq!(lasting(&mut db), before);
    let more = write_later(&mut db, 41);
    expect_undelivered(&mut db, receiver, &fortieth, &more);
}

/// In a source whose ids are higher than the target's.
#[test]
fn a_dump_is_restored_where_ids_are_low() {
    for way in [by_psql as Way, by_pg_restore] {
        let from = quick().start();
        burn_ids(&mut from.connect(), 3_000);
        let receiver = Receiver::start();
        let mut source = filled(&from, &receiver);
        let into = target().apart().start();
        expect_restored(&from, &mut source, &receiver, &into, way);
    }
}

#[test]
fn a_dump_is_restored_where_ids_are_high() {
    for way in [by_psql as Way, by_pg_restore_in_parallel] {
        let from = quick().start();
        let receiver = Receiver::start();
        let mut source = filled(&from, &receiver);
        let into = target().apart().start();
        burn_ids(&mut into.connect(), 3_000);
        expect_restored(&from, &mut source, &receiver, &into, way);
    }
}

#[test]
fn a_dump_is_restored_where_ids_are_much_the_same() {
    for way in [by_pg_restore_at_once as Way, by_pg_restore_in_parallel] {
        let from = quick().start();
        let receiver = Receiver::start();
        let mut source = filled(&from, &receiver);
        let into = target().apart().start();
        expect_restored(&from, &mut source, &receiver, &into, way);
    }
}

#[test]
fn a_dump_is_restored_into_a_copy_of_its_cluster() {
    // They share their system identifier, but not their transactions.
    for (ids_there, ids_here) in [(3_000, 0), (0, 3_000)] {
        let from = quick().start();
        burn_ids(&mut from.connect(), ids_there + 1);
        let receiver = Receiver::start();
        let mut source = filled(&from, &receiver);
        let into = target().start();
        burn_ids(&mut into.connect(), ids_here + 1);
        expect_restored(&from, &mut source, &receiver, &into, by_psql);
    }
}

#[test]
fn a_dump_is_restored_beside_the_original() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut source = filled(&cluster, &receiver);
    let dump = cluster.dump("app");
    assert!(!dump.contains("topsecret"));
    assert!(!dump.contains("COPY outbox.secrets"));
    expect_restored(&cluster, &mut source, &receiver, &cluster, by_psql);

    // The original goes on as if nothing had been, and an old dump brings back what had not been delivered then.
    receiver.clear();
    let fortieth = derived_id(&mut source);
    assert!(source.one::<bool>("select outbox.start()"));
    let more = write_later(&mut source, 51);
    expect_undelivered(&mut source, &receiver, &fortieth, &more);
    receiver.clear();
    cluster.restore("old", &dump);
    let mut old = cluster.connect_to("old");
    receiver.wait_for_distinct(20);
    let more = write_later(&mut old, 61);
    expect_undelivered(&mut old, &receiver, &fortieth, &more);
    assert_eq!(old.one::<i64>("select count(*) from outbox.secrets"), 0);
}

#[test]
fn what_is_written_before_anybody_looks_is_delivered() {
    for higher in [false, true] {
        let from = quick().start();
        let into = target().apart().preload(false).start();
        burn_ids(&mut if higher { &into } else { &from }.connect(), 3_000);
        let receiver = Receiver::start();
        let mut source = filled(&from, &receiver);
        let fortieth = derived_id(&mut source);
        workers::admin(&into).run("create role reader");
        by_psql(&from, &into, "restored");
        let mut db = into.connect_to("restored");
        let mut more = write_later(&mut db, 41);
        // One that is open when the first look comes, and that look itself in a transaction that has written.
        let mut open = into.connect_to("restored");
        open.run("begin; select outbox.emit('later', id => 'open')");
        more.extend(write_later(&mut db, 43));
        db.run("begin; select outbox.emit('later', id => 'own1'); select * from outbox.read(); select outbox.emit('later', id => 'own2'); commit");
        more.extend(["own1".to_owned(), "own2".to_owned()]);
        more.extend(write_later(&mut db, 45));
        open.run("commit");
        more.extend(write_later(&mut db, 47));
        assert!(db.one::<bool>("select outbox.start()"));
        receiver.wait_for_distinct(20 + more.len() + 1);
        until_idle(&mut db, "web");
        let arrived = receiver.ids();
        let late = arrived
            .iter()
            .position(|id| id == "open")
            .expect("it arrives");
        let mut others = arrived.clone();
        others.remove(late);
        let mut wanted = ids(21..=39);
        wanted.push(fortieth.clone());
        wanted.extend(more.iter().cloned());
        assert_eq!(others, wanted, "{arrived:?}");
        // For all readers.
        for sink in ["midway", "grouped", "through"] {
            let got: BTreeSet<String> = pull_all(&mut db, sink).into_iter().collect();
            let missing: Vec<_> = more.iter().filter(|id| !got.contains(*id)).collect();
            assert!(
                missing.is_empty() && got.contains("open"),
                "{sink}: {missing:?}"
            );
        }
        let after: String = db.one("select outbox.cursor('mine')");
        let read: BTreeSet<String> = db
            .all::<String>(&format!("select id from outbox.read('{after}', 1000)"))
            .into_iter()
            .collect();
        assert!(more.iter().all(|id| read.contains(id)) && read.contains("open"));
        assert!(ids(13..=39).iter().all(|id| read.contains(id)));
    }
}

#[test]
fn nothing_is_delivered_until_the_restore_is_over() {
    let from = quick().start();
    burn_ids(&mut from.connect(), 3_000);
    let receiver = Receiver::start();
    let mut source = filled(&from, &receiver);
    let fortieth = derived_id(&mut source);
    // Both another cluster and this one: the one re-bases, the other need not.
    let elsewhere = target()
        .apart()
        .setting("outbox.poll_interval", "20ms")
        .setting("outbox.retention_min_age", "0")
        .setting("outbox.retention_interval", "20ms")
        .start();
    workers::admin(&elsewhere).run("create role reader");
    from.set("outbox.poll_interval", "20ms");
    for into in [&elsewhere, &from] {
        receiver.clear();
        workers::admin(into).run("create database slow template template0");
        let dump = from.dump("app");
        let mut psql = into.program("psql");
        psql.args([
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            "slow",
        ]);
        psql.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut psql = psql.spawn().expect("psql starts");
        let mut input = psql.stdin.take().unwrap();
        let mut output = BufReader::new(psql.stdout.take().unwrap()).lines();
        let mut look = into.connect_to("slow");
        let mut restorer_was_told = false;
        let mut sinks_were_there = false;
        for (n, part) in dump.split("\nCOPY ").enumerate() {
            let copy = if n > 0 { "\nCOPY " } else { "" };
            writeln!(input, "{copy}{part}\nselect 'part {n} done';").unwrap();
            input.flush().unwrap();
            output
                .by_ref()
                .map_while(Result::ok)
                .find(|line| line.starts_with(&format!("part {n} done")))
                .expect("psql goes on");
            // Let the dispatcher see what is there so far.
            let there = look.one::<bool>(
                "select exists (select from pg_extension where extname = 'pg_outbox')",
            );
            if there {
                let pid = dispatcher(into, "slow");
                for _ in 0..5 {
                    workers::admin(into).run("select pg_current_xact_id()");
                    until_resting(into, pid);
                }
                assert_eq!(receiver.count(), 0, "after part {n}");
                sinks_were_there |= look.one::<bool>("select exists (select from outbox.sinks)");
                if look.one::<bool>("select exists (select from outbox.status where waiting_for like 'the end of the session with pid %')") {
                    restorer_was_told = true;
                    assert_eq!(look.refused("select * from outbox.read()").sqlstate, "55006");
                    assert_eq!(look.refused("select * from outbox.poll('midway')").sqlstate, "55006");
                    assert_eq!(look.refused("select outbox.tick()").sqlstate, "55006");
                    assert_eq!(look.refused("select outbox.prune()").sqlstate, "55006");
                }
            }
        }
        assert!(restorer_was_told && sinks_were_there);
        drop(input);
        assert!(psql.wait().unwrap().success());
        let more = write_later(&mut look, 41);
        receiver.wait_for_distinct(22);
        until_idle(&mut look, "web");
        let mut wanted = ids(21..=39);
        wanted.push(fortieth.clone());
        wanted.extend(more);
        assert_eq!(receiver.ids(), wanted);
        let left = pull_all(&mut look, "midway");
        assert_eq!(left[..27], ids(13..=39));
    }
}

#[test]
fn a_cluster_whose_identifier_changes_goes_on_with_everything() {
    // As pg_upgrade does it: same database, same transaction ids, another identifier; here with everybody at work.
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "batch_size => 5");
    http_sink(
        &mut db,
        "slow",
        &receiver,
        json!({}),
        "batch_size => 1, enabled => false",
    );
    db.run(
        "create table taken (id text);
         create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select id from unnest(e)';
         select outbox.create_sink('function', 'function', config => '{\"function\": \"take\"}');
         select outbox.create_sink('grouped', 'pull', \"grouping\" => 'transaction');",
    );
    let (stop, written) = (AtomicBool::new(false), [const { AtomicI64::new(0) }; 3]);
    thread::scope(|scope| {
        for (lane, written) in written.iter().enumerate() {
            let (cluster, stop) = (&cluster, &stop);
            scope.spawn(move || {
                let mut db = cluster.connect();
                while !stop.load(Ordering::Relaxed) {
                    let n = written.load(Ordering::Relaxed);
                    let first = lane as i64 * 1_000_000 + n;
                    // The second lane takes its time, so that something is always open.
                    let pause = if lane == 1 { 0.05 } else { 0.005 };
                    db.run(&format!(
                        "begin; select outbox.emit('x', id => 'n{first}'); select pg_sleep({pause}); select outbox.emit('x', id => 'n{}'); commit",
                        first + 1
                    ));
                    written.store(n + 2, Ordering::Relaxed);
                }
            });
        }
        let mut admin = cluster.connect();
        for _ in 0..6 {
            let before: Vec<_> = written.iter().map(|n| n.load(Ordering::Relaxed)).collect();
            until("every lane to write", || {
                let now = written.iter().map(|n| n.load(Ordering::Relaxed));
                now.zip(&before)
                    .all(|(now, before)| now > *before)
                    .then_some(())
            });
            admin.run("update outbox.clusters set system_identifier = system_identifier - 1");
            until("the re-basing", || {
                admin
                    .one::<bool>("select system_identifier = (select system_identifier from pg_control_system()) from outbox.clusters")
                    .then_some(())
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut wanted = BTreeSet::new();
    for (lane, written) in written.iter().enumerate() {
        let first = lane as i64 * 1_000_000;
        wanted.extend(ids(first..first + written.load(Ordering::Relaxed)));
    }
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.events"),
        wanted.len() as i64
    );
    receiver.wait_for_distinct(wanted.len());
    until_idle(&mut db, "web");
    until_idle(&mut db, "function");
    let taken: Vec<String> = db.all("select distinct id from taken");
    let pulled = pull_all(&mut db, "grouped");
    receiver.clear();
    db.run("select outbox.resume_sink('slow')");
    receiver.wait_for_distinct(wanted.len());
    for got in [taken, pulled, receiver.ids()] {
        let got: BTreeSet<String> = got.into_iter().collect();
        let missing: Vec<_> = wanted.difference(&got).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

#[test]
fn a_database_that_was_restored_can_be_dumped_and_restored_again() {
    let first = quick().start();
    burn_ids(&mut first.connect(), 3_000);
    let receiver = Receiver::start();
    let mut source = filled(&first, &receiver);
    let fortieth = derived_id(&mut source);
    let second = target().apart().start();
    workers::admin(&second).run("create role reader");
    by_psql(&first, &second, "app2");
    let mut db = second.connect_to("app2");
    receiver.wait_for_distinct(20);
    until_idle(&mut db, "web");
    db.run("select outbox.stop()");
    until_quiet(&second, "app2");
    receiver.clear();
    let more = write_later(&mut db, 41);
    assert_eq!(status(&mut db, "web").lag_events, 2);
    let dump = second.dump("app2");
    let third = target().apart().start();
    workers::admin(&third).run("create role reader");
    burn_ids(&mut third.connect(), 100);
    third.restore("app3", &dump);
    let mut db = third.connect_to("app3");
    receiver.wait_for_distinct(2);
    until_idle(&mut db, "web");
    assert_eq!(receiver.ids(), more);
    let mut wanted = ids(13..=39);
    wanted.push(fortieth);
    wanted.extend(more);
    assert_eq!(pull_all(&mut db, "midway"), wanted);
}
