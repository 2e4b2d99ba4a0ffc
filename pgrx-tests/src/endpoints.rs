//! A thousand endpoints of tenants, of which a tenth hang and a tenth fail: what the others notice of them.

use std::thread::sleep;
use std::time::Duration;

use postgres::Client;

use crate::{Cluster, Receiver, Reply, Sql, until};

const ENDPOINTS: i64 = 1_000;
/// Each endpoint gets an event in every twentieth of the rounds: what is measured is isolation, not how much a machine can do at once.
const ROUNDS: i64 = 40;
const PART: i64 = 20;
/// To the good ones.
const DELIVERIES: i64 = ENDPOINTS * ROUNDS / PART * 8 / 10;

/// What a cluster needs for it: retries come when it is over, so that it is first attempts that are measured.
pub const SETTINGS: [(&str, &str); 5] = [
    ("outbox.allow_private_networks", "on"),
    ("outbox.webhook_http", "on"),
    ("outbox.webhook_ports", ""),
    ("outbox.webhook_timeout", "5s"),
    ("outbox.webhook_waits", "60"),
];

/// Delivers to the good endpoints, with or without the `bad` ones beside them, on a cluster that is used for nothing else. Returns how
/// long each delivery took, from the event's being written to its receipt on record, in milliseconds, sorted.
///
/// # Panics
/// If not all arrive.
pub fn latencies_of_the_good(cluster: &Cluster, bad: bool) -> Vec<f64> {
    let mut db = cluster.connect();
    let good = Receiver::start();
    let hanging = Receiver::start();
    hanging.reply_always(Reply::hang());
    let failing = Receiver::start();
    failing.reply_always(Reply::status(500));
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
        sleep(Duration::from_millis(300));
    }
    good.wait_for_requests(usize::try_from(DELIVERIES).expect("few"));
    until("all to be recorded", || {
        let delivered: i64 =
            db.one("select count(*) from outbox.webhook_deliveries where state = 'delivered'");
        (delivered == DELIVERIES).then_some(())
    });
    if bad {
        assert!(!failing.requests().is_empty() && hanging.connections() > 0);
    }
    db.all(
        "select (extract(epoch from a.at - (d.event ->> 'time')::timestamptz) * 1000)::float8 as ms
           from outbox.webhook_deliveries d join outbox.webhook_attempts a on a.delivery = d.id where d.state = 'delivered' order by ms",
    )
}

/// Registers the endpoints whose number's last digit is as said.
fn register(db: &mut Client, last_digit: &str, to: &Receiver) {
    db.run(&format!(
        "select outbox.create_webhook('t' || n, '{}' || n) from generate_series(1, {ENDPOINTS}) n where n % 10 {last_digit}",
        to.url()
    ));
}
