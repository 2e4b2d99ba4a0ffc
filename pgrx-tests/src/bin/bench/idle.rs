//! What sinks cost when nothing happens.

use std::thread::sleep;
use std::time::Duration;

use outbox_tests::{Receiver, Sql, until};
use postgres::Client;

use crate::Run;
use crate::machine::TICKS;
use crate::processes::{dispatchers, memory, status, ticks_of, workers};
use crate::report::Line;
use crate::stage::Stage;

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let seconds = run.of(60, 10);
    // Autovacuum has transactions of its own.
    let mut stage = Stage::new(&[("autovacuum", "off")]);
    let receiver = Receiver::builder().counting().start();
    let config = format!(r#"{{"url": "{}"}}"#, receiver.url());
    stage.db.run(&format!(
        "create function take_in(events outbox.event[]) returns void language sql as 'select';
         select outbox.create_sink('one', 'http', '{config}');
         select outbox.create_sink('two', 'http', '{config}');
         select outbox.create_sink('three', 'function', '{{\"function\": \"take_in(outbox.event[])\"}}');
         select outbox.emit('order.placed', '{{}}') from generate_series(1, 100)"
    ));
    until("the sinks to be idle", || {
        let busy: i64 = stage
            .db
            .one("select count(*) from outbox.status where state <> 'idle'");
        (busy == 0).then_some(())
    });
    sleep(Duration::from_secs(5));

    let pids = workers(&mut stage.db);
    let before = (ticks(&pids), wake_ups(&pids), transactions(&mut stage.db));
    sleep(Duration::from_secs(seconds));
    // Looking at the counters was a transaction, too.
    let after = (
        ticks(&pids),
        wake_ups(&pids),
        transactions(&mut stage.db) - 1,
    );
    let per_second = |count: i64| count as f64 / seconds as f64;
    assert_eq!(
        pids,
        workers(&mut stage.db),
        "the workers are still the same"
    );
    vec![
        Line::new(
            format!("idle for {seconds} s, CPU of all workers"),
            (after.0 - before.0) as f64 / TICKS,
            "s",
        )
        .at_most(0.05)
        .note(format!(
            "{} workers, {:.1} wake-ups/s",
            pids.len(),
            per_second(after.1.cast_signed() - before.1.cast_signed())
        ))
        .memory(memory(&dispatchers(&mut stage.db))),
        Line::new(
            format!("idle for {seconds} s, transactions"),
            per_second(after.2 - before.2),
            "per s",
        )
        .at_most(0.05),
    ]
}

fn ticks(pids: &[u32]) -> u64 {
    pids.iter()
        .filter_map(|&pid| ticks_of(pid))
        .map(|ticks| ticks.own)
        .sum()
}

fn wake_ups(pids: &[u32]) -> u64 {
    pids.iter()
        .filter_map(|&pid| status(pid, "voluntary_ctxt_switches"))
        .sum()
}

/// Transactions of all databases so far. Sessions report theirs when they fall idle, at most once a second.
fn transactions(db: &mut Client) -> i64 {
    sleep(Duration::from_millis(1500));
    db.one("select sum(xact_commit + xact_rollback)::bigint from pg_stat_database")
}
