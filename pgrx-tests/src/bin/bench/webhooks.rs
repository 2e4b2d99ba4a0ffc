//! Whether webhooks that hang or fail cost the others anything: 1,000 endpoints, with and without such a fifth of them.

use outbox_tests::endpoints::{SETTINGS, latencies_of_the_good};

use crate::Run;
use crate::drain::listed;
use crate::latency::percentile;
use crate::machine::Meter;
use crate::report::{Line, number};
use crate::stage::Stage;

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let (mut with, mut without, mut others) = (Vec::new(), Vec::new(), 0.0_f64);
    for _ in 0..run.of(3, 1) {
        for bad in [false, true] {
            let stage = Stage::new(&SETTINGS);
            let meter = Meter::start(&stage.cluster);
            let latencies = latencies_of_the_good(&stage.cluster, bad);
            others = others.max(meter.others());
            if bad { &mut with } else { &mut without }.push(latencies);
        }
    }
    let line = |what: &str, rounds: &[Vec<f64>]| {
        let p99 = rounds
            .iter()
            .map(|round| percentile(round, 0.99))
            .collect::<Vec<_>>();
        let best = p99.iter().copied().fold(f64::INFINITY, f64::min);
        let medians = rounds
            .iter()
            .map(|round| percentile(round, 0.5))
            .collect::<Vec<_>>();
        let note = format!(
            "p99 of the rounds {}, p50 {}",
            listed(&p99),
            listed(&medians)
        );
        let text =
            format!("webhooks, 800 good endpoints{what}, p99 from commit to receipt on record");
        (best, Line::new(text, best, "ms").others(others).note(note))
    };
    let (alone, first) = line("", &without);
    let (beside, second) = line(", 100 that hang and 100 that fail", &with);
    let ratio = Line::new("the same, as a ratio", beside / alone, "")
        .at_most(1.1)
        .note(format!("{} ms to {} ms", number(beside), number(alone)));
    vec![first, second, ratio]
}
