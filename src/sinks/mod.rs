//! The sinks: everything that takes events out of the database, one module per kind.
//!
//! Owns what a kind is: the reading of its `config`, and the client that delivers. Knows the envelope and the words of
//! [`crate::dispatch`] for what a delivery came to; knows no Postgres, no cursor and no retry: each delivery is tried once,
//! and what becomes of a failure is decided elsewhere.
//!
//! The kinds `function` and `pull` have no client. They live in the database, and the layers that may use it deliver to
//! them; here is only what their `config` says.

mod batch;
mod checkpoint;
mod client;
mod config;
mod fields;
mod function;
mod http;
mod kafka;
mod nats;
mod plain_text;
mod postgres;
mod redact;
mod secrets;
mod template;
mod tls;

pub(crate) use batch::{Batch, Came, Origin, Watch};
pub(crate) use checkpoint::Witness;
use client::Sink;
pub(crate) use client::{Client, Defaults};
pub(crate) use config::{Config, ConfigError, parse, redaction};
pub(crate) use function::FunctionConfig;
pub(crate) use http::webhook;
pub(crate) use plain_text::{LONGEST, one_line};
pub(crate) use redact::Redaction;
pub(crate) use secrets::{SecretSource, Secrets};
