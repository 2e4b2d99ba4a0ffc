//! A receiver that keeps the checkpoint: what is told to it, and what is left out.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::dispatch::{Failure, Mark, Place, Snapshot, Window};
use crate::sinks::Origin;

fn origin() -> Arc<Origin> {
    Arc::new(Origin {
        sink: "s".into(),
        life: "5f3c".into(),
        history: "7.1".into(),
    })
}

/// In a window that holds all events of [`event`].
fn place(seq: i64) -> Place {
    let done = Window::empty(Snapshot::empty(), 0);
    Place {
        window: Arc::new(done.next(Snapshot::before(900), 99, None)),
        mark: Mark { group: seq, seq },
    }
}

/// Events up to `last`, which reach to `to`.
fn reaching(last: u32, to: Option<i64>) -> Batch {
    Batch {
        origin: origin(),
        reaches: to.map(place),
        ..batch(last)
    }
}

fn sender(receiver: &Receiver) -> Sender {
    let at = format!("{}/at", receiver.origin());
    Sender::new(&receiver.url(), json!({ "checkpoint_url": at }))
}

fn answer(position: &serde_json::Value) -> Reply {
    Reply::Answer(200, "", json!({ "position": position }).to_string().into())
}

#[test]
fn a_request_tells_how_far_it_reaches_unless_something_is_outstanding_before_it() {
    let receiver = Receiver::start(|request| match request.line.starts_with("GET") {
        true => answer(&json!(null)),
        false => Reply::ok(),
    });
    let sender = sender(&receiver);
    assert_eq!(sender.deliver(&reaching(2, Some(2))), Outcome::Delivered);
    assert_eq!(sender.deliver(&reaching(1, None)), Outcome::Delivered);
    let received = receiver.received();
    assert!(
        received[0].line.starts_with("GET /at "),
        "{}",
        received[0].line
    );
    assert_eq!(
        received[1].header("outbox-checkpoint"),
        Some("1/5f3c/7.1/3:3:/900:900:/2")
    );
    assert_eq!(received[2].header("outbox-checkpoint"), None);
    assert_eq!(received.len(), 3, "it is asked once");
}

#[test]
fn what_it_has_is_left_out_and_failures_keep_their_places() {
    let receiver = Receiver::start(|request| match request.line.starts_with("GET") {
        true => answer(&json!("1/5f3c/7.1/3:3:/900:900:/3")),
        false => Reply::Answer(200, "", br#"{"failures": [{"id": "evt_5"}]}"#.to_vec()),
    });
    let sender = sender(&receiver);
    assert_eq!(sender.deliver(&reaching(3, Some(3))), Outcome::Delivered);
    assert_eq!(receiver.received().len(), 1, "nothing was left to send");
    let outcome = sender.deliver(&reaching(6, Some(6)));
    let failure = Failure {
        index: 4,
        error: "reported as failed, without a reason".into(),
        permanent: false,
    };
    assert_eq!(outcome, Outcome::Partial(vec![failure]));
    let sent = receiver.received()[1].json();
    assert_eq!(sent.as_array().unwrap().len(), 3);
    assert_eq!(sent[0]["id"], "evt_4");
    // One that is tried by itself, or was set aside, is sent whatever lies behind it.
    sender.deliver(&reaching(1, None));
    assert_eq!(receiver.received()[2].json()[0]["id"], "evt_1");
}

#[test]
fn after_a_failure_it_is_asked_again() {
    let receiver = Receiver::start(|request| match request.line.starts_with("GET") {
        true => answer(&json!(null)),
        false => Reply::status(503),
    });
    let sender = sender(&receiver);
    sender.refused(&reaching(1, Some(1)));
    sender.refused(&reaching(1, Some(1)));
    let lines: Vec<_> = receiver
        .received()
        .iter()
        .map(|request| request.line.split(' ').next().unwrap().to_owned())
        .collect();
    assert_eq!(lines, ["GET", "POST", "GET", "POST"]);
}
