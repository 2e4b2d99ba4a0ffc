//! Changing sinks that have something parked, and what is refused.

use outbox_tests::{Receiver, Sql};
use serde_json::json;

use super::scene::{http_sink, quick, until_dead, until_idle, until_status};
use super::{Moody, emit, parked, until_parked};

#[test]
fn what_is_parked_stays_so_when_keys_are_not_isolated_any_more() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b1 a2");
    moody.takes("b1");
    until_parked(&mut db, "keys", "a1 a2");
    db.run("select outbox.alter_sink('keys', isolation => 'batch')");
    emit(&mut db, "a3 b2");
    moody.takes("b2");
    until_parked(&mut db, "keys", "a1 a2 a3");
    moody.refuses("");
    moody.takes("a1 a2 a3");
    until_idle(&mut db, "keys");
    assert_eq!(moody.taken("a"), "a1 a2 a3");
    // From now on, what fails holds all others.
    moody.refuses("c1");
    emit(&mut db, "c1 c2 d1");
    until_status(&mut db, "keys", "retrying", |status| status.attempts >= 1);
    assert_eq!(parked(&mut db, "keys"), "");
    assert_eq!(until_dead(&mut db, "keys", 1)[0].id(), "c1");
    until_idle(&mut db, "keys");
}

#[test]
fn whole_transactions_wait_for_what_is_parked() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b1 a2");
    until_parked(&mut db, "keys", "a1 a2");
    let change =
        "select outbox.alter_sink('keys', isolation => 'batch', \"grouping\" => 'transaction')";
    let refused = db.refused(change);
    assert_eq!(refused.sqlstate, "55000");
    assert!(refused.detail.is_some() && refused.hint.is_some());
    moody.refuses("");
    moody.takes("a1 a2");
    until_idle(&mut db, "keys");
    db.run(change);
    emit(&mut db, "a3 b2");
    moody.takes("a3 b2");
}

#[test]
fn what_is_parked_goes_with_its_sink_and_waits_while_it_is_paused() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    for sink in ["one", "two"] {
        http_sink(
            &mut db,
            sink,
            &moody.receiver,
            json!({"mode": "single"}),
            "isolation => 'key'",
        );
    }
    emit(&mut db, "a1 b1 a2");
    for sink in ["one", "two"] {
        until_parked(&mut db, sink, "a1 a2");
    }
    db.run("select outbox.pause_sink('one'); select outbox.drop_sink('two')");
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.parked where sink = 'two'"),
        0
    );
    let paused = until_status(&mut db, "one", "paused, and let go", |status| {
        status.state == "paused" && status.lease_pid.is_none()
    });
    assert_eq!(paused.lag_events, 2);
    // Not before: what is under way when a sink is paused is waited for.
    moody.refuses("");
    moody.receiver.clear();
    db.run("select outbox.resume_sink('one')");
    moody.takes("a1 a2");
    until_idle(&mut db, "one");
    assert_eq!(moody.taken("a"), "a1 a2");
    assert_eq!(db.one::<i64>("select count(*) from outbox.parked"), 0);
}

#[test]
fn events_that_are_gone_or_not_wanted_any_more_are_not_waited_for() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 b1 a2");
    until_parked(&mut db, "keys", "a1 a2");
    db.run("delete from outbox.events where id = 'a1'");
    moody.takes("a2");
    until_idle(&mut db, "keys");
    moody.refuses("c1");
    emit(&mut db, "c1 d1 c2");
    until_parked(&mut db, "keys", "c1 c2");
    db.run("select outbox.alter_sink('keys', filter => 'id <> ''c1''')");
    moody.takes("c2");
    assert_eq!(until_idle(&mut db, "keys").dead_letters, 0);
    assert_eq!(moody.taken("c"), "c2");
}

#[test]
fn not_everything_can_be_isolated_by_key() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let refused = db.refused("select outbox.create_sink('x', 'pull', isolation => 'key')");
    assert_eq!(refused.sqlstate, "22023");
    assert_eq!(
        refused.message,
        "isolation \"key\" does not fit this sink of kind \"pull\""
    );
    assert!(refused.detail.is_some() && refused.hint.is_some());
    let config = format!("'{{\"url\": \"{}\"}}'", receiver.url());
    let refused = db.refused(&format!(
        "select outbox.create_sink('x', 'http', config => {config}, isolation => 'key', \"grouping\" => 'transaction')"
    ));
    assert_eq!(refused.sqlstate, "22023");
    assert!(refused.detail.is_some() && refused.hint.is_some());
    let config = config.replace("}", ", \"checkpoint_url\": \"http://127.0.0.1:1/at\"}");
    let refused = db.refused(&format!(
        "select outbox.create_sink('x', 'http', config => {config}, isolation => 'key')"
    ));
    assert_eq!(refused.sqlstate, "22023");
    db.run("select outbox.create_sink('p', 'pull')");
    let refused = db.refused("select outbox.alter_sink('p', isolation => 'key')");
    assert_eq!(refused.sqlstate, "22023");
}
