//! What of an event gets where.

use outbox_tests::{Sql, until};
use serde_json::{Value, json};

use super::scene::{emit, ids, quick, quoted, status, until_idle, until_status};
use super::{destination, postgres_sink, until_applied};

#[test]
fn columns_are_found_by_name_and_values_are_exact() {
    let there = destination();
    let mut remote = there.connect();
    remote.run(
        r#"create schema "Raw";
           create table "Raw"."All of it" (
               n bigint generated always as identity primary key, more text default 'as ever', length int generated always as (length(id)) stored,
               id varchar(200) unique, topic text, source text, subject text, tenant text, "time" timestamptz, payload jsonb,
               headers json, txid xid8, seq numeric, "position" text);
           create table as_text (id text, topic text, payload text, "time" timestamp, seq text)"#,
    );
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(
        &mut db,
        "all",
        &there,
        json!({"table": "\"Raw\".\"All of it\""}),
        "",
    );
    postgres_sink(
        &mut db,
        "text",
        &there,
        json!({"table": "public.as_text"}),
        "",
    );
    let payload = r#"{"n": 12345678901234567890.123456789012345678900, "s": "it's \\ \"x\" ü 👍 {,}", "null": null, "deep": [[[1e400]]]}"#;
    let headers = r#"{"trace": "a, {b}", "n": 7.50}"#;
    db.run(&format!(
        "insert into outbox.events (id, topic, source, subject, tenant, \"time\", payload, headers) values
         ('a', 'order.placed', 'public.orders', '7', 'acme', '2024-02-29 12:00:00.123456+00', {}, {}),
         ('b', 'x', null, null, null, 'infinity', null, null),
         ('c', 'x', '', 'NULL', '{{}}', '0044-03-15 00:00:00+00', 'null', '{{}}')",
        quoted(payload),
        quoted(headers)
    ));
    for sink in ["all", "text"] {
        until_status(&mut db, sink, "all delivered", |status| {
            status.delivered == 3
        });
    }
    let columns = "id, topic, source, subject, tenant, \"time\"::text, payload::text, headers::text, txid::text, seq::text";
    let there: Vec<String> = remote.all(&format!(
        "select row({columns})::text from \"Raw\".\"All of it\" order by n"
    ));
    let here: Vec<String> = db.all(&format!(
        "select row({columns})::text from outbox.events order by seq"
    ));
    // jsonb or json, a number is the same.
    assert_eq!(there, here);
    let more: Vec<String> =
        remote.all("select concat_ws('|', more, length, \"position\" = txid::text || ':' || seq) from \"Raw\".\"All of it\"");
    assert_eq!(more, ["as ever|1|t"; 3]);
    let payloads: Vec<Option<String>> = remote.all("select payload from as_text order by seq::int");
    let jsonb: String = db.one("select payload::text from outbox.events where id = 'a'");
    assert_eq!(payloads, [Some(jsonb), None, Some("null".to_owned())]);
}

#[test]
fn a_statement_gets_cloudevents() {
    let there = destination();
    let mut remote = there.connect();
    remote.run("create table counters (key text primary key, total numeric not null)");
    let cluster = quick().start();
    let mut db = cluster.connect();
    let statement = "with events as (insert into applied (id, topic, payload, subject, seq)
             select e ->> 'id', e ->> 'type', e -> 'data', e ->> 'subject', split_part(e ->> 'sequence', ':', 2)::bigint
               from jsonb_array_elements($1) with ordinality as a (e, n) order by n returning payload)
         insert into counters as c select 'all', sum((payload ->> 'n')::numeric) from events having count(*) > 0
             on conflict (key) do update set total = c.total + excluded.total";
    let config = json!({"table": null, "statement": statement});
    postgres_sink(&mut db, "w", &there, config, "batch_size => 3");
    emit(&mut db, 1..=20);
    assert_eq!(until_applied(&mut remote, 20), ids(1..=20));
    until_idle(&mut db, "w");
    let total: String = remote.one("select total::text from counters");
    assert_eq!(total, "210");
    let types: Vec<String> = remote.all("select distinct topic from applied");
    assert_eq!(types, ["test.numbered"]);
    for (statement, says) in [
        (
            "select $1::jsonb, $2::int",
            "the statement takes more than $1",
        ),
        (
            "selec $1",
            "the statement: syntax error at or near \"selec\" (42601)",
        ),
        (
            "select $1::jsonb; select 1",
            "the statement: cannot insert multiple commands into a prepared statement (42601)",
        ),
    ] {
        let config = json!({"dsn": there.url("app"), "statement": statement});
        db.run(&format!(
            "select outbox.alter_sink('w', config => {})",
            quoted(&config.to_string())
        ));
        emit(&mut db, 21..=21);
        let failing = until_status(&mut db, "w", "an error", |status| {
            status
                .last_error
                .as_deref()
                .is_some_and(|error| error.contains("the statement"))
        });
        assert_eq!(failing.last_error.as_deref(), Some(says));
        db.run("delete from outbox.events where id = 'n21'");
        db.run("select outbox.drop_sink('w')");
        postgres_sink(&mut db, "w", &there, json!({}), "start => 'tail'");
    }
}

#[test]
fn the_checkpoint_table_can_be_made_by_somebody_else() {
    let there = destination();
    let mut remote = there.connect();
    remote.run("create role writer login; revoke create on schema public from public; grant insert on applied to writer");
    let cluster = quick().start();
    let mut db = cluster.connect();
    let dsn = there.url("app").replace("postgres@", "writer@");
    let config = json!({"dsn": dsn, "checkpoint": "public.seen"});
    postgres_sink(&mut db, "w", &there, config, "");
    emit(&mut db, 1..=3);
    let failing = until_status(&mut db, "w", "an error", |status| {
        status.last_error.is_some()
    });
    assert_eq!(
        failing.last_error.as_deref(),
        Some("checkpoint table \"public\".\"seen\": permission denied for schema public (42501)")
    );
    postgres_sink(
        &mut db,
        "maker",
        &there,
        json!({"checkpoint": "public.seen"}),
        "start => 'tail'",
    );
    emit(&mut db, 4..=4);
    until_status(&mut db, "maker", "one delivered", |status| {
        status.delivered == 1
    });
    remote.run("grant select, insert, delete on seen to writer");
    until_idle(&mut db, "w");
    until("both to have delivered", || {
        (remote.one::<i64>("select count(*) from applied") == 5).then_some(())
    });
    let sinks: Vec<String> = remote.all("select distinct name from seen order by 1");
    assert_eq!(sinks, ["maker", "w"]);
}

#[test]
fn old_notes_are_removed() {
    let there = destination();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    postgres_sink(&mut db, "w", &there, json!({"remember_hours": 5}), "");
    postgres_sink(&mut db, "other", &there, json!({}), "");
    emit(&mut db, 1..=1);
    until_applied(&mut remote, 2);
    remote.run(
        "insert into outbox_checkpoint (sink, name, first_seq, last_seq, events, applied_at)
         select c.sink, c.name, 0, 0, '', now() - interval '6 hours' from outbox_checkpoint c, generate_series(1, 2500)",
    );
    // Looked for once an hour, and whenever a connection is made.
    db.run(
        "select outbox.alter_sink('w', config => (select config from outbox.sinks where id = 'w'))",
    );
    for n in 2..=6 {
        emit(&mut db, n..=n);
        until_applied(&mut remote, n as usize * 2);
    }
    let notes = "select count(*) from outbox_checkpoint where applied_at < now() - interval '5 hours' and name = ";
    assert_eq!(remote.one::<i64>(&format!("{notes} 'w'")), 0);
    assert_eq!(remote.one::<i64>(&format!("{notes} 'other'")), 2500);
}

#[test]
fn what_is_redacted_is_neither_sent_nor_kept() {
    let there = destination();
    let mut remote = there.connect();
    remote.run("alter table applied add constraint not_two check (subject <> '2')");
    let cluster = quick().start();
    let mut db = cluster.connect();
    let config = json!({"redact": ["customer.email", "cards[].number"]});
    postgres_sink(&mut db, "w", &there, config.clone(), "");
    db.run("create function same(e outbox.event) returns jsonb language sql as $$ select e.payload || '{\"shaped\": true}' $$");
    let shaped = "transform => 'same(outbox.event)', filter => 'subject is not null'";
    postgres_sink(&mut db, "shaped", &there, config, shaped);
    for subject in 1..=3 {
        db.run(&format!(
            r#"select outbox.emit('x', '{{"customer": {{"email": "me@example.com", "id": 7.5}}, "cards": [{{"number": "4711"}}, {{"x": 1}}]}}', subject => '{subject}')"#
        ));
    }
    for sink in ["w", "shaped"] {
        until_status(&mut db, sink, "a dead letter", |status| {
            status.dead_letters == 1 && status.delivered == 2
        });
    }
    let expected =
        json!({"customer": {"email": null, "id": 7.5}, "cards": [{"number": null}, {"x": 1}]});
    let sent: Vec<Value> = remote.all("select payload - 'shaped' from applied");
    let dead: Vec<Value> = db.all("select (event -> 'data') - 'shaped' from outbox.dead_letters");
    assert_eq!(sent.iter().chain(&dead).collect::<Vec<_>>(), [&expected; 6]);
    let refused = db.refused(
        r#"select outbox.create_sink('x', 'http', config => '{"url": "http://x", "redact": ["a..b"]}')"#,
    );
    assert_eq!(refused.sqlstate, "22023");
    assert_eq!(
        refused.detail.as_deref(),
        Some("Path \"a..b\" is not readable.")
    );
    let refused =
        db.refused(r#"select outbox.create_sink('x', 'pull', config => '{"redact": []}')"#);
    assert_eq!(refused.sqlstate, "22023");
    assert_eq!(status(&mut db, "w").dead_letters, 1);
}
