//! Outbox tables that applications have already, adopted as streams.

mod scene;

use outbox_tests::{Receiver, Sql};
use postgres::Client;
use scene::{http_sink, quick, until_idle};
use serde_json::json;

/// Events of a stream by `outbox.read`, one JSON object each.
fn events(db: &mut Client, stream: &str) -> Vec<serde_json::Value> {
    db.all(&format!(
        r#"select jsonb_build_array(id, topic, source, subject, tenant, payload, headers) from outbox.read(stream => '{stream}')"#
    ))
}

#[test]
fn the_table_of_debeziums_router() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    db.run(
        "create table outboxevent (id uuid primary key, aggregatetype varchar(255) not null, aggregateid varchar(255) not null, type varchar(255) not null, payload jsonb);
         select outbox.adopt_stream('orders', 'outboxevent')",
    );
    http_sink(&mut db, "web", &receiver, json!({}), "stream => 'orders'");
    // As those applications do it: the row goes at once.
    db.run(
        r#"begin; insert into outboxevent values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 'Order', '7', 'OrderPlaced', '{"total": 1.50}');
           delete from outboxevent; commit"#,
    );
    let event = &receiver.wait_for(1)[0];
    assert_eq!(event.id, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11");
    until_idle(&mut db, "web");
    assert_eq!(
        events(&mut db, "orders"),
        [json!([
            "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            "OrderPlaced",
            "Order",
            "7",
            null,
            serde_json::from_str::<serde_json::Value>(r#"{"total": 1.50}"#).expect("JSON"),
            null
        ])]
    );
    db.run("select outbox.drop_sink('web'), outbox.uncapture('outboxevent'), outbox.drop_stream('orders')");
    db.run("insert into outboxevent values (gen_random_uuid(), 'Order', '7', 'OrderPlaced', '{}')");
}

#[test]
fn a_table_with_other_columns_and_types() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table box (no bigint generated always as identity, what text, entity text, about jsonb, body text, tenant int, meta json, created_at timestamp default '2024-01-01 12:00');
         create role app login; grant insert on box to app",
    );
    let refusal = db.refused("select outbox.adopt_stream('s', 'box')");
    assert_eq!(refusal.sqlstate, "22023");
    assert!(
        refusal
            .detail
            .is_some_and(|detail| detail.contains("no, what, entity"))
    );
    for (columns, sqlstate) in [
        (r#"{"topic": "nope"}"#, "42704"),
        (r#"{"topic": "what", "kind": "entity"}"#, "22023"),
        (r#"{"topic": 5}"#, "22023"),
        (
            r#"{"topic": "what", "time": "body", "payload": "about"}"#,
            "42710",
        ),
        (r#"{"topic": "what", "time": "about"}"#, "22023"),
        ("[]", "22023"),
    ] {
        if sqlstate == "42710" {
            db.run("select outbox.create_stream('s')");
        }
        let refusal = db.refused(&format!(
            "select outbox.adopt_stream('s', 'box', '{columns}')"
        ));
        assert_eq!(
            refusal.sqlstate, sqlstate,
            "{columns}: {} {:?}",
            refusal.message, refusal.detail
        );
        db.run("do $$ begin perform outbox.drop_stream('s'); exception when undefined_object then null; end $$");
    }
    db.run(r#"select outbox.adopt_stream('s', 'box', '{"id": "no", "topic": "what", "subject": "no", "headers": "meta"}')"#);
    let mut app = cluster.connect_as("app");
    app.run(
        r#"insert into box (what, entity, body, tenant, meta) values ('a', 'e', '{"n": 1.0}', 7, '{"x": "y"}'), ('b', null, 'no json', null, null), ('c', 'e', '"\u0000"', 1, null)"#,
    );
    let read = events(&mut db, "s");
    let one: serde_json::Value = serde_json::from_str(r#"{"n": 1.0}"#).expect("JSON");
    assert_eq!(
        read,
        [
            json!(["1", "a", "e", "1", "7", one, {"x": "y"}]),
            json!(["2", "b", null, "2", null, "no json", null]),
            json!(["3", "c", "e", "3", "1", "\"\\u0000\"", null]),
        ]
    );
    assert_eq!(
        db.one::<String>("select min(\"time\" at time zone 'UTC')::text from outbox.s"),
        "2024-01-01 12:00:00"
    );
    // It is followed like any captured table.
    db.run("alter table box rename what to kind");
    app.run("insert into box (kind) values ('d')");
    assert_eq!(events(&mut db, "s")[3][1], "d");
    assert_eq!(db.refused("alter table box drop kind").sqlstate, "2BP01");
    assert_eq!(
        app.refused("insert into box (kind) values (null)").sqlstate,
        "23502"
    );
}
