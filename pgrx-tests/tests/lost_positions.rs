//! Positions that this database has not given out, and those that look like it.

use outbox_tests::{Cluster, Mode, Sql};
use postgres::Client;

/// Nothing here needs a dispatcher.
fn cluster() -> Cluster {
    Cluster::builder().preload(false).start()
}

/// What a position that this database has not given out is refused with, wherever it is brought.
fn refused(db: &mut Client, position: &str, says: &str) {
    db.run("select outbox.create_sink('pulled', 'pull', enabled => false)");
    for call in [
        format!("select * from outbox.read('{position}')"),
        format!("select outbox.save_cursor('brought', '{position}')"),
        format!("select outbox.ack('pulled', '{position}')"),
        format!("select outbox.create_sink('s', 'pull', start => '{position}')"),
    ] {
        let refusal = db.refused(&call);
        assert_eq!(refusal.sqlstate, "22023", "{call}: {refusal:?}");
        let expected = format!("position {position} {says} \"outbox\"");
        assert_eq!(refusal.message, expected, "{call}");
        assert!(refusal.detail.is_some(), "{call}");
        assert!(refusal.hint.unwrap().contains("outbox.tail()"), "{call}");
    }
    db.run("select outbox.drop_sink('pulled')");
    assert_eq!(
        db.one::<Option<String>>("select outbox.cursor('brought')"),
        None
    );
}

const AHEAD: &str = "lies ahead of stream";
const UNKNOWN: &str = "is not known in stream";

fn emit(db: &mut Client, events: i64) {
    db.run(&format!(
        "select outbox.emit('test') from generate_series(1, {events})"
    ));
}

fn tail(db: &mut Client) -> String {
    db.one("select outbox.tail()")
}

#[test]
fn a_position_of_a_future_that_was_lost_is_refused() {
    let mut cluster = cluster();
    let mut db = cluster.connect();
    emit(&mut db, 10);
    let common = tail(&mut db);
    cluster.stop(Mode::Fast);
    let mut older = cluster.copy();
    cluster.start_again();
    let mut db = cluster.connect();
    emit(&mut db, 1);
    emit(&mut db, 39);
    let lost = tail(&mut db);
    cluster.stop(Mode::Fast);
    drop(cluster);

    older.start_again();
    let mut db = older.connect();
    refused(&mut db, &lost, AHEAD);
    assert_eq!(
        db.all::<i64>(&format!("select seq from outbox.read('{common}')"))
            .len(),
        0
    );
    // Some transactions later its own number has passed it, and then that of the events does.
    let id_of_lost: i64 = lost.split(':').next().unwrap().parse().unwrap();
    emit(&mut db, 1);
    while db.one::<i64>("select pg_current_xact_id()::text::bigint") <= id_of_lost {}
    refused(&mut db, &lost, AHEAD);
    emit(&mut db, 60);
    refused(&mut db, &lost, UNKNOWN);
    let read = format!("select seq from outbox.read('{common}')");
    assert_eq!(db.all::<i64>(&read).len(), 61);
    // What this history has given out is as good as ever.
    let here = tail(&mut db);
    emit(&mut db, 5);
    let read = format!("select seq from outbox.read('{here}')");
    assert_eq!(db.all::<i64>(&read).len(), 5);
    assert!(db.one::<bool>(&format!("select outbox.save_cursor('mine', '{here}')")));
}

#[test]
fn positions_that_pass_nothing_over_are_taken() {
    let cluster = Cluster::builder()
        .setting("outbox.retention_min_age", "0")
        .start();
    let mut db = cluster.connect();
    // Made up, and before everything.
    for position in ["0:0", "3:9223372036854775807", "700:1"] {
        assert_eq!(
            db.all::<i64>(&format!("select seq from outbox.read('{position}')"))
                .len(),
            0
        );
    }
    emit(&mut db, 5);
    emit(&mut db, 5);
    let txid: i64 = db.one("select max(txid::text::bigint) from outbox.events");
    let read = |from: &str| format!("select seq from outbox.read('{from}')");
    assert_eq!(db.all::<i64>(&read(&format!("{txid}:0"))).len(), 5);
    // Within a transaction whose snapshot is older.
    let mut other = cluster.connect();
    other.run("begin isolation level repeatable read; select from outbox.events");
    emit(&mut db, 1);
    let newer = tail(&mut db);
    assert_eq!(other.all::<i64>(&read(&newer)).len(), 0);
    other.run("commit");
    // One that has its id and not committed yet: a sink or a notification may have told of others behind it.
    other.run("begin; select pg_current_xact_id()");
    emit(&mut db, 1);
    let newest: String = db.one("select max(txid)::text || ':' || max(seq) from (select txid, seq from outbox.events order by txid desc limit 1) e");
    assert_eq!(db.all::<i64>(&read(&newest)).len(), 0);
    other.run("commit");

    // Retention has removed the position's own event, and an older one is still held.
    let mut held = other.transaction().unwrap();
    held.run("select outbox.emit('held')");
    emit(&mut db, 3);
    let last: String =
        db.one("select txid::text || ':' || seq from outbox.events order by seq desc limit 1");
    held.commit().unwrap();
    db.run("select outbox.create_sink('p', 'pull', start => 'tail')");
    db.run(&format!("delete from outbox.cursors where name = 'none'; select outbox.save_cursor('reader', '{last}')"));
    db.run("select outbox.prune()");
    emit(&mut db, 2);
    assert_eq!(db.all::<i64>(&read(&last)).len(), 2);
    // And all of it is gone.
    db.run("truncate outbox.events");
    assert_eq!(db.all::<i64>(&read(&last)).len(), 0);
}
