//! Kind `http`: events as CloudEvents, posted to a URL.
//!
//! A delivery is one request with all its events, or one request an event. The body is serialised once, and the same bytes
//! are signed and sent. Any 2xx status is success, unless the answer lists failures; every other status, redirects
//! included, is a failure of the delivery that says nothing about a single event.

mod answer;
mod checkpoint;
mod client;
mod config;
mod exchange;
mod request;
mod signing;
mod single;
mod transport;
pub(crate) mod webhook;

#[cfg(test)]
mod receiver;
#[cfg(test)]
pub(super) mod tests;

pub(crate) use client::Http;
pub(crate) use config::HttpConfig;
