//! Over HTTP with a request for each event: how many a second, and how soon one is received.

use crate::Run;
use crate::drain::{Kind, measured};
use crate::endpoint::Endpoint;
use crate::latency::{Arrivals, lines, measure_to};
use crate::report::Line;
use crate::stage::Stage;

const RATE: u64 = 1000;
/// Requests under way at once.
const CONCURRENCY: usize = 16;

pub(crate) fn sink(to: &Endpoint) -> String {
    let url = to.url();
    format!(r#"'http', '{{"url": "{url}", "mode": "single", "concurrency": {CONCURRENCY}}}'"#)
}

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let drained = measured(run, Kind::Single, "drain-single").map(|drained| {
        drained
            .line("drain over HTTP, a request an event, sixteen at once")
            .at_least(20_000.0)
    });
    let mut figure: Vec<Line> = drained.into_iter().collect();
    if run.profile.is_none() {
        let mut stage = Stage::new(run.settings());
        let rounds = (0..run.of(6, 1))
            .map(|_| {
                let arrivals = Arrivals::default();
                let endpoint = Endpoint::start({
                    let arrivals = arrivals.clone();
                    move |body, at| arrivals.note(body, at)
                });
                measure_to(&mut stage, &sink(&endpoint), &arrivals, RATE, run.of(5, 2))
            })
            .collect::<Vec<_>>();
        figure.extend(lines("in single requests ", RATE, &rounds));
    }
    figure
}
