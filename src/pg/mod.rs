//! The rim towards Postgres: everything that is `unsafe`, each block with its reason.
//!
//! Nothing here knows about sinks, nor about events but for what their tables look like (`append`). All of it must be called on the main thread of a backend or worker.

#![allow(unsafe_code)]

pub(crate) mod append;
mod array;
pub(crate) mod background;
pub(crate) mod call;
pub(crate) mod catalog;
pub(crate) mod culprits;
pub(crate) mod encoding;
pub(crate) mod error;
pub(crate) mod exact;
pub(crate) mod expression;
pub(crate) mod firing;
pub(crate) mod guc;
pub(crate) mod hint;
pub(crate) mod invalidation;
pub(crate) mod latch;
pub(crate) mod lock;
pub(crate) mod security;
pub(crate) mod sequence;
pub(crate) mod shmem;
pub(crate) mod spi;
pub(crate) mod statement;
pub(crate) mod timeout;
pub(crate) mod transaction;
pub(crate) mod xact;
