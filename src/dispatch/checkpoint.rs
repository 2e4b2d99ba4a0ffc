//! What an engine knows beyond its queue, in a form that outlives the process. It holds values;
//! what they mean is with those who use them.

use serde::{Deserialize, Serialize};

use super::backoff::Time;

/// What is remembered over a restart about the event at the head and about the sink. Small, and
/// lenient: a field that is missing has its default, one that is unknown is ignored. Which events
/// behind the head went through is not in it: unless the caller keeps them, those are delivered
/// again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Checkpoint {
    /// How often the event at the head has failed by itself.
    #[serde(skip_serializing_if = "is_default")]
    pub attempts: u32,
    /// How many of them may be the fault of an outage.
    #[serde(skip_serializing_if = "is_default")]
    pub excused: u32,
    /// The latest failure.
    #[serde(skip_serializing_if = "is_default")]
    pub error: Option<String>,
    /// Nothing is handed over before.
    #[serde(skip_serializing_if = "is_default")]
    pub due: Option<Time>,
    /// The size to which batches are reduced; `None`: they are full.
    #[serde(skip_serializing_if = "is_default")]
    pub size: Option<usize>,
    /// How many events from the head on are suspected of failing; 0 for none.
    #[serde(skip_serializing_if = "is_default")]
    pub suspects: usize,
    /// The offsets from the head of those events that failed a neighbour test in this round.
    #[serde(skip_serializing_if = "is_default")]
    pub tested: Vec<usize>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Checkpoint {
    /// Whether there is nothing to remember.
    pub fn is_empty(&self) -> bool {
        is_default(self)
    }
}
