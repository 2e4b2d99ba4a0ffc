//! Mode `single`: one request an event, several at once.
//!
//! Events of one key (source and subject) form a lane. Within a lane, each is sent after the one before it went through, so
//! that order within a key holds; lanes are independent of each other. When an event fails, the rest of its lane stays
//! back. When the endpoint as a whole seems to be down, or the delivery is called off, everything not yet sent does. What stayed
//! back is reported as not tried: it has not failed. What is through is told at once, for a batch may take long.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::JoinSet;

use super::exchange::{Endpoint, Setback};
use super::request::Message;
use super::signing::Keys;
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::envelope::Event;
use crate::sinks::{Batch, Came, Secrets, Watch};

/// After so many refusals and not one event that was taken, the rest is not sent.
const REFUSALS: usize = 5;

/// Why a delivery failed in which nothing was sent.
const NOTHING_SENT: &str = "nothing was sent";

/// Sends the events of `batch`, at most `concurrency` of them at a time.
pub(super) async fn deliver(
    endpoint: &Arc<Endpoint>,
    batch: &Batch,
    keys: Keys,
    concurrency: usize,
) -> Came {
    let lanes = lanes(&batch.events);
    let workers = concurrency.min(lanes.len());
    let pass = Arc::new(Pass {
        endpoint: Arc::clone(endpoint),
        events: batch.events.clone(),
        secrets: batch.secrets.clone(),
        watch: Arc::clone(&batch.watch),
        keys,
        state: Mutex::new(State {
            lanes,
            fates: batch.events.iter().map(|_| Fate::Unsent).collect(),
            refusals: 0,
            answered: false,
            halted: false,
        }),
    });
    if !endpoint.is_connected() {
        pass.probe().await;
    }
    // Dropping the set ends the workers: a delivery that is given up leaves nothing running.
    let mut set = JoinSet::new();
    for _ in 1..workers {
        set.spawn(Arc::clone(&pass).work());
    }
    Arc::clone(&pass).work().await;
    while set.join_next().await.is_some() {}
    let fates = std::mem::take(&mut pass.state().fates);
    let unsent = fates.iter().all(|fate| matches!(fate, Fate::Unsent));
    if unsent && batch.watch.is_called_off() {
        return Came::CalledOff;
    }
    Came::To(outcome(fates))
}

/// The places of the events of each key, in order, the key that comes first in front.
fn lanes(events: &[Arc<Event>]) -> VecDeque<VecDeque<usize>> {
    let mut lanes: VecDeque<VecDeque<usize>> = VecDeque::new();
    let mut of_key = HashMap::new();
    for (index, event) in events.iter().enumerate() {
        let lane = *of_key.entry(event.key()).or_insert_with(|| {
            lanes.push_back(VecDeque::new());
            lanes.len() - 1
        });
        lanes[lane].push_back(index);
    }
    lanes
}

/// What the workers of one delivery share.
struct Pass {
    endpoint: Arc<Endpoint>,
    events: Vec<Arc<Event>>,
    secrets: Secrets,
    watch: Arc<Watch>,
    keys: Keys,
    state: Mutex<State>,
}

struct State {
    lanes: VecDeque<VecDeque<usize>>,
    fates: Vec<Fate>,
    refusals: usize,
    /// The endpoint has taken an event, or judged one.
    answered: bool,
    halted: bool,
}

enum Fate {
    Unsent,
    Through,
    Rejected(Failure),
    Refused(Refusal),
}

impl Pass {
    async fn work(self: Arc<Self>) {
        while let Some(mut lane) = self.next_lane() {
            while let Some(index) = lane.pop_front() {
                if !self.send(index).await {
                    break;
                }
            }
        }
    }

    /// Sends one event while no other is under way: when the endpoint is down, one request finds out as well as many; and
    /// when it speaks HTTP/2, all later ones share the connection that this one opens.
    async fn probe(&self) {
        let Some(mut lane) = self.next_lane() else {
            return;
        };
        let Some(index) = lane.pop_front() else {
            return;
        };
        if self.send(index).await {
            self.state().lanes.push_front(lane);
        }
    }

    /// Returns whether the next event of the same lane may be sent.
    async fn send(&self, index: usize) -> bool {
        let event = &self.events[index];
        let message = Message::single(event, &self.keys).await;
        let alone = std::slice::from_ref(event);
        if self.watch.is_called_off() {
            self.state().halted = true;
            return false;
        }
        let sent = self.endpoint.send(message, alone, &self.secrets).await;
        let mut state = self.state();
        let on = state.record(index, sent);
        if matches!(state.fates[index], Fate::Through) {
            self.watch.went_through(index);
        }
        on
    }

    fn next_lane(&self) -> Option<VecDeque<usize>> {
        let mut state = self.state();
        if state.halted {
            return None;
        }
        state.lanes.pop_front()
    }

    /// Never held over an await; and after a panic, what the others recorded still stands.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Notes what came of one event. Returns whether the next event of the same lane may be sent.
    fn record(&mut self, index: usize, sent: Result<Vec<Failure>, Setback>) -> bool {
        let (fate, on) = match sent {
            Ok(failures) => {
                self.answered = true;
                match failures.into_iter().next() {
                    None => (Fate::Through, true),
                    // What will never go through holds nothing up.
                    Some(failure) => {
                        let on = failure.permanent;
                        (Fate::Rejected(Failure { index, ..failure }), on)
                    }
                }
            }
            Err(Setback { refusal, outage }) => {
                self.refusals += 1;
                self.halted |= outage || (self.refusals >= REFUSALS && !self.answered);
                (Fate::Refused(refusal), false)
            }
        };
        self.fates[index] = fate;
        on && !self.halted
    }
}

fn outcome(fates: Vec<Fate>) -> Outcome {
    let answered = fates
        .iter()
        .any(|fate| matches!(fate, Fate::Through | Fate::Rejected(_)));
    if !answered {
        return Outcome::Failed(refusal(fates));
    }
    let mut failures = Vec::new();
    let mut untried = Vec::new();
    let mut retry_after = None;
    for (index, fate) in fates.into_iter().enumerate() {
        match fate {
            Fate::Through => {}
            Fate::Unsent => untried.push(index),
            Fate::Rejected(failure) => failures.push(failure),
            Fate::Refused(refusal) => {
                retry_after = retry_after.max(refusal.retry_after);
                failures.push(Failure {
                    index,
                    error: refusal.error,
                    permanent: false,
                });
            }
        }
    }
    if !untried.is_empty() || retry_after.is_some() {
        return Outcome::Cut {
            failures,
            untried,
            retry_after,
        };
    }
    match failures.is_empty() {
        true => Outcome::Delivered,
        false => Outcome::Partial(failures),
    }
}

/// The first refusal, with the longest wait that was asked for.
fn refusal(fates: Vec<Fate>) -> Refusal {
    let refusals = fates.into_iter().filter_map(|fate| match fate {
        Fate::Refused(refusal) => Some(refusal),
        _ => None,
    });
    refusals
        .reduce(|first, other| Refusal {
            retry_after: first.retry_after.max(other.retry_after),
            ..first
        })
        .unwrap_or_else(|| Refusal {
            error: NOTHING_SENT.to_owned(),
            retry_after: None,
        })
}
