//! What is wrong is told when it is set, as one clear error, and nothing is left behind.

mod scene;

use outbox_tests::{Cluster, Refusal, Sql};
use postgres::Client;
use scene::{assert_clear, quoted};
use serde_json::{Value, json};

fn scene() -> (Cluster, Client) {
    let cluster = Cluster::builder().preload(false).start();
    let db = cluster.connect();
    (cluster, db)
}

/// What the server says, which must be clear, and of that SQLSTATE.
#[track_caller]
fn refused(db: &mut Client, sqlstate: &str, statement: &str) -> Refusal {
    let refusal = db.refused(statement);
    assert_eq!(refusal.sqlstate, sqlstate, "{statement}: {refusal:?}");
    assert_clear(&refusal.message);
    for more in [&refusal.detail, &refusal.hint].into_iter().flatten() {
        assert_clear(more);
    }
    refusal
}

const WEB: &str = r#"'http', config => '{"url": "http://127.0.0.1:9/"}'"#;

#[test]
fn sinks_that_cannot_be_made() {
    let (_cluster, mut db) = scene();
    db.run(&format!("select outbox.create_sink('taken', {WEB})"));
    db.run(
        "create function takes_text(text) returns void language sql as 'select';
         create function gives_text(outbox.event) returns text language sql as 'select ''x''';
         create function gives_many(outbox.event) returns setof jsonb language sql as 'select ''1''::jsonb';
         create function two(outbox.event[], int) returns void language sql as 'select';
         create procedure proc(outbox.event[]) language sql as 'select'",
    );
    let too_long = format!("'{}', {WEB}", "x".repeat(101));
    let longest = format!("'{}', {WEB}", "x".repeat(100));
    let cases: &[(&str, &str)] = &[
        // Ids.
        (&format!("null, {WEB}"), "22023"),
        (&format!("'', {WEB}"), "22023"),
        (&format!("' ', {WEB}"), "22023"),
        (&format!("'a b', {WEB}"), "22023"),
        (&format!("'a/b', {WEB}"), "22023"),
        (&format!("'a:b', {WEB}"), "22023"),
        (&format!("'ä', {WEB}"), "22023"),
        (&format!("E'a\\n', {WEB}"), "22023"),
        (
            &format!("'x''; drop table outbox.events; --', {WEB}"),
            "22023",
        ),
        (&too_long, "22023"),
        (&format!("'taken', {WEB}"), "42710"),
        ("'taken', 'pull'", "42710"),
        // Kinds.
        ("'x', null", "22023"),
        ("'x', ''", "22023"),
        ("'x', 'HTTP'", "22023"),
        ("'x', 'carrier-pigeon'", "22023"),
        ("'x', 'usage'", "22023"),
        // What is common to all.
        ("'x', 'pull', stream => 'nowhere'", "42704"),
        ("'x', 'pull', stream => ''", "42704"),
        ("'x', 'pull', start => ''", "22023"),
        ("'x', 'pull', start => 'Tail'", "22023"),
        ("'x', 'pull', start => 'garbage'", "22023"),
        ("'x', 'pull', start => '1'", "22023"),
        ("'x', 'pull', start => '1:'", "22023"),
        ("'x', 'pull', start => '1:1:1'", "22023"),
        ("'x', 'pull', start => '-1:1'", "22023"),
        ("'x', 'pull', start => '1.5e3'", "22023"),
        ("'x', 'pull', start => '18446744073709551616:1'", "22023"),
        ("'x', 'pull', start => '18446744073709551615:1'", "22023"),
        ("'x', 'pull', batch_size => 0", "22023"),
        ("'x', 'pull', batch_size => -1", "22023"),
        ("'x', 'pull', batch_size => 100001", "22023"),
        ("'x', 'pull', \"grouping\" => 'row'", "22023"),
        ("'x', 'pull', \"grouping\" => ''", "22023"),
        ("'x', 'pull', isolation => 'row'", "22023"),
        ("'x', 'pull', topics => array[null]", "22023"),
        ("'x', 'pull', topics => array['']", "22023"),
        ("'x', 'pull', topics => array['a..b']", "22023"),
        ("'x', 'pull', topics => array['.a']", "22023"),
        ("'x', 'pull', topics => array['a.']", "22023"),
        ("'x', 'pull', topics => array['>.a']", "22023"),
        ("'x', 'pull', topics => array['a*']", "22023"),
        ("'x', 'pull', topics => array['ok', 'a.b>']", "22023"),
        (
            "'x', 'pull', transform => 'gives_text(outbox.event)'",
            "22023",
        ),
        (
            "'x', 'pull', transform => 'gives_many(outbox.event)'",
            "22023",
        ),
        ("'x', 'pull', transform => 'takes_text(text)'", "22023"),
        ("'x', 'pull', transform => 0::regprocedure", "42704"),
        // As Postgres itself says for the type regprocedure.
        ("'x', 'pull', transform => 'nowhere(outbox.event)'", "42883"),
        // Configs.
        ("'x', 'pull', config => null", "ok"),
        ("'x2', 'pull', config => '{}'", "ok"),
        ("'x', 'pull', config => '[]'", "22023"),
        ("'x', 'pull', config => '1'", "22023"),
        ("'x', 'pull', config => 'null'", "22023"),
        (r#"'x', 'pull', config => '{"url": "http://x/"}'"#, "22023"),
        ("'x', 'function'", "22023"),
        (
            r#"'x', 'function', config => '{"function": null}'"#,
            "22023",
        ),
        (r#"'x', 'function', config => '{"function": ""}'"#, "22023"),
        (r#"'x', 'function', config => '{"function": 7}'"#, "22023"),
        (
            r#"'x', 'function', config => '{"function": "nowhere"}'"#,
            "42704",
        ),
        (
            r#"'x', 'function', config => '{"function": "no.where(outbox.event[])"}'"#,
            "42704",
        ),
        (
            r#"'x', 'function', config => '{"function": "takes_text(text)"}'"#,
            "22023",
        ),
        (
            r#"'x', 'function', config => '{"function": "two(outbox.event[], int)"}'"#,
            "22023",
        ),
        (
            r#"'x', 'function', config => '{"function": "proc(outbox.event[])"}'"#,
            "22023",
        ),
        (
            r#"'x', 'function', config => '{"function": "f(); drop table outbox.events; --"}'"#,
            "42704",
        ),
        (
            r#"'x', 'function', config => '{"function": "now", "colour": 1}'"#,
            "22023",
        ),
        (&longest, "ok"),
    ];
    for (arguments, sqlstate) in cases {
        let statement = format!("select outbox.create_sink({arguments})");
        if *sqlstate == "ok" {
            db.run(&statement);
        } else {
            refused(&mut db, sqlstate, &statement);
        }
    }
    let sinks: i64 = db.one("select count(*) from outbox.sinks");
    assert_eq!(sinks, 4, "what was refused has left nothing behind");
    let cursors = db.one::<i64>("select count(*) from outbox.cursors");
    assert_eq!(cursors, 4);

    let usage = refused(&mut db, "22023", "select outbox.create_sink('x3', 'usage')");
    assert!(usage.hint.unwrap().contains("outbox.record_usage"));
    let taken = refused(
        &mut db,
        "42710",
        "select outbox.create_sink('taken', 'pull')",
    );
    assert!(taken.message.contains("\"taken\"") && taken.hint.unwrap().contains("alter_sink"));
    let kind = refused(&mut db, "22023", "select outbox.create_sink('x3', 'htp')");
    assert!(kind.message.contains("\"htp\"") && kind.hint.unwrap().contains("\"http\""));
    for (detail, pattern) in [("empty", "a..b"), ("last", ">.a"), ("whole", "a*")] {
        let statement =
            format!("select outbox.create_sink('x3', 'pull', topics => '{{{pattern}}}')");
        let refusal = refused(&mut db, "22023", &statement);
        assert!(refusal.message.contains(pattern), "{refusal:?}");
        assert!(refusal.detail.unwrap().contains(detail));
    }
}

#[test]
fn endpoints_that_cannot_be() {
    let (_cluster, mut db) = scene();
    for config in [
        json!({}),
        json!({"url": null}),
        json!({"url": ""}),
        json!({"url": 7}),
        json!({"url": ["http://x/"]}),
        json!({"url": "garbage"}),
        json!({"url": "//x/"}),
        json!({"url": "ftp://x/"}),
        json!({"url": "javascript:alert(1)"}),
        json!({"url": "file:///etc/passwd"}),
        json!({"url": "http://"}),
        json!({"url": "http://x:99999/"}),
        json!({"url": "http://x:0/"}),
        json!({"url": "http://[::1/"}),
        json!({"url": "http://a b/"}),
        json!({"url": "http://x/", "urll": "http://x/"}),
        json!({"url": "http://x/", "URL": "http://x/"}),
        json!({"url": "http://x/", "mode": "bulk"}),
        json!({"url": "http://x/", "mode": 1}),
        json!({"url": "http://x/", "timeout_ms": 0}),
        json!({"url": "http://x/", "timeout_ms": -5}),
        json!({"url": "http://x/", "timeout_ms": 1.5}),
        json!({"url": "http://x/", "timeout_ms": "10"}),
        json!({"url": "http://x/", "timeout_ms": 99_999_999_999_u64}),
        json!({"url": "http://x/", "concurrency": 4}),
        json!({"url": "http://x/", "mode": "single", "concurrency": 0}),
        json!({"url": "http://x/", "mode": "single", "concurrency": 100_000}),
        json!({"url": "http://x/", "headers": []}),
        json!({"url": "http://x/", "headers": {"a b": "1"}}),
        json!({"url": "http://x/", "headers": {"": "1"}}),
        json!({"url": "http://x/", "headers": {"a": 1}}),
        json!({"url": "http://x/", "headers": {"a": "1\r\nb: 2"}}),
        json!({"url": "http://x/", "headers": {"a": "ü"}}),
        json!({"url": "http://x/", "headers": {"Content-Length": "1"}}),
        json!({"url": "http://x/", "headers": {"a": "1", "A": "2"}}),
        json!({"url": "http://x/", "signature": "github"}),
        json!({"url": "http://x/", "signature": "rot13", "secret": "s"}),
        json!({"url": "http://x/", "secret": ""}),
        json!({"url": "http://x/", "secret": ["s"]}),
        json!({"url": "http://x/", "ca_file": "/x"}),
        json!({"url": "https://x/", "ca_file": "x"}),
        json!({"url": "http://u:p@x/", "headers": {"authorization": "x"}}),
    ] {
        let statement = format!(
            "select outbox.create_sink('x', 'http', config => {})",
            quoted(&config.to_string())
        );
        let refusal = refused(&mut db, "22023", &statement);
        assert!(
            refusal.message.contains("\"http\""),
            "{config}: {refusal:?}"
        );
    }
    assert_eq!(db.one::<i64>("select count(*) from outbox.sinks"), 0);

    // The key that is meant is told, and no value is.
    let config = json!({"url": "http://user:hidden@x/", "secert": "hidden"});
    let statement = format!(
        "select outbox.create_sink('x', 'http', config => {})",
        quoted(&config.to_string())
    );
    let refusal = refused(&mut db, "22023", &statement);
    assert!(
        refusal.message.contains("\"secert\"")
            && refusal.hint.as_ref().unwrap().contains("\"secret\"")
    );
    assert!(!format!("{refusal:?}").contains("hidden"));
}

#[test]
fn filters_that_are_no_expression() {
    let (_cluster, mut db) = scene();
    db.run("create table victim (n int)");
    db.run("select outbox.create_sink('p', 'pull')");
    for filter in [
        "(",
        ")",
        "topic =",
        "topic = 'a",
        "topic = \"a\"",
        "nonsense",
        "nonsense > 1",
        "nowhere.f(topic)",
        "topic",
        "1",
        "payload",
        "count(*) > 0",
        "row_number() over () = 1",
        "generate_series(1, 2) = 1",
        "unnest(array[true])",
        "$2 is null",
        "true, false",
        "true as x",
        "true from outbox.events",
        "true limit 1",
        "true order by 1",
        "true offset 1",
        "true union select true",
        "select true",
        "true); drop table victim; --",
        "true); drop table victim; select (true",
        "true; drop table victim",
        "true;",
        "true) or (true",
        "true) offset 0) t; drop table victim; --",
        "true /*",
        "true */",
        "true $$",
        "with x as (delete from victim returning n) select true",
        "(with x as (delete from victim returning n) select count(*) > 0 from x)",
        "exists (delete from victim returning n)",
        "into victim",
        "true group by topic",
        "true for update",
        "distinct true",
        "all true",
    ] {
        for call in [
            format!("create_sink('x', 'pull', filter => {})", quoted(filter)),
            format!("alter_sink('p', filter => {})", quoted(filter)),
        ] {
            let refusal = refused(&mut db, "22023", &format!("select outbox.{call}"));
            assert!(refusal.message.contains("filter"), "{refusal:?}");
            assert!(
                refusal.detail.is_some() && refusal.hint.is_some(),
                "{refusal:?}"
            );
        }
    }
    assert_eq!(db.all::<String>("select id from outbox.sinks"), ["p"]);
    assert_eq!(
        db.one::<Option<String>>("select filter from outbox.sinks"),
        None
    );
    db.run("insert into victim values (1)");

    // What is an expression is none the worse for looking odd.
    db.run("select outbox.emit('a', subject => 'x')");
    for filter in [
        "((true))",
        " true ",
        "true -- remark",
        "true /* remark */",
        "\n\ttrue\n",
        "case when topic = 'a' then true end",
        "(select true)",
        "exists (select 1 where subject = 'x')",
        "topic in ('a', 'b')",
        "topic = any (array['a'])",
        "$x$)$x$ <> topic",
        "'); drop table victim; --' <> topic",
        "E'\\'' <> topic",
        "true and not (false or subject is null)",
        "time > '-infinity'",
    ] {
        db.run(&format!(
            "select outbox.alter_sink('p', filter => {})",
            quoted(filter)
        ));
        let polled = db.all::<String>("select topic from outbox.poll('p')");
        assert_eq!(polled, ["a"], "{filter}");
    }
}

#[test]
fn a_refused_change_changes_nothing() {
    let (_cluster, mut db) = scene();
    db.run(&format!(
        "select outbox.create_sink('web', {WEB}, topics => '{{a.*}}', tenant => 't', filter => 'subject is null', batch_size => 5)"
    ));
    db.run("create function takes_text(text) returns void language sql as 'select'");
    let row = "select to_jsonb(s) from outbox.sinks s";
    let before: Value = db.one(row);
    for (change, sqlstate) in [
        ("'nobody', batch_size => 1", "42704"),
        ("null, batch_size => 1", "42704"),
        ("'web', batch_size => 0", "22023"),
        ("'web', config => '{}'", "22023"),
        ("'web', config => '[]'", "22023"),
        (
            r#"'web', config => '{"url": "http://x/", "nonsense": 1}'"#,
            "22023",
        ),
        ("'web', topics => '{a..b}'", "22023"),
        ("'web', topics => '{ok}', filter => '('", "22023"),
        ("'web', transform => 'takes_text(text)'", "22023"),
        ("'web', \"grouping\" => 'x'", "22023"),
        ("'web', isolation => 'x'", "22023"),
    ] {
        refused(
            &mut db,
            sqlstate,
            &format!("select outbox.alter_sink({change})"),
        );
    }
    assert_eq!(db.one::<Value>(row), before);
}

#[test]
fn everything_else_that_names_what_is_not_there() {
    let (_cluster, mut db) = scene();
    for (call, sqlstate) in [
        ("tick('nobody')", "42704"),
        ("prune('nowhere')", "42704"),
        ("pause_sink('nobody')", "42704"),
        ("resume_sink('nobody')", "42704"),
        ("drop_sink('nobody')", "42704"),
        ("redeliver('nobody')", "42704"),
        ("discard('nobody', '1:1')", "42704"),
        ("discard('nobody', 'garbage')", "22023"),
        ("discard('nobody', null)", "22023"),
        ("set_secret(null, '{}')", "22023"),
        ("set_secret('', '{}')", "22023"),
        ("set_secret('a b', '{}')", "22023"),
        ("set_secret('a', array[''])", "22023"),
        ("set_secret('a', array[null])", "22023"),
        ("grant('postgres', 'everything')", "22023"),
        ("revoke('postgres', 'everything')", "22023"),
        ("grant('nobody', 'emit')", "42704"),
        ("grant('postgres', 'read', array['nobody'])", "42704"),
        ("grant('postgres', 'emit', array['nobody'])", "22023"),
    ] {
        refused(&mut db, sqlstate, &format!("select outbox.{call}"));
    }
}
