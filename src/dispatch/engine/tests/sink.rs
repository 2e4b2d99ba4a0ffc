//! Events, and a sink that fails on some of them or on all.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::super::{Failure, Item, Outcome, Policy, Refusal};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// Its place in the source.
    pub(super) id: usize,
    pub(super) key: usize,
    /// How many it stands for.
    pub(super) weight: usize,
}

impl Item for Event {
    type Key = usize;
    fn key(&self) -> &usize {
        &self.key
    }
    fn weight(&self) -> usize {
        self.weight
    }
}

/// How a sink that is up speaks of poison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Fails the delivery that it is in.
    Mute,
    /// Names it, and takes the others.
    Naming,
    /// Names it, says that it will never be taken, and takes the others.
    Judging,
    /// Takes what comes before the first, names that, and does not try what comes behind it.
    Halting,
    /// Puts it off, as if it had not been handed over, and takes the others.
    PuttingOff,
}

#[derive(Debug)]
pub(super) struct Sink {
    pub(super) up: bool,
    pub(super) style: Style,
    pub(super) poison: BTreeSet<usize>,
    /// What it asks for when it refuses.
    pub(super) retry_after: Option<Duration>,
}

impl Sink {
    pub(super) fn new(poison: impl IntoIterator<Item = usize>) -> Self {
        let poison = poison.into_iter().collect();
        Sink {
            up: true,
            style: Style::Mute,
            poison,
            retry_after: None,
        }
    }

    pub(super) fn takes(&self, id: usize) -> bool {
        self.up && !self.poison.contains(&id)
    }

    pub(super) fn deliver(&self, ids: &[usize]) -> Outcome {
        let bad: Vec<usize> = (0..ids.len())
            .filter(|index| !self.takes(ids[*index]))
            .collect();
        let Some(&first) = bad.first() else {
            return Outcome::Delivered;
        };
        if !self.up || self.style == Style::Mute {
            let error = if self.up { "bad event" } else { "down" }.to_owned();
            return Outcome::Failed(Refusal {
                error,
                retry_after: self.retry_after,
            });
        }
        let permanent = self.style == Style::Judging;
        let failure = |index, permanent| Failure {
            index,
            error: "bad event".to_owned(),
            permanent,
        };
        if self.style == Style::Halting {
            return Outcome::Cut {
                failures: vec![failure(first, false)],
                untried: (first + 1..ids.len()).collect(),
                retry_after: self.retry_after,
            };
        }
        if self.style == Style::PuttingOff {
            return Outcome::Cut {
                failures: Vec::new(),
                untried: bad,
                retry_after: None,
            };
        }
        let mut failures: Vec<Failure> =
            bad.iter().map(|index| failure(*index, permanent)).collect();
        // What a careless sink might add.
        failures.push(failure(first, !permanent));
        failures.push(failure(ids.len(), true));
        failures.push(failure(usize::MAX, false));
        Outcome::Partial(failures)
    }
}

/// The defaults, with batches of `batch_size`.
pub(super) fn policy(batch_size: usize) -> Policy {
    Policy {
        batch_size,
        retry_min: Duration::from_secs(1),
        retry_max: Duration::from_secs(300),
        poison_attempts: 5,
    }
}
