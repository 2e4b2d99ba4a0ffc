//! A delivery of the stream that goes on: what is known to be through of it, and how it is called off.

use std::sync::Arc;

use super::super::now;
use super::Course;
use crate::dispatch::{Outcome, Time};
use crate::pg::spi::Spi;
use crate::sinks::{Came, Origin, Watch, Witness};
use crate::store::histories;

/// What was handed over.
pub(super) struct Delivery {
    pub(super) watch: Arc<Watch>,
    /// Which entry each event is of.
    pub(super) owners: Vec<usize>,
    /// How many events of each entry are not known to be through.
    left: Vec<usize>,
}

impl Delivery {
    /// Of entries with so many events.
    pub(super) fn new(watch: Arc<Watch>, events: Vec<usize>) -> Self {
        let owners = events.iter().enumerate();
        let owners = owners.flat_map(|(index, &count)| std::iter::repeat_n(index, count));
        Self {
            watch,
            owners: owners.collect(),
            left: events,
        }
    }

    /// The entries that are through now that these events are.
    fn completed(&mut self, events: &[usize]) -> Vec<usize> {
        let mut completed = Vec::new();
        for owner in events.iter().filter_map(|&event| self.owners.get(event)) {
            let left = &mut self.left[*owner];
            *left = left.saturating_sub(1);
            if *left == 0 {
                completed.push(*owner);
            }
        }
        completed
    }
}

impl Course {
    /// Settles what is through of the delivery in flight.
    pub(crate) fn take_progress(&mut self) {
        let Some(delivery) = &mut self.delivery else {
            return;
        };
        let Some((events, since)) = delivery.watch.take_through() else {
            return;
        };
        let through = delivery.completed(&events);
        if through.is_empty() {
            return;
        }
        let ago = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let since = Time(now().0.saturating_sub(ago));
        self.redelivery.sink_is_up();
        self.is_up();
        self.unsaved.since.get_or_insert(since);
        let settled = self.engine.progress(&through);
        self.settle(settled);
        self.note_ahead();
    }

    /// Takes what the delivery in flight came to.
    pub(crate) fn came(&mut self, came: Came) {
        match came {
            Came::To(outcome) => self.outcome(&outcome),
            Came::CalledOff => self.give_back(),
            Came::Asks(witness) => {
                self.give_back();
                self.asked = Some(witness);
            }
        }
    }

    fn give_back(&mut self) {
        self.in_flight = false;
        self.delivery = None;
        self.engine.give_back();
    }

    /// Nothing more is to be handed over, nor sent of what is in flight.
    pub(crate) fn call_off(&mut self) {
        self.called_off = true;
        let watches = self.delivery.as_ref().map(|delivery| &delivery.watch);
        for watch in watches.into_iter().chain(&self.parked_watch) {
            watch.call_off();
        }
    }

    /// What is still in flight is not waited for any longer: what is known of it is what there is to save.
    pub(crate) fn give_up(&mut self) {
        self.call_off();
        self.take_progress();
        if self.in_flight {
            self.give_back();
        }
        if let Some(watch) = self.parked_watch.take()
            && let Some((through, _)) = watch.take_through()
        {
            let in_flight = 0..self.parking().in_flight();
            self.parked_outcome(&Outcome::Cut {
                failures: Vec::new(),
                untried: in_flight.filter(|index| !through.contains(index)).collect(),
                retry_after: None,
            });
        }
    }

    /// Whether a destination was found to be at an event of which it must be known whether it is here.
    pub(crate) fn wants_to_verify(&self) -> bool {
        self.asked.is_some()
    }

    /// Looks for that event.
    pub(crate) fn verify(&mut self, spi: &Spi) {
        let Some(witness) = self.asked.take() else {
            return;
        };
        let there = histories::event_at(spi, &self.reader.stream, self.sink.number, witness.seq);
        let is_here = there.is_some_and(|event| Witness::new(&event) == witness);
        if !is_here {
            pgrx::warning!(
                "pg_outbox: sink \"{}\": its receiver has come to an event that this database does not hold, so what it may lack is sent again",
                self.sink.id
            );
        }
        self.origin = Arc::new(Origin {
            verified: Some((witness, is_here)),
            ..(*self.origin).clone()
        });
    }
}
