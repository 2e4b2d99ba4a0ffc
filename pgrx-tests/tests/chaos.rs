//! Everything at once: writers that commit, roll back and prepare, while dispatchers, backends and the server are killed and
//! the receivers fail at random. Every committed event arrives everywhere, and nothing else does.
//!
//! The order of commits is known for each subject: a writer locks the subject's row, and counts it up. What was committed is
//! known from the table of changes, in which each transaction tells what it emits: a commit whose answer was lost may or may
//! not have happened.
//!
//! `OUTBOX_CHAOS_SEED` repeats a run, as far as the threads allow; `OUTBOX_CHAOS_CHANGES` makes it longer (10000).

mod scene;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use outbox_tests::{Cluster, Mode, Receiver, Reply, Request, Signal, Sql};
use postgres::{Client, NoTls};
use scene::{http_sink, quick};
use serde_json::{Value, json};

const WRITERS: u64 = 8;
const SUBJECTS: u64 = 200;

/// SplitMix64: small, and good enough to be unfair with.
#[derive(Clone)]
struct Dice(u64);

impl Dice {
    /// Another sequence for each `of` of the same seed.
    fn new(seed: u64, of: u64) -> Self {
        Self(seed ^ of.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True in so many of a hundred cases.
    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn pause(&mut self, at_most: Duration) {
        thread::sleep(at_most * u32::try_from(self.below(101)).unwrap_or(0) / 100);
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

/// What all threads share.
struct Run {
    seed: u64,
    wanted: u64,
    config: postgres::Config,
    /// Changes whose commit was reported.
    committed: AtomicU64,
    acknowledged: Mutex<HashSet<String>>,
    /// Changes that were rolled back for sure.
    rolled_back: Mutex<HashSet<String>>,
    done: AtomicBool,
}

impl Run {
    /// A session, as soon as there is a server to have one with; none if the run ends before.
    fn connect(&self) -> Option<Client> {
        loop {
            if let Ok(client) = self.config.connect(NoTls) {
                return Some(client);
            }
            if self.is_done() {
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }
}

/// Ends the run when it goes out of scope, be it that the test has failed.
struct Ending<'r>(&'r Run);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::SeqCst);
    }
}

/// One of the applications.
struct Writer<'r> {
    run: &'r Run,
    dice: Dice,
    number: u64,
    transactions: u64,
}

impl Writer<'_> {
    fn write(mut self) {
        let mut session = self.run.connect();
        while let Some(db) = session.as_mut().filter(|_| !self.run.is_done()) {
            if self.transaction(db).is_ok() {
                continue;
            }
            // It was a deadlock, or a lock that somebody holds for long, or the end of the session.
            if db.is_closed() || db.simple_query("rollback").is_err() {
                session = self.run.connect();
            }
            if let Some(db) = &mut session {
                self.resolve(db);
            }
        }
    }

    /// What was prepared before a crash is there after it, and holds its locks.
    fn resolve(&mut self, db: &mut Client) {
        let verb = ["commit", "rollback"][self.dice.below(2) as usize];
        let pattern = format!("writer-{}-%", self.number);
        let prepared = db.query(
            "select gid from pg_prepared_xacts where gid like $1",
            &[&pattern],
        );
        for row in prepared.unwrap_or_default() {
            let gid: String = row.get(0);
            let _ = db.batch_execute(&format!("{verb} prepared '{gid}'"));
        }
    }

    fn transaction(&mut self, db: &mut Client) -> Result<(), postgres::Error> {
        self.transactions += 1;
        let dice = &mut self.dice;
        let mut subjects: Vec<u64> = (0..1 + dice.below(4))
            .map(|_| dice.below(SUBJECTS))
            .collect();
        if dice.percent(95) {
            subjects.sort_unstable();
        }
        db.batch_execute("begin; set local lock_timeout = '2s'")?;
        let (mut changes, mut undone) = (Vec::new(), Vec::new());
        for (step, subject) in subjects.into_iter().enumerate() {
            let id = format!("w{}-{}-{step}", self.number, self.transactions);
            let savepoint = self.dice.percent(30);
            if savepoint {
                db.batch_execute("savepoint s")?;
            }
            self.change(db, &id, subject)?;
            if self.dice.percent(20) {
                self.dice.pause(Duration::from_millis(10));
            }
            if savepoint && self.dice.percent(40) {
                db.batch_execute("rollback to savepoint s; release savepoint s")?;
                undone.push(id);
                continue;
            }
            if savepoint && self.dice.percent(50) {
                db.batch_execute("release savepoint s")?;
            }
            changes.push(id);
        }
        if self.dice.percent(2) {
            self.dice.pause(Duration::from_millis(300));
        }
        let took = match self.dice.below(100) {
            0..12 => {
                db.batch_execute("rollback")?;
                false
            }
            12..24 => self.in_two_phases(db)?,
            _ => {
                db.batch_execute("commit")?;
                true
            }
        };
        self.run.rolled_back.lock().unwrap().extend(undone);
        if took {
            let count = changes.len() as u64;
            self.run.acknowledged.lock().unwrap().extend(changes);
            self.run.committed.fetch_add(count, Ordering::SeqCst);
        } else {
            self.run.rolled_back.lock().unwrap().extend(changes);
        }
        Ok(())
    }

    /// Changes a subject, and tells of it in an event.
    fn change(&mut self, db: &mut Client, id: &str, subject: u64) -> Result<(), postgres::Error> {
        let subject = i64::try_from(subject).unwrap_or(0);
        let row = db.query_one(
            "update subjects set version = version + 1 where id = $1 returning version",
            &[&subject],
        )?;
        let version: i64 = row.get(0);
        db.execute(
            "insert into changes (id, subject, version) values ($1, $2, $3)",
            &[&id, &subject, &version],
        )?;
        let emit = if self.dice.percent(50) {
            "select outbox.emit('subject.changed', jsonb_build_object('version', $3::bigint), subject => $2::bigint::text, source => 'subjects', id => $1)"
        } else {
            "insert into outbox.events (id, topic, source, subject, payload)
             values ($1, 'subject.changed', 'subjects', $2::bigint::text, jsonb_build_object('version', $3::bigint))"
        };
        db.execute(emit, &[&id, &subject, &version])?;
        Ok(())
    }

    fn in_two_phases(&mut self, db: &mut Client) -> Result<bool, postgres::Error> {
        let gid = format!("writer-{}-{}", self.number, self.transactions);
        db.batch_execute(&format!("prepare transaction '{gid}'"))?;
        self.dice.pause(Duration::from_millis(50));
        let commits = self.dice.percent(70);
        let verb = if commits { "commit" } else { "rollback" };
        db.batch_execute(&format!("{verb} prepared '{gid}'"))?;
        Ok(commits)
    }
}

/// What a receiver has taken responsibility for: versions by subject, each event where it was first.
#[derive(Default)]
struct Arrivals {
    seen: HashSet<String>,
    by_subject: BTreeMap<String, Vec<i64>>,
    again: u64,
}

impl Arrivals {
    fn take(&mut self, request: &Request) {
        let events: Vec<Value> = serde_json::from_slice(&request.body).expect("a batch");
        for event in events {
            let id = event["id"].as_str().expect("an id").to_owned();
            if !self.seen.insert(id) {
                self.again += 1;
                continue;
            }
            let subject = event["subject"].as_str().expect("a subject").to_owned();
            let version = event["data"]["version"].as_i64().expect("a version");
            self.by_subject.entry(subject).or_default().push(version);
        }
    }
}

/// A receiver that now and then refuses, and now and then takes events and never says so.
fn unreliable(seed: u64, of: u64, pace: Duration) -> (Receiver, Arc<Mutex<Arrivals>>) {
    let receiver = Receiver::start();
    let arrivals = Arc::new(Mutex::new(Arrivals::default()));
    let (taken, dice) = (Arc::clone(&arrivals), Mutex::new(Dice::new(seed, of)));
    receiver.reply_with(move |request| {
        let fate = {
            let mut dice = dice.lock().unwrap();
            dice.pause(pace);
            dice.below(100)
        };
        match fate {
            0..3 => Reply::status(500),
            3..5 => Reply::reset(),
            5 => Reply::status(429).header("retry-after", "0"),
            6 => Reply::hang(),
            7 => Reply::raw("HTTP/1.1 2"),
            fate => {
                taken.lock().unwrap().take(request);
                match fate {
                    8 => Reply::reset(),
                    9 => Reply::close(),
                    _ => Reply::ok(),
                }
            }
        }
    });
    (receiver, arrivals)
}

/// What is done to the server and the receivers while the writers write.
#[derive(Debug, Clone, Copy)]
enum Blow {
    EndDispatcher,
    EndWriter,
    KillBackend,
    StopAtOnce,
    StopFast,
    CutReceiver,
}

const BLOWS: [Blow; 14] = [
    Blow::EndDispatcher,
    Blow::CutReceiver,
    Blow::KillBackend,
    Blow::EndDispatcher,
    Blow::EndWriter,
    Blow::StopAtOnce,
    Blow::EndDispatcher,
    Blow::CutReceiver,
    Blow::KillBackend,
    Blow::EndDispatcher,
    Blow::StopFast,
    Blow::EndWriter,
    Blow::StopAtOnce,
    Blow::EndDispatcher,
];

fn strike(blow: Blow, run: &Run, cluster: &RwLock<Cluster>, receiver: &Receiver, dice: &mut Dice) {
    let one_of = |kind: &str, dice: &mut Dice| -> Option<i32> {
        let mut db = run.connect()?;
        let sql = format!(
            "select pid from pg_stat_activity where {kind} and pid <> pg_backend_pid() order by pid"
        );
        let rows = db.query(&sql, &[]).ok()?;
        let pids: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
        let index = dice.below(pids.len().max(1) as u64) as usize;
        pids.get(index).copied()
    };
    let end = |pid: Option<i32>| {
        if let (Some(pid), Some(mut db)) = (pid, run.connect()) {
            let _ = db.execute("select pg_terminate_backend($1)", &[&pid]);
        }
    };
    match blow {
        Blow::EndDispatcher => end(one_of("backend_type = 'pg_outbox dispatcher'", dice)),
        Blow::EndWriter => end(one_of("backend_type = 'client backend'", dice)),
        Blow::KillBackend => {
            let kinds = [
                "backend_type = 'client backend'",
                "backend_type = 'pg_outbox dispatcher'",
            ];
            let kind = kinds[dice.below(2) as usize];
            if let Some(pid) = one_of(kind, dice) {
                cluster.read().unwrap().kill_backend(pid, Signal::KILL);
            }
        }
        Blow::StopAtOnce | Blow::StopFast => {
            let mode = match blow {
                Blow::StopAtOnce => Mode::Immediate,
                _ => Mode::Fast,
            };
            let mut cluster = cluster.write().unwrap();
            cluster.stop(mode);
            cluster.start_again();
        }
        Blow::CutReceiver => {
            receiver.stop();
            dice.pause(Duration::from_secs(3));
            receiver.start_again();
        }
    }
}

/// Waits as long as something goes on. If nothing does any more, `tell` says how things stand.
fn until_all_are_there(
    what: &str,
    wanted: u64,
    mut have: impl FnMut() -> u64,
    tell: impl Fn() -> String,
) {
    let (mut last, mut since) = (have(), Instant::now());
    while last < wanted {
        thread::sleep(Duration::from_millis(50));
        let now = have();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        if since.elapsed() > Duration::from_secs(60) {
            panic!("{what}: stuck at {last} of {wanted}\n{}", tell());
        }
    }
}

/// How things stand.
fn told(cluster: &Cluster) -> String {
    [
        "select * from outbox.status",
        "select pid, backend_type, state, wait_event_type, wait_event, xact_start, query from pg_stat_activity where backend_type ~ 'client|outbox'",
        "select * from pg_prepared_xacts",
        "select pid, locktype, relation::regclass, transactionid, mode, granted from pg_locks where not granted",
    ]
    .map(|sql| cluster.table("app", sql))
    .join("\n")
}

fn assert_in_order(sink: &str, subject: &str, versions: &[i64], committed: i64) {
    let expected: Vec<i64> = (1..=committed).collect();
    assert_eq!(versions, expected, "{sink}: subject {subject} out of order");
}

#[test]
fn every_committed_event_arrives_and_nothing_else() {
    let seed = number(
        "OUTBOX_CHAOS_SEED",
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64,
    );
    println!("OUTBOX_CHAOS_SEED={seed}");
    let cluster = quick()
        .setting("outbox.poll_interval", "200ms")
        .setting("outbox.retention_min_age", "1s")
        .setting("outbox.retention_interval", "500ms")
        .setting("deadlock_timeout", "50ms")
        .setting("max_prepared_transactions", "40")
        .start();
    let mut db = cluster.connect();
    db.run(&format!(
        "create table subjects (id bigint primary key, version bigint not null default 0);
         insert into subjects select n from generate_series(0, {SUBJECTS} - 1) n;
         create table changes (id text primary key, subject bigint not null, version bigint not null);
         create table received (number bigserial, id text, subject text, version bigint);
         create function take(events outbox.event[]) returns void language plpgsql as $$
         begin
             insert into received (id, subject, version)
             select e.id, e.subject, (e.payload ->> 'version')::bigint from unnest(events) with ordinality e order by ordinality;
             if random() < 0.05 then
                 raise exception 'now and then';
             end if;
         end $$;
         select outbox.create_sink('function', 'function', config => '{{\"function\": \"take\"}}')"
    ));
    let (fast, fast_arrivals) = unreliable(seed, 100, Duration::ZERO);
    let (slow, slow_arrivals) = unreliable(seed, 101, Duration::from_millis(20));
    let config = json!({"timeout_ms": 1_000});
    http_sink(&mut db, "fast", &fast, config.clone(), "batch_size => 64");
    http_sink(&mut db, "slow", &slow, config, "batch_size => 20");
    drop(db);

    let run = Run {
        seed,
        wanted: number("OUTBOX_CHAOS_CHANGES", 10_000),
        config: cluster.config("postgres", "app"),
        committed: AtomicU64::new(0),
        acknowledged: Mutex::default(),
        rolled_back: Mutex::default(),
        done: AtomicBool::new(false),
    };
    let cluster = RwLock::new(cluster);
    thread::scope(|scope| {
        let _ending = Ending(&run);
        for number in 0..WRITERS {
            let dice = Dice::new(run.seed, number);
            let writer = Writer {
                run: &run,
                dice,
                number,
                transactions: 0,
            };
            scope.spawn(move || writer.write());
        }
        let mut dice = Dice::new(seed, 200);
        let commits = || run.committed.load(Ordering::SeqCst);
        let tell = || told(&cluster.read().unwrap());
        // Spread over the run, however fast the machine is; all of them, and in a long run again and again.
        let blows = BLOWS.len() as u64 * (run.wanted / 10_000).max(1);
        for (blow, after) in BLOWS.into_iter().cycle().zip(1..=blows) {
            let due = run.wanted * after / (blows + 1);
            until_all_are_there("commits", due, commits, tell);
            strike(blow, &run, &cluster, &fast, &mut dice);
        }
        until_all_are_there("commits", run.wanted, commits, tell);
    });
    let cluster = cluster.into_inner().unwrap();
    let mut db = cluster.connect();
    for gid in db.all::<String>("select gid from pg_prepared_xacts") {
        db.run(&format!("commit prepared '{gid}'"));
    }

    // What was committed, whatever was said of it.
    let rows = db
        .query("select id, subject::text, version from changes", &[])
        .unwrap();
    let committed: HashSet<String> = rows.iter().map(|row| row.get(0)).collect();
    let mut versions: BTreeMap<String, i64> = BTreeMap::new();
    for row in &rows {
        let last = versions.entry(row.get(1)).or_default();
        *last = (*last).max(row.get(2));
    }
    let acknowledged = run.acknowledged.into_inner().unwrap();
    assert!(
        acknowledged.is_subset(&committed),
        "a commit that was reported is lost"
    );
    let rolled_back = run.rolled_back.into_inner().unwrap();
    assert!(
        rolled_back.is_disjoint(&committed),
        "a rollback that was reported is undone"
    );
    println!(
        "{} changes committed, {} of them without an answer; {} rolled back",
        committed.len(),
        committed.len() - acknowledged.len(),
        rolled_back.len()
    );

    let wanted = committed.len() as u64;
    for (sink, arrivals) in [("fast", &fast_arrivals), ("slow", &slow_arrivals)] {
        let have = || arrivals.lock().unwrap().seen.len() as u64;
        until_all_are_there(sink, wanted, have, || told(&cluster));
    }
    let have = || {
        db.one::<i64>("select count(*) from received")
            .cast_unsigned()
    };
    until_all_are_there("function", wanted, have, || told(&cluster));
    for sink in ["fast", "slow", "function"] {
        let idle = scene::until_idle(&mut db, sink);
        assert_eq!((idle.dead_letters, idle.lag_events), (0, 0), "{sink}");
    }

    for (sink, arrivals) in [("fast", &fast_arrivals), ("slow", &slow_arrivals)] {
        let arrivals = arrivals.lock().unwrap();
        let stray: BTreeSet<_> = arrivals.seen.difference(&committed).collect();
        assert!(
            stray.is_empty(),
            "{sink}: events that were never committed: {stray:?}"
        );
        assert_eq!(arrivals.seen, committed, "{sink}");
        for (subject, arrived) in &arrivals.by_subject {
            assert_in_order(sink, subject, arrived, versions[subject]);
        }
        println!(
            "{sink}: {} arrived, and {} of them again",
            arrivals.seen.len(),
            arrivals.again
        );
    }
    let rows = db
        .query(
            "select id, subject, version from received order by number",
            &[],
        )
        .unwrap();
    assert_eq!(
        rows.len(),
        committed.len(),
        "the function has each event once"
    );
    let mut received: HashMap<String, Vec<i64>> = HashMap::new();
    for row in &rows {
        assert!(committed.contains(row.get::<_, &str>(0)));
        received.entry(row.get(1)).or_default().push(row.get(2));
    }
    for (subject, arrived) in &received {
        assert_in_order("function", subject, arrived, versions[subject]);
    }
}
