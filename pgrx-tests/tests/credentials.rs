//! What must be seen nowhere, whatever fails: the credentials of sinks and, in the log, what events hold.

mod scene;

use outbox_tests::{Receiver, Reply, Sql, Tls};
use postgres::Client;
use scene::unseen::{assert_unseen, talkative};
use scene::{
    dead_letters, http_sink, quoted, replace_dispatcher, until_dead, until_idle, until_status,
};
use serde_json::json;

const HEADER: &str = "header-credential-4711";
const SECRET: &str = "signing-secret-4711";
const PASSWORD: &str = "url-password-4711";
const TOKEN: &str = "url-token-4711";
const PAYLOAD: &str = "payload-value-4711";
const CREDENTIALS: [&str; 4] = [HEADER, SECRET, PASSWORD, TOKEN];

/// Emits events whose payload is not to be logged; the statement itself is a test's matter, not the extension's.
fn emit_values(db: &mut Client, count: i32) {
    db.run("set log_min_duration_statement = -1");
    db.run(&format!(
        "select outbox.emit('test.value', jsonb_build_object('v', '{PAYLOAD}', 'n', n), subject => n::text) from generate_series(1, {count}) n"
    ));
    db.run("reset log_min_duration_statement");
}

/// A receiver's URL with all that can be secret about it, and the same in a header and a secret.
fn confidential(url: &str) -> serde_json::Value {
    let url = url.replace("://", &format!("://user:{PASSWORD}@")) + &format!("?token={TOKEN}");
    json!({"url": url, "secret": "hook", "headers": {"x-api-key": HEADER}})
}

#[test]
fn no_failure_of_a_sink_shows_its_credentials_or_what_it_was_sent() {
    let cluster = talkative();
    let mut db = cluster.connect();
    db.run(&format!(
        "select outbox.set_secret('hook', array['{SECRET}'])"
    ));
    // Receivers that quote all that they were sent, and what they know.
    let quoting = format!("{HEADER} {SECRET} {PASSWORD} {TOKEN} {PAYLOAD}");
    let failing: Vec<(&str, Reply)> = vec![
        (
            "status",
            Reply::status(500)
                .body(quoting.clone())
                .header("x-quote", &quoting),
        ),
        (
            "redirected",
            Reply::redirect(&format!("http://u:{PASSWORD}@127.0.0.1:1/?{TOKEN}")),
        ),
        ("reset", Reply::reset()),
        ("hang", Reply::hang()),
        ("garbage", Reply::raw(format!("{quoting}\r\n\r\n"))),
        (
            "bad-header",
            Reply::raw(format!("HTTP/1.1 200 OK\r\n{quoting}\r\n\r\n")),
        ),
        ("later", Reply::status(429).header("retry-after", &quoting)),
        (
            "cut",
            Reply::raw(format!(
                "HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{quoting}"
            )),
        ),
    ];
    let mut receivers = Vec::new();
    for (sink, reply) in failing {
        let receiver = Receiver::start();
        receiver.reply_always(reply);
        let mut config = confidential(&receiver.url());
        config["timeout_ms"] = json!(100);
        http_sink(&mut db, sink, &receiver, config, "batch_size => 2");
        receivers.push((sink, receiver));
    }
    // Some of them never come as far as an answer.
    for (sink, tls) in [("expired", Tls::Expired), ("self-signed", Tls::SelfSigned)] {
        let receiver = Receiver::builder().tls(tls).start();
        http_sink(&mut db, sink, &receiver, confidential(&receiver.url()), "");
        receivers.push((sink, receiver));
    }
    let refused = Receiver::start();
    refused.stop();
    http_sink(
        &mut db,
        "refused",
        &refused,
        confidential(&refused.url()),
        "",
    );
    receivers.push(("refused", refused));
    let nowhere = Receiver::start();
    http_sink(
        &mut db,
        "nowhere",
        &nowhere,
        confidential("http://no-such-host.invalid/hook"),
        "",
    );
    receivers.push(("nowhere", nowhere));
    // And one that names its events one by one, quoting.
    let naming = Receiver::start();
    let quoted_error = quoting.clone();
    naming.reply_with(move |request| {
        let events: Vec<serde_json::Value> = serde_json::from_slice(&request.body).unwrap();
        let ids: Vec<_> = events
            .iter()
            .map(|event| event["id"].as_str().unwrap())
            .collect();
        let failures: Vec<_> = ids
            .iter()
            .zip(0..)
            .filter(|(_, n)| n % 3 != 2)
            .map(|(id, n)| (*id, quoted_error.as_str(), n % 3 == 0))
            .collect();
        Reply::failures(&failures)
    });
    http_sink(&mut db, "naming", &naming, confidential(&naming.url()), "");

    emit_values(&mut db, 12);
    for (sink, _) in &receivers {
        until_status(&mut db, sink, "some attempts", |status| {
            status.attempts >= 7
        });
    }
    until_status(&mut db, "naming", "dead letters", |status| {
        status.dead_letters >= 4
    });
    db.run("select * from outbox.tick()");
    assert_unseen(&cluster, &CREDENTIALS);
    // What a receiver said of an event is kept with the event, but not logged.
    assert!(!cluster.log().contains(PAYLOAD), "the log holds a payload");

    // Nor do any of the ways to set it right.
    for (sink, receiver) in &receivers {
        receiver.reply_always(Reply::ok());
        db.run(&format!(
            "select outbox.pause_sink('{sink}'), outbox.resume_sink('{sink}')"
        ));
    }
    replace_dispatcher(&mut db, "naming");
    db.run("select outbox.redeliver('naming')");
    naming.reply_always(Reply::ok());
    until_dead(&mut db, "naming", 0);
    until_idle(&mut db, "status");
    assert_unseen(&cluster, &CREDENTIALS);
    assert!(!cluster.log().contains(PAYLOAD), "the log holds a payload");
}

#[test]
fn making_and_changing_a_sink_does_not_log_its_credentials() {
    let cluster = talkative();
    let mut db = cluster.connect();
    let config = confidential("http://127.0.0.1:1/hook");
    let literal = quoted(&config.to_string());
    db.run(&format!(
        "select outbox.create_sink('simple', 'http', config => {literal})"
    ));
    db.execute(
        &format!("select outbox.create_sink('extended', 'http', config => {literal})"),
        &[],
    )
    .unwrap();
    for n in 0..7 {
        db.execute(
            "select outbox.create_sink($1, 'http', config => $2)",
            &[&format!("bound-{n}"), &config],
        )
        .unwrap();
        db.execute(
            "select outbox.alter_sink($1, config => $2)",
            &[&format!("bound-{n}"), &config],
        )
        .unwrap();
    }
    db.run(&format!(
        "select outbox.alter_sink('simple', config => {literal})"
    ));
    // What is refused is logged by default, with the statement.
    db.refused(&format!(
        "select outbox.create_sink('simple', 'http', config => {literal})"
    ));
    db.refused(&format!(
        "select outbox.create_sink('no name', 'http', config => {literal})"
    ));
    db.refused(&format!(
        "select outbox.create_sink('other', 'htpt', config => {literal})"
    ));
    db.refused(&format!(
        "select outbox.alter_sink('nobody', config => {literal})"
    ));
    for (key, value) in [
        ("urll", json!(format!("http://user:{PASSWORD}@host/"))),
        ("url", json!(format!("ftp://user:{PASSWORD}@host/"))),
        ("url", json!(format!("http://user:{PASSWORD}@ho st/"))),
        ("headers", json!({"content-type": HEADER})),
        ("headers", json!({"x": [HEADER]})),
        ("headers", json!({"x": format!("{HEADER}\n")})),
        ("headers", json!(HEADER)),
        ("timeout_ms", json!(HEADER)),
        ("mode", json!(HEADER)),
        ("signature", json!(HEADER)),
    ] {
        let mut wrong = config.clone();
        wrong[key] = value;
        let wrong = quoted(&wrong.to_string());
        let refusal = db.refused(&format!(
            "select outbox.create_sink('wrong', 'http', config => {wrong})"
        ));
        let told = format!("{refusal:?}");
        assert_eq!(refusal.sqlstate, "22023", "{told}");
        assert!(
            CREDENTIALS.iter().all(|value| !told.contains(value)),
            "{told}"
        );
    }
    assert_unseen(&cluster, &CREDENTIALS);
}

#[test]
fn what_events_hold_is_not_logged_when_user_code_fails_on_it() {
    let cluster = talkative();
    let mut db = cluster.connect();
    db.run(
        "create table strict (id text primary key, v text check (length(v) < 5), n int);
         create function quoting(events outbox.event[]) returns void language plpgsql as $$
         begin
             raise exception 'cannot take %', events[1].payload ->> 'v'
                 using detail = events[1].payload ->> 'v', hint = events[1].payload ->> 'v';
         end $$;
         create function violating(events outbox.event[]) returns void language sql as
         $$ insert into strict select e.id, e.payload ->> 'v', 1 from unnest(events) e $$;
         create function casting(events outbox.event[]) returns void language sql as
         $$ insert into strict select e.id, '', (e.payload ->> 'v')::int from unnest(events) e $$;
         create function shaping(e outbox.event) returns jsonb language sql as
         $$ select to_jsonb((e.payload ->> 'v')::numeric) $$;
         create function picky(events outbox.event[]) returns void language plpgsql as $$
         declare e outbox.event;
         begin
             foreach e in array events loop
                 if (e.payload ->> 'n')::int % 2 = 0 then raise exception 'not %', e.payload; end if;
             end loop;
         end $$;",
    );
    for function in ["quoting", "violating", "casting", "picky"] {
        db.run(&format!("select outbox.create_sink('{function}', 'function', config => '{{\"function\": \"{function}\"}}')"));
    }
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "shaping",
        &receiver,
        json!({}),
        "transform => 'shaping(outbox.event)'",
    );
    http_sink(
        &mut db,
        "filtering",
        &receiver,
        json!({}),
        "filter => '(payload ->> ''v'')::int > 0'",
    );
    emit_values(&mut db, 8);
    for sink in ["quoting", "violating", "casting", "shaping", "filtering"] {
        until_status(&mut db, sink, "some attempts", |status| {
            status.attempts >= 7
        });
    }
    until_status(&mut db, "picky", "dead letters", |status| {
        status.dead_letters >= 3
    });
    db.run("select * from outbox.tick()");
    let log = cluster.log();
    let line = log.lines().find(|line| line.contains(PAYLOAD));
    assert_eq!(line, None);
    // The log says which events were set aside, and where to look.
    let letter = &dead_letters(&mut db, "picky")[0];
    let told = format!("sink \"picky\": event {} dead-lettered", letter.position);
    assert!(log.contains(&told), "{told}");
}
