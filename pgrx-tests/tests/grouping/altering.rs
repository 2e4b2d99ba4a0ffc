//! A sink that is altered while a window of its stream is half through.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use postgres::Client;
use serde_json::json;

use super::scene::{http_sink, quick, status, until_idle, until_status};
use super::write;

/// A function that writes down what it gets, and fails as long as a topic of it is refused.
const TAKE: &str =
    "create table seen (n bigint generated always as identity, topic text, subject text);
    create table refused (topic text);
    create function take(events outbox.event[]) returns void language plpgsql as $$
        begin
            if exists (select from refused r, unnest(events) e where e.topic = r.topic) then
                raise 'not now';
            end if;
            insert into seen (topic, subject) select topic, subject from unnest(events);
        end $$";

fn function_sink(db: &mut Client, grouping: &str, batch_size: i32) {
    db.run(&format!(
        r#"select outbox.create_sink('fn', 'function', config => '{{"function": "take"}}', "grouping" => '{grouping}',
                                     batch_size => {batch_size}, enabled => false)"#
    ));
}

fn seen(db: &mut Client) -> Vec<String> {
    db.all("select topic || subject from seen order by n")
}

/// A receiver that takes no request with an event of topic `b` as long as it is closed.
fn closed() -> (Receiver, &'static AtomicBool) {
    let is_closed: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(true)));
    let receiver = Receiver::start();
    receiver.reply_with(move |request| {
        let body = String::from_utf8_lossy(&request.body);
        if is_closed.load(Ordering::SeqCst) && body.contains(r#""type":"b""#) {
            Reply::status(503)
        } else {
            Reply::ok()
        }
    });
    (receiver, is_closed)
}

/// Transaction `a` within transaction `b`: b1 a1 a2 b2.
fn interleave(cluster: &Cluster) {
    let (mut a, mut b) = (cluster.connect(), cluster.connect());
    b.run("begin; select outbox.emit('b', subject => '1')");
    write(&mut a, "a", 2);
    b.run("select outbox.emit('b', subject => '2'); commit");
}

#[test]
fn what_was_begun_by_transactions_is_ended_so() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(TAKE);
    db.run("insert into refused values ('b')");
    let (receiver, is_closed) = closed();
    function_sink(&mut db, "transaction", 2);
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        r#""grouping" => 'transaction', batch_size => 2, enabled => false"#,
    );
    interleave(&cluster);
    for sink in ["fn", "web"] {
        db.run(&format!("select outbox.resume_sink('{sink}')"));
        until_status(&mut db, sink, "a half through", |status| {
            status.delivered == 2 && status.attempts > 0 && status.lag_events == 2
        });
        db.run(&format!(
            "select outbox.alter_sink('{sink}', \"grouping\" => 'event')"
        ));
        // It has been taken up again, as altered, and fails again.
        until_status(&mut db, sink, "tried again", |status| {
            status.attempts > 0 && status.lag_events == 2
        });
    }
    db.run("truncate refused");
    is_closed.store(false, Ordering::SeqCst);
    for sink in ["fn", "web"] {
        until_idle(&mut db, sink);
    }
    assert_eq!(seen(&mut db), ["a1", "a2", "b1", "b2"]);
    let whole = receiver.events();
    assert_eq!(whole.len(), 4);
    assert!(
        whole
            .iter()
            .all(|event| event.extensions["transactioncount"] == "2")
    );
    // From the next window on, as asked for.
    write(&mut db, "c", 2);
    let events = receiver.wait_for(6);
    assert!(!events[5].extensions.contains_key("transaction"));
}

#[test]
fn what_was_begun_by_events_is_ended_so() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(TAKE);
    db.run("insert into refused values ('b')");
    let (receiver, is_closed) = closed();
    function_sink(&mut db, "event", 1);
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        "batch_size => 1, enabled => false",
    );
    // The first two of a transaction, and of another one in between, are through when a third fails.
    let (mut a, mut b) = (cluster.connect(), cluster.connect());
    a.run("begin; select outbox.emit('a', subject => '1')");
    b.run("begin; select outbox.emit('c', subject => '1')");
    a.run("select outbox.emit('a', subject => '2'), outbox.emit('b', subject => '1'), outbox.emit('a', subject => '3'); commit");
    b.run("select outbox.emit('c', subject => '2'); commit");
    for sink in ["fn", "web"] {
        db.run(&format!("select outbox.resume_sink('{sink}')"));
        until_status(&mut db, sink, "a half through", |status| {
            status.delivered == 3 && status.attempts > 0 && status.lag_events == 3
        });
        db.run(&format!(
            "select outbox.alter_sink('{sink}', \"grouping\" => 'transaction', batch_size => 3)"
        ));
    }
    db.run("truncate refused");
    is_closed.store(false, Ordering::SeqCst);
    let all = ["a1", "c1", "a2", "b1", "a3", "c2"];
    for sink in ["fn", "web"] {
        until_idle(&mut db, sink);
    }
    assert_eq!(seen(&mut db), all);
    assert_eq!(receiver.events().len(), all.len());
    write(&mut db, "d", 3);
    let events = receiver.wait_for(9);
    assert_eq!(events[8].extensions["transactioncount"], "3");
}

#[test]
fn a_large_transaction_goes_on_where_it_was_in_batches_of_any_size() {
    // With fewer, an event behind the failing one is tried to tell it from an outage, and may arrive before it.
    let cluster = quick().setting("outbox.poison_attempts", "1000").start();
    let mut db = cluster.connect();
    db.run(TAKE);
    let (receiver, is_closed) = closed();
    db.run("insert into refused values ('b')");
    function_sink(&mut db, "transaction", 4);
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        r#""grouping" => 'transaction', batch_size => 4, enabled => false"#,
    );
    db.run(
        "select outbox.emit(case n when 30 then 'b' else 'a' end, subject => n::text) from generate_series(1, 60) n",
    );
    for sink in ["fn", "web"] {
        db.run(&format!("select outbox.resume_sink('{sink}')"));
        for change in [
            "batch_size => 7",
            r#"batch_size => 3, "grouping" => 'event'"#,
            r#"batch_size => 11, "grouping" => 'transaction'"#,
        ] {
            until_status(&mut db, sink, "trouble", |status| {
                (20..30).contains(&status.delivered) && status.attempts > 0
            });
            db.run(&format!("select outbox.alter_sink('{sink}', {change})"));
        }
    }
    db.run("truncate refused");
    is_closed.store(false, Ordering::SeqCst);
    for sink in ["fn", "web"] {
        until_idle(&mut db, sink);
    }
    let once: Vec<i64> = db.all("select subject::bigint from seen order by n");
    assert_eq!(once, (1..=60).collect::<Vec<_>>());
    for (event, n) in receiver.events().iter().zip(1..) {
        assert_eq!(event.extensions["transactionindex"], n.to_string());
        assert_eq!(event.extensions["transactioncount"], "60");
    }
    assert_eq!(receiver.events().len(), 60);
}

#[test]
fn a_batch_that_was_handed_out_stays_the_same() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    let poll = "select topic || subject from outbox.poll('pull', 3)";
    for (before, after) in [("transaction", "event"), ("event", "transaction")] {
        db.run(&format!(
            "select outbox.create_sink('pull', 'pull', start => 'tail', \"grouping\" => '{before}')"
        ));
        interleave(&cluster);
        let first = db.all::<String>(poll);
        db.run(&format!(
            "select outbox.alter_sink('pull', \"grouping\" => '{after}')"
        ));
        assert_eq!(db.all::<String>(poll), first, "{before}");
        let position: String = db.one(&format!(
            "select position from outbox.poll('pull', 3) offset {} limit 1",
            first.len() - 1
        ));
        assert!(db.one::<bool>(&format!("select outbox.ack('pull', '{position}')")));
        assert_eq!(status(&mut db, "pull").lag_events, 4 - first.len() as i64);
        let mut all = first;
        all.extend(db.all::<String>(poll));
        assert!(db.one::<bool>("select outbox.ack('pull')"));
        let expected = match before {
            "event" => ["b1", "a1", "a2", "b2"],
            _ => ["a1", "a2", "b1", "b2"],
        };
        assert_eq!(all, expected);
        assert_eq!(db.all::<String>(poll), Vec::<String>::new());
        // The next window is read as asked for.
        interleave(&cluster);
        let next = db.all::<String>(poll);
        assert_eq!(next[0], if after == "event" { "b1" } else { "a1" });
        db.run("select outbox.drop_sink('pull')");
    }
}

#[test]
fn retention_keeps_what_an_altered_sink_has_not_had() {
    let cluster = Cluster::builder()
        .preload(false)
        .setting("outbox.retention_min_age", "0")
        .start();
    let mut db = cluster.connect();
    db.run(r#"select outbox.create_sink('pull', 'pull', "grouping" => 'transaction')"#);
    interleave(&cluster);
    let poll = "select topic || subject from outbox.poll('pull', 2)";
    assert_eq!(db.all::<String>(poll), ["a1", "a2"]);
    assert!(db.one::<bool>("select outbox.ack('pull')"));
    db.run(r#"select outbox.alter_sink('pull', "grouping" => 'event'); select outbox.prune()"#);
    assert_eq!(db.all::<String>(poll), ["b1", "b2"]);
}

#[test]
fn what_an_altered_sink_has_not_had_is_known_after_a_move() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run(r#"select outbox.create_sink('pull', 'pull', "grouping" => 'transaction')"#);
    interleave(&cluster);
    let poll = "select topic || subject from outbox.poll('pull', 2)";
    assert_eq!(db.all::<String>(poll), ["a1", "a2"]);
    assert!(db.one::<bool>("select outbox.ack('pull')"));
    db.run(r#"select outbox.alter_sink('pull', "grouping" => 'event')"#);
    db.run("update outbox.clusters set system_identifier = system_identifier - 1");
    // What comes between those that it has not had comes again.
    let all = db.all::<String>("select topic || subject from outbox.poll('pull', 10)");
    assert_eq!(all, ["b1", "a1", "a2", "b2"]);
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// So many transactions of a few events each, which interleave with those of other writers.
fn write_some(db: &mut Client, dice: &mut Dice, writer: u64, transactions: u64) -> u64 {
    let mut written = 0;
    for transaction in 0..transactions {
        let size = 1 + dice.roll(12);
        db.run("begin");
        for n in 1..=size {
            db.run(&format!(
                "select outbox.emit('w{writer}.t{transaction}', subject => '{n}')"
            ));
        }
        db.run("commit");
        written += size;
    }
    written
}

/// A consumer that takes batches of any size and acknowledges all or a part of each, until it is told that no more comes.
fn consume(db: &mut Client, dice: &mut Dice, ended: &AtomicBool) -> Vec<(String, String)> {
    let mut had = Vec::new();
    loop {
        let last_look = ended.load(Ordering::SeqCst);
        let poll = format!(
            "select topic, subject, position from outbox.poll('pull', {})",
            1 + dice.roll(30)
        );
        let rows = db.query(&poll, &[]).unwrap();
        let batch: Vec<(String, String, String)> = rows
            .iter()
            .map(|row| (row.get(0), row.get(1), row.get(2)))
            .collect();
        if batch.is_empty() {
            if last_look {
                return had;
            }
            thread::yield_now();
            continue;
        }
        let upto = match dice.roll(3) {
            // It forgets what it was handed.
            0 => continue,
            1 => dice.roll(batch.len() as u64) as usize,
            _ => batch.len() - 1,
        };
        // While the sink is being altered nothing can be acknowledged: it comes again.
        if !db.one::<bool>(&format!("select outbox.ack('pull', '{}')", batch[upto].2)) {
            continue;
        }
        had.extend(
            batch
                .into_iter()
                .take(upto + 1)
                .map(|(topic, subject, _)| (topic, subject)),
        );
    }
}

#[test]
fn nothing_is_lost_or_doubled_whenever_sinks_are_altered() {
    let seed = 20_261_201;
    println!("seed {seed}");
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(TAKE);
    let receiver = Receiver::start();
    function_sink(&mut db, "transaction", 5);
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        r#""grouping" => 'transaction', batch_size => 5, enabled => false"#,
    );
    db.run("select outbox.create_sink('pull', 'pull')");
    let (altered, drained) = (AtomicBool::new(false), AtomicBool::new(false));
    let (total, pulled) = thread::scope(|scope| {
        let (altered, drained, cluster) = (&altered, &drained, &cluster);
        let mut writers = Vec::new();
        for writer in 0..5 {
            writers.push(scope.spawn(move || {
                let mut dice = Dice(seed + writer);
                let mut db = cluster.connect();
                // A window that is long, and then short ones.
                let backlog = write_some(&mut db, &mut dice, writer, 25);
                until("sinks to be altered", || {
                    altered.load(Ordering::SeqCst).then_some(())
                });
                backlog + write_some(&mut db, &mut dice, writer + 100, 15)
            }));
        }
        let consumer = scope.spawn(move || {
            let mut db = cluster.connect();
            consume(&mut db, &mut Dice(seed + 50), drained)
        });
        until("a backlog", || {
            (db.one::<i64>("select count(*) from outbox.events") > 400).then_some(())
        });
        db.run("select outbox.resume_sink(sink) from unnest(array['fn', 'web']) sink");
        let mut dice = Dice(seed + 60);
        for round in 0..60 {
            let sink = ["fn", "web", "pull"][dice.roll(3) as usize];
            let grouping = ["event", "transaction"][dice.roll(2) as usize];
            let size = 1 + dice.roll(15);
            let before = status(&mut db, sink);
            db.run(&format!(
                r#"select outbox.alter_sink('{sink}', "grouping" => '{grouping}', batch_size => {size})"#
            ));
            // Somewhat later in its window, if it has not come to the end.
            if before.lag_events > 0 {
                until("a sink to go on", || {
                    let now = status(&mut db, sink);
                    (now.delivered > before.delivered || now.lag_events == 0).then_some(())
                });
            }
            altered.store(round > 15, Ordering::SeqCst);
        }
        let total: u64 = writers
            .into_iter()
            .map(|writer| writer.join().unwrap())
            .sum();
        for sink in ["fn", "web"] {
            until_idle(&mut db, sink);
        }
        drained.store(true, Ordering::SeqCst);
        (total, consumer.join().unwrap())
    });
    let count = |events: Vec<(String, String)>| {
        let mut times = BTreeMap::<_, u32>::new();
        for event in events {
            *times.entry(event).or_default() += 1;
        }
        assert_eq!(times.len() as u64, total, "nothing is lost");
        times
    };
    let rows = db.query("select topic, subject from seen", &[]).unwrap();
    let called = count(rows.iter().map(|row| (row.get(0), row.get(1))).collect());
    assert!(called.values().all(|times| *times == 1));
    assert!(count(pulled).values().all(|times| *times == 1));
    let events = receiver.events().into_iter();
    count(
        events
            .map(|event| (event.topic, event.subject.unwrap()))
            .collect(),
    );
}
