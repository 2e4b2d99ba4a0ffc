//! What is handed to a sink in one delivery.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Secrets;
use super::checkpoint::Witness;
use crate::dispatch::{Outcome, Place};
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
    /// What the two sides tell each other while it goes on.
    pub(crate) watch: Arc<Watch>,
}

/// What tells a sink, and what its positions mean, from all others.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) sink: String,
    /// A UUID. A sink that is dropped and made again has another one; one that comes back from a dump keeps it.
    pub(crate) life: String,
    /// The cluster: transaction ids of another one mean nothing here.
    pub(crate) cluster: String,
    /// Random: whoever delivers has taken the sink over with it.
    pub(crate) takeover: String,
    /// The last event that a destination was found to have come to, and whether this database holds it.
    pub(crate) verified: Option<(Witness, bool)>,
}

/// What a delivery came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Came {
    To(Outcome),
    /// Nothing was sent: the delivery was called off before.
    CalledOff,
    /// Nothing was sent: first it must be known whether this database holds that event.
    Asks(Witness),
}

/// A delivery that goes on, seen from both sides.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    called_off: AtomicBool,
    through: Mutex<Through>,
}

#[derive(Debug, Default)]
struct Through {
    /// Places within the batch.
    untold: Vec<usize>,
    since: Option<Instant>,
}

impl Watch {
    /// Nothing more is to be sent; what is under way is waited for.
    pub(crate) fn call_off(&self) {
        self.called_off.store(true, Ordering::Release);
    }

    /// To be asked before each request.
    pub(crate) fn is_called_off(&self) -> bool {
        self.called_off.load(Ordering::Acquire)
    }

    /// An event is through while others of its batch are not.
    pub(in crate::sinks) fn went_through(&self, index: usize) {
        let mut through = self.through();
        through.untold.push(index);
        through.since.get_or_insert_with(Instant::now);
    }

    /// Whether there is something to [take](Self::take_through).
    pub(crate) fn has_news(&self) -> bool {
        !self.through().untold.is_empty()
    }

    /// The events that went through since this was asked last, and since when the first of them is.
    pub(crate) fn take_through(&self) -> Option<(Vec<usize>, Instant)> {
        let Through { untold, since } = std::mem::take(&mut *self.through());
        since.map(|since| (untold, since))
    }

    /// Never held over anything that could panic.
    fn through(&self) -> MutexGuard<'_, Through> {
        self.through.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
