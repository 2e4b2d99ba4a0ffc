//! Whether a batch costs the same however many events are stored: a sink at the tail, while another one is far behind.

use std::time::Instant;

use outbox_tests::{Receiver, Sql, until};

use crate::Run;
use crate::drain::listed;
use crate::machine::Meter;
use crate::processes::{dispatchers, memory};
use crate::report::{Line, number};
use crate::stage::Stage;

const BATCH: u64 = 1000;
const BATCHES: u64 = 50;

/// Milliseconds per batch, one number for each round.
struct Depth {
    times: Vec<f64>,
    memory: u64,
    others: f64,
}

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let deep = run.of(5_000_000, 500_000);
    let rounds = run.of(7, 3);
    let shallow = measure(10_000, rounds);
    let deep_one = measure(deep, rounds);
    let best = |depth: &Depth| depth.times.iter().copied().fold(f64::INFINITY, f64::min);
    let line = |stored: u64, depth: &Depth| {
        let what = format!("time per batch of 1,000, {} stored", number(stored as f64));
        Line::new(what, best(depth), "ms")
            .note(format!("best of {}", listed(&depth.times)))
            .memory(depth.memory)
            .others(depth.others)
    };
    vec![
        line(10_000, &shallow),
        line(deep, &deep_one),
        Line::new(
            "time per batch, ratio",
            best(&deep_one) / best(&shallow),
            "",
        )
        .at_most(1.2),
    ]
}

/// Drains of 50 batches behind `stored` events, over HTTP.
fn measure(stored: u64, rounds: usize) -> Depth {
    let mut stage = Stage::new(&[]);
    let nobody = Receiver::start();
    nobody.stop();
    stage.db.run(&format!(
        r#"select outbox.create_sink('behind', 'http', '{{"url": "{}"}}')"#,
        nobody.url()
    ));
    stage.fill(stored);
    let receiver = Receiver::builder().counting().start();
    stage.db.run(&format!(
        r#"select outbox.create_sink('tail', 'http', '{{"url": "{}"}}', start => 'tail', batch_size => {BATCH})"#,
        receiver.url()
    ));
    let meter = Meter::start(&stage.cluster);
    let mut times = Vec::new();
    let mut expected = 0;
    for _ in 0..rounds {
        stage.db.run("select outbox.pause_sink('tail')");
        stage.fill(BATCH * BATCHES);
        expected += BATCH * BATCHES;
        let start = Instant::now();
        stage.db.run("select outbox.resume_sink('tail')");
        until("the batches", || {
            (receiver.count() >= expected).then_some(())
        });
        times.push(start.elapsed().as_secs_f64() * 1000.0 / BATCHES as f64);
    }
    Depth {
        times,
        memory: memory(&dispatchers(&mut stage.db)),
        others: meter.others(),
    }
}
