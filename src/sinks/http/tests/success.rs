//! What arrives when all goes well.

use super::*;

#[test]
fn a_batch_arrives_as_one_array() {
    let receiver = Receiver::start(|_| Reply::ok());
    let sender = Sender::new(
        &format!("{}?key=1", receiver.url()),
        json!({"headers": {"X-Env": "test", "User-Agent": "mine"}}),
    );
    assert_eq!(sender.deliver(&batch(3)), Outcome::Delivered);

    let [request] = &receiver.received()[..] else {
        panic!("one request")
    };
    assert_eq!(request.line, "POST /hook?key=1 HTTP/1.1");
    assert_eq!(
        request.header("content-type"),
        Some("application/cloudevents-batch+json")
    );
    assert_eq!(request.header("x-env"), Some("test"));
    assert_eq!(request.header("user-agent"), Some("mine"));
    assert_eq!(request.header("accept-encoding"), Some("identity"));
    assert_eq!(request.ids(), ["evt_1", "evt_2", "evt_3"]);
    assert_eq!(
        request.json()[0],
        json!({
            "specversion": "1.0", "id": "evt_1", "source": "public.orders", "type": "order.placed", "subject": "1",
            "time": "1970-01-01T00:00:00Z", "datacontenttype": "application/json", "sequence": "700:1",
            "data": {"total": serde_json::from_str::<Value>("10.50").unwrap()},
        })
    );
}

#[test]
fn an_unsigned_request_carries_no_signature() {
    let receiver = Receiver::start(|_| Reply::ok());
    let sender = Sender::new(&receiver.url(), no_config());
    // Values that the sink does not ask for change nothing.
    let batch = Batch {
        secrets: secrets(&["unasked"]),
        ..batch(1)
    };
    assert_eq!(sender.deliver(&batch), Outcome::Delivered);
    let request = &receiver.received()[0];
    assert_eq!(request.header("idempotency-key"), Some("evt_1"));
    assert_eq!(request.all("x-outbox-signature"), [""; 0]);
    assert!(
        request
            .header("user-agent")
            .unwrap()
            .starts_with("pg_outbox/")
    );
}

#[test]
fn a_user_and_password_in_the_url_are_basic_authentication() {
    let receiver = Receiver::start(|_| Reply::ok());
    let url = receiver.url().replace("http://", "http://us%40er:pa%3Ass@");
    assert_eq!(
        Sender::new(&url, no_config()).deliver(&batch(1)),
        Outcome::Delivered
    );
    let request = &receiver.received()[0];
    assert_eq!(
        request.header("authorization"),
        Some("Basic dXNAZXI6cGE6c3M=")
    );
    assert_eq!(request.line, "POST /hook HTTP/1.1");
}

#[test]
fn any_status_of_the_2xx_is_success() {
    for status in [200, 201, 202, 204, 207, 299] {
        let receiver = Receiver::start(move |_| Reply::status(status));
        let sender = Sender::new(&receiver.url(), no_config());
        assert_eq!(sender.deliver(&batch(2)), Outcome::Delivered, "{status}");
    }
}

#[test]
fn nothing_is_sent_for_no_events() {
    let sender = Sender::new(&nowhere(), no_config());
    assert_eq!(sender.deliver(&batch(0)), Outcome::Delivered);
}

#[test]
fn one_connection_serves_thousands_of_requests() {
    let receiver = Receiver::start(|request| match request.ids()[0].as_str() {
        // Refusals and their bodies do not cost the connection either.
        "evt_3" => Reply::Answer(503, "", vec![b'x'; 10_000]),
        _ => Reply::Answer(200, "", b"fine".to_vec()),
    });
    let sender = Sender::new(&receiver.url(), no_config());
    for n in 0..3_000 {
        let events = vec![Arc::new(event(n % 4))];
        sender.deliver(&Batch {
            events,
            ..Batch::default()
        });
    }
    assert_eq!(receiver.received().len(), 3_000);
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn a_connection_that_was_closed_while_kept_is_no_failure() {
    let receiver = Receiver::start(|request| match request.ids()[0].as_str() {
        // An answer that promises to keep the connection, which is then closed nonetheless.
        "evt_1" => Reply::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()),
        _ => Reply::ok(),
    });
    let sender = Sender::new(&receiver.url(), no_config());
    for n in 1..=200 {
        let events = vec![Arc::new(event(1 + n % 2))];
        let batch = Batch {
            events,
            ..Batch::default()
        };
        assert_eq!(sender.deliver(&batch), Outcome::Delivered, "{n}");
    }
}

#[test]
fn an_answer_too_large_to_read_is_success_all_the_same() {
    let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = [b"10000\r\n", &[b'x'; 0x10000][..], b"\r\n"].concat();
    let receiver = Receiver::start(move |request| match request.ids()[0].as_str() {
        "evt_1" => Reply::Flood(head.to_vec(), chunk.clone()),
        _ => Reply::Answer(200, "", vec![b'{'; 5_000_000]),
    });
    let sender = Sender::new(&receiver.url(), no_config());
    assert_eq!(sender.deliver(&batch(2)), Outcome::Delivered);
    let other = Batch {
        events: vec![Arc::new(event(2))],
        ..Batch::default()
    };
    assert_eq!(sender.deliver(&other), Outcome::Delivered);
}

#[test]
fn a_large_event_arrives_whole() {
    let receiver = Receiver::start(|_| Reply::ok());
    let sender = Sender::new(&receiver.url(), json!({"secret": "s"}));
    let text = "x".repeat(10_000_000);
    let large = Event {
        payload: Some(format!("\"{text}\"")),
        ..event(1)
    };
    let batch = Batch {
        events: vec![Arc::new(large)],
        secrets: secrets(&["a", "b"]),
        ..Batch::default()
    };
    assert_eq!(sender.deliver(&batch), Outcome::Delivered);
    assert_eq!(receiver.received()[0].json()[0]["data"], json!(text));
}
