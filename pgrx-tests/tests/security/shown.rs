//! What is shown and logged: neither secrets nor what is in events.

use outbox_tests::{Cluster, Sql};

use super::scene::{quick, until_status};
use super::{function_sink, http_sink, with_operators};

/// A cluster that logs everything that it can be made to log.
fn talkative() -> Cluster {
    quick()
        .setting("log_statement", "all")
        .setting("log_min_duration_statement", "0")
        .setting("log_duration", "on")
        .setting("log_min_error_statement", "debug5")
        .setting("log_error_verbosity", "verbose")
        .setting("log_parameter_max_length", "-1")
        .setting("log_parameter_max_length_on_error", "-1")
        .start()
}

#[test]
fn secrets_are_not_seen_in_passing() {
    let cluster = talkative();
    let mut db = with_operators(&cluster);
    db.run("create role keeper login; select outbox.grant('keeper', 'secrets')");
    let mut keeper = cluster.connect_as("keeper");
    let pid: i32 = keeper.one("select pg_backend_pid()");
    let mut last_seen = move || {
        let seen: String = db.one(&format!(
            "select query from pg_stat_activity where pid = {pid}"
        ));
        seen
    };

    // By itself, among others, with parameters, from a block of code.
    keeper.run("select outbox.set_secret('a', array['hunter2-plain'])");
    assert_eq!(last_seen(), "select outbox.set_secret(...)");
    keeper.run("select 1; select outbox.set_secret('b', '{hunter2-among}'); select 2");
    assert_eq!(last_seen(), "select outbox.set_secret(...)");
    keeper
        .execute(
            "select outbox.set_secret($1, $2)",
            &[&"c", &vec!["hunter2-bound"]],
        )
        .expect("it is set");
    assert_eq!(last_seen(), "select outbox.set_secret(...)");
    keeper.run("do $$ begin perform OutBox.Set_Secret('d', array['hunter2-block']); end $$");
    assert_eq!(last_seen(), "select outbox.set_secret(...)");

    // And when it fails, before the function is called or in it.
    assert_eq!(
        keeper
            .refused("select outbox.set_secret('e', 'hunter2-malformed')")
            .sqlstate,
        "22P02"
    );
    assert_eq!(
        keeper
            .refused("select outbox.set_secret('f', array['hunter2-null', null])")
            .sqlstate,
        "22023"
    );
    assert_eq!(
        keeper
            .refused("select outbox.set_secret('g h', array['hunter2-name'])")
            .sqlstate,
        "22023"
    );
    assert_eq!(
        keeper
            .refused("select outbox.set_secret('i', array['hunter2-then']), 1 / 0")
            .sqlstate,
        "22012"
    );
    assert_eq!(
        keeper
            .refused("select outbox.set_secret('j', array['hunter2-syntax'] + )")
            .sqlstate,
        "42601"
    );
    let failed = keeper.execute(
        "select outbox.set_secret($1, $2)",
        &[&"k l", &vec!["hunter2-bound-too"]],
    );
    assert!(failed.is_err());
    let mut op = cluster.connect_as("op");
    assert_eq!(
        op.refused("select outbox.set_secret('m', array['hunter2-denied'])")
            .sqlstate,
        "42501"
    );

    let log = cluster.log();
    let seen: Vec<_> = log
        .lines()
        .filter(|line| line.contains("hunter2-"))
        .collect();
    assert_eq!(seen, Vec::<&str>::new());
    // The rest is logged as ever.
    assert!(log.contains("select pg_backend_pid()"));
    let kept: i64 = cluster.connect().one("select count(*) from outbox.secrets");
    assert_eq!(kept, 4);
}

#[test]
fn what_is_in_events_gets_into_no_state_and_no_log() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = outbox_tests::Receiver::start();
    let mut op = cluster.connect_as("op");
    op.run(
        "create table op.unique_ones (v text unique, n int check (n > 0));
         insert into op.unique_ones values ('hunter2-value', 1);
         create function op.take(outbox.event[]) returns void language sql as
             $$ insert into op.unique_ones select e.payload ->> 'v', 1 from unnest($1) e $$;
         create function op.check(outbox.event[]) returns void language sql as
             $$ insert into op.unique_ones select 'new ' || (e.payload ->> 'v'), 0 from unnest($1) e $$;
         create function op.number(outbox.event[]) returns void language sql as
             $$ select sum((e.payload ->> 'v')::int) from unnest($1) e $$;
         create function op.shape(outbox.event) returns jsonb language sql as
             $$ select to_jsonb(($1.payload ->> 'v')::timestamptz) $$",
    );
    for function in ["take", "check", "number"] {
        function_sink(&mut op, function, &format!("op.{function}"), "");
    }
    http_sink(
        &mut op,
        "shape",
        &receiver,
        ", transform => 'op.shape(outbox.event)'",
    );
    http_sink(
        &mut op,
        "filter",
        &receiver,
        ", filter => '(payload ->> $$v$$)::bigint > 0'",
    );
    db.run(
        "select outbox.emit('a', '{\"v\": \"hunter2-value\"}'), outbox.emit('b', '{\"v\": \"2\"}')",
    );
    for (sink, state) in [
        ("take", "23505"),
        ("check", "23514"),
        ("number", "22P02"),
        ("shape", "22007"),
        ("filter", "22P02"),
    ] {
        let now = until_status(&mut db, sink, "an error", |now| {
            now.last_error.is_some() || now.dead_letters > 0
        });
        let told = now.last_error.unwrap_or_else(|| {
            db.one(&format!(
                "select error from outbox.dead_letters where sink = '{sink}' limit 1"
            ))
        });
        assert!(
            told.ends_with(&format!("(SQLSTATE {state})")),
            "{sink}: {told}"
        );
        assert!(!told.contains("hunter2"), "{sink}: {told}");
    }
    db.run("select outbox.stop()");
    for sink in ["take", "check", "number", "shape", "filter"] {
        let told = super::tick(&mut db, sink).1.unwrap_or_default();
        assert!(!told.contains("hunter2"), "{sink}: {told}");
    }
    let log = cluster.log();
    let seen: Vec<_> = log
        .lines()
        .filter(|line| line.contains("hunter2-value"))
        .collect();
    assert_eq!(seen, Vec::<&str>::new());
}
