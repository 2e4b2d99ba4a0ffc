//! Kind `kafka`: events as CloudEvents, produced by an idempotent producer and acknowledged by all in-sync replicas.
//!
//! The client is librdkafka. Its threads are its own; ours only hands over what is to be sent and waits for the reports. Each
//! delivery ends within its time-out, and whatever was not reported by then is purged.

mod client;
mod config;
mod message;
mod outcome;
mod producer;
mod properties;
mod reports;
mod route;

pub(crate) use client::Kafka;
pub(crate) use config::KafkaConfig;
