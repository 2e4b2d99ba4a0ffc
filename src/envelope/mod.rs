//! The envelope: what an event is once it has left the database, and the bytes it travels as.
//!
//! Owns the event, its position, its CloudEvents 1.0 JSON and the signatures over it. Knows no sink, no network, no clock
//! and no Postgres: everything here is a function of its arguments.

mod attributes;
mod cloudevent;
mod event;
mod extensions;
mod position;
mod read;
mod rfc3339;
mod signature;
mod uri_reference;

#[cfg(test)]
mod properties;

pub(crate) use attributes::attributes;
pub(crate) use cloudevent::write_cloudevent;
pub(crate) use event::{Event, Part};
pub(crate) use position::Position;
pub(crate) use read::read_cloudevent;
pub(crate) use rfc3339::timestamp_text;
pub(crate) use signature::{Signer, standard_key};
