//! How fast a backlog is delivered: to a function in the database, over HTTP, and to another PostgreSQL.

use std::thread::sleep;
use std::time::{Duration, Instant};

use outbox_tests::{Receiver, Sql, until};

use crate::Run;
use crate::brokers;
use crate::endpoint::Endpoint;
use crate::machine::Meter;
use crate::processes::{dispatchers, memory};
use crate::profile::Profile;
use crate::report::{Line, number};
use crate::rows;
use crate::single;
use crate::stage::{self, Stage};

/// A sink that takes the backlog.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Function,
    Http,
    SignedHttp,
    Single,
    Postgres,
    Nats,
    Kafka,
}

/// What drains came to.
pub(crate) struct Drained {
    /// Events per second, one for each drain.
    pub(crate) rates: Vec<f64>,
    /// Private memory of the dispatchers after the last one, in kB.
    pub(crate) memory: u64,
    /// Cores that other programs had meanwhile.
    pub(crate) others: f64,
}

impl Drained {
    /// On a machine that others use too, the best run says most.
    pub(crate) fn best(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    pub(crate) fn line(&self, what: &str) -> Line {
        Line::new(what, self.best(), "events/s")
            .note(format!("best of {}", listed(&self.rates)))
            .memory(self.memory)
            .others(self.others)
    }
}

/// Numbers of several runs, in the order in which they ran.
pub(crate) fn listed(numbers: &[f64]) -> String {
    let texts = numbers.iter().copied().map(number).collect::<Vec<_>>();
    texts.join(" · ")
}

pub(crate) fn function(run: &Run) -> Vec<Line> {
    let drained = measured(run, Kind::Function, "drain-function").map(|drained| {
        drained
            .line("drain to a function that inserts, batches of 1,000")
            .at_least(150_000.0)
    });
    with_latency(drained, run, rows::by_function)
}

/// Unless the time went into a profile.
fn with_latency(drained: Option<Line>, run: &Run, latency: fn(&Run) -> Vec<Line>) -> Vec<Line> {
    let mut figure: Vec<Line> = drained.into_iter().collect();
    if run.profile.is_none() {
        figure.extend(latency(run));
    }
    figure
}

pub(crate) fn http(run: &Run) -> Vec<Line> {
    let plain = measured(run, Kind::Http, "drain-http").map(|drained| {
        drained
            .line("drain over HTTP, batches of 1,000")
            .at_least(100_000.0)
    });
    let signed = if run.profile.is_some() {
        None
    } else {
        measured(run, Kind::SignedHttp, "drain-http-signed")
            .map(|drained| drained.line("drain over HTTP, signed").at_least(100_000.0))
    };
    plain.into_iter().chain(signed).collect()
}

pub(crate) fn postgres(run: &Run) -> Vec<Line> {
    let drained = measured(run, Kind::Postgres, "drain-postgres")
        .map(|drained| drained.line("drain to a table of another PostgreSQL, batches of 1,000"));
    with_latency(drained, run, rows::elsewhere)
}

/// Drains on a cluster of their own. Nothing if the time went into a profile.
pub(crate) fn measured(run: &Run, kind: Kind, name: &str) -> Option<Drained> {
    let events = match kind {
        Kind::Postgres | Kind::Single => run.of(200_000, 50_000),
        _ => run.of(500_000, 100_000),
    };
    let mut stage = Stage::new(run.settings());
    stage.fill(events);
    if let Some(time) = run.profile {
        let mut profile = Profile::start(name, time, &mut stage.db);
        while !profile.is_over() {
            drain(&mut stage, kind, events, &mut |stage| {
                profile.take_part(&dispatchers(&mut stage.db));
            });
        }
        profile.print(&mut stage.db);
        return None;
    }
    Some(drains(&mut stage, kind, events, run.of(5, 2)))
}

/// Several drains of the same backlog, each by a new sink.
pub(crate) fn drains(stage: &mut Stage, kind: Kind, events: u64, times: usize) -> Drained {
    let meter = Meter::start(&stage.cluster);
    let (mut rates, mut used) = (Vec::new(), 0);
    for _ in 0..times {
        let time = drain(stage, kind, events, &mut |stage| {
            used = memory(&dispatchers(&mut stage.db));
        });
        rates.push(events as f64 / time.as_secs_f64());
    }
    Drained {
        rates,
        memory: used,
        others: meter.others(),
    }
}

/// Has a new sink take everything that is stored, and drops it. Returns the time from the sink's first moment to the arrival of
/// the last event; `at_end` is called before the sink is dropped.
pub(crate) fn drain(
    stage: &mut Stage,
    kind: Kind,
    events: u64,
    at_end: &mut dyn FnMut(&mut Stage),
) -> Duration {
    let receiver = Receiver::builder().counting().start();
    let endpoint = matches!(kind, Kind::Single).then(|| Endpoint::start(|_, _| {}));
    let there = matches!(kind, Kind::Postgres).then(stage::elsewhere);
    let nats = matches!(kind, Kind::Nats).then(brokers::nats);
    let kafka = matches!(kind, Kind::Kafka).then(brokers::kafka);
    let create = match kind {
        Kind::Function => {
            stage.db.run(
                "drop table if exists arrived;
                 create table arrived (seq bigint, topic text, subject text, \"time\" timestamptz, payload jsonb);
                 create or replace function take_in(events outbox.event[]) returns void language sql as $$
                     insert into arrived select e.seq, e.topic, e.subject, e.\"time\", e.payload from unnest(events) e $$",
            );
            r#"'function', '{"function": "take_in(outbox.event[])"}'"#.to_owned()
        }
        Kind::Http => format!(r#"'http', '{{"url": "{}"}}'"#, receiver.url()),
        Kind::Postgres => {
            let there = there.as_ref().expect("it was started");
            format!(
                r#"'postgres', '{{"dsn": "{}", "table": "arrived"}}'"#,
                there.url("app")
            )
        }
        Kind::SignedHttp => {
            stage.db.run(
                "select outbox.set_secret('bench', array['0123456789abcdef0123456789abcdef'])",
            );
            let url = receiver.url();
            format!(r#"'http', '{{"url": "{url}", "secret": "bench", "signature": "github"}}'"#)
        }
        Kind::Single => single::sink(endpoint.as_ref().expect("it was started")),
        Kind::Nats => brokers::nats_sink(nats.as_ref().expect("it was started")),
        Kind::Kafka => brokers::kafka_sink(kafka.as_ref().expect("it was started")),
    };
    stage.db.run(&format!(
        "select outbox.create_sink('bench', {create}, batch_size => 1000, enabled => false)"
    ));
    let start = Instant::now();
    stage.db.run("select outbox.resume_sink('bench')");
    let mut time = match kind {
        Kind::Function | Kind::Postgres | Kind::Nats | Kind::Kafka => None,
        Kind::Http | Kind::SignedHttp => {
            until("the receiver to have all", || {
                (receiver.count() >= events).then_some(())
            });
            Some(start.elapsed())
        }
        Kind::Single => {
            let endpoint = endpoint.as_ref().expect("it was started");
            until("the endpoint to have all", || {
                (endpoint.requests() >= events).then_some(())
            });
            Some(start.elapsed())
        }
    };
    // Of a function, of another server and of what a broker has acknowledged, only the cursor tells.
    let delivered = "select delivered from outbox.cursors where name = 'sink:bench'";
    until("the cursor to be saved", || {
        let done = stage.db.one::<i64>(delivered).cast_unsigned() >= events;
        if !done {
            sleep(Duration::from_millis(5));
        }
        done.then_some(())
    });
    let time = *time.get_or_insert_with(|| start.elapsed());
    at_end(stage);
    stage.db.run("select outbox.drop_sink('bench')");
    time
}
