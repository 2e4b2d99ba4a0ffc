//! Kind `nats`: events as CloudEvents, published to JetStream and acknowledged by it.
//!
//! The few words of the NATS protocol that this takes are spoken here, and not by a general client, for the sake of order. A
//! client that reconnects by itself carries on in the middle of a batch: events that were on their way when the connection
//! broke are lost and those behind them are not, and once the lost ones are published again, they stand behind them. Here
//! a batch is published on one connection. If that breaks, what follows is lost too, and all of it is handed over again; what
//! had arrived is recognised by its `Nats-Msg-Id`.

mod answer;
mod client;
mod config;
mod connection;
mod login;
mod message;
mod nkey;
mod publish;
mod subject;
mod wire;

pub(crate) use client::Nats;
pub(crate) use config::NatsConfig;
