//! What events say: payload modes, columns, keys, tenants, conditions, topics.

use outbox_tests::Sql;
use serde_json::{Value, json};

use super::{after, payload, quiet, short, taken};

const TABLE: &str = "create table orders (id bigint generated always as identity primary key, state text, total numeric, secret text)";
const INSERT: &str = "insert into orders (state, total, secret) values ('new', 1.50, 'x')";

#[test]
fn the_whole_row_by_default() {
    let (_cluster, mut db) = quiet();
    db.run(TABLE);
    db.run("select outbox.capture('orders')");
    let changes = after(&mut db, INSERT);
    assert_eq!(changes.len(), 1);
    assert_eq!(changes[0].topic, "outbox.public.orders.insert");
    assert_eq!(changes[0].source, "public.orders");
    assert_eq!(changes[0].subject.as_deref(), Some("1"));
    assert_eq!(changes[0].tenant, None);
    assert_eq!(changes[0].headers, Value::Null);
    let row = json!({"id": 1, "state": "new", "total": 1.5, "secret": "x"});
    assert_eq!(
        changes[0].payload.to_string().replace("1.50", "1.5"),
        row.to_string().replace("1.50", "1.5")
    );
    let changes = after(&mut db, "update orders set state = 'paid'");
    assert_eq!(changes[0].topic, "outbox.public.orders.update");
    assert_eq!(changes[0].payload["state"], "paid");
    let changes = after(&mut db, "delete from orders");
    assert_eq!(changes[0].topic, "outbox.public.orders.delete");
    assert_eq!(changes[0].subject.as_deref(), Some("1"));
    assert_eq!(changes[0].payload["state"], "paid");
}

#[test]
fn each_mode_says_what_it_promises() {
    let (_cluster, mut db) = quiet();
    db.run(TABLE);
    db.run("select outbox.capture('orders', payload => 'keys')");
    let says = |db: &mut postgres::Client| {
        let all = [
            INSERT,
            "update orders set state = 'paid', total = 1.50",
            "delete from orders",
        ];
        all.map(|sql| payload(db, sql).to_string())
    };
    assert_eq!(says(&mut db), [r#"{"id":1}"#; 3]);
    db.run("select outbox.alter_capture('orders', payload => 'changed')");
    assert_eq!(
        says(&mut db),
        [
            r#"{"id":2,"state":"new","total":1.50,"secret":"x"}"#,
            r#"{"id":2,"state":"paid"}"#,
            r#"{"id":2}"#,
        ]
        .map(sorted)
    );
    db.run("select outbox.alter_capture('orders', payload => 'full')");
    assert_eq!(
        says(&mut db),
        [
            r#"{"id":3,"state":"new","total":1.50,"secret":"x"}"#,
            r#"{"id":3,"state":"paid","total":1.50,"secret":"x"}"#,
            r#"{"id":3,"state":"paid","total":1.50,"secret":"x"}"#,
        ]
        .map(sorted)
    );
    db.run("select outbox.alter_capture('orders', payload => 'before_after')");
    let new = r#"{"id":4,"state":"new","total":1.50,"secret":"x"}"#;
    let paid = r#"{"id":4,"state":"paid","total":1.50,"secret":"x"}"#;
    assert_eq!(
        says(&mut db),
        [
            format!(r#"{{"before":null,"after":{new}}}"#),
            format!(r#"{{"before":{new},"after":{paid}}}"#),
            format!(r#"{{"before":{paid},"after":null}}"#),
        ]
        .map(|text| sorted(&text))
    );
}

/// JSON as jsonb prints it: shorter names first.
fn sorted(text: &str) -> String {
    fn sort(value: Value) -> Value {
        match value {
            Value::Object(members) => {
                let mut members = members.into_iter().collect::<Vec<_>>();
                members.sort_by_key(|(name, _)| (name.len(), name.clone()));
                Value::Object(
                    members
                        .into_iter()
                        .map(|(name, value)| (name, sort(value)))
                        .collect(),
                )
            }
            other => other,
        }
    }
    sort(serde_json::from_str(text).expect("it is JSON")).to_string()
}

#[test]
fn nothing_changed_is_nothing_said() {
    let (_cluster, mut db) = quiet();
    db.run(TABLE);
    db.run("select outbox.capture('orders', columns => '{state}', redact => '{secret}')");
    db.run(INSERT);
    taken(&mut db);
    assert_eq!(
        short(&mut db, "update orders set state = state"),
        Vec::<String>::new()
    );
    assert_eq!(
        short(&mut db, "update orders set total = 7"),
        Vec::<String>::new()
    );
    assert_eq!(
        short(&mut db, "update orders set secret = 'y'"),
        Vec::<String>::new()
    );
    assert_eq!(
        short(
            &mut db,
            "update orders set state = 'x' where false; delete from orders where false"
        ),
        Vec::<String>::new()
    );
    assert_eq!(
        short(&mut db, "insert into orders (state) select 'x' where false"),
        Vec::<String>::new()
    );
    assert_eq!(
        payload(&mut db, "update orders set state = 'paid', total = 8").to_string(),
        r#"{"id":1,"state":"paid"}"#
    );
    // Only those rows of a statement that have changed.
    db.run("insert into orders (state) values ('paid'), ('new')");
    taken(&mut db);
    assert_eq!(
        short(&mut db, "update orders set state = 'paid'"),
        ["update 3"]
    );
}

#[test]
fn a_key_is_never_left_out() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (b text, a int, c text, primary key (a, b))");
    db.run("select outbox.capture('t', columns => '{c}', redact => '{a,b,c}')");
    let changes = after(&mut db, "insert into t values ('x', 7, 'hidden')");
    assert_eq!(changes[0].subject.as_deref(), Some("7:x"));
    assert_eq!(changes[0].payload.to_string(), r#"{"a":7,"b":"x"}"#);
}

#[test]
fn a_key_of_ones_own_and_no_key_at_all() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (a int, b text, c bool); create table u (a int, b text)");
    db.run("select outbox.capture('t', key => '{b,c}'), outbox.capture('u', payload => 'changed')");
    assert_eq!(
        short(
            &mut db,
            "insert into t values (1, 'x', true), (2, null, false)"
        ),
        ["insert x:t", "insert :f"]
    );
    // The whole row is what identifies it.
    assert_eq!(
        short(
            &mut db,
            "insert into u values (1, 'x'); update u set b = 'y'; delete from u"
        ),
        ["insert 1:x", "update 1:x", "delete 1:y"]
    );
    let long = short(&mut db, "insert into u values (1, repeat('x', 2000))");
    assert!(
        long[0].starts_with("insert md5:") && long[0].len() == "insert md5:".len() + 32,
        "{long:?}"
    );
}

#[test]
fn an_update_of_the_key_is_told_by_the_old_one() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (id int primary key, n int)");
    for (mode, told) in [
        ("keys", r#"{"id":2}"#),
        ("changed", r#"{"id":2}"#),
        ("full", r#"{"n":5,"id":2}"#),
    ] {
        db.run(&format!(
            "select outbox.capture('t', payload => '{mode}'); insert into t values (1, 5)"
        ));
        taken(&mut db);
        let changes = after(&mut db, "update t set id = 2");
        assert_eq!(changes[0].subject.as_deref(), Some("1"));
        assert_eq!(changes[0].payload.to_string(), sorted(told), "{mode}");
        db.run("select outbox.uncapture('t'); truncate t");
    }
    // Of many rows at once, each keeps its own.
    db.run("select outbox.capture('t', payload => 'before_after'); insert into t select n, n from generate_series(1, 1000) n");
    taken(&mut db);
    let changes = after(&mut db, "update t set id = id + 5000");
    assert_eq!(changes.len(), 1000);
    for change in changes {
        let n = change.payload["before"]["id"].as_i64().expect("a number");
        assert_eq!(change.subject, Some(n.to_string()));
        assert_eq!(change.payload["after"]["id"], n + 5000);
        assert_eq!(change.payload["after"]["n"], n);
    }
}

#[test]
fn conditions_choose_rows_by_both_versions() {
    let (_cluster, mut db) = quiet();
    db.run(TABLE);
    db.run("select outbox.capture('orders', columns => '{state}', condition => 'new.total > 10 or old.total > 10')");
    assert_eq!(
        short(
            &mut db,
            "insert into orders (total) values (1), (11), (null), (12)"
        ),
        ["insert 2", "insert 4"]
    );
    assert_eq!(
        short(
            &mut db,
            "update orders set state = 'x', total = case id when 1 then 20 else total - 5 end"
        ),
        ["update 1", "update 2", "update 4"]
    );
    assert_eq!(
        short(&mut db, "update orders set state = 'y'"),
        ["update 1"]
    );
    assert_eq!(short(&mut db, "delete from orders"), ["delete 1"]);
    db.run("select outbox.alter_capture('orders', condition => 'new is distinct from old -- all')");
    assert_eq!(
        short(&mut db, "insert into orders (total) values (1)"),
        ["insert 5"]
    );
    for bad in [
        "new.nope > 1",
        "new.total",
        "true) or (true",
        "count(*) > 1",
        "old.total > 10; drop table orders",
        "select true",
    ] {
        let refusal = db.refused(&format!(
            "select outbox.alter_capture('orders', condition => $x${bad}$x$)"
        ));
        assert_eq!(refusal.sqlstate, "22023", "{bad}: {}", refusal.message);
        assert!(refusal.detail.is_some() && refusal.hint.is_some());
    }
}

#[test]
fn tenants_topics_streams_and_headers() {
    let (_cluster, mut db) = quiet();
    db.run("create schema \"Odd.one\"; create table \"Odd.one\".\"T\"\"x\" (id int primary key, who text)");
    db.run("select outbox.create_stream('billing')");
    db.run(r#"select outbox.capture('"Odd.one"."T""x"', tenant_column => 'who')"#);
    let changes = after(
        &mut db,
        r#"set outbox.tenant = 'acme'; set outbox.headers = '{"trace": "1"}'; insert into "Odd.one"."T""x" values (1, 'me')"#,
    );
    assert_eq!(changes[0].topic, "outbox.Odd.one.T\"x.insert");
    assert_eq!(changes[0].source, r#""Odd.one"."T""x""#);
    assert_eq!(changes[0].tenant.as_deref(), Some("me"));
    assert_eq!(changes[0].headers, json!({"trace": "1"}));
    db.run(r#"select outbox.alter_capture('"Odd.one"."T""x"', tenant_column => '', topic => 'it''s \changed', stream => 'billing')"#);
    db.run(r#"insert into "Odd.one"."T""x" values (2, 'you')"#);
    let (topic, tenant, headers): (String, String, Value) = {
        let row = db
            .query_one("select topic, tenant, headers from outbox.billing", &[])
            .expect("one event");
        (row.get(0), row.get(1), row.get(2))
    };
    assert_eq!(
        (topic.as_str(), tenant.as_str()),
        ("it's \\changed", "acme")
    );
    assert_eq!(headers, json!({"trace": "1", "operation": "insert"}));
    db.run(r#"reset all; select outbox.alter_capture('"Odd.one"."T""x"', topic => '{table}/{operation}', stream => 'outbox')"#);
    let changes = after(&mut db, r#"delete from "Odd.one"."T""x" where id = 2"#);
    assert_eq!(changes[0].topic, "T\"x/delete");
    assert_eq!(changes[0].headers, Value::Null);
    let refusal = {
        db.run(r#"select outbox.alter_capture('"Odd.one"."T""x"', stream => 'billing')"#);
        db.refused("select outbox.drop_stream('billing')")
    };
    assert_eq!(refusal.sqlstate, "2BP01");
}

#[test]
fn bad_arguments_are_told_at_once() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (id int primary key); create view v as select 1 as id; create temp table tmp (id int)");
    for (arguments, sqlstate) in [
        ("'t', operations => '{}'", "22023"),
        ("'t', operations => '{upsert}'", "22023"),
        ("'t', operations => null", "22023"),
        ("'t', payload => 'half'", "22023"),
        ("'t', payload => null", "22023"),
        ("'t', columns => '{}'", "22023"),
        ("'t', columns => '{nope}'", "42704"),
        ("'t', columns => '{null}'", "22023"),
        ("'t', redact => '{nope}'", "42704"),
        ("'t', key => '{nope}'", "42704"),
        ("'t', key => '{id,id}'", "22023"),
        ("'t', tenant_column => 'nope'", "42704"),
        ("'t', stream => 'nope'", "42704"),
        ("'t', condition => 'nope'", "22023"),
        ("'v'", "22023"),
        ("'tmp'", "22023"),
        ("'pg_class'", "22023"),
        ("'outbox.events'", "22023"),
        ("'outbox.captures'", "22023"),
        ("null", "22023"),
        ("99999::oid", "42704"),
    ] {
        let refusal = db.refused(&format!("select outbox.capture({arguments})"));
        assert_eq!(
            refusal.sqlstate, sqlstate,
            "{arguments}: {}",
            refusal.message
        );
    }
    db.run("select outbox.capture('t')");
    assert_eq!(db.refused("select outbox.capture('t')").sqlstate, "42710");
    db.run("select outbox.uncapture('t')");
    for function in [
        "uncapture",
        "pause_capture",
        "resume_capture",
        "alter_capture",
    ] {
        assert_eq!(
            db.refused(&format!("select outbox.{function}('t')"))
                .sqlstate,
            "42704"
        );
    }
    assert_eq!(
        short(&mut db, "insert into t values (1)"),
        Vec::<String>::new()
    );
    assert_eq!(
        db.one::<i64>("select count(*) from pg_trigger where tgrelid = 't'::regclass"),
        0
    );
}
