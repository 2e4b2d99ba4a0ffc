//! Whether reads walk over what cannot be vacuumed: drains and latency while a snapshot is held open, and without.
//!
//! Retention removes events as soon as they are delivered, so that dead events pile up beside dead cursors.

use outbox_tests::Sql;

use crate::Run;
use crate::drain::{Kind, drain, listed};
use crate::latency::{self, percentile};
use crate::machine::Meter;
use crate::pull::pull;
use crate::report::{Line, number};
use crate::stage::Stage;

const RETENTION: [(&str, &str); 2] = [
    ("outbox.retention_min_age", "0"),
    ("outbox.retention_interval", "200ms"),
];

/// What is done on a fresh cluster, and gives events per second.
type Work = fn(&mut Stage, u64) -> f64;

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let events = run.of(500_000, 50_000);
    let works: [(&str, Work); 3] = [
        ("drain to a function", |stage, events| {
            events as f64 / drain(stage, Kind::Function, events, &mut |_| ()).as_secs_f64()
        }),
        ("drain over HTTP", |stage, events| {
            events as f64 / drain(stage, Kind::Http, events, &mut |_| ()).as_secs_f64()
        }),
        ("pull", |stage, events| {
            let mut client = stage.cluster.connect();
            events as f64 / pull(stage, &mut client, events).as_secs_f64()
        }),
    ];
    let mut lines = Vec::new();
    for (what, work) in works {
        lines.push(compared(what, work, events, run.of(3, 1)));
    }
    lines.extend(latencies(run));
    lines
}

fn compared(what: &str, work: Work, events: u64, rounds: usize) -> Line {
    let (mut free, mut held, mut others) = (Vec::new(), Vec::new(), 0.0_f64);
    for _ in 0..rounds {
        for hold in [false, true] {
            let mut stage = Stage::new(&RETENTION);
            let holder = hold.then(|| stage.hold_snapshot());
            stage.fill(events);
            let meter = Meter::start(&stage.cluster);
            let rate = work(&mut stage, events);
            others = others.max(meter.others());
            if hold { &mut held } else { &mut free }.push(rate);
            drop(holder);
        }
    }
    let best = |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max);
    Line::new(
        format!("{what}, snapshot held, ratio"),
        best(&held) / best(&free),
        "",
    )
    .at_least(0.9)
    .others(others)
    .note(format!(
        "events/s held {}; not held {}",
        listed(&held),
        listed(&free)
    ))
}

fn latencies(run: &Run) -> Vec<Line> {
    let seconds = run.of(30, 5);
    let measured = [false, true].map(|hold| {
        let mut stage = Stage::new(&RETENTION);
        let holder = hold.then(|| stage.hold_snapshot());
        let latency = latency::measure(&mut stage, 1000, seconds);
        let dead: i64 = stage
            .db
            .one("select coalesce(sum(n_tup_del + n_tup_upd), 0)::bigint from pg_stat_user_tables where schemaname = 'outbox'");
        drop(holder);
        (latency, dead)
    });
    let [(free, _), (held, dead)] = &measured;
    [("p50", 0.5), ("p99", 0.99)]
        .into_iter()
        .map(|(name, share)| {
            let [free, at_held] = [free, held].map(|latency| percentile(&latency.arrivals, share));
            // The inverse, so that as with rates more is better.
            Line::new(
                format!("latency at 1,000/s, {name}, snapshot held, ratio"),
                free / at_held,
                "",
            )
            .at_least(0.9)
            .others(held.others)
            .note(format!(
                "{} ms held, {} ms not held; {dead} rows updated or deleted",
                number(at_held),
                number(free)
            ))
        })
        .collect()
}
