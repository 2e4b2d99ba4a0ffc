//! Webhooks of tenants: one event, signed and posted to a URL that came from a stranger.
//!
//! Owns what such a URL may be, where it may lead, and one attempt at it. Retries, rows and settings are other people's business.

mod address;
mod courier;
mod names;
mod target;

pub(crate) use courier::{Attempt, Courier, Outcome, Verdict};
pub(crate) use target::{Rules, parse};
