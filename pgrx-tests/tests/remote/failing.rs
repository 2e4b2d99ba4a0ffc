//! A bad event, an outage and a hang are told apart; and none of them shows what an event holds.

use outbox_tests::Sql;
use serde_json::json;

use super::scene::unseen::{assert_unseen, talkative};
use super::scene::{
    assert_clear, emit, ids, ids_without, quick, status, until_dead, until_idle, until_status,
};
use super::{destination, postgres_sink, until_applied};

#[test]
fn a_bad_event_is_set_aside_and_the_others_go_through() {
    let there = destination();
    let mut remote = there.connect();
    remote.run("alter table applied add constraint small check (subject not in ('3', '4', '17'))");
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "batch_size => 8");
    emit(&mut db, 1..=40);
    let letters = until_dead(&mut db, "w", 3);
    assert_eq!(until_applied(&mut remote, 37), ids_without(40, &[3, 4, 17]));
    for letter in letters {
        assert_eq!(
            letter.error,
            "23514 check violation, constraint \"small\", table \"public.applied\""
        );
    }
    until_idle(&mut db, "w");
}

#[test]
fn a_table_that_takes_nothing_is_an_outage() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({}), "");
    emit(&mut db, 1..=5);
    until_status(&mut db, "w", "all delivered", |status| {
        status.delivered == 5
    });
    for (broken, mended, says) in [
        (
            "alter table applied rename to elsewhere",
            "alter table elsewhere rename to applied",
            "there is no table \"applied\"",
        ),
        (
            "alter table applied add more text not null default 'x'; alter table applied alter more drop default",
            "alter table applied drop more",
            "23502 not-null violation, column \"more\", table \"public.applied\"",
        ),
        (
            "alter table applied drop payload",
            "alter table applied add payload jsonb",
            "table \"applied\" has no column \"payload\" that can be written",
        ),
    ] {
        remote.run(broken);
        let before = status(&mut db, "w").delivered;
        db.run(
            "select outbox.emit('test.more', '{}', id => 'm' || n) from generate_series(1, 6) n",
        );
        let failing = until_status(&mut db, "w", "more than five attempts", |status| {
            status.attempts > 6
        });
        let error = failing.last_error.unwrap();
        assert_clear(&error);
        assert_eq!(error, says);
        assert_eq!(failing.dead_letters, 0);
        remote.run(mended);
        until_status(&mut db, "w", "all delivered", |status| {
            status.delivered == before + 6 && status.last_error.is_none()
        });
    }
    assert_eq!(status(&mut db, "w").dead_letters, 0);
}

#[test]
fn a_destination_that_hangs_is_given_up_and_tried_again() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({"timeout_ms": 300}), "");
    emit(&mut db, 1..=2);
    until_applied(&mut remote, 2);
    let mut locker = there.connect();
    let mut locked = locker.transaction().unwrap();
    locked.run("lock table applied in access exclusive mode");
    emit(&mut db, 3..=9);
    let failing = until_status(&mut db, "w", "some attempts", |status| status.attempts >= 3);
    let error = failing.last_error.unwrap();
    assert!(
        error.contains("57014") || error.starts_with("no answer within"),
        "{error}"
    );
    assert_eq!(failing.dead_letters, 0);
    locked.commit().unwrap();
    until_idle(&mut db, "w");
    assert_eq!(until_applied(&mut remote, 9), ids(1..=9));
}

#[test]
fn nobody_there_and_nobody_let_in() {
    let there = destination();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let url = there.url("app");
    for (sink, dsn, says) in [
        (
            "nobody",
            "host=127.0.0.1 port=1 user=me".to_owned(),
            "cannot connect to 127.0.0.1:1: ",
        ),
        (
            "database",
            url.replace("/app", "/elsewhere"),
            "database \"elsewhere\" does not exist (3D000)",
        ),
        (
            "role",
            url.replace("postgres@", "stranger@"),
            "role \"stranger\" does not exist (28000)",
        ),
        (
            "tls",
            format!("{url}?sslmode=require"),
            "server does not support TLS",
        ),
        (
            "name",
            "host=no-such-host.invalid user=me".to_owned(),
            "cannot connect to no-such-host.invalid:5432: ",
        ),
    ] {
        postgres_sink(&mut db, sink, &there, json!({"dsn": dsn}), "");
        emit(&mut db, 1..=1);
        let failing = until_status(&mut db, sink, "an error", |status| status.attempts >= 2);
        let error = failing.last_error.unwrap();
        assert!(error.contains(says), "{sink}: {error}");
        assert_clear(&error);
        db.run(&format!("select outbox.drop_sink('{sink}')"));
        db.run("delete from outbox.events");
    }
}

#[test]
fn no_failure_shows_a_payload_or_a_password() {
    const PAYLOAD: &str = "payload-value-4711";
    const PASSWORD: &str = "login-password-4711";
    let there = destination();
    let mut remote = there.connect();
    remote.run(
        "create table narrow (id text, topic text, payload jsonb, subject int);
         create table strict (id text primary key, topic text, payload jsonb check (payload is null));
         create function quoting(e jsonb) returns void language plpgsql as $$
         begin
             raise exception 'cannot take %', e using detail = e::text, hint = e::text, errcode = 'P0001';
         end $$;
         create function troubled(e jsonb) returns void language plpgsql as $$
         begin
             raise exception 'cannot take %', e using detail = e::text, errcode = '53100';
         end $$;",
    );
    let cluster = talkative();
    let mut db = cluster.connect();
    let dsn = there
        .url("app")
        .replace("postgres@", &format!("postgres:{PASSWORD}@"));
    db.run(&format!(
        "select outbox.set_secret('there', array['{dsn}'])"
    ));
    db.run(&format!(
        "select outbox.set_secret('nowhere', array['postgresql://u:{PASSWORD}@127.0.0.1:1/x'])"
    ));
    db.run(&format!(
        "select outbox.set_secret('nonsense', array['host=x passwrd={PASSWORD}'])"
    ));
    for (sink, config) in [
        ("narrow", json!({"table": "narrow"})),
        ("strict", json!({"table": "strict"})),
        (
            "quoting",
            json!({"table": null, "statement": "select quoting($1)"}),
        ),
        (
            "troubled",
            json!({"table": null, "statement": "select troubled($1)"}),
        ),
        (
            "casting",
            json!({"table": null, "statement": "select ($1::jsonb -> 0 -> 'data' ->> 'v')::int"}),
        ),
        ("nowhere", json!({"secret": "nowhere"})),
        ("nonsense", json!({"secret": "nonsense"})),
        ("unset", json!({"secret": "unset"})),
    ] {
        let mut config = config;
        config["dsn"] = json!(null);
        if config.get("secret").is_none() {
            config["secret"] = json!("there");
        }
        postgres_sink(&mut db, sink, &there, config, "batch_size => 2");
    }
    db.run("set log_min_duration_statement = -1");
    db.run(&format!(
        "select outbox.emit('test.value', jsonb_build_object('v', '{PAYLOAD}'), subject => '{PAYLOAD}') from generate_series(1, 4)"
    ));
    db.run("reset log_min_duration_statement");
    for sink in [
        "narrow", "strict", "quoting", "troubled", "casting", "nowhere", "nonsense", "unset",
    ] {
        let failing = until_status(&mut db, sink, "some attempts", |status| {
            status.attempts >= 6
        });
        let error = failing.last_error.unwrap();
        assert!(!error.contains(PAYLOAD), "{sink}: {error}");
        assert_clear(&error);
    }
    db.run("select * from outbox.tick()");
    assert_unseen(&cluster, &[PASSWORD]);
    assert!(!cluster.log().contains(PAYLOAD), "the log holds a payload");
    assert_eq!(
        status(&mut db, "unset").last_error.as_deref(),
        Some("not sent: secret \"unset\" has no active value to log in with")
    );
}
