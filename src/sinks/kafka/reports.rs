//! What the client's threads report, and who waits for it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::ProducerContext;
use tokio::sync::Notify;

/// A delivery and an event of it in one number, which travels with the message: what a delivery that was given up is reported
/// must not be taken for the next one's.
pub(super) fn tag(serial: u32, index: usize) -> usize {
    (serial as usize) << 32 | index
}

/// Reports of the delivery that is under way.
#[derive(Default)]
pub(super) struct Reports {
    state: Mutex<State>,
    /// All is reported, or the brokers do not let us in.
    pub(super) done: Notify,
}

#[derive(Default)]
struct State {
    serial: u32,
    /// How many messages were handed over, once that is known.
    expected: Option<usize>,
    reported: usize,
    failed: Vec<(usize, RDKafkaErrorCode)>,
    /// The client's latest trouble with a broker.
    trouble: Option<String>,
    unauthorized: bool,
    connected: bool,
}

/// How things stand.
pub(super) struct Standing {
    pub(super) complete: bool,
    pub(super) reported: usize,
    pub(super) trouble: Option<String>,
    /// Brokers do not take what the client says it is.
    pub(super) unauthorized: bool,
    /// A message has been to a broker, in this delivery or an earlier one.
    pub(super) connected: bool,
}

impl Reports {
    /// A new delivery: what was reported before is of no interest.
    pub(super) fn begin(&self, serial: u32) {
        let mut state = self.state();
        *state = State {
            serial,
            connected: state.connected,
            ..State::default()
        };
    }

    /// So many messages have been handed over.
    pub(super) fn expect(&self, messages: usize) {
        self.state().expected = Some(messages);
    }

    pub(super) fn standing(&self) -> Standing {
        let state = self.state();
        Standing {
            complete: state.is_complete(),
            reported: state.reported,
            trouble: state.trouble.clone(),
            unauthorized: state.unauthorized,
            connected: state.connected,
        }
    }

    /// Which messages failed, and why.
    pub(super) fn take_failed(&self) -> Vec<(usize, RDKafkaErrorCode)> {
        std::mem::take(&mut self.state().failed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_complete(&self) -> bool {
        self.expected
            .is_some_and(|expected| self.reported >= expected)
    }
}

impl ClientContext for Reports {
    /// What matters comes as an error, too.
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let code = error.rdkafka_error_code();
        // It follows the reason why each of them is down.
        if code == Some(RDKafkaErrorCode::AllBrokersDown) {
            return;
        }
        let mut state = self.state();
        state.trouble = Some(reason.to_owned());
        if code == Some(RDKafkaErrorCode::Authentication) {
            state.unauthorized = true;
            self.done.notify_one();
        }
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, tag: usize) {
        let failed = result
            .as_ref()
            .err()
            .map(|(error, _)| error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail));
        let mut state = self.state();
        state.connected |= failed != Some(RDKafkaErrorCode::PurgeQueue);
        if (tag >> 32) as u32 != state.serial {
            return;
        }
        if let Some(code) = failed {
            state.failed.push((tag & 0xffff_ffff, code));
        }
        state.reported += 1;
        if state.is_complete() {
            self.done.notify_one();
        }
    }
}
