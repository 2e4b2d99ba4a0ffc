//! Everything at once: writers that commit, roll back and prepare, while dispatchers, backends and the server are killed, operators alter,
//! pause and stop sinks, users leave transactions open, and the receivers and functions fail at random. Every committed event arrives everywhere, and nothing else does.
//!
//! The order of commits is known for each subject: a writer locks the subject's row, and counts it up. What was committed is
//! known from the table of changes, in which each transaction tells what it emits: a commit whose answer was lost may or may
//! not have happened.
//!
//! `OUTBOX_CHAOS_SEED` repeats a run, as far as the threads allow; `OUTBOX_CHAOS_CHANGES` makes it longer (10000).

mod blows;
mod dice;
mod endpoint;
mod operators;
#[path = "../scene/mod.rs"]
mod scene;
mod writer;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::RwLock;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use outbox_tests::{Cluster, Sql};
use postgres::Client;
use serde_json::json;

use blows::{BLOWS, strike};
use dice::Dice;
use endpoint::{Arrivals, unreliable};
use scene::{http_sink, quick};
use writer::{Run, SUBJECTS, Writer};

const WRITERS: u64 = 8;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

#[test]
fn every_committed_event_arrives_and_nothing_else() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number(
        "OUTBOX_CHAOS_SEED",
        now.as_secs() << 20 | u64::from(now.subsec_micros()),
    );
    println!("OUTBOX_CHAOS_SEED={seed}");
    let cluster = cluster();
    let mut db = cluster.connect();
    let (fast, fast_arrivals) = unreliable(Dice::new(seed, 100), Duration::ZERO);
    let (slow, slow_arrivals) = unreliable(Dice::new(seed, 101), Duration::from_millis(20));
    let config = json!({"timeout_ms": 1_000});
    http_sink(&mut db, "fast", &fast, config.clone(), "batch_size => 64");
    http_sink(&mut db, "slow", &slow, config, "batch_size => 20");
    db.run(
        "select outbox.create_sink('function', 'function', config => '{\"function\": \"take\"}')",
    );
    db.run(operators::REPORTS);
    db.run(
        "select outbox.create_sink('reports', 'function', config => '{\"function\": \"report\"}')",
    );
    drop(db);

    let run = Run::new(cluster.config("postgres", "app"));
    let wanted = number("OUTBOX_CHAOS_CHANGES", 10_000);
    let cluster = RwLock::new(cluster);
    thread::scope(|scope| {
        let _ending = run.ends_with_this();
        for number in 0..WRITERS {
            let writer = Writer::new(&run, Dice::new(seed, number), number);
            scope.spawn(move || writer.write());
        }
        scope.spawn(|| operators::operate(&run, Dice::new(seed, 300)));
        let mut dice = Dice::new(seed, 200);
        let tell = || told(&cluster.read().unwrap());
        // Spread over the run, however fast the machine is; all of them, and in a long run again and again.
        let blows = BLOWS.len() as u64 * (wanted / 10_000).max(1);
        for (blow, after) in BLOWS.into_iter().cycle().zip(1..=blows) {
            let due = wanted * after / (blows + 1);
            until_all_are_there("commits", due, || run.committed(), tell);
            strike(blow, &run, &cluster, &fast, &mut dice);
        }
        until_all_are_there("commits", wanted, || run.committed(), tell);
    });
    let cluster = cluster.into_inner().unwrap();
    let mut db = cluster.connect();
    operators::put_right(&mut db);
    for gid in db.all::<String>("select gid from pg_prepared_xacts") {
        db.run(&format!("commit prepared '{gid}'"));
    }

    let committed = Committed::of(&mut db);
    committed.agree_with(&run);
    let wanted = committed.ids.len() as u64;
    for (sink, arrivals) in [("fast", &fast_arrivals), ("slow", &slow_arrivals)] {
        let have = || arrivals.lock().unwrap().seen.len() as u64;
        until_all_are_there(sink, wanted, have, || told(&cluster));
    }
    for (sink, table) in [("function", "received"), ("reports", "reported")] {
        let count = format!("select count(*) from {table}");
        let have = || db.one::<i64>(&count).cast_unsigned();
        until_all_are_there(sink, wanted, have, || told(&cluster));
    }
    for sink in ["fast", "slow", "function", "reports"] {
        let idle = scene::until_idle(&mut db, sink);
        assert_eq!((idle.dead_letters, idle.lag_events), (0, 0), "{sink}");
    }
    committed.are_what_arrived("fast", &fast_arrivals.lock().unwrap());
    committed.are_what_arrived("slow", &slow_arrivals.lock().unwrap());
    committed.are_what_was_received(&mut db, "function", "received");
    committed.are_what_was_received(&mut db, "reports", "reported");
}

fn cluster() -> Cluster {
    let cluster = quick()
        .setting("outbox.poll_interval", "200ms")
        .setting("outbox.retention_min_age", "1s")
        .setting("outbox.retention_interval", "500ms")
        .setting("deadlock_timeout", "50ms")
        .setting("max_prepared_transactions", "40")
        .start();
    cluster.connect().run(&format!(
        "create table subjects (id bigint primary key, version bigint not null default 0);
         insert into subjects select n from generate_series(0, {SUBJECTS} - 1) n;
         create table changes (id text primary key, subject bigint not null, version bigint not null);
         create table received (number bigserial, id text, subject text, version bigint);
         create table reported (number bigserial, id text, subject text, version bigint);
         create function take(events outbox.event[]) returns void language plpgsql as $$
         begin
             insert into received (id, subject, version)
             select e.id, e.subject, (e.payload ->> 'version')::bigint from unnest(events) with ordinality e order by ordinality;
             if random() < 0.05 then
                 raise exception 'now and then';
             end if;
         end $$"
    ));
    cluster
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

/// What was committed, whatever was said of it.
struct Committed {
    ids: HashSet<String>,
    /// The last version of each subject; it had every version before.
    versions: BTreeMap<String, i64>,
}

impl Committed {
    fn of(db: &mut Client) -> Self {
        let rows = db
            .query("select id, subject::text, version from changes", &[])
            .expect("changes can be read");
        let mut versions: BTreeMap<String, i64> = BTreeMap::new();
        for row in &rows {
            let last = versions.entry(row.get(1)).or_default();
            *last = (*last).max(row.get(2));
        }
        let ids = rows.iter().map(|row| row.get(0)).collect();
        Self { ids, versions }
    }

    fn agree_with(&self, run: &Run) {
        let acknowledged = run.acknowledged.lock().unwrap();
        let lost: BTreeSet<_> = acknowledged.difference(&self.ids).collect();
        assert!(
            lost.is_empty(),
            "commits that were reported and are lost: {lost:?}"
        );
        let rolled_back = run.rolled_back.lock().unwrap();
        let there: BTreeSet<_> = rolled_back.intersection(&self.ids).collect();
        assert!(
            there.is_empty(),
            "rolled back, and there nevertheless: {there:?}"
        );
        println!(
            "{} changes committed, {} of them without an answer; {} rolled back",
            self.ids.len(),
            self.ids.len() - acknowledged.len(),
            rolled_back.len()
        );
    }

    fn are_what_arrived(&self, sink: &str, arrivals: &Arrivals) {
        let stray: BTreeSet<_> = arrivals.seen.difference(&self.ids).collect();
        assert!(
            stray.is_empty(),
            "{sink}: events that were never committed: {stray:?}"
        );
        assert_eq!(arrivals.seen.len(), self.ids.len(), "{sink}");
        for (subject, versions) in &arrivals.by_subject {
            self.assert_in_order(sink, subject, versions);
        }
        println!(
            "{sink}: {} arrived, and {} of them again",
            arrivals.seen.len(),
            arrivals.again
        );
    }

    /// In the table into which a function sink writes.
    fn are_what_was_received(&self, db: &mut Client, sink: &str, table: &str) {
        let sql = format!("select id, subject, version from {table} order by number");
        let rows = db.query(&sql, &[]).expect("what was received can be read");
        assert_eq!(rows.len(), self.ids.len(), "{sink} has each event once");
        let mut received: HashMap<String, Vec<i64>> = HashMap::new();
        for row in &rows {
            assert!(self.ids.contains(row.get::<_, &str>(0)));
            received.entry(row.get(1)).or_default().push(row.get(2));
        }
        for (subject, versions) in &received {
            self.assert_in_order(sink, subject, versions);
        }
    }

    fn assert_in_order(&self, sink: &str, subject: &str, versions: &[i64]) {
        let expected: Vec<i64> = (1..=self.versions[subject]).collect();
        assert_eq!(versions, expected, "{sink}: subject {subject} out of order");
    }
}
