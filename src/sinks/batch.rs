//! What is handed to a sink in one delivery.

use std::sync::Arc;

use super::Secrets;
use crate::dispatch::Place;
use crate::envelope::Event;

/// Events in the order in which the sink gets them, with what was current when they were handed over.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) events: Vec<Arc<Event>>,
    /// The active values of the secret that the sink names, so that a rotation takes effect with the next delivery. Empty
    /// when it names none, and when none is active.
    pub(crate) secrets: Secrets,
    /// Whose delivery it is.
    pub(crate) origin: Arc<Origin>,
    /// Once all of the events are through, everything up to here is settled: delivered, or set aside. None when events before
    /// them are still to come, and when they were taken up again from outside of the stream.
    pub(crate) reaches: Option<Place>,
}

/// What tells a sink, and what its positions mean, from all others.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) sink: String,
    /// A UUID. A sink that is dropped and made again has another one; one that comes back from a dump keeps it.
    pub(crate) life: String,
    /// The cluster and its timeline: transaction ids of another one mean nothing here.
    pub(crate) history: String,
}
