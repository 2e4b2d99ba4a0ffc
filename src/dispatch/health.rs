//! How a sink is doing, in the words that operators read.

/// How a sink is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Nothing is known to be wrong.
    Flowing,
    /// A batch failed; which of its events it was is being found out.
    Bisecting,
    /// The event at the head has failed by itself and is tried again.
    Retrying {
        /// Its failures so far.
        attempts: u32,
    },
    /// Others fail as well: the sink is taken to be down. Nothing is given up.
    Down {
        /// The failures of the event at the head so far.
        attempts: u32,
    },
}
