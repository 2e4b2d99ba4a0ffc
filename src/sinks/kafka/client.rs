//! The client of kind `kafka`: hands a delivery to the producer, and waits until every message of it is reported.

use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::producer::{BaseRecord, Producer as _};
use tokio::sync::Mutex;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout_at};

use super::config::{KafkaConfig, Mode, Secret};
use super::message::Writer;
use super::outcome::{Fault, Suspect, failed, outcome};
use super::producer::{self, Producer, Retired};
use super::reports::tag;
use super::route::Route;
use crate::dispatch::Outcome;
use crate::sinks::plain_text::{LONGEST, one_line, without};
use crate::sinks::{Batch, Defaults, Secrets, Sink};

/// How much is handed over before others get their turn on the thread.
const AT_ONCE: usize = 256 * 1024;
/// While the producer's own queue is full.
const FULL_RETRY: Duration = Duration::from_millis(5);

pub(crate) struct Kafka {
    config: ClientConfig,
    secret: Option<Secret>,
    mode: Mode,
    route: Route,
    /// More than this travels without company.
    batch_bytes: usize,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    producer: Option<Producer>,
    retired: Retired,
    serial: u32,
    /// Which of the secret's active values is used: during a rotation either may be the one that is known.
    turn: usize,
    /// The latest trouble with a broker since the last delivery that went through: a client tells it once, not at each attempt.
    trouble: Option<String>,
}

impl Kafka {
    pub(in crate::sinks) fn open(config: &KafkaConfig, defaults: &Defaults) -> Self {
        let batch_bytes = config
            .property("batch.size")
            .and_then(|bytes| bytes.parse().ok());
        Self {
            config: config.client(),
            secret: config.secret.clone(),
            mode: config.mode,
            route: Route::new(config.topic.clone(), defaults.topic_prefix.clone()),
            batch_bytes: batch_bytes.unwrap_or(usize::MAX),
            timeout: config.timeout,
            state: Mutex::default(),
        }
    }

    async fn attempt(&self, batch: &Batch, deadline: Instant) -> Outcome {
        let late = || format!("not acknowledged within {:?}", self.timeout);
        let Ok(mut state) = timeout_at(deadline, self.state.lock()).await else {
            return failed(late());
        };
        let state = &mut *state;
        let spent = state
            .producer
            .take_if(|producer| producer::is_spent(producer));
        state.retired.take(spent);
        let producer = match state.producer.take() {
            Some(producer) => producer,
            None => match self.start(&batch.secrets, state.turn) {
                Ok(producer) => producer,
                Err(error) => return failed(error),
            },
        };
        let producer = state.producer.insert(producer);
        state.serial = state.serial.wrapping_add(1);
        producer.context().begin(state.serial);
        let published = timeout_at(deadline, self.publish(producer, state.serial, batch)).await;
        let standing = producer.context().standing();
        state.trouble = standing.trouble.or(state.trouble.take());
        let error = match published {
            Ok(Some(Outcome::Failed(refusal))) => refusal.error,
            Ok(Some(outcome)) => {
                state.trouble = None;
                return outcome;
            }
            Ok(None) | Err(_) => {
                // What is still under way must not arrive behind what is handed over next. A client that has only been connecting
                // goes on with that, or a delivery that takes less time than a connection would never get through.
                let connecting = !standing.connected && !standing.unauthorized;
                if !(connecting && producer::withdraw(producer).await) {
                    state.retired.take(state.producer.take());
                }
                if standing.unauthorized {
                    state.turn = state.turn.wrapping_add(1);
                }
                late()
            }
        };
        failed(match &state.trouble {
            Some(trouble) => format!("{error}: {trouble}"),
            None => error,
        })
    }

    fn start(&self, secrets: &Secrets, turn: usize) -> Result<Producer, String> {
        let mut config = self.config.clone();
        if let Some(Secret { name, property }) = &self.secret {
            let values: Vec<_> = secrets.expose().collect();
            if values.is_empty() {
                return Err(format!(
                    "not sent: secret \"{name}\" has no active value to log in with"
                ));
            }
            config.set(*property, values[turn % values.len()]);
        }
        producer::start(&config)
    }

    /// Sends a batch and waits for its reports. None if the brokers do not let us in.
    async fn publish(&self, producer: &Producer, serial: u32, batch: &Batch) -> Option<Outcome> {
        let reports = producer.context();
        let mut writer = Writer::new(self.mode);
        let mut topic = String::new();
        let mut faults = Vec::new();
        let (mut sent, mut bytes) = (0, 0);
        let mut end = batch.events.len();
        for (index, event) in batch.events.iter().enumerate() {
            if index > 0 && batch.watch.is_called_off() {
                end = index;
                break;
            }
            if let Err(why) = self.route.topic(event, &mut topic) {
                faults.push((index, Fault::Misrouted(why)));
                continue;
            }
            loop {
                let message = writer.write(event);
                bytes += message.size;
                let record = BaseRecord {
                    topic: &topic,
                    partition: None,
                    payload: message.value,
                    key: event.subject.as_deref(),
                    // Now: a topic's retention goes by it.
                    timestamp: None,
                    headers: Some(message.headers),
                    delivery_opaque: tag(serial, index),
                };
                match producer
                    .send(record)
                    .map_err(|(error, _)| error.rdkafka_error_code())
                {
                    Ok(()) => {
                        sent += 1;
                        break;
                    }
                    Err(Some(RDKafkaErrorCode::QueueFull)) => sleep(FULL_RETRY).await,
                    Err(Some(RDKafkaErrorCode::MessageSizeTooLarge)) => {
                        faults.push((index, Fault::TooLarge));
                        break;
                    }
                    Err(code) => {
                        let code = code.unwrap_or(RDKafkaErrorCode::Fail);
                        faults.push((index, Fault::Refused(code)));
                        break;
                    }
                }
            }
            if bytes > AT_ONCE {
                bytes = 0;
                yield_now().await;
            }
        }
        reports.expect(sent);
        loop {
            let standing = reports.standing();
            if standing.complete {
                break;
            }
            if standing.unauthorized && standing.reported == 0 {
                return None;
            }
            reports.done.notified().await;
        }
        let reported = reports.take_failed().into_iter();
        faults.extend(reported.map(|(index, code)| (index, Fault::Refused(code))));
        let outcome = self.outcome(batch, end, faults, &mut writer);
        Some(outcome.cut_at(end, batch.events.len()))
    }

    /// Of the first `count` events.
    fn outcome(
        &self,
        batch: &Batch,
        count: usize,
        faults: Vec<(usize, Fault)>,
        writer: &mut Writer,
    ) -> Outcome {
        let mut topic = String::new();
        let faults = faults.into_iter().map(|(index, fault)| {
            let event = &batch.events[index];
            let named = match self.route.topic(event, &mut topic) {
                Ok(()) => self.route.named(&topic),
                Err(_) => String::new(),
            };
            let suspect = Suspect {
                index,
                topic: named,
                in_company: count > 1 && writer.write(event).size <= self.batch_bytes,
            };
            (fault, suspect)
        });
        outcome(count, faults.collect())
    }

    /// A broker may quote what it was sent.
    fn shown(&self, error: &str, secrets: &Secrets) -> String {
        one_line(&without(error, secrets.expose()), LONGEST)
    }
}

impl Sink for Kafka {
    async fn deliver(&self, batch: &Batch) -> Outcome {
        if batch.events.is_empty() {
            return Outcome::Delivered;
        }
        let deadline = Instant::now() + self.timeout;
        let outcome = self.attempt(batch, deadline).await;
        outcome.with_errors(|error| self.shown(error, &batch.secrets))
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        state.retired.take(state.producer.take());
        state.retired.wait();
    }
}
