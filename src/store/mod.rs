//! What is kept in tables, one file per table. SPI only: called in a transaction, on the main thread, with the extension's rights.

pub(crate) mod audit;
pub(crate) mod backfills;
pub(crate) mod captures;
pub(crate) mod cursors;
pub(crate) mod dead_letters;
pub(crate) mod events;
pub(crate) mod functions;
pub(crate) mod health;
pub(crate) mod histories;
pub(crate) mod parked;
pub(crate) mod publications;
pub(crate) mod rebase;
pub(crate) mod retention;
pub(crate) mod secrets;
pub(crate) mod sinks;
pub(crate) mod streams;
pub(crate) mod transactions;
pub(crate) mod usage;
pub(crate) mod webhooks;
