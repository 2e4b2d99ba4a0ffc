//! Decides what is handed to a sink, when, and what becomes of each event.
//!
//! Pure: no I/O, no Postgres, no clock, no logging, nothing that waits. The caller reads events and
//! pushes them in, asks for the next step at a time of its own, hands over what the step names, and
//! reports what came of it. What leaves the [`Engine`] leaves in the order in which it was pushed,
//! once, delivered or dead: the caller moves its cursor past it.
//!
//! When an event behind the head goes through by itself, or the sink judges it for good, a *run*
//! begins: the events ahead of it, from the head on, are tried one after the other without any
//! wait. It ends when the sink asks for one, when somebody changes the sink, and with the process.
//!
//! What the engine promises, whatever the sink does:
//! - *An outage dead-letters nothing, but for one that begins within a run.* An event is given up
//!   only if it fails in a run and has by then failed [`Policy::poison_attempts`] times by itself,
//!   in the run or before; or if the sink itself named it and said that no retry can help. Where
//!   another event had failed, too, before the one that began the run went through, there may have
//!   been an outage: then only failures since count. So a good event dies only if the sink was up
//!   when the run began and, before any wait, failed on each try that the run made of that event.
//! - *A bad event stops nobody for long*, as long as one of the 16 pending events behind it is a
//!   good one. That one is enough to decide on all bad ones ahead of it.
//! - *Nothing is handed over out of order*, but for the single events that are tried to tell a bad
//!   event from an outage.
//!
//! With [`Isolation::Key`] the engine gives nothing up but what the sink judges for good. As soon as
//! another key has gone through, a failing event leaves as parked, and so do the later ones of its
//! key; [`Lanes`] takes them from there, and until it has none left the engine parks whatever comes
//! of that key. An event that overtakes one of its own key is never tried. In an outage nothing is
//! parked, but for what a sink names that takes others of the same batch.

mod backoff;
mod checkpoint;
mod engine;
mod health;
mod lanes;
mod neighbours;
mod outcome;
mod policy;
mod pool;
mod queue;
mod sizing;
mod snapshot;
mod topics;
mod window;

pub use backoff::Time;
pub use checkpoint::Checkpoint;
pub use engine::{Engine, Step};
pub use health::Health;
pub use lanes::Lanes;
pub use outcome::{Failure, Outcome, Refusal};
pub use policy::{Isolation, Policy};
pub use pool::{Limits, Pool, QUEUE, webhook_wait};
pub use queue::{Fate, Item, Settled, Trial};
pub use snapshot::Snapshot;
pub use topics::Pattern;
pub use window::{Floors, Grouping, Mark, Place, Window};
