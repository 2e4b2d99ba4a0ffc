//! Events that are never taken: each is decided on by itself, while others of other keys prove that the sink is up.

use outbox_tests::Sql;
use postgres::Client;
use serde_json::json;

use super::scene::{DeadLetter, dead_letters, http_sink, quick, status, until_idle};
use super::{Moody, emit, parked, until_parked};

/// Lets an event of another key through now and then until a sink has so many dead letters.
fn with_traffic_until_dead(db: &mut Client, sink: &str, count: i64) -> Vec<DeadLetter> {
    for n in 1..2_000 {
        emit(db, &format!("z{n}"));
        std::thread::sleep(std::time::Duration::from_millis(30));
        if status(db, sink).dead_letters == count {
            return dead_letters(db, sink);
        }
    }
    panic!("never {count} dead letters: {:?}", status(db, sink));
}

#[test]
fn the_first_of_a_key_is_set_aside_and_the_next_follows() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    moody.refuses("a1 a3");
    http_sink(
        &mut db,
        "keys",
        &moody.receiver,
        json!({"mode": "single"}),
        "isolation => 'key'",
    );
    emit(&mut db, "a1 a2 a3 a4 b1");
    let dead = with_traffic_until_dead(&mut db, "keys", 2);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.attempts))
        .collect();
    assert_eq!(told, [("a1", 5), ("a3", 5)]);
    assert_eq!(dead[0].error, "HTTP 500 Internal Server Error");
    assert_eq!(dead[0].event["subject"], json!("a"));
    moody.takes("a4");
    until_idle(&mut db, "keys");
    assert_eq!(moody.taken("a"), "a2 a4");
    assert_eq!(
        moody.tries("a1"),
        6,
        "five attempts, and the one that decided"
    );
    let log = format!("event {} dead-lettered after 5 attempts", dead[0].position);
    assert!(cluster.log().contains(&log));

    moody.refuses("a3");
    db.run("select outbox.redeliver('keys')");
    moody.takes("a1");
    moody.refuses("");
    moody.takes("a3");
    outbox_tests::until("all letters to be gone", || {
        dead_letters(&mut db, "keys").is_empty().then_some(())
    });
}

#[test]
fn without_anything_else_going_through_nothing_is_given_up() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
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
    emit(&mut db, "b1 a1 a2 a3");
    moody.takes("b1");
    outbox_tests::until("many attempts", || {
        (status(&mut db, "keys").attempts >= 15).then_some(())
    });
    assert_eq!(status(&mut db, "keys").dead_letters, 0);
    emit(&mut db, "c1");
    moody.takes("a2 a3 c1");
    let dead = dead_letters(&mut db, "keys");
    assert_eq!(dead.len(), 1);
    assert!(dead[0].attempts >= 15, "{dead:?}");
}

#[test]
fn many_failing_keys_are_each_decided_on() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let moody = Moody::start();
    let firsts = "abcdefghijkl".chars().map(|key| format!("{key}1"));
    moody.refuses(&firsts.clone().collect::<Vec<_>>().join(" "));
    for (sink, config) in [("single", json!({"mode": "single"})), ("batch", json!({}))] {
        http_sink(&mut db, sink, &moody.receiver, config, "isolation => 'key'");
    }
    for n in 1..=3 {
        let round = "abcdefghijklmnop".chars().map(|key| format!("{key}{n}"));
        emit(&mut db, &round.collect::<Vec<_>>().join(" "));
    }
    for sink in ["single", "batch"] {
        let dead = with_traffic_until_dead(&mut db, sink, 12);
        let ids: Vec<_> = dead.iter().map(|letter| letter.id().to_owned()).collect();
        assert_eq!(ids, firsts.clone().collect::<Vec<_>>());
        until_idle(&mut db, sink);
        assert_eq!(parked(&mut db, sink), "");
    }
    for key in "abcdefghijkl".chars() {
        let taken = moody.taken(&key.to_string());
        let mut taken = taken.split(' ').collect::<Vec<_>>();
        taken.sort_unstable();
        let [second, third] = [format!("{key}2"), format!("{key}3")];
        assert_eq!(taken, [&second, &second, &third, &third], "by both");
    }
}

#[test]
fn an_outage_after_something_was_parked_kills_nothing() {
    let cluster = quick().setting("outbox.retry_max", "30ms").start();
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
    moody.receiver.stop();
    emit(&mut db, "b2 c1 a3");
    outbox_tests::until("the outage to be noticed, for long", || {
        let now = status(&mut db, "keys");
        (now.state == "down" && now.attempts >= 20).then_some(())
    });
    // The event is good by now.
    moody.refuses("");
    moody.receiver.start_again();
    moody.takes("a1 a2 a3 b2 c1");
    assert_eq!(until_idle(&mut db, "keys").dead_letters, 0);
    assert_eq!(moody.taken("a"), "a1 a2 a3");
}
