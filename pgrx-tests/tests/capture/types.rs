//! Every type's values come through exactly, and none makes a write fail.

use outbox_tests::Sql;
use postgres::Client;

use super::{payload, quiet, taken};

/// Type, value as SQL, and what the payload says of it, as jsonb prints it.
const VALUES: &[(&str, &str, &str)] = &[
    ("bool", "true", "true"),
    ("int2", "(-32768)", "-32768"),
    ("int4", "2147483647", "2147483647"),
    ("int8", "9223372036854775807", "9223372036854775807"),
    ("int8", "(-9223372036854775808)", "-9223372036854775808"),
    ("numeric", "1.500", "1.500"),
    ("numeric", "'NaN'", "\"NaN\""),
    ("numeric", "'-Infinity'", "\"-Infinity\""),
    (
        "numeric(1000,500)",
        "1",
        concat!(
            "1.",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000",
            "00000000000000000000000000000000000000000000000000"
        ),
    ),
    ("float8", "0.1::float8 + 0.2::float8", "0.30000000000000004"),
    ("float8", "'NaN'", "\"NaN\""),
    ("float8", "'-infinity'", "\"-Infinity\""),
    ("float4", "1.1", "1.1"),
    (
        "text",
        "E'q\"\\\\ \\u00e4\\u0001\\n'",
        "\"q\\\"\\\\ ä\\u0001\\n\"",
    ),
    ("varchar(3)", "'abc'", "\"abc\""),
    ("char(3)", "'a'", "\"a  \""),
    ("name", "'n'", "\"n\""),
    ("\"char\"", "'c'", "\"c\""),
    ("bytea", "'\\x00ff5c'", "\"\\\\x00ff5c\""),
    (
        "uuid",
        "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",
        "\"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11\"",
    ),
    ("date", "'2024-02-29'", "\"2024-02-29\""),
    ("date", "'infinity'", "\"infinity\""),
    ("date", "'0044-03-15 BC'", "\"0044-03-15 BC\""),
    ("time", "'24:00:00'", "\"24:00:00\""),
    ("timetz", "'04:05:06.789+02'", "\"04:05:06.789+02\""),
    (
        "timestamp",
        "'2024-02-29 12:00:00.123456'",
        "\"2024-02-29T12:00:00.123456\"",
    ),
    (
        "timestamptz",
        "'2024-02-29 12:00:00.123456+02'",
        "\"2024-02-29T10:00:00.123456+00:00\"",
    ),
    ("timestamptz", "'-infinity'", "\"-infinity\""),
    (
        "interval",
        "'1 year 2 mons -3 days 04:05:06.789'",
        "\"1 year 2 mons -3 days +04:05:06.789\"",
    ),
    ("money", "1234.5::numeric::money", "\"$1,234.50\""),
    ("inet", "'10.0.0.1/8'", "\"10.0.0.1/8\""),
    ("cidr", "'10.0.0.0/8'", "\"10.0.0.0/8\""),
    ("macaddr", "'08:00:2b:01:02:03'", "\"08:00:2b:01:02:03\""),
    ("bit(3)", "B'101'", "\"101\""),
    ("varbit", "B''", "\"\""),
    ("point", "'(1.5,2)'", "\"(1.5,2)\""),
    ("circle", "'<(1,2),3>'", "\"<(1,2),3>\""),
    ("tsvector", "'a:1 b:2'", "\"'a':1 'b':2\""),
    ("xml", "'<a>&lt;</a>'", "\"<a>&lt;</a>\""),
    ("jsonpath", "'$.a'", "\"$.\\\"a\\\"\""),
    ("pg_lsn", "'16/B374D848'", "\"16/B374D848\""),
    ("oid", "4294967295", "\"4294967295\""),
    ("regclass", "'t'", "\"public.t\""),
    ("regtype", "'int'", "\"integer\""),
    ("int4range", "'[1,5)'", "\"[1,5)\""),
    (
        "tstzrange",
        "'[2024-01-01 00:00+02,infinity]'",
        "\"[\\\"2023-12-31 22:00:00+00\\\",infinity]\"",
    ),
    ("nummultirange", "'{[1.50,2],(3,)}'", "\"{[1.50,2],(3,)}\""),
    (
        "jsonb",
        "'{\"a\": 12345678901234567890.10, \"b\": [null]}'",
        "{\"a\": 12345678901234567890.10, \"b\": [null]}",
    ),
    (
        "json",
        "'{\"b\": 1.10, \"a\": [1, null]}'",
        "{\"a\": [1, null], \"b\": 1.10}",
    ),
    ("json", "'\"\\ud834\\udd1e\"'", "\"𝄞\""),
    (
        "json",
        "'{\"a\": \"\\u0000\"}'",
        "\"{\\\"a\\\": \\\"\\\\u0000\\\"}\"",
    ),
    ("json", "'\"\\ud800\"'", "\"\\\"\\\\ud800\\\"\""),
    ("json", "'1e999999'", "\"1e999999\""),
    ("json", "'null'", "null"),
    (
        "json[]",
        "array['{\"a\": 1}', '\"\\u0000\"', null]::json[]",
        "[{\"a\": 1}, \"\\\"\\\\u0000\\\"\", null]",
    ),
    ("int[]", "'{}'", "[]"),
    ("int[]", "'{{1,2},{3,null}}'", "[[1, 2], [3, null]]"),
    ("int[]", "'[0:1]={1,2}'", "[1, 2]"),
    ("numeric[]", "'{1.50,NaN}'", "[1.50, \"NaN\"]"),
    (
        "text[]",
        "array['a\"b', 'NULL', null]",
        "[\"a\\\"b\", \"NULL\", null]",
    ),
    (
        "timestamptz[]",
        "'{2024-02-29 12:00:00+02}'",
        "[\"2024-02-29T10:00:00+00:00\"]",
    ),
    (
        "jsonb[]",
        "array['{\"a\": 1}', 'null']::jsonb[]",
        "[{\"a\": 1}, null]",
    ),
    ("mood", "'so \"so\"'", "\"so \\\"so\\\"\""),
    ("mood[]", "array['ok']::mood[]", "[\"ok\"]"),
    ("positive", "7", "7"),
    (
        "doc",
        "'{\"x\": \"\\u0000\"}'",
        "\"{\\\"x\\\": \\\"\\\\u0000\\\"}\"",
    ),
    (
        "pair",
        "row(9223372036854775807, 'a\"b')",
        "{\"a\": 9223372036854775807, \"B b\": \"a\\\"b\"}",
    ),
    ("pair", "row(null, null)", "{\"a\": null, \"B b\": null}"),
    (
        "pair[]",
        "array[row(1, 'x'), null]::pair[]",
        "[{\"a\": 1, \"B b\": \"x\"}, null]",
    ),
    (
        "nest",
        "row(row(1, 'x'), '{1.50}', '\"\\u0000\"')",
        "{\"j\": \"\\\"\\\\u0000\\\"\", \"n\": [1.50], \"p\": {\"a\": 1, \"B b\": \"x\"}}",
    ),
    ("moodrange", "moodrange('sad', 'ok')", "\"[sad,ok)\""),
    ("sly", "row(1)", "{\"n\": 1}"),
];

const TYPES: &str = "
    create type mood as enum ('sad', 'ok', 'so \"so\"');
    create type moodrange as range (subtype = mood);
    create domain positive as int check (value > 0);
    create domain doc as json;
    create type pair as (a int8, \"B b\" text);
    create type nest as (p pair, n numeric[], j json);
    create type sly as (n int)";

/// A user's cast to json would be run with the rights of whoever runs it.
const CASTS: &str = "
    create function sly_json(sly) returns json language plpgsql as $$ begin raise 'run as %', current_user; end $$;
    create cast (sly as json) with function sly_json(sly);
    create function mood_json(mood) returns json language plpgsql as $$ begin raise 'run as %', current_user; end $$;
    create cast (mood as json) with function mood_json(mood)";

const HOSTILE: &str = "
    set datestyle = 'SQL, DMY'; set intervalstyle = 'sql_standard'; set extra_float_digits = -10; set bytea_output = escape;
    set timezone = 'Asia/Tokyo'; set search_path = public; set quote_all_identifiers = on; set xmloption = content";

/// The values of those types that the server knows: not every one is built with libxml.
pub(super) fn values(db: &mut Client) -> Vec<&'static (&'static str, &'static str, &'static str)> {
    let has_xml: bool =
        db.one("select setting like '%--with-libxml%' from pg_config where name = 'CONFIGURE'");
    let values = VALUES.iter();
    values
        .filter(|(type_, ..)| has_xml || *type_ != "xml")
        .collect()
}

pub(super) fn with_types(db: &mut Client) {
    db.run(TYPES);
    db.run(CASTS);
}

#[test]
fn each_value_of_each_type() {
    let (_cluster, mut db) = quiet();
    with_types(&mut db);
    for hostile in [false, true] {
        for (type_, value, told) in values(&mut db) {
            let told = if *type_ == "money" {
                told.replace(['$', ','], "")
            } else {
                (*told).to_owned()
            };
            db.run("drop table if exists t; create table t (id int primary key)");
            db.run(&format!(
                "alter table t add v {type_}; select outbox.capture('t')"
            ));
            if hostile {
                db.run(HOSTILE);
            }
            db.run(&format!("insert into t values (1, {value})"));
            let printed = |db: &mut Client, column: &str| -> String {
                let text: String = db.one(&format!("with gone as (delete from outbox.events returning payload) select ({column})::text from gone"));
                text
            };
            let what = format!("{type_} {value}");
            let money = |text: String| {
                if *type_ == "money" {
                    text.replace(['$', ','], "")
                } else {
                    text
                }
            };
            assert_eq!(money(printed(&mut db, "payload -> 'v'")), told, "{what}");
            db.run("update t set v = null");
            assert_eq!(printed(&mut db, "payload -> 'v'"), "null", "{what}");
            db.run("select outbox.alter_capture('t', payload => 'before_after')");
            db.run(&format!("update t set v = {value}"));
            assert_eq!(
                money(printed(&mut db, "payload -> 'after' -> 'v'")),
                told,
                "{what}"
            );
            // What is written again as it was is no change.
            db.run(&format!("update t set v = {value}"));
            assert_eq!(
                db.one::<i64>("select count(*) from outbox.events"),
                0,
                "{what}"
            );
            db.run("delete from t");
            assert_eq!(
                money(printed(&mut db, "payload -> 'before' -> 'v'")),
                told,
                "{what}"
            );
            db.run("reset all");
        }
    }
}

#[test]
fn any_type_can_be_a_key() {
    let (_cluster, mut db) = quiet();
    with_types(&mut db);
    for (type_, value, _) in values(&mut db) {
        db.run(&format!(
            "drop table if exists t; create table t (v {type_}, n int)"
        ));
        db.run(
            "select outbox.capture('t', key => '{v}', tenant_column => 'v', payload => 'changed')",
        );
        db.run(&format!(
            "insert into t values ({value}, 1); update t set n = 2; delete from t"
        ));
        let changes = taken(&mut db);
        assert_eq!(changes.len(), 3, "{type_} {value}");
        assert!(
            changes
                .iter()
                .all(|change| change.subject == changes[0].subject
                    && change.tenant == changes[0].subject)
        );
    }
}

#[test]
fn large_values_that_are_not_wanted_are_not_fetched() {
    let (_cluster, mut db) = quiet();
    db.run("create table t (id int primary key, n int, wide text); alter table t alter wide set storage external");
    db.run("select outbox.capture('t', payload => 'changed')");
    db.run(
        "insert into t select 1, 1, string_agg(md5(n::text), '') from generate_series(1, 655360) n",
    );
    let changes = taken(&mut db);
    assert_eq!(
        changes[0].payload["wide"].as_str().map(str::len),
        Some(20_971_520)
    );
    // Out of line and unchanged: nothing of it is read, which shows in the blocks that are.
    let read = |db: &mut Client| -> i64 {
        db.run("select pg_stat_force_next_flush()");
        db.one("select coalesce(toast_blks_hit + toast_blks_read, 0) from pg_statio_user_tables where relname = 't'")
    };
    let before = read(&mut db);
    assert_eq!(
        payload(&mut db, "update t set n = 2").to_string(),
        r#"{"n":2,"id":1}"#
    );
    db.run("select outbox.alter_capture('t', payload => 'full', columns => '{n}')");
    assert_eq!(
        payload(&mut db, "update t set n = 3").to_string(),
        r#"{"n":3,"id":1}"#
    );
    assert_eq!(read(&mut db), before);
    db.run("select outbox.alter_capture('t', columns => '{}')");
    let full = payload(&mut db, "update t set n = 4");
    assert_eq!(full["wide"].as_str().map(str::len), Some(20_971_520));
    assert!(read(&mut db) > before);
}

#[test]
fn odd_columns() {
    let (_cluster, mut db) = quiet();
    let long = "x".repeat(63);
    db.run(&format!(
        r#"create table "T" (gone int, "Id" int primary key, "a""b" text, "c'd\" text, "{long}" int, "outbox_change" int, n1 int, place int)"#
    ));
    db.run(r#"alter table "T" drop gone"#);
    db.run(r#"select outbox.capture('"T"', payload => 'changed', condition => 'new.n1 is distinct from 9 and new."a""b" is null')"#);
    let told = payload(
        &mut db,
        r#"insert into "T" values (1, null, 'q', 5, 6, 7, 8)"#,
    );
    assert_eq!(told["c'd\\"], "q");
    assert_eq!(told[&long], 5);
    assert_eq!(told["a\"b"], serde_json::Value::Null);
    assert_eq!(told.as_object().map(serde_json::Map::len), Some(7));
    let told = payload(
        &mut db,
        &format!(r#"update "T" set "c'd\" = null, "{long}" = 6"#),
    );
    assert_eq!(told["c'd\\"], serde_json::Value::Null);
    assert_eq!(told.as_object().map(serde_json::Map::len), Some(3));
    let many = (1..=1500)
        .map(|n| format!("c{n} int"))
        .collect::<Vec<_>>()
        .join(", ");
    db.run(&format!(
        "create table wide (id int primary key, {many}); select outbox.capture('wide')"
    ));
    assert_eq!(
        payload(&mut db, "insert into wide (id, c1500) values (1, 7)")["c1500"],
        7
    );
    assert_eq!(payload(&mut db, "update wide set c1 = 8")["c1500"], 7);
    let refusal = db.refused("select outbox.alter_capture('wide', payload => 'before_after')");
    assert_eq!(refusal.sqlstate, "22023");
    assert_eq!(payload(&mut db, "update wide set c1 = 9")["c1"], 9);
}

#[test]
fn columns_that_are_generated_when_they_are_read() {
    if outbox_tests::major() < 18 {
        return;
    }
    let (_cluster, mut db) = quiet();
    db.run("create table t (id int primary key, n int, twice int generated always as (n * 2) virtual, thrice int generated always as (n * 3) stored)");
    db.run("select outbox.capture('t', payload => 'before_after', condition => 'new.n > 0')");
    let told = payload(&mut db, "insert into t values (1, 5)");
    assert_eq!(told["after"].to_string(), r#"{"n":5,"id":1,"thrice":15}"#);
    let told = payload(&mut db, "update t set n = 6");
    assert_eq!(told["after"].to_string(), r#"{"n":6,"id":1,"thrice":18}"#);
    assert_eq!(
        db.refused("select outbox.alter_capture('t', columns => '{twice}')")
            .sqlstate,
        "42704"
    );
}
