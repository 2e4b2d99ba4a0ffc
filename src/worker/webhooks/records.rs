//! What attempts came to, until it is written: on the deliveries, and on what is known of the endpoints.
//!
//! Nothing in here waits for a lock. A row that somebody else holds, a tenant's open transaction say, is written once it is free.

use std::collections::BTreeSet;
use std::time::Duration;

use super::UnderWay;
use crate::dispatch::{Time, webhook_wait};
use crate::pg::spi::Spi;
use crate::settings;
use crate::sinks::webhook::{Outcome, Verdict};
use crate::store::webhooks::{self, Record};
use crate::worker::now;

const GONE: u16 = 410;

#[derive(Default)]
pub(super) struct Records {
    new: Vec<Record>,
    /// Held by others when they were to be written last.
    held: Vec<Record>,
    held_well: BTreeSet<String>,
    held_gone: BTreeSet<String>,
}

/// What a transaction has come to; it counts once that has committed.
#[derive(Default)]
pub(super) struct Written {
    /// What came of these is known, although the table does not say so yet.
    pub(super) held: Vec<i64>,
    well: Vec<String>,
    gone: Vec<String>,
    /// Endpoints that are disabled from now on.
    pub(super) disabled: Vec<String>,
}

impl Records {
    pub(super) fn push(&mut self, record: Record) {
        self.new.push(record);
    }

    /// Something is to be written that nobody is known to hold.
    pub(super) fn has_new(&self) -> bool {
        !self.new.is_empty()
    }

    pub(super) fn has_held(&self) -> bool {
        !(self.held.is_empty() && self.held_well.is_empty() && self.held_gone.is_empty())
    }

    pub(super) fn write(&self, spi: &Spi) -> Written {
        let mut written = Written::default();
        let all: Vec<Record> = self.held.iter().chain(&self.new).cloned().collect();
        if !all.is_empty() {
            written.held = webhooks::record(spi, &all);
        }
        let named = |held: &BTreeSet<String>, which: &dyn Fn(&Record) -> bool| {
            let new = self.new.iter().filter(|record| which(record));
            let names = new.map(|record| record.webhook.clone());
            names.chain(held.iter().cloned()).collect::<BTreeSet<_>>()
        };
        let well = named(&self.held_well, &|record| record.error.is_none());
        let gone = named(&self.held_gone, &|record| record.status == Some(GONE));
        let failing = named(&BTreeSet::new(), &|record| record.error.is_some());
        // In one batch both may be true of an endpoint; then it is well.
        let failing = failing.difference(&well).cloned().collect::<Vec<_>>();
        if !well.is_empty() {
            written.well = webhooks::are_well(spi, &Vec::from_iter(well));
        }
        if !failing.is_empty() {
            let patience = settings::webhooks::disable_after();
            written.disabled = webhooks::are_failing(spi, &failing, patience);
        }
        if !gone.is_empty() {
            let gone = Vec::from_iter(gone);
            written.gone = webhooks::are_gone(spi, &gone);
            written.disabled.extend(gone);
        }
        written
    }

    /// The transaction has committed. True if something was written that had been held.
    pub(super) fn settle(&mut self, written: Written) -> bool {
        let was_held = self
            .held
            .iter()
            .any(|record| !written.held.contains(&record.id));
        let all = std::mem::take(&mut self.held)
            .into_iter()
            .chain(std::mem::take(&mut self.new));
        self.held = all
            .filter(|record| written.held.contains(&record.id))
            .collect();
        self.held_well = written.well.into_iter().collect();
        self.held_gone = written.gone.into_iter().collect();
        was_held
    }
}

/// What is to be written of an attempt, and until when its endpoint wants to be left alone.
pub(super) fn judged(id: i64, known: &UnderWay, outcome: &Outcome) -> (Record, Option<Time>) {
    let attempts = known.attempts + 1;
    let (state, error, wait, pause) = match &outcome.verdict {
        Verdict::Delivered => ("delivered", None, None, None),
        Verdict::Gone => ("dead", Some("HTTP 410 Gone".to_owned()), None, None),
        Verdict::Failed { error, retry_after } => {
            let wait = (attempts < settings::webhooks::attempts()).then(|| {
                let waits = settings::webhooks::waits();
                webhook_wait(&waits, attempts, *retry_after, chance())
            });
            let state = if wait.is_some() { "pending" } else { "dead" };
            (state, Some(error.clone()), wait, *retry_after)
        }
    };
    let at = now();
    let later = |wait: Duration| {
        at.0.saturating_add(u64::try_from(wait.as_millis()).unwrap_or(0))
    };
    let record = Record {
        id,
        webhook: known.webhook.clone(),
        status: outcome.status,
        duration_ms: i64::try_from(outcome.duration.as_millis()).unwrap_or(i64::MAX),
        error,
        state,
        next_attempt_at: wait.and_then(|wait| i64::try_from(later(wait) * 1000).ok()),
    };
    (record, pause.map(|wait| Time(later(wait))))
}

/// From 0 to 1.
fn chance() -> f64 {
    let digits = crate::pg::catalog::random_hex().unwrap_or([b'8'; 32]);
    let text = std::str::from_utf8(&digits[..8]).unwrap_or("0");
    f64::from(u32::from_str_radix(text, 16).unwrap_or(0)) / f64::from(u32::MAX)
}
