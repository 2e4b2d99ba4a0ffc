//! What is handed to a sink in one delivery.

use std::sync::Arc;

use super::Secrets;
use crate::envelope::Event;

/// Events in the order in which the sink gets them, with what was current when they were handed over.
pub(crate) struct Batch {
    pub(crate) events: Vec<Arc<Event>>,
    /// The active values of the secret that the sink names, so that a rotation takes effect with the next delivery. Empty
    /// when it names none, and when none is active.
    pub(crate) secrets: Secrets,
}
