//! The values of secrets are seen nowhere, however they are set.

mod scene;

use std::thread;

use outbox_tests::{Sql, until};
use scene::unseen::{assert_unseen, talkative};
use scene::{emit, quick};

#[test]
fn setting_a_secret_shows_it_nowhere() {
    let cluster = talkative();
    let mut db = cluster.connect();
    let literal = |value: &str| format!("select outbox.set_secret('hook', array['{value}'])");
    db.run(&literal("value-of-a-simple-query"));
    db.run(
        "begin; SELECT  Outbox . \"set_secret\" ('hook', array['value-among-others']); select 1; commit",
    );
    db.execute(&literal("value-of-an-extended-query"), &[])
        .unwrap();
    let with_parameters = db.prepare("select outbox.set_secret($1, $2)").unwrap();
    for n in 0..10 {
        let values = [
            format!("value-of-parameter-{n}"),
            "value-of-a-second-one".to_owned(),
        ];
        db.execute(&with_parameters, &[&"hook", &&values[..]])
            .unwrap();
    }
    db.run("prepare set_it as select outbox.set_secret($1, $2); execute set_it('hook', '{value-of-execute}'); deallocate set_it");
    db.run("do $$ declare v text := 'value-of-a-block'; begin perform outbox.set_secret('hook', array[v]); end $$");
    db.run(
        "create function rotate(v text) returns void language plpgsql as
         $$ begin perform outbox.set_secret('hook', array[v]); end $$",
    );
    db.run("select rotate('value-of-a-wrapper')");
    db.run("with v(v) as (values ('value-of-a-cte')) select outbox.set_secret('hook', array[v]) from v");
    let kept: Vec<String> = db.one("select \"values\" from outbox.secrets");
    assert_eq!(kept, ["value-of-a-cte"]);
    assert_unseen(&cluster, &["value-of-", "value-among-"]);
    // The log does say that there was something.
    assert!(cluster.log().contains("a statement that holds secrets"));
}

#[test]
fn not_even_when_every_statement_is_logged() {
    let cluster = quick().setting("log_statement", "all").start();
    let mut db = cluster.connect();
    let literal = "select outbox.set_secret('hook', array['value-of-a-literal'])";
    db.run(literal);
    db.execute(literal, &[]).unwrap();
    let values = ["value-of-a-parameter"];
    db.execute("select outbox.set_secret($1, $2)", &[&"hook", &&values[..]])
        .unwrap();
    assert_unseen(&cluster, &["value-of-"]);
}

#[test]
fn failing_to_set_a_secret_shows_it_nowhere() {
    let cluster = talkative();
    let mut db = cluster.connect();
    db.run("create role nobody login; create role stranger login; grant usage on schema outbox to nobody");
    let calls = [
        "select outbox.set_secret('not a name', array['value-of-'])",
        "select outbox.set_secret('hook', array['value-of-', ''])",
        "select outbox.set_secret('hook', array['value-of-', null])",
        "select outbox.set_secret(null, array['value-of-'])",
        "select outbox.set_secret('hook', array['value-of-'], 'too many')",
        "select outbox.set_secret('hook', 'value-of-a-text')",
        "select outbox.set_secret('hook', '{value-of-, \"value-of-')",
        "select outbox.set_secret('hook', array['value-of-'",
        "select outbox.set_secret('hook', array['value-of-']) from nowhere",
        "select outbox.set_secret('hook', array['value-of-']), 1/0",
    ];
    for call in calls {
        let refusal = db.refused(call);
        let told = format!("{refusal:?}");
        assert!(
            !told.contains("value-of-") || refusal.sqlstate == "22P02",
            "{told}"
        );
        assert!(db.execute(call, &[]).is_err());
    }
    for role in ["nobody", "stranger"] {
        let mut other = cluster.connect_as(role);
        assert_eq!(
            other
                .refused("select outbox.set_secret('hook', array['value-of-'])")
                .sqlstate,
            "42501"
        );
        assert!(
            other
                .execute(
                    "select outbox.set_secret($1, $2)",
                    &[&"hook", &&["value-of-"][..]]
                )
                .is_err()
        );
    }
    let refused = db.execute(
        "select outbox.set_secret($1, $2)",
        &[&"not a name", &&["value-of-"][..]],
    );
    assert!(refused.is_err());
    // In a transaction that has failed already.
    let mut failed = db.transaction().unwrap();
    failed.refused("select 1/0");
    failed.refused("select outbox.set_secret('hook', array['value-of-'])");
    drop(failed);
    assert_eq!(db.one::<i64>("select count(*) from outbox.secrets"), 0);
    assert_unseen(&cluster, &["value-of-"]);
}

#[test]
fn a_call_that_waits_shows_its_value_to_nobody() {
    let cluster = talkative();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('hook', array['x'])");
    let mut holder = cluster.connect();
    let mut held = holder.transaction().unwrap();
    held.run("select outbox.set_secret('hook', array['y'])");
    thread::scope(|scope| {
        scope.spawn(|| {
            cluster
                .connect()
                .run("select outbox.set_secret('hook', array['value-of-one-that-waits'])")
        });
        scope.spawn(|| {
            let mut other = cluster.connect();
            other
                .execute(
                    "select outbox.set_secret('hook', array['value-of-one-that-waits-too'])",
                    &[],
                )
                .unwrap();
        });
        until("both to wait", || {
            let waiting: i64 =
                db.one("select count(*) from pg_stat_activity where wait_event_type = 'Lock'");
            (waiting == 2).then_some(())
        });
        let shown: Vec<String> =
            db.all("select query from pg_stat_activity where wait_event_type = 'Lock'");
        assert!(
            shown.iter().all(|query| !query.contains("value-of-")),
            "{shown:?}"
        );
        held.commit().unwrap();
    });
    assert_unseen(&cluster, &["value-of-"]);
}

#[test]
fn a_dump_does_not_hold_secrets() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('hook', array['value-of-a-secret'])");
    emit(&mut db, 1..=1);
    let dump = cluster.dump("app");
    assert!(dump.contains("test.numbered"));
    assert!(!dump.contains("value-of-a-secret"));
}
