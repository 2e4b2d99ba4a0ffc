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

impl Outcome {
    /// What came of a delivery of exactly one event.
    pub(super) fn alone(&self) -> Result<(), Setback<'_>> {
        match self {
            Outcome::Delivered => Ok(()),
            Outcome::Partial(failures) => {
                match failures.iter().find(|failure| failure.index == 0) {
                    None => Ok(()),
                    Some(failure) => Err(Setback {
                        error: &failure.error,
                        permanent: failure.permanent,
                        retry_after: None,
                    }),
                }
            }
            Outcome::Failed(refusal) => Err(Setback {
                error: &refusal.error,
                permanent: false,
                retry_after: refusal.retry_after,
            }),
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
