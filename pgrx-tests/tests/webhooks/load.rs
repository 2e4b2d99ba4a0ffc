//! A thousand endpoints, of which a tenth hang and a tenth fail: the others notice nothing.

use std::time::Duration;

use outbox_tests::{Receiver, Reply, Sql};
use postgres::Client;

use super::{builder, until_fanned_out};

const ENDPOINTS: i64 = 1_000;
/// Each endpoint gets an event in every twentieth of the rounds: what is measured is isolation, not how much a machine can do at once.
const ROUNDS: i64 = 40;
const PART: i64 = 20;
/// To the good ones.
const DELIVERIES: i64 = ENDPOINTS * ROUNDS / PART * 8 / 10;

/// The p99 of the time from an event to its receipt over the good endpoints, in ms. `bad`: whether the bad ones are there.
fn p99_of_the_good(bad: bool) -> f64 {
    let cluster = builder()
        .setting("outbox.webhook_timeout", "5s")
        .setting("outbox.webhook_waits", "60")
        .start();
    let mut db = cluster.connect();
    let good = Receiver::start();
    let hanging = Receiver::start();
    hanging.reply_always(Reply::hang());
    let failing = Receiver::start();
    failing.reply_always(Reply::status(500));
    let register = |db: &mut Client, tenths: &str, to: &Receiver| {
        db.run(&format!(
            "select outbox.create_webhook('t' || n, '{}' || n) from generate_series(1, {ENDPOINTS}) n where n % 10 {tenths}",
            to.url()
        ));
    };
    register(&mut db, "not in (0, 1)", &good);
    if bad {
        register(&mut db, "= 0", &hanging);
        register(&mut db, "= 1", &failing);
    }
    for round in 0..ROUNDS {
        db.run(&format!(
            "select outbox.emit('load', tenant => 't' || n) from generate_series(1, {ENDPOINTS}) n
              where (n / 10) % {PART} = {round} % {PART} and (n % 10 not in (0, 1) or {bad})"
        ));
        std::thread::sleep(Duration::from_millis(300));
    }
    until_fanned_out(&mut db);
    let wanted = usize::try_from(DELIVERIES).expect("few");
    good.wait_for_requests(wanted);
    outbox_tests::until("all to be recorded", || {
        let delivered: i64 =
            db.one("select count(*) from outbox.webhook_deliveries where state = 'delivered'");
        (delivered == DELIVERIES).then_some(())
    });
    if bad {
        assert!(!failing.requests().is_empty() && hanging.connections() > 0);
    }
    // From the commit, near enough, to the moment when the answer had come.
    db.one(
        "select percentile_cont(0.99) within group (order by extract(epoch from a.at - (d.event ->> 'time')::timestamptz) * 1000)::float8
           from outbox.webhook_deliveries d join outbox.webhook_attempts a on a.delivery = d.id where d.state = 'delivered'",
    )
}

#[test]
fn slow_and_dead_endpoints_cost_the_others_nothing() {
    let without = p99_of_the_good(false);
    let with = p99_of_the_good(true);
    println!(
        "p99 of the good endpoints: {without:.0} ms without, {with:.0} ms with a tenth that hangs and a tenth that fails"
    );
    // A machine that others use has moods; a place that is taken by what hangs would cost seconds.
    assert!(
        with < without * 2.0 + 300.0,
        "{with} ms, {without} ms without"
    );
}
