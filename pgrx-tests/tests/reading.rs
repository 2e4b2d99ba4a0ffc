//! Readers that keep nothing but a pair: `read`, `tail` and cursors of their own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use outbox_tests::{Cluster, Sql, until};
use postgres::Client;

/// Nothing here needs a dispatcher.
fn cluster() -> Cluster {
    Cluster::builder().preload(false).start()
}

fn topics(db: &mut Client) -> Vec<String> {
    db.all("select topic from outbox.read()")
}

#[test]
fn a_reader_pages_through_a_stream() {
    let cluster = cluster();
    let mut db = cluster.connect();
    assert_eq!(db.one::<Option<String>>("select outbox.tail()"), None);
    assert_eq!(db.one::<i64>("select count(*) from outbox.read()"), 0);
    for n in 0..50 {
        db.run(&format!(
            "begin; select outbox.emit('a', subject => '{n}.1'); select outbox.emit('b', subject => '{n}.2'); commit"
        ));
    }
    db.run("insert into outbox.events (topic, subject) select 'bulk', n::text from generate_series(1, 100) n");

    let all: Vec<String> = db.all("select position from outbox.read(max_events => 1000)");
    assert_eq!(all.len(), 200);
    assert!(all.is_sorted_by_key(|position| {
        let (txid, seq) = position.split_once(':').unwrap();
        (txid.parse::<u64>().unwrap(), seq.parse::<u64>().unwrap())
    }));
    assert_eq!(all.last(), Some(&db.one("select outbox.tail()")));
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.read()"),
        100,
        "the default"
    );

    // Page by page, in both spellings; a page may end in the middle of a transaction.
    let (mut paged, mut after) = (Vec::<String>::new(), "null".to_owned());
    loop {
        let page: Vec<String> = db.all(&format!("select position from outbox.read({after}, 7)"));
        let Some(last) = page.last() else { break };
        after = format!("'{last}'");
        if paged.len() % 2 == 0 {
            after = after.replace(':', ".");
        }
        paged.extend(page);
    }
    assert_eq!(paged, all);

    // What it returns is the table's row, and the position.
    let query = "select count(*) from outbox.read(max_events => 1000) r join outbox.events e
                  on (r.txid, r.seq, r.id, r.topic, r.source, r.subject, r.tenant, r.time, r.payload, r.headers)
                     is not distinct from (e.txid, e.seq, e.id, e.topic, e.source, e.subject, e.tenant, e.time, e.payload, e.headers)
                 and r.position = outbox.format_position(e.txid, e.seq)";
    assert_eq!(db.one::<i64>(query), 200);
}

#[test]
fn reading_says_what_is_wrong() {
    let cluster = cluster();
    let mut db = cluster.connect();
    for (call, sqlstate) in [
        ("outbox.read('garbage')", "22023"),
        ("outbox.read('')", "22023"),
        ("outbox.read('1:1:1')", "22023"),
        (
            "outbox.read('18446744073709551615:9223372036854775807')",
            "22023",
        ),
        ("outbox.read(null, 0)", "22023"),
        ("outbox.read(null, -1)", "22023"),
        ("outbox.read(null, null)", "22023"),
        ("outbox.read(stream => 'nowhere')", "42704"),
        ("outbox.read(stream => null)", "42704"),
        ("outbox.read(stream => 'events')", "42704"),
        ("outbox.tail('nowhere')", "42704"),
        ("outbox.tail(null)", "42704"),
        ("outbox.save_cursor('c', 'garbage')", "22023"),
        ("outbox.save_cursor('c', null)", "22023"),
        ("outbox.save_cursor(null, '1:1')", "22023"),
        ("outbox.save_cursor('', '1:1')", "22023"),
        ("outbox.save_cursor(repeat('x', 201), '1:1')", "22023"),
        ("outbox.save_cursor('sink:web', '1:1')", "22023"),
        ("outbox.save_cursor('c', '1:1', 'nowhere')", "42704"),
        ("outbox.save_cursor('c', '1:1', null)", "42704"),
        ("outbox.drop_cursor('sink:web')", "22023"),
        ("outbox.drop_cursor(null)", "22023"),
    ] {
        let refusal = db.refused(&format!("select {call}"));
        assert_eq!(refusal.sqlstate, sqlstate, "{call}: {refusal:?}");
    }
    assert_eq!(db.one::<i64>("select count(*) from outbox.cursors"), 0);
}

#[test]
fn nothing_is_read_past_an_open_transaction() {
    let cluster = cluster();
    cluster
        .connect_to("postgres")
        .run("create database elsewhere");
    let mut db = cluster.connect();
    db.run("select outbox.emit('before')");

    let mut open = cluster.connect();
    open.run("begin; select pg_current_xact_id()");
    db.run("select outbox.emit('held back')");
    assert_eq!(topics(&mut db), ["before"]);
    let tail: String = db.one("select outbox.tail()");
    assert_eq!(
        tail,
        db.one::<String>("select max(position) from outbox.read()")
    );
    open.run("select outbox.emit('of the open one')");
    assert_eq!(
        topics(&mut open),
        ["before"],
        "its own no more than others'"
    );
    open.run("commit");
    assert_eq!(
        db.all::<String>(&format!("select topic from outbox.read('{tail}')")),
        ["of the open one", "held back"],
        "in pair order: the one that began to write first"
    );

    // A subtransaction, another database and a prepared transaction hold it back likewise.
    let tail: String = db.one("select outbox.tail()");
    let read = format!("select topic from outbox.read('{tail}')");
    let mut other = cluster.connect_to("elsewhere");
    other.run("begin; savepoint s; create table t (n int)");
    db.run("select outbox.emit('c')");
    assert_eq!(db.all::<String>(&read), Vec::<String>::new());
    other.run("rollback");
    assert_eq!(db.all::<String>(&read), ["c"]);

    let tail: String = db.one("select outbox.tail()");
    let read = format!("select topic from outbox.read('{tail}')");
    open.run("begin; select outbox.emit('prepared'); prepare transaction 'p'");
    drop(open);
    db.run("select outbox.emit('d')");
    assert_eq!(db.all::<String>(&read), Vec::<String>::new());
    db.run("commit prepared 'p'");
    assert_eq!(db.all::<String>(&read), ["prepared", "d"]);
}

#[test]
fn readers_need_no_transaction_id_and_may_run_read_only() {
    let cluster = cluster();
    let mut db = cluster.connect();
    db.run("select outbox.emit('a')");
    for mode in ["read committed", "repeatable read", "serializable"] {
        db.run(&format!(
            "begin transaction isolation level {mode} read only"
        ));
        assert_eq!(topics(&mut db), ["a"], "{mode}");
        assert_ne!(
            db.one::<Option<String>>("select outbox.tail()"),
            None,
            "{mode}"
        );
        assert_eq!(
            db.one::<Option<String>>("select pg_current_xact_id_if_assigned()::text"),
            None,
            "{mode}"
        );
        db.run("commit");
    }

    // A snapshot that is kept shows what it showed, and horizon and rows stay of one piece.
    db.run("begin isolation level repeatable read");
    assert_eq!(topics(&mut db), ["a"]);
    cluster.connect().run("select outbox.emit('b')");
    assert_eq!(topics(&mut db), ["a"]);
    db.run("commit");
    assert_eq!(topics(&mut db), ["a", "b"]);
}

#[test]
fn a_standby_can_be_read() {
    let cluster = cluster();
    let mut db = cluster.connect();
    db.run("select outbox.emit('a'); select outbox.emit('b')");
    db.run("select outbox.save_cursor('mine', outbox.tail())");
    let standby = cluster.standby();
    let mut there = standby.connect();
    until("the events to arrive", || {
        (topics(&mut there) == ["a", "b"]).then_some(())
    });
    for query in ["select outbox.tail()", "select outbox.cursor('mine')"] {
        assert_eq!(there.one::<String>(query), db.one::<String>(query));
    }
}

/// A small generator of numbers that look random: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Commits, rolls back and prepares; takes its id before, between and after its events. Returns the subjects that were
/// committed.
fn write(db: &mut Client, writer: u64) -> BTreeSet<String> {
    let mut random = Random(writer);
    let mut committed = BTreeSet::new();
    for transaction in 0..60 {
        db.run("begin");
        let mut written = Vec::new();
        for step in 0..=random.below(5) {
            let subject = format!("{writer}.{transaction}.{step}");
            let emit = format!("select outbox.emit('t', subject => '{subject}')");
            match random.below(6) {
                0 => db.run("select pg_current_xact_id()"),
                1 => db.run(&format!("savepoint s; {emit}; rollback to s")),
                2 => {
                    db.run(&format!("savepoint s; {emit}; release s"));
                    written.push(subject);
                }
                3 => db.run(&format!(
                    "select pg_sleep({})",
                    random.below(10) as f64 / 1000.0
                )),
                _ => {
                    db.run(&emit);
                    written.push(subject);
                }
            }
        }
        match random.below(5) {
            0 => db.run("rollback"),
            1 => {
                db.run(&format!(
                    "prepare transaction 'w{writer}'; select pg_sleep(0.002)"
                ));
                if random.below(2) == 0 {
                    db.run(&format!("commit prepared 'w{writer}'"));
                    committed.extend(written);
                } else {
                    db.run(&format!("rollback prepared 'w{writer}'"));
                }
            }
            _ => {
                db.run("commit");
                committed.extend(written);
            }
        }
    }
    committed
}

#[test]
fn a_reader_that_keeps_a_pair_misses_nothing() {
    let cluster = &cluster();
    let writing = &AtomicBool::new(true);
    let read = |seed: u64| {
        let mut db = cluster.connect();
        let mut random = Random(seed);
        let (mut seen, mut pairs, mut last) = (Vec::new(), Vec::new(), false);
        loop {
            let max = 1 + random.below(20);
            // Each read from what the last one saved, as a reader that starts anew every time.
            let rows = db
                .query(
                    &format!("select position, subject from outbox.read(outbox.cursor('reader {seed}'), {max})"),
                    &[],
                )
                .unwrap();
            if let Some(row) = rows.last() {
                let position: String = row.get(0);
                let moved: bool = db.one(&format!(
                    "select outbox.save_cursor('reader {seed}', '{position}')"
                ));
                assert!(moved);
            }
            for row in &rows {
                let position: String = row.get(0);
                let (txid, seq) = position.split_once(':').unwrap();
                pairs.push((txid.parse::<u64>().unwrap(), seq.parse::<u64>().unwrap()));
                seen.push(row.get::<_, String>(1));
            }
            if rows.is_empty() {
                if last {
                    return (seen, pairs);
                }
                // Once more after the last writer has ended.
                last = !writing.load(Ordering::SeqCst);
            }
        }
    };
    let (committed, readers) = thread::scope(|scope| {
        let writers: Vec<_> = (1..=4)
            .map(|writer| scope.spawn(move || write(&mut cluster.connect(), writer)))
            .collect();
        let readers: Vec<_> = [101, 102]
            .map(|seed| scope.spawn(move || read(seed)))
            .into();
        let committed: BTreeSet<String> = writers
            .into_iter()
            .flat_map(|writer| writer.join().unwrap())
            .collect();
        writing.store(false, Ordering::SeqCst);
        let readers: Vec<_> = readers
            .into_iter()
            .map(|reader| reader.join().unwrap())
            .collect();
        (committed, readers)
    });
    assert!(committed.len() > 100, "{}", committed.len());
    for (seen, pairs) in readers {
        assert!(pairs.is_sorted_by(|a, b| a < b), "in pair order, each once");
        assert_eq!(seen.len(), committed.len());
        assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), committed);
    }
}

#[test]
fn a_cursor_moves_forward_only() {
    let cluster = cluster();
    let mut db = cluster.connect();
    let mut save = |position: &str| -> bool {
        db.one(&format!("select outbox.save_cursor('c', '{position}')"))
    };
    assert!(save("31:12"));
    for late in ["31:12", "31.12", "31:11", "30:99", "9:9999", "0:0"] {
        assert!(!save(late), "{late}");
    }
    assert!(save("31.13"));
    assert!(save("100:1"), "numbers, not text");
    assert!(!save("99:9"));
    assert_eq!(db.one::<String>("select outbox.cursor('c')"), "100:1");

    let row = "select concat_ws(' ', name, stream, txid, seq, updated_at between now() - interval '1 hour' and clock_timestamp()) from outbox.cursors";
    assert_eq!(db.one::<String>(row), "c outbox 100 1 t");
    assert_eq!(
        db.one::<Option<String>>("select outbox.cursor('another')"),
        None
    );

    // A cursor is one stream's.
    db.run("select outbox.create_stream('billing')");
    let refusal = db.refused("select outbox.save_cursor('c', '200:1', 'billing')");
    assert_eq!(refusal.sqlstate, "22023");
    assert!(refusal.message.contains("\"c\"") && refusal.hint.is_some());
    assert_eq!(db.one::<String>("select outbox.cursor('c')"), "100:1");

    assert!(db.one::<bool>("select outbox.drop_cursor('c')"));
    assert!(!db.one::<bool>("select outbox.drop_cursor('c')"));
    assert_eq!(db.one::<Option<String>>("select outbox.cursor('c')"), None);
    assert!(db.one::<bool>("select outbox.save_cursor('c', '1:1', 'billing')"));

    // What is rolled back was not saved, and a sink's cursor is nobody's but the sink's.
    db.run("begin; select outbox.save_cursor('c', '5:5', 'billing'); rollback");
    assert_eq!(db.one::<String>("select outbox.cursor('c')"), "1:1");
    db.run("select outbox.create_sink('web', 'pull')");
    for call in ["save_cursor('sink:web', '9:9')", "drop_cursor('sink:web')"] {
        let refusal = db.refused(&format!("select outbox.{call}"));
        assert_eq!(refusal.sqlstate, "22023", "{call}");
        assert!(refusal.message.contains("belongs to a sink"), "{call}");
    }
}

#[test]
fn an_old_holders_late_save_moves_nothing_back() {
    let cluster = cluster();
    let (mut old, mut new) = (cluster.connect(), cluster.connect());
    new.run("select outbox.save_cursor('c', '10:1')");
    // The old holder's statement waits for the new one's transaction, and must judge by what that leaves.
    new.run("begin; select outbox.save_cursor('c', '30:1')");
    thread::scope(|scope| {
        let late = scope.spawn(|| old.one::<bool>("select outbox.save_cursor('c', '20:1')"));
        let mut db = cluster.connect();
        until("the late save to wait", || {
            let waiting: i64 = db.one(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%20:1%'",
            );
            (waiting == 1).then_some(())
        });
        new.run("commit");
        assert!(!late.join().unwrap());
    });
    assert_eq!(new.one::<String>("select outbox.cursor('c')"), "30:1");
}

#[test]
fn concurrent_saves_end_at_the_greatest() {
    let cluster = &cluster();
    let moves: usize = thread::scope(|scope| {
        let savers: Vec<_> = (1..=8)
            .map(|saver| {
                scope.spawn(move || {
                    let mut db = cluster.connect();
                    let mut random = Random(saver);
                    let mut moved = 0;
                    for step in 0..100 {
                        let (txid, seq) = (step * 5 + random.below(40), random.below(1000));
                        let save = format!("select outbox.save_cursor('c', '{txid}:{seq}')");
                        moved += usize::from(db.one::<bool>(&save));
                        let after: String = db.one("select outbox.cursor('c')");
                        let (at_txid, at_seq) = after.split_once(':').unwrap();
                        let at = (at_txid.parse().unwrap(), at_seq.parse().unwrap());
                        assert!(at >= (txid, seq), "{after} after {txid}:{seq}");
                    }
                    let last = format!("select outbox.save_cursor('c', '600:{saver}')");
                    moved + usize::from(db.one::<bool>(&last))
                })
            })
            .collect();
        savers.into_iter().map(|saver| saver.join().unwrap()).sum()
    });
    assert!(moves >= 8);
    assert_eq!(
        cluster.connect().one::<String>("select outbox.cursor('c')"),
        "600:8"
    );
}
