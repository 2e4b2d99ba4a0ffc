//! What a delivery came to: the words in which sinks report and the engine listens. It knows
//! neither side.

use std::time::Duration;

/// What a delivery of events came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of them went through.
    Delivered,
    /// The sink is up: those listed failed, all the others went through. An index out of range is
    /// ignored, and of several mentions of one event the first counts.
    Partial(Vec<Failure>),
    /// The same of a delivery that was cut short: of those in `untried`, given by their indices, nothing
    /// is known but that they were not handed on, be it that an earlier one of their key had failed or
    /// that the sink had stopped answering. They have not failed. One that is listed as failed, too, has.
    Cut {
        /// As in [`Outcome::Partial`].
        failures: Vec<Failure>,
        /// Counted from 0 within what was handed over.
        untried: Vec<usize>,
        /// How long the sink asked to be left alone.
        retry_after: Option<Duration>,
    },
    /// Nothing is known to be through.
    Failed(Refusal),
}

/// One event of a delivery that a sink, being up, did not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which one, counted from 0 within what was handed over.
    pub index: usize,
    /// Why, for people to read.
    pub error: String,
    /// Whether the sink says of this very event that no retry can help. Never to be concluded from
    /// an answer that every event would get.
    pub permanent: bool,
}

/// A delivery that failed as a whole, be it for one event or for the sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, for people to read.
    pub error: String,
    /// How long the sink asked to be left alone.
    pub retry_after: Option<Duration>,
}

/// What a delivery came to for one of its events.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verdict<'a> {
    Through,
    Failed(&'a Failure),
    Untried,
}

/// What is said of an event that never got its turn, where something has to be said.
const UNTRIED: &str = "not tried";

impl Outcome {
    /// How long the sink asked to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Outcome::Failed(refusal) => refusal.retry_after,
            Outcome::Cut { retry_after, .. } => *retry_after,
            Outcome::Delivered | Outcome::Partial(_) => None,
        }
    }

    /// Whether none of `count` events was tried: they have been put off.
    pub(super) fn puts_off(&self, count: usize) -> bool {
        matches!(self, Outcome::Cut { .. }) && self.verdicts(count).is_err()
    }

    /// What became of each of `count` events.
    ///
    /// # Errors
    /// When nothing is known of any of them.
    pub(super) fn verdicts(&self, count: usize) -> Result<Vec<Verdict<'_>>, &str> {
        let (failures, untried): (&[Failure], &[usize]) = match self {
            Outcome::Delivered => (&[], &[]),
            Outcome::Partial(failures) => (failures, &[]),
            Outcome::Cut {
                failures, untried, ..
            } => (failures, untried),
            Outcome::Failed(refusal) => return Err(&refusal.error),
        };
        let mut verdicts = vec![Verdict::Through; count];
        for &index in untried {
            if let Some(verdict) = verdicts.get_mut(index) {
                *verdict = Verdict::Untried;
            }
        }
        for failure in failures.iter().rev() {
            if let Some(verdict) = verdicts.get_mut(failure.index) {
                *verdict = Verdict::Failed(failure);
            }
        }
        let any_tried = verdicts
            .iter()
            .any(|verdict| !matches!(verdict, Verdict::Untried));
        any_tried.then_some(verdicts).ok_or(UNTRIED)
    }

    /// The same of a delivery of `count` events of which only the first `end` were handed on.
    pub fn cut_at(self, end: usize, count: usize) -> Self {
        if end >= count {
            return self;
        }
        let rest = end..count;
        match self {
            Outcome::Failed(refusal) => Outcome::Failed(refusal),
            Outcome::Delivered => Outcome::Cut {
                failures: Vec::new(),
                untried: rest.collect(),
                retry_after: None,
            },
            Outcome::Partial(failures) => Outcome::Cut {
                failures,
                untried: rest.collect(),
                retry_after: None,
            },
            Outcome::Cut {
                failures,
                mut untried,
                retry_after,
            } => {
                untried.extend(rest);
                Outcome::Cut {
                    failures,
                    untried,
                    retry_after,
                }
            }
        }
    }

    /// The same with each error as it is to be shown.
    pub fn with_errors(mut self, shown: impl Fn(&str) -> String) -> Self {
        match &mut self {
            Outcome::Delivered => {}
            Outcome::Failed(refusal) => refusal.error = shown(&refusal.error),
            Outcome::Partial(failures) | Outcome::Cut { failures, .. } => {
                for failure in failures {
                    failure.error = shown(&failure.error);
                }
            }
        }
        self
    }

    /// Whether a sink to which this happened with `count` events has shown that it is up: it has taken
    /// one, or judged one for good.
    pub fn proves_up(&self, count: usize) -> bool {
        let proves = |verdict: &Verdict<'_>| match verdict {
            Verdict::Through => true,
            Verdict::Failed(failure) => failure.permanent,
            Verdict::Untried => false,
        };
        self.verdicts(count)
            .is_ok_and(|verdicts| verdicts.iter().any(proves))
    }

    /// Why a delivery of exactly one event failed, if it did.
    pub fn error_alone(&self) -> Option<&str> {
        self.alone().err().map(|setback| setback.error)
    }

    /// What came of a delivery of exactly one event.
    pub(super) fn alone(&self) -> Result<(), Setback<'_>> {
        let setback = |error, permanent| Setback {
            error,
            permanent,
            retry_after: self.retry_after(),
        };
        match self.verdicts(1) {
            Err(error) => Err(setback(error, false)),
            Ok(verdicts) => match verdicts[..] {
                [Verdict::Failed(failure)] => Err(setback(&failure.error, failure.permanent)),
                _ => Ok(()),
            },
        }
    }
}

/// Why a single event did not go through.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setback<'a> {
    pub(super) error: &'a str,
    pub(super) permanent: bool,
    pub(super) retry_after: Option<Duration>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_handed_on_is_untried() {
        let failure = Failure {
            index: 1,
            error: "busy".into(),
            permanent: false,
        };
        let cut = |failures, untried| Outcome::Cut {
            failures,
            untried,
            retry_after: None,
        };
        let failures = vec![failure];
        for (whole, at_two) in [
            (Outcome::Delivered, cut(vec![], vec![2, 3])),
            (
                Outcome::Partial(failures.clone()),
                cut(failures.clone(), vec![2, 3]),
            ),
            (
                cut(failures.clone(), vec![0]),
                cut(failures.clone(), vec![0, 2, 3]),
            ),
        ] {
            assert_eq!(whole.clone().cut_at(2, 4), at_two);
            assert_eq!(whole.clone().cut_at(4, 4), whole);
        }
    }
}
