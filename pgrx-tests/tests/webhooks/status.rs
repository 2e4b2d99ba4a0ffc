//! What `outbox.status` says of webhooks.

use outbox_tests::{Receiver, Reply, Sql};

use super::{builder, emit, until_states, webhook};
use crate::scene::{Status, until_status};

const FAN_OUT: &str = "webhooks:outbox";
const DELIVERIES: &str = "webhooks:*";

#[test]
fn it_tells_what_waits_and_for_what() {
    let cluster = builder()
        .setting("outbox.webhook_waits", "3600")
        .setting("outbox.webhook_attempts", "2")
        .start();
    let mut db = cluster.connect();
    let sinks = "select sink from outbox.status order by 1";
    assert_eq!(db.all::<String>(sinks), Vec::<String>::new());
    let receiver = Receiver::start();
    let id = webhook(&mut db, "acme", &receiver, "");
    db.run("select outbox.create_sink('p', 'pull')");
    assert_eq!(db.all::<String>(sinks), ["p", DELIVERIES, FAN_OUT]);
    let names: Vec<String> = db.all(
        "select concat_ws(' ', kind, stream) from outbox.status where kind <> 'pull' order by sink",
    );
    assert_eq!(names, ["webhooks", "fan-out outbox"]);

    emit(&mut db, "acme", "a", 1..=3);
    until_states(&mut db, &["delivered 3"]);
    for row in [FAN_OUT, DELIVERIES] {
        let status = until_status(&mut db, row, "idle", |status| status.state == "idle");
        assert_eq!((status.lag_events, status.delivered), (0, 3), "{row}");
        assert_eq!(
            (status.waiting_for, status.last_error),
            (None, None),
            "{row}"
        );
        assert!(status.lease_pid.is_some(), "{row}");
    }
    assert!(db.one::<bool>(
        "select bool_and(lag_seconds = 0 and last_delivery_at > now() - interval '1 hour') from outbox.status where kind <> 'pull'"
    ));

    // Nothing goes out, and the next attempt is told.
    receiver.reply_always(Reply::status(503));
    emit(&mut db, "acme", "a", 4..=5);
    let failing = until_status(&mut db, DELIVERIES, "retrying", |status| {
        status.state == "retrying"
    });
    assert_eq!(
        (failing.lag_events, failing.delivered, failing.attempts),
        (2, 3, 1)
    );
    assert_eq!(
        failing.last_error.as_deref(),
        Some("HTTP 503 Service Unavailable")
    );
    assert!(
        failing
            .next_attempt_in
            .is_some_and(|seconds| seconds > 60.0)
    );
    let waits = failing.waiting_for.expect("it waits");
    assert!(
        waits.starts_with("endpoints that fail: 1, until 2"),
        "{waits}"
    );
    assert!(db.one::<bool>(&format!(
        "select lag_seconds > 0 from outbox.status where sink = '{DELIVERIES}'"
    )));
    assert_eq!(
        until_status(&mut db, FAN_OUT, "idle", |status| status.state == "idle").lag_events,
        0
    );

    // A disabled endpoint waits for somebody to enable it.
    db.run(&format!("select outbox.disable_webhook('{id}')"));
    let paused = until_status(&mut db, DELIVERIES, "paused", |status| {
        status.state == "paused"
    });
    assert_eq!(
        paused.waiting_for.as_deref(),
        Some("outbox.enable_webhook or delete_webhook; endpoints that are disabled: 1")
    );
    db.run(&format!("select outbox.enable_webhook('{id}')"));

    // The second attempts are the last ones.
    db.run("update outbox.webhook_deliveries set next_attempt_at = now() where state = 'pending'");
    db.run(&format!(
        "select outbox.alter_webhook('{id}', topics => '{{a,b}}')"
    ));
    until_states(&mut db, &["dead 2", "delivered 3"]);
    let dead = until_status(&mut db, DELIVERIES, "idle", |status| status.state == "idle");
    assert_eq!((dead.lag_events, dead.dead_letters), (0, 2));

    // Without a dispatcher.
    db.run("select outbox.stop()");
    emit(&mut db, "acme", "a", 6..=9);
    let stopped = until_status(&mut db, FAN_OUT, "stopped", |status| {
        status.state == "stopped"
    });
    assert_eq!((stopped.lag_events, stopped.lease_pid), (4, None));
    assert_eq!(
        stopped.waiting_for.as_deref(),
        Some("a dispatcher: outbox.start, or shared_preload_libraries")
    );
    let Status {
        state, waiting_for, ..
    } = crate::scene::status(&mut db, DELIVERIES);
    assert_eq!((state.as_str(), waiting_for), ("stopped", None));
}

#[test]
fn it_names_the_transaction_that_may_still_bring_events() {
    let cluster = builder().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    webhook(&mut db, "acme", &receiver, "");
    let mut writer = cluster.connect();
    let pid: i32 = writer.one("select pg_backend_pid()");
    writer.run("begin; select outbox.emit('held', tenant => 'acme')");
    let of_pid = format!("of pid {pid}, ");
    let status = until_status(&mut db, FAN_OUT, "waiting", |status| {
        let waits = status.waiting_for.as_ref();
        waits.is_some_and(|waits| waits.contains(&of_pid))
    });
    assert_eq!((status.state.as_str(), status.lag_events), ("idle", 0));
    writer.run("rollback");
    until_status(&mut db, FAN_OUT, "free", |status| {
        status.waiting_for.is_none()
    });
}

/// However many deliveries there are, and whatever has become of them.
#[test]
fn it_looks_at_few_of_many_deliveries() {
    let cluster = builder().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let id = webhook(&mut db, "acme", &receiver, "");
    db.run("select outbox.stop()");
    db.run(&format!(
        "insert into outbox.webhook_deliveries (webhook, tenant, event_id, topic, event, state, finished_at)
         select '{id}', 'acme', 'n' || n, 'a', '{{}}', (array['pending', 'delivered', 'dead'])[n % 3 + 1], case when n % 3 > 0 then now() end
           from generate_series(1, 30000) n"
    ));
    db.run("vacuum (analyze) outbox.webhook_deliveries");
    db.run("begin");
    let fetched = |db: &mut postgres::Client| -> i64 {
        db.one("select pg_stat_get_xact_tuples_fetched('outbox.webhook_deliveries'::regclass) + pg_stat_get_xact_tuples_returned('outbox.webhook_deliveries'::regclass)")
    };
    let before = fetched(&mut db);
    let status = crate::scene::status(&mut db, DELIVERIES);
    assert_eq!((status.lag_events, status.dead_letters), (10_000, 10_000));
    let looked_at = fetched(&mut db) - before;
    assert!(looked_at <= 3_000, "{looked_at}");
    db.run("rollback");
}
