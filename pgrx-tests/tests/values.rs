//! Values arrive as they were written: at an endpoint, at a function, at a pull consumer, and at whoever reads.

mod everywhere;
mod scene;

use everywhere::{Scene, same_everywhere};
use outbox_tests::{Event, Reply, Sql, until};
use postgres::Client;
use scene::http_sink;
use serde_json::json;

/// The payloads in the database's own words, by id.
fn payload(db: &mut Client, event: &Event) -> Option<String> {
    db.query_one(
        "select payload::text from outbox.events where id = $1",
        &[&event.id],
    )
    .unwrap()
    .get(0)
}

#[test]
fn a_payload_of_50_megabytes() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    // What no compression makes small, between what is small.
    db.run("select outbox.emit('small', '1')");
    db.run(
        "select outbox.emit('big', jsonb_build_object('text', string_agg(md5(n::text) || 'ä', ''))) from generate_series(1, 1500000) n",
    );
    db.run("select outbox.emit('small', '2')");
    let events = scene.receiver.wait_for(3);
    let topics: Vec<_> = events.iter().map(|event| &*event.topic).collect();
    assert_eq!(topics, ["small", "big", "small"]);
    assert!(events[1].data_text.as_ref().unwrap().len() > 50_000_000);
    // Compared here, and not by assert_eq, which would print both.
    assert!(payload(&mut db, &events[1]) == events[1].data_text);
    same_everywhere(&mut db, 3);

    // Also again, after a failure, and with others of its size in one transaction.
    scene.receiver.reply_next([Reply::status(503)]);
    db.run(
        "select outbox.emit('big', to_jsonb(repeat('x' || n, 10000000))) from generate_series(1, 3) n",
    );
    for event in &scene.receiver.wait_for(6)[3..] {
        assert!(event.data_text.as_ref().unwrap().len() > 20_000_000);
        assert!(payload(&mut db, event) == event.data_text);
    }
    until("the function to be called", || {
        (db.one::<i64>("select count(*) from seen") == 6).then_some(())
    });
}

#[test]
fn numbers_keep_each_digit() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    let digits = "1234567890".repeat(40);
    let numbers = [
        "0".to_owned(),
        "-0".into(),
        "0.10".into(),
        "1.000000000000000000000000000000".into(),
        "9007199254740993".into(),
        "-9223372036854775808".into(),
        "18446744073709551616".into(),
        "1e400".into(),
        "1E-400".into(),
        "123456789.123456789e-3".into(),
        digits.clone(),
        format!("-{digits}.{digits}"),
        format!("0.{digits}"),
    ];
    for number in &numbers {
        let statement = format!(
            r#"select outbox.emit('n', '{{"n": [{number}]}}', headers => '{{"n": {number}}}')"#
        );
        db.run(&statement);
    }
    for event in scene.receiver.wait_for(numbers.len()) {
        assert_eq!(event.data_text, payload(&mut db, &event));
        // A header is a number only where CloudEvents has such numbers, and text otherwise, with all its digits.
        let header: String = db
            .query_one(
                "select headers ->> 'n' from outbox.events where id = $1",
                &[&event.id],
            )
            .unwrap()
            .get(0);
        assert_eq!(event.extensions["n"].trim_matches('"'), header);
    }
    same_everywhere(&mut db, numbers.len());
    let row: String = db.one(&format!("select payload #>> '{{n,0}}' from outbox.read(null, 1000) where payload @> '{{\"n\": [{digits}]}}'"));
    assert_eq!(row, digits);
}

/// Texts that have troubled somebody.
fn texts() -> Vec<String> {
    let mut texts: Vec<String> = [
        "plain",
        "it's \"quoted\" \\ and \\\\ back / forth",
        "größe ñandú Ωmega żółć",
        "漢字かな交じり文 한국어 ไทย",
        "👍🏽 👨‍👩‍👧‍👦 🇪🇺 \u{10FFFF}",
        "مرحبا \u{202E}gnirts\u{202C} \u{200F}",
        "e\u{301} \u{FEFF}bom \u{2028}line\u{2029}para \u{85}next \u{7F}del \u{FFFD}",
        "<script>alert(1)</script>&amp;%00%0a${x}{{y}}",
        "'; drop table outbox.events; --",
        " leading and trailing ",
        "\\u0041 \\n \\x41",
    ]
    .map(str::to_owned)
    .into();
    texts.push((1..0x20).filter_map(char::from_u32).collect());
    texts.push("long ".repeat(2000));
    texts
}

#[test]
fn texts_of_all_kinds() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    let texts = texts();
    for text in &texts {
        db.execute(
            "select outbox.emit($1, jsonb_build_object('text', $1::text, $1::text, 1), subject => $1, tenant => $1,
                                headers => jsonb_build_object('text', $1::text, 'list', jsonb_build_array($1::text)), id => 'id ' || $1)",
            &[text],
        )
        .unwrap();
    }
    let events = scene.receiver.wait_for(texts.len());
    for (event, text) in events.iter().zip(&texts) {
        assert_eq!(event.topic, *text);
        assert_eq!(event.subject.as_ref(), Some(text));
        assert_eq!(event.tenant.as_ref(), Some(text));
        assert_eq!(event.id, format!("id {text}"));
        assert_eq!(event.data(), json!({"text": text, text.as_str(): 1}));
        let header = |name: &str| serde_json::from_str::<String>(&event.extensions[name]).unwrap();
        assert_eq!(header("text"), *text);
        let list: Vec<String> = serde_json::from_str(&header("list")).unwrap();
        assert_eq!(list, [text.as_str()]);
    }
    same_everywhere(&mut db, texts.len());

    // Also by way of a session's settings, of filters, and of topics that are asked for.
    for (n, text) in texts.iter().enumerate() {
        db.execute("select set_config('outbox.tenant', $1, false), set_config('outbox.headers', jsonb_build_object('text', $1::text)::text, false)", &[text]).unwrap();
        db.run("select outbox.emit('by.settings')");
        let filter = format!("subject = '{}'", text.replace('\'', "''"));
        db.execute(
            "select outbox.create_sink($1, 'pull', filter => $2, tenant => $3)",
            &[&format!("p{n}"), &filter, text],
        )
        .unwrap();
        let polled: Vec<String> = db.all(&format!("select subject from outbox.poll('p{n}')"));
        assert_eq!(polled, [text.as_str()]);
    }
    let events = scene.receiver.wait_for(2 * texts.len());
    for (event, text) in events[texts.len()..].iter().zip(&texts) {
        assert_eq!(event.tenant.as_ref(), Some(text));
        assert_eq!(
            serde_json::from_str::<String>(&event.extensions["text"]).unwrap(),
            *text
        );
    }
}

#[test]
fn what_jsonb_refuses_is_refused_at_the_write() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    for (value, sqlstate) in [
        (r#""\u0000""#, "22P05"),
        (r#"{"\u0000": 1}"#, "22P05"),
        (r#""\ud800""#, "22P02"),
        (r#""\udc00 alone""#, "22P02"),
        (r#""\ud83d x""#, "22P02"),
        ("{\"a\": 1", "22P02"),
        ("NaN", "22P02"),
        ("", "22P02"),
    ] {
        for statement in [
            format!("select outbox.emit('a', '{value}')"),
            format!("select outbox.emit('a', headers => '{value}')"),
            format!("insert into outbox.events (topic, payload) values ('a', '{value}')"),
        ] {
            assert_eq!(db.refused(&statement).sqlstate, sqlstate, "{statement}");
        }
    }
    // The write that goes with it fails as well, and a transaction may go on behind a savepoint.
    db.run("create table business (n int); begin; insert into business values (1); savepoint s");
    db.refused(r#"insert into business values (2); select outbox.emit('a', '"\u0000"')"#);
    db.run("rollback to s; select outbox.emit('good'); commit");
    assert_eq!(db.all::<i32>("select n from business"), [1]);
    // A pair of surrogates is one character, written as such or not.
    db.run(r#"select outbox.emit('pair', '"\ud83d\ude00"')"#);
    let events = scene.receiver.wait_for(2);
    assert_eq!(events[0].topic, "good");
    assert_eq!(events[1].data(), json!("😀"));
    same_everywhere(&mut db, 2);
}

#[test]
fn payloads_of_every_shape() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    let deep = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    let deep_objects = format!("{}1{}", "{\"a\": ".repeat(1000), "}".repeat(1000));
    let wide = format!(
        "{{{}}}",
        (0..20_000)
            .map(|n| format!("\"k{n}\": {n}"))
            .collect::<Vec<_>>()
            .join(", ")
    );
    let shapes = [
        "null".to_owned(),
        "true".into(),
        "0".into(),
        "\"\"".into(),
        "{}".into(),
        "[]".into(),
        "[null, {\"\": [{}]}]".into(),
        r#"{"b": 1, "a": 2, "aa": {"z": null}}"#.into(),
        deep(100),
        deep(3000),
        deep_objects,
        wide,
    ];
    for shape in &shapes {
        db.execute("select outbox.emit('s', $1::text::jsonb, headers => jsonb_build_object('h', $1::text::jsonb))", &[shape]).unwrap();
    }
    db.run("select outbox.emit('none')");
    let events = scene.receiver.wait_for(shapes.len() + 1);
    for (event, shape) in events.iter().zip(&shapes) {
        assert_eq!(event.data_text, payload(&mut db, event), "{shape}");
        assert!(event.data_text.is_some());
    }
    assert_eq!(
        events.last().unwrap().data_text,
        None,
        "no payload is no data"
    );
    same_everywhere(&mut db, shapes.len() + 1);

    // And once more by way of the dead letters.
    let failed: Vec<_> = events
        .iter()
        .take(11)
        .map(|event| event.id.clone())
        .collect();
    let failures: Vec<_> = failed.iter().map(|id| (&**id, "no", true)).collect();
    db.run("select outbox.drop_sink('web')");
    scene.receiver.clear();
    scene.receiver.reply_next([Reply::failures(&failures)]);
    http_sink(&mut db, "web", &scene.receiver, json!({}), "");
    scene::until_status(&mut db, "web", "11 dead letters", |status| {
        status.dead_letters == 11
    });
    db.run("select outbox.redeliver('web')");
    for event in scene.receiver.wait_for_distinct(shapes.len() + 1) {
        assert_eq!(event.data_text, payload(&mut db, &event));
        assert_eq!(
            event.extensions,
            events
                .iter()
                .find(|first| first.id == event.id)
                .unwrap()
                .extensions
        );
    }
}

#[test]
fn times_of_every_age() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    let times = [
        ("2026-01-31 12:00:00+00", "2026-01-31T12:00:00Z"),
        (
            "2026-01-31 12:00:00.000001+02",
            "2026-01-31T10:00:00.000001Z",
        ),
        (
            "1969-12-31 23:59:59.999999+00",
            "1969-12-31T23:59:59.999999Z",
        ),
        ("2024-02-29 00:00:00+00", "2024-02-29T00:00:00Z"),
        ("0001-01-01 00:00:00+00", "0001-01-01T00:00:00Z"),
        ("9999-12-31 23:59:59+00", "9999-12-31T23:59:59Z"),
        // What RFC 3339 cannot say becomes the nearest that it can.
        ("4713-01-01 00:00:00+00 BC", "0001-01-01T00:00:00Z"),
        ("10000-01-01 00:00:00+00", "9999-12-31T23:59:59.999999Z"),
        ("294276-12-31 23:59:59+00", "9999-12-31T23:59:59.999999Z"),
        ("-infinity", "0001-01-01T00:00:00Z"),
        ("infinity", "9999-12-31T23:59:59.999999Z"),
    ];
    db.run("select outbox.pause_sink('web')");
    for (time, _) in times {
        db.run(&format!(
            "insert into outbox.events (topic, time) values ('t', '{time}')"
        ));
    }
    // The status copes with them while they wait.
    assert_eq!(scene::status(&mut db, "web").lag_events, times.len() as i64);
    for (time, _) in times {
        db.run(&format!("select outbox.create_sink('tmp', 'pull', enabled => false, filter => 'time = ''{time}'''), outbox.drop_sink('tmp')"));
    }
    db.run("select outbox.resume_sink('web')");
    let arrived: Vec<_> = scene
        .receiver
        .wait_for(times.len())
        .into_iter()
        .map(|event| event.time)
        .collect();
    assert_eq!(arrived, times.map(|(_, expected)| expected));
    same_everywhere(&mut db, times.len());
    // And so does retention: what is of the future stays, what is past goes.
    scene.cluster.set("outbox.retention_min_age", "0");
    until("the setting to be read", || {
        db.run("select outbox.prune()");
        let left = "select count(*) from outbox.events where time < '3000-01-01'";
        (db.one::<i64>(left) == 0).then_some(())
    });
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.events where time > '3000-01-01'"),
        4
    );
}

#[test]
fn empty_texts_and_odd_headers() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    db.run(
        r#"insert into outbox.events (topic, subject, tenant, source, headers) values
            ('a', '', '', '', '{}'),
            ('b', null, null, null, '{"X-Trace-Id": "1", "id": "mine", "data": 1, "tenant": "forged", "n": null, "ok": true}'),
            ('c', 's', 't', 'u', '["no", "object"]'),
            ('d', 's', 't', 'u', '"text"'),
            ('e', 's', 't', 'u', 'null')"#,
    );
    assert_eq!(
        db.refused("insert into outbox.events (topic) values ('')")
            .sqlstate,
        "23514"
    );
    let events = scene.receiver.wait_for(5);
    assert_eq!((&events[0].subject, &events[0].tenant), (&None, &None));
    assert!(!events[0].source.is_empty(), "CloudEvents require one");
    let b = &events[1];
    assert_ne!(b.id, "mine");
    assert_eq!((&b.tenant, &b.data_text), (&None, &None));
    assert_eq!(b.extensions.keys().collect::<Vec<_>>(), ["ok", "xtraceid"]);
    assert!(events[2..].iter().all(|event| event.extensions.is_empty()));
    same_everywhere(&mut db, 5);
}
