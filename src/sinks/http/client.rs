//! The client of kind `http`: a delivery as one request or as many.

use std::sync::Arc;

use super::config::{HttpConfig, Mode, Signing};
use super::exchange::Endpoint;
use super::request::Message;
use super::signing::Keys;
use super::single;
use crate::dispatch::{Outcome, Refusal};
use crate::sinks::{Batch, Defaults, Sink};

pub(crate) struct Http {
    endpoint: Arc<Endpoint>,
    mode: Mode,
    signing: Option<Signing>,
}

impl Http {
    pub(in crate::sinks) fn open(config: &HttpConfig, defaults: &Defaults) -> Result<Self, String> {
        Ok(Self {
            endpoint: Arc::new(Endpoint::open(config, defaults.http_timeout)?),
            mode: config.mode,
            signing: config.signing.clone(),
        })
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
            Mode::Batch => {
                let message = Message::batch(&batch.events, &keys).await;
                let sent = self.endpoint.send(message, &batch.events, &batch.secrets);
                match sent.await {
                    Ok(failures) if failures.is_empty() => Outcome::Delivered,
                    Ok(failures) => Outcome::Partial(failures),
                    Err(setback) => Outcome::Failed(setback.refusal),
                }
            }
            Mode::Single { concurrency } => {
                single::deliver(&self.endpoint, batch, keys, concurrency).await
            }
        }
    }
}
