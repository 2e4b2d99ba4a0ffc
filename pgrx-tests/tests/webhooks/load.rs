//! A thousand endpoints, of which a tenth hang and a tenth fail: the others notice nothing. `pgrx-tests/bench.sh webhooks` measures it.

use outbox_tests::endpoints::{SETTINGS, latencies_of_the_good};

use crate::scene::quick;

/// The p99 of the good endpoints, in ms, once all of their deliveries are on record.
fn p99_of_the_good(bad: bool) -> f64 {
    let settings = SETTINGS.into_iter();
    let builder = settings.fold(quick(), |builder, (name, value)| {
        builder.setting(name, value)
    });
    // What hangs does not end while this runs: if the good ones waited for it, they would never be done.
    let builder = builder.setting("outbox.webhook_timeout", "1h");
    let latencies = latencies_of_the_good(&builder.start(), bad);
    latencies[latencies.len() * 99 / 100]
}

#[test]
fn slow_and_dead_endpoints_cost_the_others_nothing() {
    let without = p99_of_the_good(false);
    let with = p99_of_the_good(true);
    println!(
        "p99 of the good endpoints: {without:.0} ms without, {with:.0} ms with a tenth that hangs and a tenth that fails"
    );
}
