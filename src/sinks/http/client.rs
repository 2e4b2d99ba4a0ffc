//! The client of kind `http`: a delivery as one request or as many.

use std::sync::Arc;

use super::checkpoint::{At, Checkpoint};
use super::config::{HttpConfig, Mode, Signing};
use super::exchange::{Endpoint, Setback};
use super::request::Message;
use super::signing::Keys;
use super::single;
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::envelope::Event;
use crate::sinks::{Batch, Came, Defaults};

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

    /// Tries `batch` once, as [`crate::sinks::client::Sink`] says.
    pub(in crate::sinks) async fn deliver(&self, batch: &Batch) -> Came {
        if batch.events.is_empty() {
            return Came::To(Outcome::Delivered);
        }
        let keys = match Keys::new(self.signing.as_ref(), &batch.secrets) {
            Ok(keys) => keys,
            Err(error) => {
                return Came::To(Outcome::Failed(Refusal {
                    error,
                    retry_after: None,
                }));
            }
        };
        match self.mode {
            Mode::Batch => self.deliver_together(batch, &keys).await,
            Mode::Single { concurrency } => {
                single::deliver(&self.endpoint, batch, keys, concurrency).await
            }
        }
    }

    /// All events as one request.
    async fn deliver_together(&self, batch: &Batch, keys: &Keys) -> Came {
        let Some(checkpoint) = &self.checkpoint else {
            let message = Message::batch(&batch.events, keys).await;
            return Came::To(outcome(self.send(message, &batch.events, batch).await));
        };
        let has = match checkpoint.at(&self.endpoint, &batch.origin).await {
            Ok(has) => has,
            Err(setback) => return Came::To(Outcome::Failed(setback.refusal)),
        };
        if batch.watch.is_called_off() {
            return Came::CalledOff;
        }
        // A single event that is tried ahead, or taken up again, says nothing of those before it.
        let Some(reaches) = &batch.reaches else {
            let message = Message::batch(&batch.events, keys).await;
            return Came::To(outcome(self.send(message, &batch.events, batch).await));
        };
        let reached = match has {
            At::Nowhere => None,
            At::Place(reached) => Some(reached),
            At::Unknown(witness) => return Came::Asks(witness),
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
            return Came::To(Outcome::Delivered);
        }
        let mut message = Message::batch(&events, keys).await;
        checkpoint.tell(&batch.origin, reaches, &batch.events, &mut message.headers);
        let mut sent = self.send(message, &events, batch).await;
        match &mut sent {
            Ok(failures) => {
                for failure in failures {
                    failure.index = places[failure.index];
                }
            }
            Err(_) => checkpoint.forget(),
        }
        Came::To(outcome(sent))
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
