//! Events on their way to an HTTP endpoint that is well: what arrives is exact, signed, complete and in order.

mod scene;

use std::collections::HashSet;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use outbox_tests::{Receiver, Reply, Request, Sql, until};
use scene::{
    assert_clear, emit, http_sink, ids, quick, replace_dispatcher, until_idle, until_status,
};
use serde_json::{Value, json};

/// The body of a request, and the event in it if it is one.
fn body(request: &Request) -> &str {
    std::str::from_utf8(&request.body).expect("a body in UTF-8")
}

#[test]
fn an_event_arrives_as_a_cloudevent_with_every_field_exact() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    http_sink(&mut db, "exact", &receiver, json!({}), "");
    let digits = "9".repeat(400);
    let position: String = db.one(&format!(
        r#"insert into outbox.events (id, topic, source, subject, tenant, "time", payload, headers)
           values ('evt_exact', 'order.placed', 'public.orders', '7:ä', 'acme', '2026-02-03 04:05:06.789+05:30',
                   '{{"price": 0.10, "id": 9007199254740993, "huge": {digits}, "text": "quote \" and \\ and \u00e4"}}',
                   '{{"traceparent": "00-aa-bb-01", "Attempt-No": 3}}')
           returning outbox.format_position(txid, seq)"#
    ));
    let request = &receiver.wait_for_requests(1)[0];
    let about = r#""source":"public.orders","type":"order.placed","subject":"7:ä""#;
    let expected = format!(
        r#"[{{"specversion":"1.0","id":"evt_exact",{about},"time":"2026-02-02T22:35:06.789000Z","#
    ) + &format!(
        r#""datacontenttype":"application/json","sequence":"{position}","tenant":"acme","#
    );
    // jsonb orders its keys by their length.
    let data = format!(
        r#""data":{{"id": 9007199254740993, "huge": {digits}, "text": "quote \" and \\ and ä", "price": 0.10}}}}]"#
    );
    let body = body(request);
    assert!(body.starts_with(&expected), "{body}");
    assert!(body.ends_with(&data), "{body}");
    let extensions = &body[expected.len()..body.len() - data.len()];
    let extensions: Value =
        serde_json::from_str(&format!("{{{}}}", extensions.trim_end_matches(',')))
            .unwrap_or_else(|error| panic!("{error}: {extensions}"));
    assert_eq!(
        extensions,
        json!({"traceparent": "00-aa-bb-01", "attemptno": 3})
    );
}

#[test]
fn what_an_event_does_not_have_is_not_in_the_envelope() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    http_sink(&mut db, "sparse", &receiver, json!({}), "");
    db.run("insert into outbox.events (topic) values ('bare')");
    db.run("insert into outbox.events (topic, payload) values ('json null', 'null')");
    db.run("select outbox.emit('emitted', '{}')");
    receiver.wait_for(3);
    let attributes: Vec<Vec<String>> = receiver
        .requests()
        .iter()
        .flat_map(|request| serde_json::from_slice::<Vec<Value>>(&request.body).unwrap())
        .map(|event| event.as_object().unwrap().keys().cloned().collect())
        .collect();
    let bare = ["specversion", "id", "source", "type", "time", "sequence"];
    let full = [
        "specversion",
        "id",
        "source",
        "type",
        "time",
        "datacontenttype",
        "sequence",
        "data",
    ];
    assert_eq!(attributes[0], bare);
    assert_eq!(attributes[1], full);
    assert_eq!(attributes[2], full);
    let events = receiver.events();
    assert_eq!(events[1].data(), Value::Null);
    assert!(events.iter().all(|event| !event.id.is_empty()));
    let distinct: HashSet<_> = receiver.ids().into_iter().collect();
    assert_eq!(distinct.len(), 3);
}

#[test]
fn a_request_says_what_it_is() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    let url = receiver.url().replace("http://", "http://user:p%40ss@") + "?key=1&x=a%20b";
    let config = json!({"url": url, "headers": {"X-Custom": "one two"}});
    http_sink(&mut db, "told", &receiver, config, "batch_size => 3");
    emit(&mut db, 1..=1);
    let single = Arc::clone(&receiver.wait_for_requests(1)[0]);
    assert_eq!(single.method, "POST");
    assert_eq!(single.path, "/events?key=1&x=a%20b");
    for (name, value) in [
        ("content-type", "application/cloudevents-batch+json"),
        ("idempotency-key", "n1"),
        ("x-custom", "one two"),
        // user:p@ss
        ("authorization", "Basic dXNlcjpwQHNz"),
        ("content-length", &single.body.len().to_string()),
        ("host", receiver.url().split('/').nth(2).unwrap()),
    ] {
        let values: Vec<_> = single.headers(name).collect();
        assert_eq!(values, [value], "{name}");
    }
    assert_eq!(single.header("x-outbox-signature"), None);

    // The same events under the same key, others under another.
    receiver.clear();
    receiver.reply_next([Reply::status(503)]);
    emit(&mut db, 2..=4);
    until_idle(&mut db, "told");
    receiver.wait_for_distinct(3);
    let mut known: Vec<(Vec<String>, String)> = Vec::new();
    for request in receiver.requests() {
        let events: Vec<Value> = serde_json::from_slice(&request.body).unwrap();
        let company: Vec<_> = events
            .iter()
            .map(|event| event["id"].as_str().unwrap().to_owned())
            .collect();
        let key = request.header("idempotency-key").unwrap().to_owned();
        for (other, used) in &known {
            assert_eq!(*other == company, *used == key, "{company:?} as {key}");
        }
        known.push((company, key));
    }
    assert!(known.len() > 1);
}

#[test]
fn batches_are_full_but_no_larger_and_in_order() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    emit(&mut db, 1..=95);
    http_sink(&mut db, "batches", &receiver, json!({}), "batch_size => 10");
    receiver.wait_for(95);
    assert_eq!(receiver.ids(), ids(1..=95));
    let sizes: Vec<usize> = receiver
        .requests()
        .iter()
        .map(|request| {
            serde_json::from_slice::<Vec<Value>>(&request.body)
                .unwrap()
                .len()
        })
        .collect();
    assert_eq!(sizes, [10, 10, 10, 10, 10, 10, 10, 10, 10, 5]);
    assert_eq!(until_idle(&mut db, "batches").delivered, 95);
}

#[test]
fn the_bytes_sent_are_the_bytes_signed_with_each_active_secret() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('hook', array['first secret'])");
    http_sink(&mut db, "signed", &receiver, json!({"secret": "hook"}), "");
    let signed = |request: &Request| -> Vec<&str> {
        let values: Vec<_> = request.headers("x-outbox-signature").collect();
        let known = ["first secret", "zweites Geheimnis: ü", "third"];
        let with = known.into_iter().filter(|secret| {
            // One header for it, and it alone.
            request.is_signed_with(secret)
        });
        let with: Vec<_> = with.collect();
        assert_eq!(values.len(), with.len(), "{values:?}");
        assert!(
            values
                .iter()
                .all(|value| value.len() == "sha256=".len() + 64)
        );
        with
    };

    emit(&mut db, 1..=3);
    receiver.wait_for_distinct(3);
    for request in receiver.requests() {
        assert_eq!(signed(&request), ["first secret"]);
    }

    receiver.clear();
    db.run("select outbox.set_secret('hook', array['zweites Geheimnis: ü', 'first secret'])");
    emit(&mut db, 4..=6);
    receiver.wait_for_distinct(3);
    for request in receiver.requests() {
        assert_eq!(signed(&request), ["first secret", "zweites Geheimnis: ü"]);
    }

    receiver.clear();
    db.run("select outbox.set_secret('hook', array['zweites Geheimnis: ü'])");
    emit(&mut db, 7..=7);
    receiver.wait_for_distinct(1);
    for request in receiver.requests() {
        assert_eq!(signed(&request), ["zweites Geheimnis: ü"]);
    }
}

#[test]
fn a_rotation_takes_effect_with_the_next_delivery_of_a_backlog() {
    let cluster = quick().setting("outbox.poll_interval", "10min").start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('hook', array['old'])");
    emit(&mut db, 1..=40);
    // The first request waits for an answer until the secret has changed.
    let (answer, answers) = channel();
    let answers = Mutex::new(Some(answers));
    receiver.reply_with(move |_| {
        if let Some(answers) = answers.lock().unwrap().take() {
            let _ = answers.recv();
        }
        Reply::ok()
    });
    let config = json!({"secret": "hook", "timeout_ms": 3_600_000});
    http_sink(&mut db, "rotated", &receiver, config, "batch_size => 10");
    receiver.wait_for_requests(1);
    // Forgotten and set anew: that is a change like any other.
    db.run("begin; select outbox.set_secret('hook', null); select outbox.set_secret('hook', array['new']); commit");
    answer.send(()).unwrap();
    receiver.wait_for_distinct(40);
    let (first, others) = receiver
        .requests()
        .split_first()
        .map(|(first, others)| (Arc::clone(first), others.to_vec()))
        .unwrap();
    assert!(first.is_signed_with("old"));
    for request in others {
        assert!(request.is_signed_with("new") && !request.is_signed_with("old"));
    }
    assert_eq!(receiver.ids(), ids(1..=40), "what was under way counts");
}

#[test]
fn without_an_active_secret_nothing_is_sent_until_there_is_one() {
    let cluster = quick()
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .setting("outbox.poll_interval", "10min")
        .start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    // Never set, emptied, and forgotten: all the same.
    for (sink, before) in [
        ("never", ""),
        (
            "emptied",
            "select outbox.set_secret('emptied', array['x']); select outbox.set_secret('emptied', '{}')",
        ),
        (
            "forgotten",
            "select outbox.set_secret('forgotten', array['x']); select outbox.set_secret('forgotten', null)",
        ),
    ] {
        db.run(before);
        http_sink(&mut db, sink, &receiver, json!({"secret": sink}), "");
    }
    emit(&mut db, 1..=5);
    for sink in ["never", "emptied", "forgotten"] {
        // Before it waits, it searches for an event that fails.
        let status = until_status(&mut db, sink, "no secret", |status| {
            status.last_error.is_some() && status.next_attempt_in.is_some()
        });
        let error = status.last_error.unwrap();
        assert_clear(&error);
        assert_eq!(
            error,
            format!("not sent: secret \"{sink}\" has no active value to sign with")
        );
        assert!(
            matches!(status.state.as_str(), "retrying" | "down"),
            "{}",
            status.state
        );
        assert!(status.next_attempt_in.is_some_and(|seconds| seconds > 60.0));
        assert_eq!((status.lag_events, status.dead_letters), (5, 0));
    }
    assert_eq!(receiver.requests().len(), 0);

    // Once it is set, there is nothing more to wait for.
    for sink in ["never", "emptied", "forgotten"] {
        receiver.clear();
        db.run(&format!(
            "select outbox.set_secret('{sink}', array['{sink} secret'])"
        ));
        receiver.wait_for_distinct(5);
        assert_eq!(receiver.ids(), ids(1..=5));
        assert!(
            receiver
                .requests()
                .iter()
                .all(|request| request.is_signed_with(&format!("{sink} secret")))
        );
        until_idle(&mut db, sink);
    }

    // Taken away again, in the middle of it all.
    db.run("select outbox.set_secret('never', null)");
    receiver.clear();
    emit(&mut db, 6..=6);
    receiver.wait_for(2);
    let status = until_status(&mut db, "never", "no secret", |status| {
        status.last_error.is_some()
    });
    assert_eq!(status.lag_events, 1);
    assert!(
        receiver
            .requests()
            .iter()
            .all(|request| !request.is_signed_with("never secret"))
    );
}

#[test]
fn without_an_active_secret_it_is_retried_and_never_dead_lettered() {
    let cluster = quick()
        .setting("outbox.retry_min", "1ms")
        .setting("outbox.retry_max", "2ms")
        .start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    http_sink(
        &mut db,
        "closed",
        &receiver,
        json!({"secret": "none"}),
        "batch_size => 4",
    );
    emit(&mut db, 1..=30);
    // As often as it takes to try every neighbour more than once.
    until_status(&mut db, "closed", "forty attempts", |status| {
        status.attempts >= 40
    });
    let status = until_status(&mut db, "closed", "down", |status| status.state == "down");
    assert_eq!(status.dead_letters, 0);
    assert!(status.waiting_for.is_some());
    assert_eq!(receiver.requests().len(), 0);
    db.run("select outbox.set_secret('none', array['now'])");
    receiver.wait_for_distinct(30);
    let first: Vec<_> = receiver
        .first_arrivals()
        .into_iter()
        .map(|event| event.id)
        .collect();
    assert_eq!(first, ids(1..=30));
}

#[test]
fn one_connection_is_kept_and_replaced_when_it_is_closed() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    http_sink(&mut db, "kept", &receiver, json!({}), "");
    for n in 1..=30 {
        emit(&mut db, n..=n);
        receiver.wait_for(n as usize);
    }
    assert_eq!(receiver.connections(), 1);
    // Also over an answer that is a failure, and one with a body.
    receiver.reply_next([
        Reply::status(500).body("sorry"),
        Reply::ok().body("x".repeat(10_000)),
    ]);
    emit(&mut db, 31..=31);
    receiver.wait_for(31);
    assert_eq!(receiver.connections(), 1);
    // The receiver restarts: that a kept connection has gone is no failure.
    until_idle(&mut db, "kept");
    receiver.stop();
    receiver.start_again();
    let before = receiver.requests().len();
    emit(&mut db, 32..=32);
    receiver.wait_for(32);
    assert_eq!(receiver.requests().len(), before + 1);
    assert_eq!(receiver.ids(), ids(1..=32));
    assert_eq!(until_idle(&mut db, "kept").attempts, 0);
}

#[test]
fn sinks_do_not_share_what_they_have_seen() {
    let cluster = quick().start();
    let receivers = [Receiver::start(), Receiver::start(), Receiver::start()];
    let mut db = cluster.connect();
    http_sink(&mut db, "from-origin", &receivers[0], json!({}), "");
    emit(&mut db, 1..=10);
    receivers[0].wait_for(10);
    http_sink(
        &mut db,
        "from-tail",
        &receivers[1],
        json!({}),
        "start => 'tail'",
    );
    http_sink(&mut db, "late", &receivers[2], json!({}), "");
    emit(&mut db, 11..=20);
    receivers[0].wait_for(20);
    receivers[1].wait_for(10);
    receivers[2].wait_for(20);
    assert_eq!(receivers[0].ids(), ids(1..=20));
    assert_eq!(receivers[1].ids(), ids(11..=20));
    assert_eq!(receivers[2].ids(), ids(1..=20));
    for sink in ["from-origin", "from-tail", "late"] {
        until_idle(&mut db, sink);
    }
}

#[test]
fn what_was_delivered_is_not_delivered_again_by_the_next_dispatcher() {
    let cluster = quick().start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    http_sink(&mut db, "handed-on", &receiver, json!({}), "");
    for round in 0..3 {
        emit(&mut db, round * 10 + 1..=round * 10 + 10);
        receiver.wait_for((round * 10 + 10) as usize);
        until("the delivery to be known", || {
            (scene::status(&mut db, "handed-on").delivered == round * 10 + 10).then_some(())
        });
        replace_dispatcher(&mut db, "handed-on");
    }
    emit(&mut db, 31..=31);
    receiver.wait_for(31);
    assert_eq!(receiver.ids(), ids(1..=31));
}

#[test]
fn after_a_truncate_that_restarts_the_numbers_nothing_is_skipped() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "");
    db.run(
        r#"create table taken (id text);
           create function take(e outbox.event[]) returns void language sql as 'insert into public.taken select id from unnest(e)';
           select outbox.create_sink('fn', 'function', config => '{"function": "take"}');
           select outbox.create_sink('pull', 'pull')"#,
    );
    // All three have had so many: then they may go.
    let until_had = |db: &mut postgres::Client, all: usize, new: usize| {
        receiver.wait_for_distinct(all);
        let mut pulled = HashSet::new();
        until("all is pulled", || {
            pulled.extend(db.all::<String>("select id from outbox.poll('pull')"));
            db.run("select outbox.ack('pull')");
            (pulled.len() == new).then_some(())
        });
        until("the function to have had all", || {
            (db.one::<i64>("select count(distinct id) from taken") == all as i64).then_some(())
        });
    };
    emit(&mut db, 1..=50);
    until_had(&mut db, 50, 50);

    // Fewer events than before, and more.
    db.run("truncate outbox.events restart identity");
    emit(&mut db, 51..=60);
    until_had(&mut db, 60, 10);
    db.run(
        "begin;
         truncate outbox.events restart identity;
         select outbox.emit('test.numbered', jsonb_build_object('n', n), subject => n::text, source => 'test', id => 'n' || n)
           from generate_series(61, 200) n;
         commit",
    );
    until_had(&mut db, 200, 140);
    emit(&mut db, 201..=210);
    until_had(&mut db, 210, 10);
    until_idle(&mut db, "web");
    until_idle(&mut db, "fn");
}
