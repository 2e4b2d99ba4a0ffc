//! What an endpoint's answer comes to: success, a redirect, a call for calm, or nothing for a long time.

mod scene;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use outbox_tests::{Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, ids, quick, status, until_idle, until_status};
use serde_json::json;

/// An answer that comes slowly, but within the time-out, is an answer.
#[test]
fn slowness_within_the_time_out_is_no_failure() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::ok().trickle(Duration::from_millis(3)));
    http_sink(
        &mut db,
        "slow",
        &receiver,
        json!({"timeout_ms": 60_000}),
        "",
    );
    emit(&mut db, 1..=3);
    receiver.wait_for(3);
    assert_eq!(until_idle(&mut db, "slow").delivered, 3);
    assert_eq!(receiver.ids(), ids(1..=3));
}

#[test]
fn a_sink_that_hangs_disturbs_no_other() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let hanging: Vec<Receiver> = (0..8).map(|_| Receiver::start()).collect();
    for (n, receiver) in hanging.iter().enumerate() {
        receiver.reply_always(Reply::hang());
        let config = json!({"timeout_ms": 3_600_000});
        http_sink(&mut db, &format!("hanging-{n}"), receiver, config, "");
    }
    let healthy = Receiver::start();
    http_sink(&mut db, "healthy", &healthy, json!({}), "");
    emit(&mut db, 1..=1);
    for receiver in &hanging {
        receiver.wait_for_requests(1);
    }
    for n in 2..=50 {
        emit(&mut db, n..=n);
        healthy.wait_for(n as usize);
    }
    assert_eq!(healthy.ids(), ids(1..=50));
    // No transaction is open while an answer is waited for.
    until("no open transaction of the dispatcher", || {
        let open: i64 = db.one(
            "select count(*) from pg_stat_activity where backend_type like 'pg_outbox%' and xact_start is not null",
        );
        (open == 0).then_some(())
    });
    for (n, receiver) in hanging.iter().enumerate() {
        assert_eq!(receiver.requests().len(), 1);
        let status = status(&mut db, &format!("hanging-{n}"));
        assert_eq!(
            (status.delivered, status.lag_events, status.dead_letters),
            (0, 50, 0)
        );
    }
}

#[test]
fn redirects_are_not_followed() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let elsewhere = Receiver::start();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::redirect(&elsewhere.url()));
    http_sink(
        &mut db,
        "sent-away",
        &receiver,
        json!({"secret": "s", "headers": {"authorization": "Bearer x"}}),
        "",
    );
    db.run("select outbox.set_secret('s', array['value'])");
    emit(&mut db, 1..=3);
    let seen = until_status(&mut db, "sent-away", "down", |status| {
        status.state == "down"
    });
    assert_eq!(
        seen.last_error.as_deref(),
        Some("HTTP 302 Found: redirects are not followed")
    );
    assert_eq!(elsewhere.connections(), 0);
}

#[test]
fn every_2xx_is_success_and_a_body_of_any_size_does_no_harm() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let gigabyte = Reply::huge_body(1 << 30);
    let replies = [
        ("s200", Reply::status(200)),
        ("s201", Reply::status(201).body("created")),
        ("s202", Reply::status(202)),
        ("s204", Reply::raw("HTTP/1.1 204 No Content\r\n\r\n")),
        ("s206", Reply::status(206)),
        ("s207", Reply::status(207).body(r#"{"failures": []}"#)),
        ("s299", Reply::status(299).body("{\"failures\": \"what?\"}")),
        ("huge", gigabyte),
        (
            "not-json",
            Reply::ok()
                .header("content-type", "application/json")
                .body("OK"),
        ),
        (
            "html",
            Reply::ok()
                .header("content-type", "text/html")
                .body("<html>{{ done }}</html>"),
        ),
        ("others", Reply::failures(&[("n99", "unknown here", true)])),
        (
            "until-close",
            Reply::raw("HTTP/1.0 200 OK\r\n\r\nthe end is where it closes"),
        ),
        (
            "chunked",
            Reply::raw("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
        ),
    ];
    let receivers: BTreeMap<&str, Receiver> = replies
        .into_iter()
        .map(|(sink, reply)| {
            let receiver = Receiver::start();
            receiver.reply_always(reply);
            http_sink(&mut db, sink, &receiver, json!({}), "batch_size => 2");
            (sink, receiver)
        })
        .collect();
    emit(&mut db, 1..=6);
    for (sink, receiver) in &receivers {
        until_status(&mut db, sink, "all delivered", |status| {
            status.delivered == 6
        });
        let seen = until_idle(&mut db, sink);
        assert_eq!((seen.dead_letters, seen.attempts), (0, 0), "{sink}");
        let requests = receiver.requests().len();
        assert_eq!(requests, 3, "{sink}");
    }
    // The gigabytes were not kept: the process that was sent three of them is still small.
    let pid = status(&mut db, "huge").lease_pid.unwrap();
    let memory = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak = memory
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let kilobytes: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kilobytes < 256 * 1024, "{peak}");
}

/// Seconds since the epoch as HTTP writes a date.
fn http_date(db: &mut Client, seconds: u64) -> String {
    db.one(&format!(
        "select to_char(to_timestamp({seconds}) at time zone 'UTC', 'Dy, DD Mon YYYY HH24:MI:SS') || ' GMT'"
    ))
}

#[test]
fn retry_after_is_honoured_in_seconds_and_as_a_date() {
    let cluster = quick().setting("outbox.retry_max", "1d").start();
    let mut db = cluster.connect();
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let date = http_date(&mut db, now + 5_000);
    for (sink, code, value) in [("seconds", 429, "5000".to_owned()), ("date", 503, date)] {
        let receiver = Receiver::start();
        receiver.reply_always(Reply::status(code).header("retry-after", &value));
        http_sink(&mut db, sink, &receiver, json!({}), "");
        emit(&mut db, 1..=5);
        let seen = until_status(&mut db, sink, "told to wait", |status| {
            status.next_attempt_in.is_some()
        });
        let wait = seen.next_attempt_in.unwrap();
        assert!((4_000.0..=5_001.0).contains(&wait), "{sink}: {wait}");
        let said = if code == 429 {
            "HTTP 429 Too Many Requests"
        } else {
            "HTTP 503 Service Unavailable"
        };
        assert_eq!(seen.last_error.as_deref(), Some(said));
        assert_eq!(seen.dead_letters, 0);
        // Nothing cuts the wait short: neither new events nor a new dispatcher.
        emit(&mut db, 6..=6);
        scene::replace_dispatcher(&mut db, sink);
        emit(&mut db, 7..=7);
        let seen = until_status(&mut db, sink, "told to wait", |status| {
            status.next_attempt_in.is_some()
        });
        assert!(seen.next_attempt_in.unwrap() > 3_000.0);
        assert_eq!(receiver.requests().len(), 1);
        // But an operator does.
        receiver.reply_always(Reply::ok());
        db.run(&format!("select outbox.resume_sink('{sink}')"));
        receiver.wait_for_distinct(7);
        until_idle(&mut db, sink);
        db.run(&format!(
            "select outbox.drop_sink('{sink}'); delete from outbox.events"
        ));
    }
}

#[test]
fn retry_after_is_capped() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let date = http_date(&mut db, 4_000_000_000);
    for value in ["99999999999999999999", "86400", &date] {
        let receiver = Receiver::start();
        receiver.reply_next(vec![Reply::status(429).header("retry-after", value); 3]);
        http_sink(&mut db, "capped", &receiver, json!({}), "");
        emit(&mut db, 1..=5);
        receiver.wait_for_distinct(5);
        until_idle(&mut db, "capped");
        db.run("select outbox.drop_sink('capped'); delete from outbox.events");
    }
}

/// `{"failures": [{"id": "n2", "error": "no stock"}]}`, compressed by gzip.
const REPORT_IN_GZIP: &[u8] = &[
    31, 139, 8, 0, 0, 0, 0, 0, 2, 3, 171, 86, 74, 75, 204, 204, 41, 45, 74, 45, 86, 178, 82, 136,
    174, 86, 202, 76, 1, 210, 74, 121, 70, 74, 58, 10, 74, 169, 69, 69, 249, 69, 96, 110, 190, 66,
    113, 73, 126, 114, 182, 82, 109, 108, 45, 0, 87, 80, 175, 168, 49, 0, 0, 0,
];

#[test]
fn an_answer_that_cannot_be_read_delivers_nothing() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let encoded = Reply::ok().header("content-encoding", "gzip");
    for (id, reply, says) in [
        (
            "encoded",
            encoded.body(REPORT_IN_GZIP),
            "HTTP 200, but the answer cannot be read: it is encoded as gzip, which was not asked for",
        ),
        (
            "cut",
            Reply::ok().body(r#"{"failures": [{"id": "n"#),
            "HTTP 200, but the answer cannot be read: it is no JSON as a whole",
        ),
    ] {
        receiver.clear();
        receiver.reply_always(reply);
        http_sink(&mut db, id, &receiver, json!({}), "start => 'tail'");
        emit(&mut db, 1..=3);
        let failing = until_status(&mut db, id, says, |status| {
            status.last_error.as_deref() == Some(says)
        });
        assert_eq!(failing.delivered, 0);
        receiver.clear();
        receiver.reply_always(Reply::ok().body("OK"));
        receiver.wait_for(3);
        assert_eq!(until_idle(&mut db, id).delivered, 3);
        assert_eq!(receiver.ids(), ids(1..=3));
        for request in receiver.requests() {
            assert_eq!(request.header("accept-encoding"), Some("identity"));
        }
        db.run(&format!("select outbox.drop_sink('{id}')"));
    }
}
