//! From commit to the receiver: a steady stream of transactions that emit one event each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, sleep};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use memchr::memmem;
use outbox_tests::{Receiver, Reply, Sql, until};
use postgres::{Client, SimpleQueryMessage};

use crate::Run;
use crate::drain::listed;
use crate::machine::Meter;
use crate::processes::{dispatchers, memory};
use crate::profile::Profile;
use crate::report::{Line, number};
use crate::stage::Stage;

/// The number of an event that has none.
const WARM_UP: u64 = u64::MAX;

/// More than one session, for one alone may not commit a thousand times a second.
const WRITERS: u64 = 4;

/// What was measured at one rate, in milliseconds, sorted.
pub(crate) struct Latency {
    pub(crate) arrivals: Vec<f64>,
    /// The time from `clock_timestamp()` just before the commit until the writer has its answer.
    commits: Vec<f64>,
    /// Transactions per second, as it came out.
    rate: f64,
    pub(crate) memory: u64,
    pub(crate) others: f64,
}

/// The value that a share of a sorted sample lies below.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share).ceil() as usize;
    sorted[index.clamp(1, sorted.len()) - 1]
}

impl Latency {
    fn at(&self, share: f64) -> f64 {
        percentile(&self.arrivals, share)
    }
}

/// On a machine that others use too, the round with the lowest p99 says most; the other rounds are told beside it.
pub(crate) fn lines(what: &str, rate: u64, rounds: &[Latency]) -> Vec<Line> {
    let best = rounds
        .iter()
        .min_by(|a, b| a.at(0.99).total_cmp(&b.at(0.99)))
        .expect("at least one round");
    let line = |name: &str, share: f64, aim| {
        let all = rounds.iter().map(|round| round.at(share));
        Line::new(
            format!("commit to received {what}at {rate}/s, {name}"),
            best.at(share),
            "ms",
        )
        .at_most(aim)
        .note(format!(
            "in the best round of {}; the writer had its commit after {} ms",
            listed(&all.collect::<Vec<_>>()),
            number(percentile(&best.commits, share))
        ))
    };
    let max = Line::new(
        format!("commit to received {what}at {rate}/s, max"),
        best.at(1.0),
        "ms",
    );
    vec![
        line("p50", 0.5, 1.0).memory(best.memory),
        line("p99", 0.99, 5.0).others(best.others),
        max.note(format!(
            "of {} events at {}/s",
            best.arrivals.len(),
            number(best.rate)
        )),
    ]
}

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let mut figure = Vec::new();
    for (rate, seconds) in [(20, run.of(20, 5)), (1000, run.of(5, 2))] {
        let mut stage = Stage::new(run.settings());
        if let Some(time) = run.profile {
            let mut profile = Profile::start(&format!("latency-{rate}"), time, &mut stage.db);
            let mut db = stage.cluster.connect();
            profile.take_part(&dispatchers(&mut db));
            measure(&mut stage, rate, time.as_secs());
            profile.print(&mut stage.db);
        } else {
            let rounds = (0..run.of(6, 2))
                .map(|_| measure(&mut stage, rate, seconds))
                .collect::<Vec<_>>();
            figure.extend(lines("", rate, &rounds));
        }
    }
    figure
}

/// What has arrived, and when.
#[derive(Clone, Default)]
pub(crate) struct Arrivals(Arc<Mutex<HashMap<u64, i64>>>);

impl Arrivals {
    /// Notes the events in these bytes, at a time in microseconds since 1970. Those without a number count as 0.
    pub(crate) fn note(&self, bytes: &[u8], at: SystemTime) {
        let at = at.duration_since(UNIX_EPOCH).expect("a time after 1970");
        let mut arrived = self.lock();
        let mut numbered = false;
        for number in numbers_in(bytes) {
            numbered = true;
            arrived.entry(number).or_insert(at.as_micros() as i64);
        }
        if !numbered {
            arrived.entry(WARM_UP).or_insert(at.as_micros() as i64);
        }
    }

    fn count(&self) -> u64 {
        self.lock().len() as u64
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, i64>> {
        self.0.lock().expect("nobody panics with it")
    }
}

/// Commits `rate` events a second, and sees when each arrives at a receiver.
pub(crate) fn measure(stage: &mut Stage, rate: u64, seconds: u64) -> Latency {
    let receiver = Receiver::builder().counting().start();
    let arrivals = Arrivals::default();
    receiver.reply_with({
        let arrivals = arrivals.clone();
        move |request| {
            arrivals.note(&request.body, request.at);
            Reply::ok()
        }
    });
    let sink = format!(r#"'http', '{{"url": "{}"}}'"#, receiver.url());
    measure_to(stage, &sink, &arrivals, rate, seconds)
}

/// The same with a sink of this kind and config, and whatever notes what arrives.
pub(crate) fn measure_to(
    stage: &mut Stage,
    sink: &str,
    arrivals: &Arrivals,
    rate: u64,
    seconds: u64,
) -> Latency {
    stage.db.run(&format!(
        "select outbox.create_sink('bench', {sink}, start => 'tail')"
    ));
    // The first delivery connects; it is not measured.
    stage
        .db
        .run("select outbox.emit('order.placed', source => 'shop')");
    until("the first delivery", || {
        (arrivals.count() > 0).then_some(())
    });

    let meter = Meter::start(&stage.cluster);
    let start = Instant::now();
    let total = rate * seconds;
    let writers = (0..WRITERS)
        .map(|writer| {
            let client = stage.cluster.connect();
            thread::spawn(move || {
                write(
                    client,
                    start,
                    rate,
                    (writer..total).step_by(WRITERS as usize),
                )
            })
        })
        .collect::<Vec<_>>();
    let committed = writers
        .into_iter()
        .flat_map(|writer| writer.join().expect("a writer ends"))
        .collect::<Vec<_>>();
    let took = start.elapsed();
    until("all to arrive", || (arrivals.count() > total).then_some(()));
    let others = meter.others();
    let used = memory(&dispatchers(&mut stage.db));
    stage.db.run("select outbox.drop_sink('bench')");

    let arrived = arrivals.lock();
    let milliseconds = |micros: i64| micros as f64 / 1000.0;
    let mut arrivals = committed
        .iter()
        .map(|commit| milliseconds(arrived[&commit.number] - commit.before))
        .collect::<Vec<_>>();
    let mut commits = committed
        .iter()
        .map(|commit| milliseconds(commit.answered - commit.before))
        .collect::<Vec<_>>();
    arrivals.sort_by(f64::total_cmp);
    commits.sort_by(f64::total_cmp);
    Latency {
        arrivals,
        commits,
        rate: total as f64 / took.as_secs_f64(),
        memory: used,
        others,
    }
}

/// One transaction. Times are microseconds since 1970.
struct Commit {
    number: u64,
    before: i64,
    answered: i64,
}

/// Commits these events, each at its time.
fn write(
    mut client: Client,
    start: Instant,
    rate: u64,
    events: impl Iterator<Item = u64>,
) -> Vec<Commit> {
    let mut commits = Vec::new();
    for number in events {
        let due = start + Duration::from_micros(number * 1_000_000 / rate);
        sleep(due.saturating_duration_since(Instant::now()));
        let messages = client.simple_query(&format!(
            r#"begin;
               select outbox.emit('order.placed', '{{"number": {number}, "note": "{:160}"}}', subject => '{number}', source => 'shop');
               select (extract(epoch from clock_timestamp()) * 1000000)::bigint;
               commit"#,
            ""
        ));
        let answered = UNIX_EPOCH.elapsed().expect("a time after 1970").as_micros() as i64;
        let messages = messages.expect("an event is emitted");
        let before = messages
            .iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => row.get(0)?.parse().ok(),
                _ => None,
            })
            .next_back()
            .expect("the time before the commit");
        commits.push(Commit {
            number,
            before,
            answered,
        });
    }
    commits
}

/// The numbers of the events in a body.
fn numbers_in(body: &[u8]) -> impl Iterator<Item = u64> {
    const KEY: &[u8] = br#""number": "#;
    memmem::find_iter(body, KEY).filter_map(|at| {
        let digits = body[at + KEY.len()..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .map(|byte| u64::from(byte - b'0'));
        digits.reduce(|number, digit| number * 10 + digit)
    })
}
