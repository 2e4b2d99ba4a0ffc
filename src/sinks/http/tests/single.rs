//! Mode `single`: order within a key, what others do meanwhile, and what is reported.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex};

use super::*;
use crate::dispatch::Failure;

/// `evt_<n>` about a subject.
fn about(n: u32, subject: &str) -> Arc<Event> {
    Arc::new(Event {
        subject: Some(subject.into()),
        ..event(n)
    })
}

fn of(events: Vec<Arc<Event>>) -> Batch {
    Batch {
        events,
        ..Batch::default()
    }
}

fn single(url: &str, concurrency: u32) -> Sender {
    Sender::new(url, json!({"mode": "single", "concurrency": concurrency}))
}

fn sent(receiver: &Receiver) -> Vec<String> {
    receiver.received().iter().flat_map(Received::ids).collect()
}

fn failure(index: usize, error: &str) -> Failure {
    Failure {
        index,
        error: error.into(),
        permanent: false,
    }
}

/// These failed, and those were not sent.
fn cut(failures: Vec<Failure>, untried: Vec<usize>) -> Outcome {
    Outcome::Cut {
        failures,
        untried,
        retry_after: None,
    }
}

#[test]
fn each_event_is_a_request() {
    let receiver = Receiver::start(|_| Reply::ok());
    assert_eq!(
        single(&receiver.url(), 1).deliver(&batch(3)),
        Outcome::Delivered
    );
    assert_eq!(sent(&receiver), ["evt_1", "evt_2", "evt_3"]);
    for request in receiver.received() {
        assert_eq!(
            request.header("content-type"),
            Some("application/cloudevents+json")
        );
        assert_eq!(
            request.header("idempotency-key"),
            Some(request.ids()[0].as_str())
        );
        assert!(request.json().is_object());
    }
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn as_many_requests_at_once_as_allowed_and_no_more() {
    // A request is answered once four are there; a fifth at the same time would show in the count.
    let gate = Arc::new((Mutex::new((0u32, 0u32)), Condvar::new()));
    let receiver = Receiver::start({
        let gate = Arc::clone(&gate);
        move |_| {
            let (state, arrived) = &*gate;
            let mut state = state.lock().unwrap();
            state.0 += 1;
            state.1 += 1;
            arrived.notify_all();
            // The very first request goes alone, to see whether anybody is there.
            let round = (state.1 - 1).div_ceil(4) * 4 + 1;
            let mut state = arrived.wait_while(state, |state| state.1 < round).unwrap();
            assert!(state.0 <= 4);
            state.0 -= 1;
            Reply::ok()
        }
    });
    assert_eq!(
        single(&receiver.url(), 4).deliver(&batch(13)),
        Outcome::Delivered
    );
    assert_eq!(receiver.connections(), 4);
}

#[test]
fn order_holds_within_a_key() {
    let receiver = Receiver::start(|_| Reply::ok());
    let keys = ["a", "b", "c", "a", "a", "b", "a", "c", "b", "a"];
    let events: Vec<_> = keys.iter().zip(1..).map(|(key, n)| about(n, key)).collect();
    assert_eq!(
        single(&receiver.url(), 8).deliver(&of(events.clone())),
        Outcome::Delivered
    );
    let mut arrived: HashMap<String, Vec<String>> = HashMap::new();
    for request in receiver.received() {
        let event = request.json();
        arrived
            .entry(event["subject"].as_str().unwrap().into())
            .or_default()
            .extend(request.ids());
    }
    for (subject, ids) in arrived {
        let expected: Vec<_> = events
            .iter()
            .filter(|event| event.subject.as_deref() == Some(&subject))
            .map(|event| event.id.clone())
            .collect();
        assert_eq!(ids, expected, "{subject}");
    }
}

#[test]
fn a_failure_holds_the_later_events_of_its_key_alone() {
    let receiver = Receiver::start(|request| match request.ids()[0].as_str() {
        "evt_2" => Reply::status(500),
        _ => Reply::ok(),
    });
    let elsewhere = Arc::new(Event {
        source: Some("public.customers".into()),
        subject: Some("a".into()),
        ..event(5)
    });
    let events = vec![
        about(1, "a"),
        about(2, "a"),
        about(3, "b"),
        about(4, "a"),
        elsewhere,
        about(6, "a"),
    ];
    assert_eq!(
        single(&receiver.url(), 1).deliver(&of(events)),
        cut(
            vec![failure(1, "HTTP 500 Internal Server Error")],
            vec![3, 5]
        )
    );
    assert_eq!(sent(&receiver), ["evt_1", "evt_2", "evt_3", "evt_5"]);
}

#[test]
fn what_will_never_go_through_holds_nothing_up() {
    let receiver = Receiver::start(|request| match request.ids()[0].as_str() {
        "evt_1" => {
            let body = br#"{"failures": [{"id": "evt_1", "error": "too old", "permanent": true}]}"#;
            Reply::Answer(200, "", body.to_vec())
        }
        "evt_3" => Reply::Answer(
            200,
            "",
            br#"{"failures": [{"id": "evt_3", "error": "later"}]}"#.to_vec(),
        ),
        _ => Reply::ok(),
    });
    let events = (1..=4).map(|n| about(n, "a")).collect();
    assert_eq!(
        single(&receiver.url(), 4).deliver(&of(events)),
        cut(
            vec![
                Failure {
                    permanent: true,
                    ..failure(0, "too old")
                },
                failure(2, "later")
            ],
            vec![3]
        )
    );
}

#[test]
fn an_endpoint_that_refuses_everything_is_not_asked_for_ever() {
    for (status, headers, asked, wait) in [
        (500, "", 5, None),
        (401, "", 5, None),
        (503, "retry-after: 7\r\n", 1, Some(Duration::from_secs(7))),
    ] {
        let receiver = Receiver::start(move |_| Reply::Answer(status, headers, Vec::new()));
        let refusal = single(&receiver.url(), 1).refused(&batch(100));
        assert!(refusal.error.starts_with(&format!("HTTP {status} ")));
        assert_eq!(refusal.retry_after, wait);
        assert_eq!(receiver.received().len(), asked);
    }
}

#[test]
fn an_endpoint_that_nobody_serves_fails_the_delivery_as_a_whole() {
    for concurrency in [1, 16] {
        let error = single(&nowhere(), concurrency).refused(&batch(100)).error;
        assert!(error.contains("Connection refused"), "{error}");
        let receiver = Receiver::start(|_| Reply::Reset);
        single(&receiver.url(), concurrency).refused(&batch(100));
        assert_eq!(
            receiver.received().len(),
            1,
            "one request finds out as well as many"
        );
    }
}

#[test]
fn an_outage_in_the_middle_stops_the_rest() {
    let receiver = Receiver::start(|request| match request.ids()[0].as_str() {
        "evt_3" => Reply::Hang(Vec::new()),
        _ => Reply::ok(),
    });
    let sender = Sender::new(
        &receiver.url(),
        json!({"mode": "single", "concurrency": 1, "timeout_ms": 1000}),
    );
    let late = format!("no answer from {} within 1s", receiver.origin());
    assert_eq!(
        sender.deliver(&batch(5)),
        cut(vec![failure(2, &late)], vec![3, 4])
    );
    assert_eq!(sent(&receiver), ["evt_1", "evt_2", "evt_3"]);
}

#[test]
fn an_endpoint_that_asks_to_be_left_alone_in_the_middle_is() {
    let receiver = Receiver::start(|request| match request.ids()[0].as_str() {
        "evt_2" => Reply::Answer(429, "retry-after: 7\r\n", Vec::new()),
        _ => Reply::ok(),
    });
    for count in [2, 5] {
        assert_eq!(
            single(&receiver.url(), 1).deliver(&batch(count)),
            Outcome::Cut {
                failures: vec![failure(1, "HTTP 429 Too Many Requests")],
                untried: (2..count as usize).collect(),
                retry_after: Some(Duration::from_secs(7)),
            }
        );
    }
}

#[test]
fn what_is_through_is_told_at_once_and_a_delivery_that_is_called_off_sends_no_more() {
    let batch = Arc::new(batch(20));
    let watch = Arc::clone(&batch.watch);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let receiver = Receiver::start({
        let (watch, seen) = (Arc::clone(&watch), Arc::clone(&seen));
        move |request| {
            if request.ids() == ["evt_4"] {
                let (through, _) = watch.take_through().unwrap();
                *seen.lock().unwrap() = through;
                watch.call_off();
            }
            Reply::ok()
        }
    });
    let outcome = single(&receiver.url(), 1).deliver(&batch);
    assert_eq!(outcome, cut(vec![], (4..20).collect()));
    assert_eq!(sent(&receiver).len(), 4);
    assert_eq!(*seen.lock().unwrap(), [0, 1, 2]);
    let (rest, _) = watch.take_through().unwrap();
    assert_eq!(rest, [3]);
    // One that is called off from the beginning sends nothing.
    assert_eq!(single(&receiver.url(), 8).came(&batch), Came::CalledOff);
    assert_eq!(sent(&receiver).len(), 4);
}
