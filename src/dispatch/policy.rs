//! What an operator may set about deliveries. It holds the limits and makes them usable; it decides
//! nothing.

use std::time::Duration;

/// The limits within which an engine works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The most events handed over at once. 0 counts as 1.
    pub batch_size: usize,
    /// The wait after the first failure of an event; it doubles with each further one.
    pub retry_min: Duration,
    /// No wait is longer than this, whatever was asked for.
    pub retry_max: Duration,
    /// How often an event must have failed by itself before it may be given up. 0 counts as 1.
    pub poison_attempts: u32,
}

/// What an event that fails holds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Everything behind it.
    #[default]
    Batch,
    /// Later events of its key alone.
    Key,
}

impl Policy {
    pub(super) fn usable(self) -> Policy {
        Policy {
            batch_size: self.batch_size.max(1),
            poison_attempts: self.poison_attempts.max(1),
            ..self
        }
    }
}
