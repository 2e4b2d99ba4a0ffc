//! A receiver that keeps the checkpoint: what is told to it, and what is left out.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::dispatch::{Failure, Grouping, Mark, Place, Snapshot, Window};
use crate::sinks::Origin;
use crate::sinks::checkpoint::{Reached, Witness};

fn origin() -> Arc<Origin> {
    Arc::new(Origin {
        sink: "s".into(),
        life: "5f3c".into(),
        cluster: "7".into(),
        takeover: "b1".into(),
        verified: None,
    })
}

/// In a window that holds all events of [`event`].
fn place(seq: i64) -> Place {
    let done = Window::empty(Snapshot::empty(), 0);
    Place {
        window: Arc::new(done.next(Grouping::Event, Snapshot::before(900), 99, None)),
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

/// What the receiver is told of events up to `seq`, of which the last is `witness`.
fn told(seq: u32, witness: u32) -> String {
    let witness = Witness::new(&event(witness));
    Reached::new(&origin(), &place(seq.into()), witness).to_string()
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
        Some(told(2, 2).as_str())
    );
    assert_eq!(received[2].header("outbox-checkpoint"), None);
    assert_eq!(received.len(), 3, "it is asked once");
}

#[test]
fn what_it_has_is_left_out_and_failures_keep_their_places() {
    let receiver = Receiver::start(|request| match request.line.starts_with("GET") {
        true => answer(&json!(told(3, 3))),
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

#[test]
fn what_another_takeover_has_told_counts_if_its_last_event_is_here() {
    let receiver = Receiver::start(|request| match request.line.starts_with("GET") {
        true => answer(&json!(told(3, 9))),
        false => Reply::ok(),
    });
    let sender = sender(&receiver);
    let after = |verified| Batch {
        origin: Arc::new(Origin {
            takeover: "b2".into(),
            verified,
            ..(*origin()).clone()
        }),
        ..reaching(4, Some(4))
    };
    let witness = Witness::new(&event(9));
    assert_eq!(sender.came(&after(None)), Came::Asks(witness.clone()));
    assert_eq!(receiver.received().len(), 1, "nothing was sent");
    for (verified, sent) in [(true, 1), (false, 4)] {
        let batch = after(Some((witness.clone(), verified)));
        assert_eq!(sender.deliver(&batch), Outcome::Delivered);
        let last = receiver.received().pop().unwrap();
        assert_eq!(last.ids().len(), sent, "{verified}");
    }
    // A place that is told later is known by the greatest of all of them.
    sender.deliver(&Batch {
        origin: origin(),
        ..reaching(4, Some(4))
    });
    let last = receiver.received().pop().unwrap();
    assert_eq!(last.header("outbox-checkpoint"), Some(told(4, 9).as_str()));
}

#[test]
fn a_delivery_that_is_called_off_meanwhile_sends_nothing() {
    let batch = Arc::new(reaching(1, Some(1)));
    let watch = Arc::clone(&batch.watch);
    let receiver = Receiver::start(move |_| {
        watch.call_off();
        answer(&json!(null))
    });
    assert_eq!(sender(&receiver).came(&batch), Came::CalledOff);
    assert_eq!(receiver.received().len(), 1, "it was asked");
}
