//! What all kinds that deliver over a network have in common.

use std::sync::Arc;
use std::time::Duration;

use super::http::Http;
use super::kafka::Kafka;
use super::nats::Nats;
use super::postgres::Postgres;
use super::{Batch, Came, Config};
use crate::dispatch::Outcome;

/// What kinds implement: deliver once, and say which events got through.
pub(crate) trait Sink: Send + Sync {
    /// Tries `batch` once. Ends within the time-outs of the sink, and reports whatever goes wrong as an outcome. To drop the
    /// future is to give the delivery up; whether it took effect is then unknown.
    fn deliver(&self, batch: &Batch) -> impl Future<Output = Outcome> + Send;
}

/// Settings that hold for a sink whose `config` does not say otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Defaults {
    /// For a whole request, from connecting to the last byte of the answer.
    pub(crate) http_timeout: Duration,
    /// What Kafka topics begin with that no template makes up.
    pub(crate) topic_prefix: Arc<str>,
}

/// A client of any kind, with its connections. They are kept between deliveries and closed when it is dropped.
pub(crate) enum Client {
    Http(Box<Http>),
    Kafka(Box<Kafka>),
    Nats(Box<Nats>),
    Postgres(Box<Postgres>),
}

impl Client {
    /// Prepares a client and connects to nothing yet. Reads the files that `config` names.
    ///
    /// # Errors
    /// For people to read, without secrets: a file that cannot be used, or a kind that has no client.
    pub(crate) fn open(config: &Config, defaults: &Defaults) -> Result<Self, String> {
        match config {
            Config::Http(http) => {
                Http::open(http, defaults).map(|http| Client::Http(Box::new(http)))
            }
            Config::Kafka(kafka) => Ok(Client::Kafka(Box::new(Kafka::open(kafka, defaults)))),
            Config::Nats(nats) => Nats::open(nats).map(|nats| Client::Nats(Box::new(nats))),
            Config::Postgres(postgres) => Ok(Client::Postgres(Box::new(Postgres::open(
                postgres, defaults,
            )))),
            Config::Function(_) | Config::Pull => Err(format!(
                "a sink of kind \"{}\" is served by the database itself",
                config.kind()
            )),
        }
    }

    /// See [`Sink::deliver`].
    pub(crate) async fn deliver(&self, batch: &Batch) -> Came {
        if batch.watch.is_called_off() {
            return Came::CalledOff;
        }
        match self {
            Client::Http(http) => http.deliver(batch).await,
            Client::Kafka(kafka) => Came::To(kafka.deliver(batch).await),
            Client::Nats(nats) => Came::To(nats.deliver(batch).await),
            Client::Postgres(postgres) => Came::To(postgres.deliver(batch).await),
        }
    }
}
