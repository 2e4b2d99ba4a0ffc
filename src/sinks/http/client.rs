//! The client of kind `http`: a delivery as one request or as many.

use std::sync::Arc;

use super::checkpoint::{self, Checkpoint};
use super::config::{HttpConfig, Mode, Signing};
use super::exchange::{Endpoint, Setback};
use super::request::Message;
use super::signing::Keys;
use super::single;
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::envelope::Event;
use crate::sinks::{Batch, Defaults, Sink};

pub(crate) struct Http {
    endpoint: Arc<Endpoint>,
    mode: Mode,
    signing: Option<Signing>,
    checkpoint: Option<Checkpoint>,
}

impl Http {
    pub(in crate::sinks) fn open(config: &HttpConfig, defaults: &Defaults) -> Result<Self, String> {
        Ok(Self {
            endpoint: Arc::new(Endpoint::open(config, defaults.http_timeout)?),
            mode: config.mode,
            signing: config.signing.clone(),
            checkpoint: config.checkpoint.clone().map(Checkpoint::new),
        })
    }

    /// All events as one request.
    async fn deliver_together(&self, batch: &Batch, keys: &Keys) -> Outcome {
        let Some(checkpoint) = &self.checkpoint else {
            let message = Message::batch(&batch.events, keys).await;
            return outcome(self.send(message, &batch.events, batch).await);
        };
        let reached = match checkpoint.reached(&self.endpoint, &batch.origin).await {
            Ok(reached) => reached,
            Err(setback) => return Outcome::Failed(setback.refusal),
        };
        // A single event that is tried ahead, or taken up again, says nothing of those before it.
        let Some(reaches) = &batch.reaches else {
            let message = Message::batch(&batch.events, keys).await;
            return outcome(self.send(message, &batch.events, batch).await);
        };
        let has = |event: &Event| {
            reached
                .as_ref()
                .is_some_and(|reached| reached.covers(event))
        };
        let (places, events): (Vec<usize>, Vec<Arc<Event>>) = batch
            .events
            .iter()
            .enumerate()
            .filter(|(_, event)| !has(event))
            .map(|(place, event)| (place, Arc::clone(event)))
            .unzip();
        if events.is_empty() {
            return Outcome::Delivered;
        }
        let mut message = Message::batch(&events, keys).await;
        checkpoint::tell(&batch.origin, reaches, &mut message.headers);
        let mut sent = self.send(message, &events, batch).await;
        match &mut sent {
            Ok(failures) => {
                for failure in failures {
                    failure.index = places[failure.index];
                }
            }
            Err(_) => checkpoint.forget(),
        }
        outcome(sent)
    }

    async fn send(
        &self,
        message: Message,
        events: &[Arc<Event>],
        batch: &Batch,
    ) -> Result<Vec<Failure>, Setback> {
        self.endpoint.send(message, events, &batch.secrets).await
    }
}

fn outcome(sent: Result<Vec<Failure>, Setback>) -> Outcome {
    match sent {
        Ok(failures) if failures.is_empty() => Outcome::Delivered,
        Ok(failures) => Outcome::Partial(failures),
        Err(setback) => Outcome::Failed(setback.refusal),
    }
}

impl Sink for Http {
    async fn deliver(&self, batch: &Batch) -> Outcome {
        if batch.events.is_empty() {
            return Outcome::Delivered;
        }
        let keys = match Keys::new(self.signing.as_ref(), &batch.secrets) {
            Ok(keys) => keys,
            Err(error) => {
                return Outcome::Failed(Refusal {
                    error,
                    retry_after: None,
                });
            }
        };
        match self.mode {
            Mode::Batch => self.deliver_together(batch, &keys).await,
            Mode::Single { concurrency } => {
                single::deliver(&self.endpoint, batch, keys, concurrency).await
            }
        }
    }
}
