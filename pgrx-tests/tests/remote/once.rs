//! Each event takes effect once, whatever becomes of the dispatcher, the other server and the cursor.

use outbox_tests::{Mode, Sql, until};
use postgres::Client;
use serde_json::json;

use super::scene::{emit, ids, quick, status, until_idle, until_status};
use super::workers::kill_dispatcher;
use super::{applied, destination, postgres_sink, until_applied};

/// Remembers where a cursor stands.
fn remember(db: &mut Client, sink: &str) {
    db.run(&format!(
        "create table remembered as select * from outbox.cursors where name = 'sink:{sink}'"
    ));
}

/// Puts a cursor back to where it stood, while nobody delivers.
fn put_back(db: &mut Client, sink: &str) {
    db.run(&format!("select outbox.pause_sink('{sink}')"));
    until_status(db, sink, "no holder of its lease", |status| {
        status.lease_pid.is_none()
    });
    db.run(&format!(
        "delete from outbox.cursors where name = 'sink:{sink}';
         insert into outbox.cursors select * from remembered;
         select outbox.resume_sink('{sink}')"
    ));
}

#[test]
fn a_dispatcher_that_is_killed_between_commit_and_save() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "batch_size => 7");
    emit(&mut db, 1..=20);
    until_applied(&mut remote, 20);
    until_idle(&mut db, "w");
    // While somebody holds the cursor's row, nothing can be saved.
    let mut holder = cluster.connect();
    let mut held = holder.transaction().unwrap();
    held.run("select from outbox.cursors where name = 'sink:w' for update");
    emit(&mut db, 21..=40);
    until_applied(&mut remote, 27);
    kill_dispatcher(&cluster, "app");
    drop(held);
    let mut db = cluster.connect();
    let saved: i64 = db.one("select delivered from outbox.cursors where name = 'sink:w'");
    assert_eq!(saved, 20, "nothing was saved");
    emit(&mut db, 41..=50);
    until_status(&mut db, "w", "all delivered", |status| {
        status.delivered == 50
    });
    assert_eq!(applied(&mut remote), ids(1..=50));
}

#[test]
fn a_cursor_that_is_put_back() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "batch_size => 10");
    remember(&mut db, "w");
    for part in 0..5 {
        emit(&mut db, part * 20 + 1..=part * 20 + 20);
        until_applied(&mut remote, part as usize * 20 + 20);
    }
    until_idle(&mut db, "w");
    put_back(&mut db, "w");
    // In one window now, and with an event that was open all the time.
    emit(&mut db, 101..=105);
    until_status(&mut db, "w", "all delivered again", |status| {
        status.delivered == 105 && status.lag_events == 0
    });
    assert_eq!(applied(&mut remote), ids(1..=105));
}

#[test]
fn events_that_commit_late_are_not_taken_for_applied() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "");
    remember(&mut db, "w");
    let mut other = cluster.connect();
    let mut open = other.transaction().unwrap();
    open.run("select outbox.emit('test.late', '{}', id => 'late')");
    emit(&mut db, 1..=30);
    until_applied(&mut remote, 30);
    until_idle(&mut db, "w");
    put_back(&mut db, "w");
    open.commit().unwrap();
    // Its number and its transaction id lie below all that were applied.
    let expected: Vec<_> = ids(1..=30).into_iter().chain(["late".to_owned()]).collect();
    assert_eq!(until_applied(&mut remote, 31), expected);
    until_status(&mut db, "w", "all delivered again", |status| {
        status.delivered == 31 && status.lag_events == 0
    });
    assert_eq!(applied(&mut remote), expected);
}

#[test]
fn an_old_dump_that_is_restored() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "enabled => false");
    emit(&mut db, 1..=10);
    let dump = cluster.dump("app");
    db.run("select outbox.resume_sink('w')");
    until_applied(&mut remote, 10);
    emit(&mut db, 11..=12);
    until_applied(&mut remote, 12);
    db.run("select outbox.pause_sink('w')");

    cluster.restore("back", &dump);
    let mut back = cluster.connect_to("back");
    back.run("select outbox.resume_sink('w')");
    until_status(&mut back, "w", "all delivered", |status| {
        status.delivered == 10
    });
    assert_eq!(
        applied(&mut remote),
        ids(1..=12),
        "nothing is applied again"
    );
    // Draws the numbers of events that the dump does not hold.
    emit(&mut back, 13..=14);
    assert_eq!(until_applied(&mut remote, 14), ids(1..=14));
    let twice: bool = remote.one("select count(distinct seq) < count(seq) from applied");
    assert!(twice, "a number was drawn twice");

    // On another cluster, positions mean something else.
    let other = quick().apart().extension(false).start();
    other.restore("back", &dump);
    let mut back = other.connect_to("back");
    back.run("select outbox.resume_sink('w')");
    until_status(&mut back, "w", "all delivered", |status| {
        status.delivered == 10
    });
    emit(&mut back, 15..=15);
    assert_eq!(until_applied(&mut remote, 15), ids(1..=15));
}

#[test]
fn a_sink_that_is_made_anew_begins_anew() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "");
    emit(&mut db, 1..=3);
    until_applied(&mut remote, 3);
    db.run("select outbox.drop_sink('w')");
    postgres_sink(&mut db, "w", &there, json!({}), "");
    assert_eq!(until_applied(&mut remote, 6), ids([1, 2, 3, 1, 2, 3]));
}

#[test]
fn a_destination_that_stops_and_starts() {
    let mut there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "batch_size => 5");
    for round in 0..4 {
        emit(&mut db, round * 50 + 1..=round * 50 + 49);
        until_applied(&mut remote, round as usize * 50 + 10);
        let mode = if round % 2 == 0 {
            Mode::Immediate
        } else {
            Mode::Fast
        };
        there.stop(mode);
        // All before it may have been quicker than the stop.
        emit(&mut db, round * 50 + 50..=round * 50 + 50);
        until_status(&mut db, "w", "trouble", |status| {
            status.last_error.is_some()
        });
        there.start_again();
        remote = there.connect();
        until_applied(&mut remote, round as usize * 50 + 50);
    }
    until_idle(&mut db, "w");
    assert_eq!(applied(&mut remote), ids(1..=200));
    assert_eq!(status(&mut db, "w").dead_letters, 0);
}

#[test]
fn a_connection_that_outlives_its_dispatcher() {
    let there = destination();
    let mut remote = there.connect();
    remote.run(
        "create function slow(events jsonb) returns void language plpgsql as $$
         begin
             perform pg_advisory_xact_lock_shared(4711);
             insert into applied (id) select e ->> 'id' from jsonb_array_elements(events) e;
         end $$",
    );
    let cluster = quick().start();
    let mut db = cluster.connect();
    let statement = json!({"table": null, "statement": "select slow($1)", "timeout_ms": 60_000});
    remote.run("select pg_advisory_lock(4711)");
    postgres_sink(&mut db, "w", &there, statement, "");
    emit(&mut db, 1..=3);
    let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'";
    until("the statement to wait", || {
        (remote.one::<i64>(waiting) == 1).then_some(())
    });
    kill_dispatcher(&cluster, "app");
    until("the next dispatcher to wait for it", || {
        (remote.one::<i64>(waiting) == 2).then_some(())
    });
    remote.run("select pg_advisory_unlock(4711)");
    let mut db = cluster.connect();
    until_status(&mut db, "w", "all delivered", |status| {
        status.delivered == 3
    });
    assert_eq!(applied(&mut remote), ids(1..=3));
}

#[test]
fn a_dead_letter_is_applied_once() {
    let there = destination();
    let mut remote = there.connect();
    remote.run("alter table applied add constraint not_three check (subject <> '3')");
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "");
    emit(&mut db, 1..=5);
    until_status(&mut db, "w", "a dead letter", |status| {
        status.dead_letters == 1 && status.delivered == 4
    });
    remote.run("alter table applied drop constraint not_three");
    db.run("select outbox.redeliver('w')");
    until_status(&mut db, "w", "no dead letter", |status| {
        status.dead_letters == 0
    });
    assert_eq!(applied(&mut remote), ids([1, 2, 4, 5, 3]));
    // Once more, as after a crash before it was removed: it is noted as applied.
    db.run(
        "insert into outbox.dead_letters (sink, txid, seq, event, error, attempts, redeliver_at)
         select 'w', e.txid, e.seq, jsonb_build_object('specversion', '1.0', 'id', e.id, 'type', e.topic, 'source', e.source), 'x', 1, now()
           from outbox.events e where e.id = 'n3'",
    );
    db.run("select outbox.redeliver('w')");
    until_status(&mut db, "w", "no dead letter", |status| {
        status.dead_letters == 0
    });
    assert_eq!(applied(&mut remote), ids([1, 2, 4, 5, 3]));
}

/// What was applied is known by each event's own number and id, which another history does not give out again.
#[test]
fn a_clone_and_an_older_copy_apply_their_own_events() {
    let there = destination();
    let mut remote = there.connect();
    let mut cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "batch_size => 7");
    let named = |db: &mut Client, history: &str| {
        db.run(&format!(
            "select outbox.emit('test.named', '{{}}', id => '{history}' || n) from generate_series(1, 30) n"
        ));
    };
    named(&mut db, "common");
    until_applied(&mut remote, 30);
    until_idle(&mut db, "w");
    cluster.stop(Mode::Fast);
    let mut copy = cluster.copy();
    cluster.start_again();
    let mut db = cluster.connect();
    named(&mut db, "original");
    until_applied(&mut remote, 60);
    copy.start_again();
    let mut clone = copy.connect();
    named(&mut clone, "clone");
    named(&mut db, "more");
    until_applied(&mut remote, 120);
    until_idle(&mut clone, "w");
    until_idle(&mut db, "w");
    let once: i64 = remote.one("select count(distinct id) from applied");
    assert_eq!((once, applied(&mut remote).len()), (120, 120));
}
