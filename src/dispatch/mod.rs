//! Decides what is handed to a sink, when, and what becomes of each event.
//!
//! Pure: no I/O, no Postgres, no clock, no logging, nothing that waits. The caller reads events and
//! pushes them in, asks for the next step at a time of its own, hands over what the step names, and
//! reports what came of it. What leaves the [`Engine`] leaves in the order in which it was pushed,
//! once, delivered or dead: the caller moves its cursor past it.
//!
//! What the engine promises, whatever the sink does:
//! - *An outage dead-letters nothing.* An event is given up only after it failed
//!   [`Policy::poison_attempts`] times by itself, then another event went through, and then, with
//!   no wait in between, it failed once more; or when the sink itself named it and said that no
//!   retry can help.
//! - *A bad event stops nobody for long*, as long as one of the 16 pending events behind it is a
//!   good one. Each verdict needs a good one of its own: what went through before says nothing
//!   about the sink now.
//! - *Nothing is handed over out of order*, but for the single events that are tried to tell a bad
//!   event from an outage.

mod backoff;
mod checkpoint;
mod engine;
mod health;
mod neighbours;
mod outcome;
mod policy;
mod queue;
mod sizing;
mod snapshot;
mod topics;
mod window;

pub use backoff::Time;
pub use checkpoint::Checkpoint;
pub use engine::{Engine, Step};
pub use health::Health;
pub use outcome::{Failure, Outcome, Refusal};
pub use policy::Policy;
pub use queue::{Fate, Item, Settled};
pub use snapshot::Snapshot;
pub use topics::Pattern;
pub use window::{Floors, Mark, Place, Window};
