//! Retention: events go when every cursor of their stream has passed them and they are old enough, and not before.

mod scene;
mod workers;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, status, until_dead, until_idle, until_status};
use serde_json::json;
use workers::dispatcher;

/// Without a dispatcher; what is passed may go at once.
fn still() -> Cluster {
    Cluster::builder()
        .preload(false)
        .setting("outbox.retention_min_age", "0")
        .start()
}

/// With a dispatcher that retains all the time.
fn eager() -> Cluster {
    quick()
        .setting("outbox.retention_min_age", "0")
        .setting("outbox.retention_interval", "20ms")
        .start()
}

#[track_caller]
fn prune(db: &mut Client) -> i64 {
    db.one("select outbox.prune()")
}

/// What the stream still holds.
#[track_caller]
fn stored(db: &mut Client) -> Vec<String> {
    db.all("select id from outbox.events order by seq")
}

/// Takes a batch of a pull sink and acknowledges it.
#[track_caller]
fn pull(db: &mut Client, sink: &str, count: i64) -> Vec<String> {
    let taken = db.all(&format!("select id from outbox.poll('{sink}', {count})"));
    db.run(&format!("select outbox.ack('{sink}')"));
    taken
}

#[track_caller]
fn pull_all(db: &mut Client, sink: &str) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let taken = pull(db, sink, 1000);
        if taken.is_empty() {
            return all;
        }
        all.extend(taken);
    }
}

/// The position of the event with this id.
#[track_caller]
fn position(db: &mut Client, id: &str) -> String {
    db.one(&format!(
        "select outbox.format_position(txid, seq) from outbox.events where id = '{id}'"
    ))
}

#[test]
fn the_slowest_cursor_holds_everything_behind_it() {
    let cluster = still();
    let mut db = cluster.connect();
    emit(&mut db, 1..=20);
    assert_eq!(prune(&mut db), 0, "without a cursor everything stays");
    db.run("select outbox.create_sink('through', 'pull'), outbox.create_sink('midway', 'pull')");
    assert_eq!(pull_all(&mut db, "through").len(), 20);
    assert_eq!(prune(&mut db), 0, "a sink that has had nothing");

    // In the middle of a window; what is handed out and not acknowledged has not been passed.
    assert_eq!(pull(&mut db, "midway", 5), ids(1..=5));
    db.run("select outbox.poll('midway', 5)");
    assert_eq!(prune(&mut db), 5);
    assert_eq!(stored(&mut db), ids(6..=20));
    let eighth = position(&mut db, "n8");
    assert!(db.one::<bool>(&format!("select outbox.ack('midway', '{eighth}')")));
    assert_eq!(prune(&mut db), 3);

    // A reader that keeps a pair.
    let tenth = position(&mut db, "n10");
    db.run(&format!("select outbox.save_cursor('mine', '{tenth}')"));
    assert_eq!(pull_all(&mut db, "midway"), ids(9..=20));
    assert_eq!(prune(&mut db), 2);
    assert_eq!(stored(&mut db), ids(11..=20));
    // A sink that is paused.
    db.run("select outbox.create_sink('paused', 'pull', enabled => false)");
    db.run("select outbox.drop_cursor('mine')");
    assert_eq!(prune(&mut db), 0);
    assert_eq!(status(&mut db, "paused").lag_events, 10);
    // A sink that is given up, and its cursor with it.
    db.run("select outbox.drop_sink('paused')");
    assert_eq!(prune(&mut db), 10);
    assert!(stored(&mut db).is_empty());

    // Whoever comes later begins with what is left.
    emit(&mut db, 21..=22);
    db.run("select outbox.create_sink('late', 'pull')");
    assert_eq!(pull_all(&mut db, "late"), ids(21..=22));
    assert_eq!(pull_all(&mut db, "through"), ids(21..=22));
    db.run("select outbox.drop_sink(id) from outbox.sinks");
    assert_eq!(prune(&mut db), 0, "without a cursor everything stays");
    assert_eq!(stored(&mut db), ids(21..=22));
}

#[test]
fn streams_are_kept_apart() {
    let cluster = still();
    let mut db = cluster.connect();
    db.run("select outbox.create_stream('billing'), outbox.create_stream('nobodys')");
    for stream in ["outbox", "billing", "nobodys"] {
        db.run(&format!(
            "select outbox.emit('x', stream => '{stream}') from generate_series(1, 10)"
        ));
    }
    db.run("select outbox.create_sink('a', 'pull'), outbox.create_sink('b', 'pull', stream => 'billing')");
    assert_eq!(pull_all(&mut db, "a").len(), 10);
    assert_eq!(prune(&mut db), 10);
    assert_eq!(pull(&mut db, "b", 4).len(), 4);
    assert_eq!(db.one::<i64>("select outbox.prune('outbox')"), 0);
    assert_eq!(db.one::<i64>("select outbox.prune('nobodys')"), 0);
    assert_eq!(db.one::<i64>("select outbox.prune('billing')"), 4);
    assert_eq!(db.one::<i64>("select count(*) from outbox.nobodys"), 10);
    assert_eq!(
        db.refused("select outbox.prune('missing')").sqlstate,
        "42704"
    );

    // Whoever drops a stream and whoever prunes it do not get into each other's way.
    db.run("begin; select outbox.prune('nobodys')");
    thread::scope(|scope| {
        let mut other = cluster.connect();
        let dropping =
            scope.spawn(move || other.run("begin; select outbox.drop_stream('nobodys')"));
        until("the drop to wait", || {
            workers::admin(&cluster)
                .one::<bool>("select exists (select from pg_locks where not granted)")
                .then_some(())
        });
        db.run("commit");
        dropping.join().unwrap();
    });
    let mut dropping = cluster.connect();
    db.run(
        "select outbox.create_stream('once_more'); select outbox.emit('x', stream => 'once_more');
            select outbox.create_sink('c', 'pull', stream => 'once_more')",
    );
    assert_eq!(pull_all(&mut db, "c").len(), 1);
    db.run("select outbox.drop_sink('c')");
    // The dispatcher may have a transaction open just now, behind which nothing can be read by pairs.
    until("the event to be readable", || {
        db.one::<Option<String>>("select outbox.tail('once_more')")
    });
    db.run("select outbox.save_cursor('c', outbox.tail('once_more'), 'once_more')");
    dropping.run("begin; select outbox.drop_stream('once_more')");
    assert_eq!(prune(&mut db), 0, "it waits for nobody");
    dropping.run("rollback");
    assert_eq!(prune(&mut db), 1);
}

#[test]
fn what_is_young_stays() {
    let cluster = quick().setting("outbox.enabled", "off").start();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('a', 'pull')");
    emit(&mut db, 1..=3);
    db.run(
        "insert into outbox.events (topic, id, \"time\")
         values ('x', 'older', now() - interval '61 min'), ('x', 'younger', now() - interval '59 min'),
                ('x', 'oldest', '-infinity'), ('x', 'never', 'infinity')",
    );
    assert_eq!(pull_all(&mut db, "a").len(), 7);
    assert_eq!(prune(&mut db), 2);
    assert_eq!(stored(&mut db), ["n1", "n2", "n3", "younger", "never"]);
    cluster.set("outbox.retention_min_age", "30min");
    until("the setting to arrive", || {
        (db.one::<String>("show outbox.retention_min_age") == "30min").then_some(())
    });
    assert_eq!(prune(&mut db), 1);
    cluster.set("outbox.retention_min_age", "0");
    until("the setting to arrive", || {
        (db.one::<String>("show outbox.retention_min_age") == "0").then_some(())
    });
    assert_eq!(prune(&mut db), 3);
    assert_eq!(stored(&mut db), ["never"]);
}

#[test]
fn a_transaction_that_is_not_through_stays_whole_from_there_on() {
    let cluster = still();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('g', 'pull', \"grouping\" => 'transaction')");
    // Two that overlap: 'late' begins first and ends last.
    let mut late = cluster.connect();
    late.run("begin; select outbox.emit('x', id => 'late1')");
    emit(&mut db, 1..=4);
    late.run("select outbox.emit('x', id => 'late2'); commit");
    emit(&mut db, 5..=6);
    assert_eq!(pull(&mut db, "g", 4), ids(1..=4));
    assert_eq!(prune(&mut db), 4);
    assert_eq!(stored(&mut db), ["late1", "late2", "n5", "n6"]);
    // In the middle of a transaction.
    let batch: Vec<String> = db.all("select position from outbox.poll('g', 2)");
    db.run(&format!("select outbox.ack('g', '{}')", batch[0]));
    assert_eq!(prune(&mut db), 1);
    assert_eq!(stored(&mut db), ["late2", "n5", "n6"]);
    assert_eq!(pull_all(&mut db, "g"), ["late2", "n5", "n6"]);
    assert_eq!(prune(&mut db), 3);
}

/// Transactions that have drawn their numbers and not committed: reads that begin behind what is pruned must not begin behind these.
#[test]
fn what_is_not_committed_yet_is_not_passed_over() {
    let cluster = still();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('a', 'pull'), outbox.create_sink('g', 'pull', \"grouping\" => 'transaction')");
    db.run("select outbox.save_cursor('mine', '0:0')");
    emit(&mut db, 1..=1);
    let mut open = cluster.connect();
    open.run("begin; select outbox.emit('x', id => 'open1')");
    let mut nested = cluster.connect();
    nested.run("begin; savepoint s; select outbox.emit('x', id => 'nested'); release s");
    db.run("begin; select outbox.emit('x', id => 'prepared'); prepare transaction 'p'");
    // Has its id, but has not drawn a number yet.
    let mut idle = cluster.connect();
    idle.run("begin; select pg_current_xact_id()");
    let mut arrived = [Vec::new(), Vec::new()];
    let mut pruned = 0;
    for n in 0..6 {
        emit(&mut db, 2 + 10 * n..=11 + 10 * n);
        for (sink, arrived) in ["a", "g"].into_iter().zip(&mut arrived) {
            arrived.extend(pull_all(&mut db, sink));
        }
        // The reader by pairs waits for what is open.
        db.run("select outbox.save_cursor('mine', coalesce(outbox.tail(), '0:0'))");
        db.run("select outbox.drop_cursor('mine')");
        pruned += prune(&mut db);
        match n {
            1 => open.run("select outbox.emit('x', id => 'open2'); commit"),
            2 => db.run("commit prepared 'p'"),
            3 => nested.run("commit"),
            4 => idle.run("select outbox.emit('x', id => 'idle'); commit"),
            _ => {}
        }
        // A prune in a transaction that has written itself sees what it has not committed.
        db.run(&format!(
            "begin; select outbox.emit('x', id => 'own{n}'); select outbox.prune(); commit"
        ));
    }
    for (sink, arrived) in ["a", "g"].into_iter().zip(&mut arrived) {
        arrived.extend(pull_all(&mut db, sink));
        let mut wanted = ids(1..=61);
        for id in ["open1", "open2", "prepared", "nested", "idle"] {
            wanted.push(id.to_owned());
        }
        wanted.extend((0..6).map(|n| format!("own{n}")));
        wanted.sort();
        arrived.sort();
        assert_eq!(*arrived, wanted, "{sink}");
    }
    prune(&mut db);
    assert!(pruned > 0);
    assert!(stored(&mut db).is_empty());
}

#[test]
fn many_steps_are_taken_and_remembered() {
    let cluster = still();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('a', 'pull')");
    db.run("insert into outbox.events (topic) select 'x' from generate_series(1, 25000)");
    // Gaps, as rollbacks leave them.
    db.run("begin; insert into outbox.events (topic) select 'x' from generate_series(1, 5000); rollback");
    db.run("insert into outbox.events (topic) select 'x' from generate_series(1, 25000)");
    assert_eq!(pull_all(&mut db, "a").len(), 50_000);
    // A snapshot of long ago: nothing that is removed can be vacuumed, and reads must not walk over it.
    let mut old = cluster.connect();
    old.run("begin isolation level repeatable read; select count(*) from outbox.events");
    emit(&mut db, 1..=3);
    assert_eq!(prune(&mut db), 50_000);
    assert_eq!(stored(&mut db), ids(1..=3));
    let (pruned, first): (i64, i64) = {
        let row = db
            .query_one(
                "select pruned_seq, (select min(seq) from outbox.events) from outbox.streams where name = 'outbox'",
                &[],
            )
            .unwrap();
        (row.get(0), row.get(1))
    };
    assert!(pruned < first && pruned > first - 3000, "{pruned}, {first}");
    db.run("select outbox.create_sink('new', 'pull')");
    let plan: serde_json::Value = db.one(
        "explain (analyze, buffers, timing off, format json) select * from outbox.poll('new')",
    );
    let plan = &plan[0]["Plan"];
    let touched =
        plan["Shared Hit Blocks"].as_i64().unwrap() + plan["Shared Read Blocks"].as_i64().unwrap();
    assert!(touched < 5_000, "{touched} blocks for three events");
    db.run("select outbox.ack('new')");
    assert_eq!(pull_all(&mut db, "a"), ids(1..=3));
    assert_eq!(prune(&mut db), 3);
}

#[test]
fn dead_letters_stay() {
    let cluster = eager();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_with(|request| {
        if String::from_utf8_lossy(&request.body).contains("\"subject\":\"2\"") {
            Reply::status(400)
        } else {
            Reply::ok()
        }
    });
    http_sink(&mut db, "a", &receiver, json!({}), "");
    emit(&mut db, 1..=5);
    until_dead(&mut db, "a", 1);
    until_idle(&mut db, "a");
    until("retention", || stored(&mut db).is_empty().then_some(()));
    receiver.reply_always(Reply::ok());
    db.run("select outbox.redeliver('a')");
    until_status(&mut db, "a", "no dead letter", |status| {
        status.dead_letters == 0
    });
    assert_eq!(receiver.ids().last().unwrap(), "n2");
}

#[test]
fn the_dispatcher_retains_while_it_delivers() {
    let cluster = eager();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "a", &receiver, json!({}), "batch_size => 100");
    db.run("select outbox.create_sink('slow', 'pull')");
    let pid = dispatcher(&cluster, "app");
    emit(&mut db, 1..=8000);
    receiver.wait_for(8000);
    until_idle(&mut db, "a");
    assert_eq!(stored(&mut db).len(), 8000, "the pull sink holds them");
    assert_eq!(pull_all(&mut db, "slow").len(), 8000);
    for n in 8001..=8020 {
        emit(&mut db, n..=n);
        receiver.wait_for(usize::try_from(n).unwrap());
    }
    assert_eq!(pull_all(&mut db, "slow"), ids(8001..=8020));
    until("retention", || stored(&mut db).is_empty().then_some(()));
    // An interval that is changed is taken up, also a long one.
    cluster.set("outbox.retention_interval", "1h");
    until("the setting to arrive", || {
        (db.one::<String>("show outbox.retention_interval") == "1h").then_some(())
    });
    emit(&mut db, 8021..=8021);
    receiver.wait_for(8021);
    assert_eq!(pull_all(&mut db, "slow"), ids(8021..=8021));
    cluster.set("outbox.retention_interval", "20ms");
    until("retention", || stored(&mut db).is_empty().then_some(()));
    assert_eq!(dispatcher(&cluster, "app"), pid);
}

#[test]
fn nothing_is_lost_while_everybody_writes_reads_and_prunes() {
    let cluster = eager();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "batch_size => 20");
    db.run(
        "create table taken (id text);
         create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select id from unnest(e)';
         select outbox.create_sink('function', 'function', config => '{\"function\": \"take\"}');
         select outbox.create_sink('pulled', 'pull');
         select outbox.create_sink('grouped', 'pull', \"grouping\" => 'transaction');
         select outbox.save_cursor('reader', '0:0');",
    );
    const LANES: i64 = 4;
    const EACH: i64 = 60;
    let done = AtomicBool::new(false);
    let (pulled, grouped, read) = thread::scope(|scope| {
        let writers: Vec<_> = (0..LANES)
            .map(|lane| {
                let cluster = &cluster;
                scope.spawn(move || {
                    let mut db = cluster.connect();
                    for n in 0..EACH {
                        let id = 10_000 * lane + 2 * n + 1;
                        db.run(&format!("begin; select outbox.emit('x', id => 'n{id}')"));
                        // Some stay open for long, with a low number.
                        let pause = if (n + lane) % 10 == 0 { 300 } else { 5 };
                        thread::sleep(Duration::from_millis(pause));
                        db.run(&format!("select outbox.emit('x', id => 'n{}')", id + 1));
                        match (n + lane) % 5 {
                            0 => {
                                let gid = format!("g{id}");
                                db.run(&format!("prepare transaction '{gid}'"));
                                thread::sleep(Duration::from_millis(30));
                                db.run(&format!("commit prepared '{gid}'"));
                            }
                            1 => {
                                db.run("rollback");
                                db.run(&format!(
                                    "insert into outbox.events (topic, id) values ('x', 'n{id}'), ('x', 'n{}')",
                                    id + 1
                                ));
                            }
                            _ => db.run("commit"),
                        }
                    }
                })
            })
            .collect();
        let consume = |sink: &'static str| {
            let (cluster, done) = (&cluster, &done);
            scope.spawn(move || {
                let mut db = cluster.connect();
                let mut got = Vec::new();
                loop {
                    let last = done.load(Ordering::Relaxed);
                    got.extend(pull(&mut db, sink, 7));
                    if last {
                        got.extend(pull_all(&mut db, sink));
                        return got;
                    }
                }
            })
        };
        let (by_pull, by_group) = (consume("pulled"), consume("grouped"));
        let reader = scope.spawn(|| {
            let mut db = cluster.connect();
            let mut got = Vec::new();
            loop {
                let last = done.load(Ordering::Relaxed);
                loop {
                    let rows = db
                        .query(
                            "select id, position from outbox.read(outbox.cursor('reader'), 10)",
                            &[],
                        )
                        .unwrap();
                    let Some(end) = rows.last() else { break };
                    let end: String = end.get(1);
                    got.extend(rows.iter().map(|row| row.get::<_, String>(0)));
                    db.run(&format!("select outbox.save_cursor('reader', '{end}')"));
                }
                if last {
                    return got;
                }
            }
        });
        let pruner = scope.spawn(|| {
            let mut db = cluster.connect();
            while !done.load(Ordering::Relaxed) {
                prune(&mut db);
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        pruner.join().unwrap();
        let got = (by_pull.join(), by_group.join(), reader.join());
        (got.0.unwrap(), got.1.unwrap(), got.2.unwrap())
    });
    let wanted: BTreeSet<String> = (0..LANES)
        .flat_map(|lane| ids(10_000 * lane + 1..=10_000 * lane + 2 * EACH))
        .collect();
    receiver.wait_for_distinct(wanted.len());
    until("the function to have had all", || {
        (db.one::<i64>("select count(*) from taken") >= wanted.len() as i64).then_some(())
    });
    let taken: Vec<String> = db.all("select id from taken");
    for (what, got) in [
        ("pulled", pulled),
        ("grouped", grouped),
        ("read", read),
        ("taken", taken),
    ] {
        assert_eq!(got.len(), wanted.len(), "{what}");
        let got: BTreeSet<String> = got.into_iter().collect();
        assert!(got == wanted, "{what}");
    }
    let web: BTreeSet<String> = receiver.ids().into_iter().collect();
    assert_eq!(web, wanted);
    until("retention to remove all", || {
        stored(&mut db).is_empty().then_some(())
    });
}
