//! Processes of their own for function sinks: a function that takes its time must not take that of other sinks.
//!
//! Where the server has no worker slot left, the dispatcher calls the function itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::bgworkers::{BackgroundWorkerStatus, DynamicBackgroundWorker};

use super::course::Course;
use crate::pg::{background, catalog};

/// How long a sink is served here after its process could not be started or ended.
const RETRY: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Helpers {
    running: BTreeMap<String, DynamicBackgroundWorker>,
    starting: Vec<String>,
    not_before: BTreeMap<String, Instant>,
}

impl Helpers {
    /// Whether a sink is, or is about to be, served by a process of its own.
    pub(super) fn serves(&self, sink: &str) -> bool {
        self.running.contains_key(sink) || self.starting.iter().any(|starting| starting == sink)
    }

    /// Notices which processes have ended, and picks the sinks that are to get one.
    pub(super) fn reconcile<'a>(&mut self, functions: impl Iterator<Item = &'a Course>) {
        let ended = self
            .running
            .iter()
            .filter(|(_, worker)| {
                !matches!(
                    worker.pid(),
                    Ok(_) | Err(BackgroundWorkerStatus::NotYetStarted)
                )
            })
            .map(|(sink, _)| sink.clone())
            .collect::<Vec<_>>();
        for sink in ended {
            self.running.remove(&sink);
            self.not_before.insert(sink, Instant::now() + RETRY);
        }
        let now = Instant::now();
        self.not_before.retain(|_, time| *time > now);
        self.starting = functions
            .map(|course| course.sink.id.clone())
            .filter(|sink| !self.not_before.contains_key(sink))
            .collect();
    }

    /// Starts the process of a sink whose lease this one has just given back. Without a slot the sink stays here.
    pub(super) fn start(&mut self, sink: &str) {
        self.starting.retain(|starting| starting != sink);
        match background::start_dispatcher(catalog::current_database(), Some(sink)) {
            Some(worker) => {
                self.running.insert(sink.to_owned(), worker);
            }
            None => {
                self.not_before
                    .insert(sink.to_owned(), Instant::now() + RETRY);
            }
        }
    }
}
