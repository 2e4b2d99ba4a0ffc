//! Endpoints that are ill, in every way that an endpoint can be: nothing is dead-lettered, the status says in one line what
//! it is, nobody else is disturbed, and once they are well again everything arrives, in order.

mod scene;

use std::time::Duration;

use outbox_tests::{Cluster, Receiver, Reply, Sql, Tls};
use postgres::Client;
use scene::{assert_clear, dead_letters, emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::{Value, json};

/// An endpoint that is ill until it is cured.
struct Patient {
    sink: String,
    receiver: Receiver,
    config: Value,
    /// What its status has to say; `{origin}` stands for where its URL leads.
    says: String,
    cure: Cure,
    /// Whether what it takes is what it is sent while it is well: not if it takes what nobody waits for any more.
    in_order: bool,
}

enum Cure {
    /// Answers 200 from now on.
    Answer,
    StartAgain,
    /// Its sink gets another config.
    Config(Value),
}

fn patient(sink: &str, reply: Reply, says: &str) -> Patient {
    let receiver = Receiver::start();
    receiver.reply_always(reply);
    Patient {
        sink: sink.to_owned(),
        receiver,
        config: json!({}),
        says: says.to_owned(),
        cure: Cure::Answer,
        in_order: true,
    }
}

impl Patient {
    fn config(mut self, config: Value) -> Self {
        self.config = config;
        self
    }

    fn cured_by(mut self, cure: Cure) -> Self {
        self.cure = cure;
        self
    }

    fn says(&self) -> String {
        let origin = self.receiver.url().replace("/events", "");
        self.says.replace("{origin}", &origin)
    }

    fn cure(&self, db: &mut Client) {
        match &self.cure {
            Cure::Answer => self.receiver.reply_always(Reply::ok()),
            Cure::StartAgain => self.receiver.start_again(),
            Cure::Config(config) => {
                let mut whole = json!({"url": self.receiver.url()});
                let members = whole.as_object_mut().unwrap();
                members.extend(config.as_object().unwrap().clone());
                let config = scene::quoted(&whole.to_string());
                db.run(&format!(
                    "select outbox.alter_sink('{}', config => {config})",
                    self.sink
                ));
            }
        }
    }
}

/// A cluster in which an endpoint's every neighbour is soon tried more than once.
fn hasty() -> Cluster {
    quick()
        .setting("outbox.retry_min", "1ms")
        .setting("outbox.retry_max", "20ms")
        .start()
}

/// Events that all patients get, and more than one round of neighbour tests can use up.
const EVENTS: i64 = 40;

/// Runs patients through their illness and their recovery, next to a sink that is well.
fn treat(patients: Vec<Patient>) {
    let cluster = hasty();
    let mut db = cluster.connect();
    let healthy = Receiver::start();
    http_sink(&mut db, "healthy", &healthy, json!({}), "");
    for patient in &patients {
        let arguments = "batch_size => 8";
        http_sink(
            &mut db,
            &patient.sink,
            &patient.receiver,
            patient.config.clone(),
            arguments,
        );
    }
    for n in 1..=EVENTS {
        emit(&mut db, n..=n);
    }
    healthy.wait_for(EVENTS as usize);
    assert_eq!(healthy.ids(), ids(1..=EVENTS), "the one that is well");

    for patient in &patients {
        let sink = &patient.sink;
        // Five lone tries, and every neighbour more than once.
        until_status(&mut db, sink, "many attempts", |status| {
            status.attempts >= 25
        });
        let seen = until_status(&mut db, sink, "down", |status| {
            status.state == "down" && status.last_error.is_some()
        });
        let error = seen.last_error.unwrap();
        assert_clear(&error);
        let says = patient.says();
        assert!(error.contains(&says), "{sink} says {error:?}, not {says:?}");
        assert_eq!((seen.dead_letters, seen.delivered), (0, 0), "{sink}");
        assert_eq!(seen.lag_events, EVENTS, "{sink}");
        let waiting_for = seen.waiting_for.unwrap_or_default();
        assert!(
            waiting_for.contains("destination"),
            "{sink} waits for {waiting_for:?}"
        );
    }

    for patient in &patients {
        patient.cure(&mut db);
    }
    for patient in &patients {
        let sink = &patient.sink;
        let arrived = patient.receiver.wait_for_distinct(EVENTS as usize);
        let seen = until_idle(&mut db, sink);
        assert_eq!(
            (seen.dead_letters, seen.lag_events, seen.attempts),
            (0, 0, 0),
            "{sink}"
        );
        assert_eq!(seen.delivered, EVENTS, "{sink}");
        assert_eq!(seen.next_attempt_in, None, "{sink}");
        let arrived: Vec<_> = arrived.iter().map(|event| event.id.as_str()).collect();
        if patient.in_order {
            assert_in_order(sink, &arrived);
        }
        assert!(dead_letters(&mut db, sink).is_empty());
    }
    assert_eq!(healthy.ids(), ids(1..=EVENTS), "the one that is well");
    let log = cluster.log();
    assert!(
        !log.contains("dead-letter"),
        "the log tells of dead letters"
    );
    assert!(!log.contains("panic"), "the log tells of a panic");
}

/// That ids arrived in order. One may be early: the neighbour that was tried at the very moment of the recovery.
fn assert_in_order(sink: &str, arrived: &[&str]) {
    let expected = ids(1..=EVENTS);
    let early = usize::from(arrived[0] != expected[0]);
    let rest: Vec<_> = expected
        .iter()
        .map(String::as_str)
        .filter(|id| early == 0 || *id != arrived[0])
        .collect();
    assert_eq!(arrived[early..], rest, "{sink}");
}

#[test]
fn statuses_that_are_no_success() {
    let statuses = [
        (400, "HTTP 400 Bad Request"),
        (401, "HTTP 401 Unauthorized"),
        (403, "HTTP 403 Forbidden"),
        (404, "HTTP 404 Not Found"),
        (405, "HTTP 405 Method Not Allowed"),
        (408, "HTTP 408 Request Timeout"),
        (410, "HTTP 410 Gone"),
        (413, "HTTP 413 Payload Too Large"),
        (422, "HTTP 422 Unprocessable Entity"),
        (429, "HTTP 429 Too Many Requests"),
        (500, "HTTP 500 Internal Server Error"),
        (501, "HTTP 501 Not Implemented"),
        (502, "HTTP 502 Bad Gateway"),
        (503, "HTTP 503 Service Unavailable"),
        (504, "HTTP 504 Gateway Timeout"),
        (599, "HTTP 599"),
    ];
    let patients = statuses.iter().map(|(code, says)| {
        // What an error page says is of no interest, and may be anything.
        let page = "<html>\r\n\u{1b}[31m it is not your fault </html>".repeat(50);
        patient(
            &format!("status-{code}"),
            Reply::status(*code).body(page),
            says,
        )
    });
    treat(patients.collect());
}

#[test]
fn answers_that_are_none() {
    let says_nothing = "no answer from {origin}";
    let mut patients = vec![
        patient("reset", Reply::reset(), says_nothing),
        patient("closed", Reply::close(), says_nothing),
        patient("nonsense", Reply::raw("HTP/9 what\r\n\r\n"), says_nothing),
        patient(
            "binary",
            Reply::raw([0xff, 0x00, 0x16, 0x03, 0x01].repeat(2_000)),
            says_nothing,
        ),
        patient(
            "bad-header",
            Reply::raw("HTTP/1.1 200 OK\r\nbad header\r\n\r\n"),
            says_nothing,
        ),
        patient(
            "endless-headers",
            Reply::raw(format!("HTTP/1.1 200 OK\r\n{}", "x: y\r\n".repeat(200_000))),
            says_nothing,
        ),
        patient(
            "only-continue",
            Reply::raw("HTTP/1.1 100 Continue\r\n\r\n"),
            says_nothing,
        ),
        patient(
            "switching",
            Reply::raw(
                "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            ),
            "HTTP 101 Switching Protocols",
        ),
        patient(
            "cut-short",
            Reply::raw("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"failures\":[]"),
            says_nothing,
        ),
        patient(
            "bad-chunk",
            Reply::raw(
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nxx\r\n0\r\n\r\n",
            ),
            says_nothing,
        ),
        patient(
            "bad-length",
            Reply::raw("HTTP/1.1 200 OK\r\ncontent-length: minus one\r\n\r\n"),
            says_nothing,
        ),
        patient(
            "refused",
            Reply::ok(),
            "cannot connect to {origin}: Connection refused (os error 111)",
        )
        .cured_by(Cure::StartAgain),
    ];
    patients[11].receiver.stop();
    for code in [301, 302, 303, 307, 308] {
        let elsewhere = Reply::status(code).header("location", "http://127.0.0.1:1/elsewhere");
        let says = "redirects are not followed";
        patients.push(patient(&format!("redirect-{code}"), elsewhere, says));
    }
    treat(patients);
}

#[test]
fn endpoints_that_take_their_time() {
    let late = "from {origin} within 200ms";
    let late = |sink, reply| patient(sink, reply, late).config(json!({"timeout_ms": 200}));
    treat(vec![
        late("hangs", Reply::hang()),
        late(
            "slow-head",
            Reply::status(503).trickle(Duration::from_millis(20)),
        ),
        // The head is there in time, and the body is not.
        Patient {
            in_order: false,
            ..late(
                "slow-body",
                Reply::ok()
                    .body("z".repeat(2_000))
                    .trickle(Duration::from_millis(1)),
            )
        },
    ]);
}

#[test]
fn certificates_that_are_not_to_be_trusted() {
    let refused = "certificate of {origin} refused: ";
    let tls = |sink: &str, tls: Tls, says: &str| {
        let receiver = Receiver::builder().tls(tls).start();
        let config = json!({"ca_file": receiver.ca_file()});
        Patient {
            sink: sink.to_owned(),
            receiver,
            config,
            says: format!("{refused}{says}"),
            cure: Cure::Answer,
            in_order: true,
        }
    };
    let cluster = hasty();
    let mut db = cluster.connect();
    let healthy = Receiver::builder().tls(Tls::Good).start();
    let config = json!({"ca_file": healthy.ca_file()});
    http_sink(&mut db, "trusted", &healthy, config, "");
    let patients = [
        tls("expired", Tls::Expired, "it has expired"),
        tls("wrong-host", Tls::WrongHost, "it is for another name"),
        tls(
            "self-signed",
            Tls::SelfSigned,
            "it is signed by no authority that is trusted here",
        ),
        tls(
            "unknown",
            Tls::Good,
            "it is signed by no authority that is trusted here",
        )
        .config(json!({})),
    ];
    for patient in &patients {
        http_sink(
            &mut db,
            &patient.sink,
            &patient.receiver,
            patient.config.clone(),
            "batch_size => 2",
        );
    }
    // One that speaks no TLS at all, and one that speaks nothing else.
    let plain = Receiver::start();
    let url = plain.url().replace("http:", "https:");
    let config = json!({"url": url, "ca_file": healthy.ca_file()});
    http_sink(&mut db, "no-tls", &plain, config, "");
    let encrypted = Receiver::builder().tls(Tls::Good).start();
    let url = encrypted.url().replace("https:", "http:");
    http_sink(&mut db, "only-tls", &encrypted, json!({"url": url}), "");
    emit(&mut db, 1..=20);
    healthy.wait_for(20);
    assert_eq!(healthy.ids(), ids(1..=20));
    for patient in &patients {
        let sink = &patient.sink;
        until_status(&mut db, sink, "many attempts", |status| {
            status.attempts >= 25
        });
        let seen = until_status(&mut db, sink, "down", |status| status.state == "down");
        let error = seen.last_error.unwrap();
        assert_clear(&error);
        assert!(error.starts_with(&patient.says()), "{sink}: {error}");
        assert_eq!((seen.dead_letters, seen.delivered), (0, 0), "{sink}");
        assert_eq!(patient.receiver.requests().len(), 0, "{sink}");
    }
    for (sink, receiver) in [("no-tls", &plain), ("only-tls", &encrypted)] {
        let seen = until_status(&mut db, sink, "down", |status| status.state == "down");
        let error = seen.last_error.unwrap();
        assert_clear(&error);
        let address = receiver.url().split('/').nth(2).unwrap().to_owned();
        assert!(error.contains(&address), "{sink}: {error}");
        assert_eq!((seen.dead_letters, receiver.count()), (0, 0), "{sink}");
    }

    // A sink whose certificate comes to be trusted goes on where it stood.
    let unknown = &patients[3];
    let config = json!({"url": unknown.receiver.url(), "ca_file": unknown.receiver.ca_file()});
    let config = scene::quoted(&config.to_string());
    db.run(&format!(
        "select outbox.alter_sink('unknown', config => {config})"
    ));
    unknown.receiver.wait_for_distinct(20);
    until_idle(&mut db, "unknown");
}

#[test]
fn a_sink_that_cannot_even_begin_says_why_and_is_cured_by_its_config() {
    let nowhere = |sink: &str, config: Value, says: &str| {
        let mut patient = patient(sink, Reply::ok(), says).config(config);
        patient.cure = Cure::Config(json!({}));
        patient
    };
    let ca = std::env::temp_dir().join(format!("outbox-no-ca-{}.pem", std::process::id()));
    std::fs::write(&ca, "no certificate").unwrap();
    let patients = vec![
        nowhere(
            "no-such-host",
            json!({"url": "http://no-such-host.invalid/hook"}),
            "cannot connect to http://no-such-host.invalid: ",
        ),
        nowhere(
            "no-such-file",
            json!({"url": "https://127.0.0.1:1/hook", "ca_file": "/nowhere/ca.pem"}),
            "cannot use ca_file /nowhere/ca.pem: No such file or directory",
        ),
        nowhere(
            "no-certificate",
            json!({"url": "https://127.0.0.1:1/hook", "ca_file": ca}),
            "there is no certificate in it",
        ),
    ];
    treat(patients);
    std::fs::remove_file(ca).unwrap();
}
