//! What a delivery comes to when something is wrong.

use super::*;
use crate::dispatch::Failure;

fn single_answer(reply: impl Fn() -> Reply + Send + Sync + 'static) -> (Receiver, Sender) {
    let receiver = Receiver::start(move |_| reply());
    let sender = Sender::new(&receiver.url(), no_config());
    (receiver, sender)
}

#[test]
fn every_other_status_is_an_outage() {
    for (status, error) in [
        (300, "HTTP 300 Multiple Choices: redirects are not followed"),
        (304, "HTTP 304 Not Modified: redirects are not followed"),
        (400, "HTTP 400 Bad Request"),
        (401, "HTTP 401 Unauthorized"),
        (404, "HTTP 404 Not Found"),
        (410, "HTTP 410 Gone"),
        (413, "HTTP 413 Payload Too Large"),
        (422, "HTTP 422 Unprocessable Entity"),
        (500, "HTTP 500 Internal Server Error"),
        (503, "HTTP 503 Service Unavailable"),
        (599, "HTTP 599"),
    ] {
        // A report of failures counts in a successful answer only.
        let body = br#"{"failures": [{"id": "evt_1", "permanent": true}]}"#;
        let receiver = Receiver::start(move |_| Reply::Answer(status, "", body.to_vec()));
        let refusal = Sender::new(&receiver.url(), no_config()).refused(&batch(2));
        assert_eq!(refusal.error, error);
        assert_eq!(refusal.retry_after, None);
        assert_eq!(receiver.received().len(), 1);
    }
}

#[test]
fn redirects_are_not_followed() {
    for status in [301, 302, 303, 307, 308] {
        let elsewhere = Receiver::start(|_| Reply::ok());
        let location: &'static str =
            format!("location: {}?token=swordfish\r\n", elsewhere.url()).leak();
        let receiver = Receiver::start(move |_| Reply::Answer(status, location, Vec::new()));
        let error = Sender::new(&receiver.url(), no_config())
            .refused(&batch(1))
            .error;
        assert!(error.ends_with(": redirects are not followed"), "{error}");
        assert!(!error.contains("swordfish"));
        assert!(elsewhere.received().is_empty());
    }
}

#[test]
fn the_wait_that_is_asked_for_is_passed_on() {
    let (_receiver, sender) =
        single_answer(|| Reply::Answer(429, "retry-after: 120\r\n", Vec::new()));
    assert_eq!(
        sender.refused(&batch(1)),
        Refusal {
            error: "HTTP 429 Too Many Requests".into(),
            retry_after: Some(Duration::from_secs(120)),
        }
    );
    let (_receiver, sender) = single_answer(|| {
        Reply::Answer(
            503,
            "retry-after: Fri, 31 Dec 9999 20:00:00 GMT\r\n",
            Vec::new(),
        )
    });
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(sender.refused(&batch(1)).retry_after, Some(day));
}

#[test]
fn an_answer_may_name_the_events_that_failed() {
    for status in [200, 207] {
        let body = br#"{"failures": [{"id": "evt_2", "error": "no\nstock", "permanent": true}, {"id": "evt_9"}, {"id": "evt_1"}]}"#;
        let receiver = Receiver::start(move |_| Reply::Answer(status, "", body.to_vec()));
        let sender = Sender::new(&receiver.url(), no_config());
        let failure = |index, error: &str, permanent| Failure {
            index,
            error: error.into(),
            permanent,
        };
        assert_eq!(
            sender.deliver(&batch(3)),
            Outcome::Partial(vec![
                failure(0, "reported as failed, without a reason", false),
                failure(1, "no stock", true),
            ])
        );
    }
}

#[test]
fn a_report_too_large_to_read_is_not_taken_for_success() {
    let (_receiver, sender) = single_answer(|| {
        let long = "x".repeat(2_000_000);
        let body = format!("{{ \"failures\": [{{\"id\": \"evt_1\", \"error\": \"{long}\"}}]}}");
        Reply::Answer(200, "", body.into_bytes())
    });
    let error = sender.refused(&batch(1)).error;
    assert_eq!(
        error,
        "HTTP 200, but the answer cannot be read: it is longer than 1049600 bytes"
    );
}

#[test]
fn an_answer_that_cannot_be_read_is_not_taken_for_success() {
    for (headers, body, why) in [
        (
            "content-encoding: gzip\r\n",
            &b"\x1f\x8b\x08\x00"[..],
            "it is encoded as gzip, which was not asked for",
        ),
        (
            "content-type: application/json\r\n",
            b"{\"failures\": [",
            "it is no JSON as a whole",
        ),
    ] {
        for status in [200, 207] {
            let (_receiver, sender) =
                single_answer(move || Reply::Answer(status, headers, body.to_vec()));
            assert_eq!(
                sender.refused(&batch(2)).error,
                format!("HTTP {status}, but the answer cannot be read: {why}")
            );
        }
    }
    // An answer without a length ends with its connection, wherever that is.
    let (_receiver, sender) = single_answer(|| {
        Reply::Raw(b"HTTP/1.0 200 OK\r\n\r\n{\"failures\": [{\"id\": \"evt".into())
    });
    let error = sender.refused(&batch(1)).error;
    assert_eq!(
        error,
        "HTTP 200, but the answer cannot be read: it is no JSON as a whole"
    );
}

#[test]
fn what_was_sent_is_not_shown_when_an_answer_quotes_it() {
    let receiver = Receiver::start(|request| {
        let quoted: Vec<_> = request.headers.iter().map(|(_, value)| value).collect();
        let error = json!({"failures": [{"id": "evt_1", "error": format!("{quoted:?} hush-hush {}", request.line)}]});
        Reply::Answer(200, "", error.to_string().into_bytes())
    });
    let sender = Sender::new(
        &format!(
            "{}?key=swordfish",
            receiver.url().replace("http://", "http://user:hunter2@")
        ),
        json!({"headers": {"X-Token": "Token tok-en", "X-Key": "k-e-y"}, "secret": "s"}),
    );
    let batch = Batch {
        secrets: secrets(&["hush-hush"]),
        ..batch(1)
    };
    let Outcome::Partial(failures) = sender.deliver(&batch) else {
        panic!("a partial outcome")
    };
    let error = &failures[0].error;
    assert!(error.contains("[redacted]"));
    for secret in [
        "hush",
        "swordfish",
        "hunter2",
        "tok-en",
        "k-e-y",
        "dXNlcjpodW50ZXIy",
    ] {
        assert!(!error.contains(secret), "{secret} in {error}");
    }
}

#[test]
fn nobody_listens() {
    let url = nowhere();
    let refusal = Sender::new(&format!("{url}?key=swordfish"), no_config()).refused(&batch(1));
    let origin = url.trim_end_matches('/');
    assert_eq!(
        refusal.error,
        format!("cannot connect to {origin}: Connection refused (os error 111)")
    );
}

#[test]
fn a_name_that_does_not_exist() {
    let sender = Sender::new("http://name.invalid/hook?key=swordfish", no_config());
    let error = sender.refused(&batch(1)).error;
    assert!(
        error.starts_with("cannot connect to http://name.invalid: "),
        "{error}"
    );
    assert!(error.contains("lookup"), "{error}");
    assert!(!error.contains("swordfish"), "{error}");
}

#[test]
fn a_receiver_that_never_answers() {
    for begun in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 100 Continue\r\n\r\n"] {
        let receiver = Receiver::start(move |_| Reply::Hang(begun.into()));
        let sender = Sender::new(&receiver.url(), json!({"timeout_ms": 100}));
        assert_eq!(
            sender.refused(&batch(1)).error,
            format!("no answer from {} within 100ms", receiver.origin())
        );
    }
}

#[test]
fn an_answer_that_never_ends() {
    let receiver =
        Receiver::start(|_| Reply::Hang(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".into()));
    let sender = Sender::new(&receiver.url(), json!({"timeout_ms": 1000}));
    assert_eq!(
        sender.refused(&batch(1)).error,
        format!("no complete answer from {} within 1s", receiver.origin())
    );
}

#[test]
fn a_refusal_that_never_ends_is_still_that_refusal() {
    let receiver =
        Receiver::start(|_| Reply::Hang(b"HTTP/1.1 410 Gone\r\ncontent-length: 9\r\n\r\n{".into()));
    let sender = Sender::new(&receiver.url(), json!({"timeout_ms": 1000}));
    assert_eq!(sender.refused(&batch(1)).error, "HTTP 410 Gone");
}

#[test]
fn a_connection_that_is_torn_down() {
    let (receiver, sender) = single_answer(|| Reply::Reset);
    let error = sender.refused(&batch(1)).error;
    let origin = receiver.origin();
    assert!(
        error == format!("no answer from {origin}: Connection reset by peer (os error 104)")
            || error
                == format!("no answer from {origin}: connection closed before message completed"),
        "{error}"
    );
    assert_eq!(
        receiver.received().len(),
        1,
        "tried once: no connection was kept before"
    );
}

#[test]
fn answers_that_are_no_http() {
    for (answer, why) in [
        ("", "connection closed before message completed"),
        ("SSH-2.0-OpenSSH_9.2\r\n", "invalid HTTP version parsed"),
        (
            "HTTP/1.1 200 OK\r\ncontent-len",
            "connection closed before message completed",
        ),
        (
            "HTTP/1.1 2000 OK\r\n\r\n",
            "invalid HTTP status-code parsed",
        ),
    ] {
        let receiver = Receiver::start(move |_| Reply::Raw(answer.into()));
        let error = Sender::new(&receiver.url(), no_config())
            .refused(&batch(1))
            .error;
        assert_eq!(
            error,
            format!("no answer from {}: {why}", receiver.origin())
        );
    }
}

#[test]
fn an_answer_that_breaks_off() {
    let receiver =
        Receiver::start(|_| Reply::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".into()));
    let error = Sender::new(&receiver.url(), no_config())
        .refused(&batch(1))
        .error;
    assert!(
        error.starts_with("no answer from http://127.0.0.1:"),
        "{error}"
    );
}

#[test]
fn a_sink_recovers_when_its_receiver_does() {
    let down = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let receiver = Receiver::start({
        let down = Arc::clone(&down);
        move |_| match down.load(std::sync::atomic::Ordering::SeqCst) {
            true => Reply::Reset,
            false => Reply::ok(),
        }
    });
    let sender = Sender::new(&receiver.url(), no_config());
    sender.refused(&batch(1));
    sender.refused(&batch(1));
    down.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(sender.deliver(&batch(1)), Outcome::Delivered);
}
