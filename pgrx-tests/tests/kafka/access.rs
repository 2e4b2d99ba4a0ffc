//! Who is let in, and whom we trust: TLS and logins.

use outbox_tests::{Cluster, Kafka, Sql, Tls};
use postgres::Client;
use serde_json::json;

use crate::scene::{assert_clear, emit, ids, quick, replace_dispatcher, status, until_status};
use crate::{NUMBERED, kafka_sink, sorted_ids, until_delivered};

/// A broker behind TLS, and a sink that trusts its authority, if that is what its certificate says.
fn over_tls(tls: Tls, trusting: bool) -> (Kafka, Cluster, Client) {
    let (broker, ca_file) = Kafka::start_over_tls(tls);
    broker.create_topic(NUMBERED, 3);
    let cluster = quick().start();
    let mut db = cluster.connect();
    let mut config = json!({"timeout_ms": 2000, "properties": {"security.protocol": "SSL"}});
    if trusting {
        config["ca_file"] = json!(ca_file);
    }
    kafka_sink(&mut db, &broker, config, "");
    emit(&mut db, 1..=3);
    (broker, cluster, db)
}

#[test]
fn over_tls_with_a_certificate_that_is_trusted() {
    let (broker, _cluster, mut db) = over_tls(Tls::Good, true);
    until_delivered(&mut db, 3);
    assert_eq!(sorted_ids(&broker.records(NUMBERED)), ids(1..=3));
}

#[test]
fn a_process_that_ends_takes_the_clients_threads_along() {
    // A crash would end our session, and so would an end that takes too long for it.
    let (broker, cluster, mut db) = over_tls(Tls::Good, true);
    for round in 1..=5 {
        until_delivered(&mut db, round * 3);
        replace_dispatcher(&mut db, "log");
        emit(&mut db, round * 3 + 1..=round * 3 + 3);
    }
    until_delivered(&mut db, 18);
    // Nor while a delivery is on its way and stays there.
    broker.hang();
    // The first of them may still have been quicker than that.
    let mut number = 18;
    outbox_tests::until("trouble", || {
        number += 1;
        emit(&mut db, number..=number);
        (status(&mut db, "log").attempts >= 1).then_some(())
    });
    replace_dispatcher(&mut db, "log");
    db.run("select outbox.drop_sink('log')");
    let log = cluster.log();
    assert!(
        !log.contains("terminated by signal"),
        "a process has crashed"
    );
    assert!(!log.contains("panic"), "the log tells of a panic");
}

#[test]
fn certificates_that_are_not_trusted() {
    for (tls, trusting) in [
        (Tls::Good, false),
        (Tls::Expired, true),
        (Tls::WrongHost, true),
    ] {
        let (broker, _cluster, mut db) = over_tls(tls, trusting);
        let seen = until_status(&mut db, "log", "in trouble", |status| status.attempts >= 2);
        let error = seen.last_error.expect("it says why");
        assert_clear(&error);
        assert!(error.contains("certificate verify failed"), "{error}");
        assert_eq!(seen.dead_letters, 0);
        assert!(broker.records(NUMBERED).is_empty());
    }
}

#[test]
fn a_login_that_is_refused_is_said_and_its_password_is_not() {
    let broker = Kafka::start_closed();
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('kafka', array['first-4711', 'second-4711'])");
    let properties = json!({
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "nobody",
    });
    let config = json!({"timeout_ms": 3000, "secret": "kafka", "properties": properties});
    kafka_sink(&mut db, &broker, config, "");
    emit(&mut db, 1..=3);
    let seen = until_status(&mut db, "log", "in trouble", |status| status.attempts >= 3);
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    assert!(error.to_lowercase().contains("sasl"), "{error}");
    assert!(!error.contains("4711"), "{error}");
    assert_eq!((seen.delivered, seen.dead_letters), (0, 0));
}

fn with_login(password: &str) -> (Kafka, Cluster, Client) {
    let broker = Kafka::start_with_login("outbox", "right-4711");
    broker.create_topic(NUMBERED, 3);
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(&format!(
        "select outbox.set_secret('kafka', array['{password}'])"
    ));
    let properties = json!({
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "outbox",
    });
    let config = json!({"timeout_ms": 3000, "secret": "kafka", "properties": properties});
    kafka_sink(&mut db, &broker, config, "");
    emit(&mut db, 1..=3);
    (broker, cluster, db)
}

#[test]
fn a_login_that_is_taken_and_a_password_that_is_rotated() {
    let (broker, cluster, mut db) = with_login("right-4711");
    until_delivered(&mut db, 3);
    db.run("select outbox.set_secret('kafka', array['right-4711', 'next-4711'])");
    emit(&mut db, 4..=6);
    until_delivered(&mut db, 6);
    // Both are active; only the second is known from now on.
    broker.set_password("next-4711");
    emit(&mut db, 7..=9);
    until_delivered(&mut db, 9);
    db.run("select outbox.set_secret('kafka', array['next-4711'])");
    emit(&mut db, 10..=12);
    until_delivered(&mut db, 12);
    assert_eq!(sorted_ids(&broker.records(NUMBERED)), ids(1..=12));
    assert_eq!(status(&mut db, "log").dead_letters, 0);
    assert!(
        !cluster.log().contains("4711"),
        "the log holds the password"
    );
}

#[test]
fn a_wrong_password_is_an_outage_until_it_is_set_right() {
    let (broker, cluster, mut db) = with_login("wrong-4711");
    let seen = until_status(&mut db, "log", "in trouble", |status| status.attempts >= 2);
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    assert!(error.to_lowercase().contains("sasl"), "{error}");
    assert!(!error.contains("4711"), "{error}");
    assert_eq!((seen.delivered, seen.dead_letters), (0, 0));
    assert!(broker.records(NUMBERED).is_empty());
    db.run("select outbox.set_secret('kafka', array['right-4711'])");
    until_delivered(&mut db, 3);
    assert_eq!(sorted_ids(&broker.records(NUMBERED)), ids(1..=3));
    assert!(
        !cluster.log().contains("4711"),
        "the log holds the password"
    );
}
