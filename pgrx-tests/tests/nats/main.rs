//! Kind nats against a real server: what arrives, how the server is found and entered, and what is said when it is not.

#[path = "../scene/mod.rs"]
mod scene;

mod access;

use async_nats::jetstream::stream;
use outbox_tests::{Cluster, Nats, Sql, until};
use postgres::Client;
use scene::{
    assert_clear, emit, ids, quick, quoted, replace_dispatcher, status, until_dead, until_idle,
    until_status,
};
use serde_json::{Value, json};

fn nats_sink(db: &mut Client, to: &Nats, config: Value, arguments: &str) {
    let mut whole = json!({"url": to.url(), "timeout_ms": 2000});
    for (key, value) in config.as_object().expect("a config is an object") {
        whole[key] = value.clone();
    }
    let config = quoted(&whole.to_string());
    db.run(&format!(
        "select outbox.create_sink('js', 'nats', config => {config} {arguments})"
    ));
}

/// A server with the stream `EVENTS`, and a cluster with the sink `js`.
fn with_sink(config: Value) -> (Nats, Cluster, Client) {
    let server = Nats::start();
    server.create_stream("EVENTS", &["test.>", "order.>", "events.>"]);
    let cluster = quick().start();
    let mut db = cluster.connect();
    nats_sink(&mut db, &server, config, "");
    (server, cluster, db)
}

fn stored_ids(server: &Nats) -> Vec<String> {
    let stored = server.stored("EVENTS");
    stored
        .iter()
        .map(|message| message.id().to_owned())
        .collect()
}

/// What the sink says is wrong, once it has been tried more than once.
#[track_caller]
fn trouble(db: &mut Client) -> String {
    let seen = until_status(db, "js", "in trouble", |status| {
        status.attempts >= 2 && status.last_error.is_some()
    });
    assert_eq!(seen.dead_letters, 0);
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    error
}

#[test]
fn an_event_is_published_as_a_cloudevent_under_its_topic() {
    let (server, _cluster, mut db) = with_sink(json!({}));
    db.run(
        r#"select outbox.emit('order.placed', '{"total": 10.50}', subject => '7', source => 'public.orders',
               tenant => 'acme', headers => '{"X-Trace": "abc"}', id => 'evt 1')"#,
    );
    until_idle(&mut db, "js");
    until("the event", || (server.count("EVENTS") == 1).then_some(()));
    let message = server.stored("EVENTS").remove(0);
    assert_eq!(message.subject, "order.placed");
    assert_eq!(message.id(), "evt%201");
    assert_eq!(
        message.headers["content-type"],
        "application/cloudevents+json"
    );
    let text = String::from_utf8(message.payload).expect("JSON is UTF-8");
    assert!(text.contains(r#""data":{"total": 10.50}"#), "{text}");
    let event: Value = serde_json::from_str(&text).expect("a CloudEvent is JSON");
    for (name, value) in [
        ("specversion", "1.0"),
        ("id", "evt 1"),
        ("type", "order.placed"),
        ("source", "public.orders"),
        ("subject", "7"),
        ("tenant", "acme"),
        ("xtrace", "abc"),
    ] {
        assert_eq!(event[name], value, "{name}");
    }
}

#[test]
fn a_template_makes_the_subject() {
    let (server, _cluster, mut db) =
        with_sink(json!({"subject": "events.{tenant}.{table}.{header.region}"}));
    db.run(
        r#"select outbox.emit('a topic', '{}', source => 'public.orders', tenant => 'acme', headers => '{"region": "eu"}', id => 'n1');
           select outbox.emit('order.placed', '{}', source => 'public.orders', headers => '{"region": "eu"}', id => 'n2');
           select outbox.emit('order.placed', '{}', source => 'public.orders', tenant => 'a b', headers => '{"region": "eu"}', id => 'n3');
           select outbox.emit('order.placed', '{}', source => 'public.lines', tenant => 'acme', headers => '{"region": "us"}', id => 'n4')"#,
    );
    let dead = until_dead(&mut db, "js", 2);
    let told: Vec<_> = dead
        .iter()
        .map(|letter| (letter.id(), letter.error.as_str()))
        .collect();
    assert_eq!(
        told,
        [
            (
                "n2",
                "no subject \"events.{tenant}.{table}.{header.region}\": the event has no {tenant}"
            ),
            (
                "n3",
                "the subject \"events.{tenant}.{table}.{header.region}\" of this event has white space or control characters in it"
            ),
        ]
    );
    until_idle(&mut db, "js");
    let stored = server.stored("EVENTS");
    let subjects: Vec<_> = stored
        .iter()
        .map(|message| message.subject.as_str())
        .collect();
    assert_eq!(subjects, ["events.acme.orders.eu", "events.acme.lines.us"]);
}

#[test]
fn without_a_stream_nothing_counts_as_delivered() {
    let server = Nats::start();
    let cluster = quick().start();
    let mut db = cluster.connect();
    nats_sink(&mut db, &server, json!({}), "");
    for n in 1..=20 {
        emit(&mut db, n..=n);
    }
    let seen = until_status(&mut db, "js", "down", |status| status.state == "down");
    assert_eq!((seen.delivered, seen.dead_letters), (0, 0));
    let error = seen.last_error.expect("it says why");
    assert!(error.starts_with("no stream takes the topic"), "{error}");
    // Nor is what a plain service answers an acknowledgement.
    server.create_stream("EVENTS", &["test.>"]);
    until_status(&mut db, "js", "through", |status| status.delivered == 20);
    assert_eq!(stored_ids(&server).len(), 20);
    assert_eq!(until_idle(&mut db, "js").dead_letters, 0);
}

#[test]
fn what_a_plain_subscriber_answers_is_no_acknowledgement() {
    let server = Nats::start();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let server = std::sync::Arc::new(std::sync::Mutex::new(server));
    let url = server.lock().expect("nobody panics with it").url();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let service = std::thread::spawn(move || answer_ok(&url, &ready, &stopped));
    is_ready.recv().expect("the service starts");
    nats_sink(
        &mut db,
        &server.lock().expect("nobody panics with it"),
        json!({}),
        "",
    );
    emit(&mut db, 1..=1);
    let error = trouble(&mut db);
    assert!(error.contains("no stream of JetStream"), "{error}");
    assert_eq!(status(&mut db, "js").delivered, 0);
    drop(stop);
    service.join().expect("the service ends");
}

/// A service that answers everything on `test.>`.
fn answer_ok(
    url: &str,
    ready: &std::sync::mpsc::Sender<()>,
    stopped: &std::sync::mpsc::Receiver<()>,
) {
    use futures_util::StreamExt;
    use std::sync::mpsc::TryRecvError;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime starts");
    runtime.block_on(async {
        let client = async_nats::connect(url).await.expect("the server answers");
        let mut requests = client.subscribe("test.>").await.expect("a subject");
        client.flush().await.expect("the server answers");
        ready.send(()).expect("the test waits");
        while stopped.try_recv() != Err(TryRecvError::Disconnected) {
            let wait = std::time::Duration::from_millis(20);
            if let Ok(Some(request)) = tokio::time::timeout(wait, requests.next()).await
                && let Some(reply) = request.reply
            {
                client
                    .publish(reply, "ok".into())
                    .await
                    .expect("the server answers");
                client.flush().await.expect("the server answers");
            }
        }
    });
}

#[test]
fn a_stream_of_another_name_is_an_outage() {
    let (server, _cluster, mut db) = with_sink(json!({"stream": "OTHERS"}));
    emit(&mut db, 1..=3);
    let error = trouble(&mut db);
    assert!(error.contains("expected stream does not match"), "{error}");
    assert_eq!(server.count("EVENTS"), 0);
    let config = json!({"url": server.url(), "stream": "EVENTS"});
    db.run(&format!(
        "select outbox.alter_sink('js', config => {})",
        quoted(&config.to_string())
    ));
    until_status(&mut db, "js", "through", |status| status.delivered == 3);
    assert_eq!(stored_ids(&server), ids(1..=3));
}

#[test]
fn what_the_stream_refuses_for_its_size_is_set_aside_alone() {
    let server = Nats::start();
    server.create_stream_with(stream::Config {
        name: "EVENTS".to_owned(),
        subjects: vec!["test.>".to_owned()],
        max_message_size: 2_000,
        ..stream::Config::default()
    });
    let cluster = quick().start();
    let mut db = cluster.connect();
    nats_sink(&mut db, &server, json!({}), "");
    db.run(
        "select outbox.emit('test.numbered', jsonb_build_object('fill', repeat('x', case n when 5 then 3000 else 10 end)), id => 'n' || n)
           from generate_series(1, 9) n",
    );
    let dead = until_dead(&mut db, "js", 1);
    assert_eq!((dead[0].id(), dead[0].attempts), ("n5", 1));
    assert_eq!(
        dead[0].error,
        "JetStream: message size exceeds maximum allowed (10054)"
    );
    until_idle(&mut db, "js");
    assert_eq!(stored_ids(&server), scene::ids_without(9, &[5]));
}

#[test]
fn a_full_stream_is_an_outage() {
    let server = Nats::start();
    server.create_stream_with(stream::Config {
        name: "EVENTS".to_owned(),
        subjects: vec!["test.>".to_owned()],
        max_messages: 5,
        discard: stream::DiscardPolicy::New,
        ..stream::Config::default()
    });
    let cluster = quick().start();
    let mut db = cluster.connect();
    nats_sink(&mut db, &server, json!({}), "");
    emit(&mut db, 1..=5);
    until_status(&mut db, "js", "through", |status| status.delivered == 5);
    emit(&mut db, 6..=10);
    let error = trouble(&mut db);
    assert!(error.contains("maximum messages exceeded"), "{error}");
    assert_eq!(stored_ids(&server), ids(1..=5));
}

#[test]
fn a_restart_of_the_server_in_mid_batch_loses_nothing_and_keeps_the_order() {
    const EVENTS: i64 = 40_000;
    let (mut server, _cluster, mut db) = with_sink(json!({"timeout_ms": 5000}));
    db.run("select outbox.alter_sink('js', batch_size => 5000)");
    emit(&mut db, 1..=EVENTS);
    for share in 1..=3 {
        until("some to arrive", || {
            (server.count("EVENTS") >= share * 8_000).then_some(())
        });
        server.stop();
        server.start_again();
    }
    until_status(&mut db, "js", "all delivered", |status| {
        status.delivered == EVENTS
    });
    assert_eq!(server.count("EVENTS"), EVENTS as u64, "each once");
    let stored = stored_ids(&server);
    assert_eq!(stored, ids(1..=EVENTS));
    assert_eq!(until_idle(&mut db, "js").dead_letters, 0);
}

#[test]
fn a_kept_connection_that_was_closed_costs_no_attempt() {
    let (mut server, _cluster, mut db) = with_sink(json!({}));
    emit(&mut db, 1..=3);
    until_status(&mut db, "js", "through", |status| status.delivered == 3);
    server.stop();
    server.start_again();
    emit(&mut db, 4..=6);
    until_status(&mut db, "js", "through", |status| status.delivered == 6);
    assert_eq!(stored_ids(&server), ids(1..=6));
    replace_dispatcher(&mut db, "js");
    emit(&mut db, 7..=9);
    until_status(&mut db, "js", "through", |status| status.delivered == 9);
    assert_eq!(stored_ids(&server), ids(1..=9));
}

#[test]
fn the_next_server_of_the_list_will_do() {
    let server = Nats::start();
    server.create_stream("EVENTS", &["test.>"]);
    let mut gone = Nats::start();
    gone.stop();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let both = format!("{}, {}", gone.url(), server.url());
    nats_sink(&mut db, &server, json!({"url": both}), "");
    emit(&mut db, 1..=3);
    until_status(&mut db, "js", "through", |status| status.delivered == 3);
    assert_eq!(stored_ids(&server), ids(1..=3));
}
