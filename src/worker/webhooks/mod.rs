//! Webhooks of tenants: writes a delivery for each matching event and webhook, and makes them.
//!
//! Everything durable is in the tables: which events have been seen is a cursor, saved in the transaction that writes their deliveries;
//! what is to be delivered is a row that is pending. What is in here is only what is under way, and which rows come next. After a
//! crash they are delivered again. It all happens in transactions of its own, so that a fault in here stops no sink.

mod fan_out;
pub(crate) mod probe;
mod records;
mod tidying;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use self::fan_out::FanOut;
use self::records::{Records, Written, judged};
use self::tidying::Tidying;
use super::io::{Attempted, Io};
use super::maintenance::in_transaction;
use super::{now, until};
use crate::dispatch::{Floors, Pool, QUEUE, Time};
use crate::pg::spi::Spi;
use crate::pg::transaction;
use crate::settings;
use crate::sinks::Secrets;
use crate::sinks::webhook::{Attempt, Courier, Outcome, Rules, Verdict};
use crate::store::rebase;
use crate::store::streams::{Horizon, Stream};
use crate::store::webhooks::{self, Delivery};

/// After an error.
const PAUSE: Duration = Duration::from_secs(1);
/// At most one transaction in this time: what comes in meanwhile shares the next one.
const GAP: Duration = Duration::from_millis(5);

pub(super) struct Webhooks {
    fan_outs: BTreeMap<String, FanOut>,
    pool: Pool,
    courier: Option<Arc<Courier>>,
    /// What the courier was made for.
    rules: Option<(Rules, Duration)>,
    under_way: BTreeMap<i64, UnderWay>,
    records: Records,
    /// Everything is to be looked at again: webhooks were made or changed.
    look: bool,
    not_before: Instant,
    /// Records that others hold are tried again then.
    retry: Instant,
    tidying: Tidying,
}

/// What is known of a delivery under way.
struct UnderWay {
    webhook: String,
    attempts: u32,
}

/// What a transaction came to.
#[derive(Default)]
struct Turn {
    written: Written,
    deliveries: Vec<Delivery>,
    /// Picked, and then found to be nothing to do.
    vanished: Vec<i64>,
}

impl Webhooks {
    pub(super) fn new() -> Self {
        Self {
            fan_outs: BTreeMap::new(),
            pool: Pool::new(settings::webhooks::limits()),
            courier: None,
            rules: None,
            under_way: BTreeMap::new(),
            records: Records::default(),
            look: true,
            not_before: Instant::now(),
            retry: Instant::now(),
            tidying: Tidying::new(),
        }
    }

    /// Webhooks, deliveries or settings may have changed.
    pub(super) fn look_again(&mut self) {
        self.look = true;
    }

    /// A look has found how far a stream has come.
    pub(super) fn saw(&mut self, stream: &Stream, horizon: &Horizon) {
        if let Some(fan_out) = self.fan_outs.get_mut(&stream.name) {
            fan_out.saw(stream, horizon);
        }
    }

    /// Whether anything waits to be delivered by the I/O thread.
    pub(super) fn need_io(&self) -> bool {
        !self.fan_outs.is_empty()
    }

    /// When there is something to do.
    pub(super) fn due(&self) -> Option<Duration> {
        let held = self.not_before.saturating_duration_since(Instant::now());
        if self.look || self.records.has_new() || self.has_more() {
            return Some(held);
        }
        let at = now();
        let delivery = self.pool.due(at).map(|time| until(time, at));
        let records = self.records.has_held().then_some(self.retry);
        let others = records.into_iter().chain(self.tidying.due());
        let others = others.map(|time| time.saturating_duration_since(Instant::now()));
        let due = delivery.into_iter().chain(others).min()?;
        Some(due.max(held))
    }

    fn has_more(&self) -> bool {
        self.fan_outs.values().any(FanOut::has_more)
    }

    /// Takes what attempts came to; it is written with the next [`run`](Self::run).
    pub(super) fn take(&mut self, attempted: Vec<Attempted>) {
        for Attempted { id, outcome } in attempted {
            let Some(known) = self.under_way.remove(&id) else {
                continue;
            };
            let (record, wait) = judged(id, &known, &outcome);
            let again = record
                .next_attempt_at
                .map(|at| Time(at.unsigned_abs() / 1000));
            let ok = outcome.verdict == Verdict::Delivered;
            self.pool.finished(id, ok, again, wait);
            self.records.push(record);
        }
    }

    /// Does what is due: one transaction, and then hands over what is to be sent.
    pub(super) fn run(&mut self, floors: &mut BTreeMap<u32, Floors>, io: Option<&Io>) {
        if self.due().is_none_or(|due| !due.is_zero()) {
            return;
        }
        self.not_before = Instant::now() + GAP;
        self.pool.set_limits(settings::webhooks::limits());
        let done = in_transaction(|spi| self.turn(spi, floors));
        match done {
            Ok(Some(Some(turn))) => {
                self.retry = Instant::now() + PAUSE;
                // What was held was not queued.
                self.look |= self.records.settle(turn.written);
                for id in turn.vanished {
                    self.pool.finished(id, true, None, None);
                }
                self.hand_over(turn.deliveries, io);
            }
            Ok(Some(None) | None) => self.start_over(),
            Err(error) => {
                let what = "webhooks could not be served";
                transaction::log(PgLogLevel::WARNING, what, &error);
                self.start_over();
            }
        }
    }

    /// What the transaction did is undone: all that is known is read again. What attempts came to is kept.
    fn start_over(&mut self) {
        self.look = true;
        self.not_before = Instant::now() + PAUSE;
        self.fan_outs.clear();
        self.pool.clear();
        for id in self.pool.ids_under_way() {
            if !self.under_way.contains_key(&id) {
                self.pool.finished(id, true, None, None);
            }
        }
    }

    /// None while what is there is not complete, or speaks of another cluster.
    fn turn(&mut self, spi: &Spi, floors: &mut BTreeMap<u32, Floors>) -> Option<Turn> {
        if rebase::is_due(spi) {
            return None;
        }
        let written = self.records.write(spi);
        for webhook in &written.disabled {
            self.pool.forget(webhook);
        }
        if std::mem::take(&mut self.look) {
            self.look_at_all(spi, &written.held);
        }
        for fan_out in self.fan_outs.values_mut() {
            let due = Time(now().0);
            for (id, webhook) in fan_out.pass(spi, floors) {
                self.pool.offer(&webhook, id, due);
            }
        }
        self.tidying.step(spi);
        let wanting = self.pool.wanting();
        if !wanting.is_empty() {
            self.fill(spi, Some(&wanting), &written.held);
        }
        let started = self.pool.start(now());
        if started.is_empty() {
            return Some(Turn {
                written,
                ..Turn::default()
            });
        }
        let deliveries = webhooks::load(spi, &started);
        let is_there = |id: &i64| deliveries.iter().any(|delivery| delivery.id == *id);
        Some(Turn {
            written,
            vanished: started.into_iter().filter(|id| !is_there(id)).collect(),
            deliveries,
        })
    }

    fn look_at_all(&mut self, spi: &Spi, held: &[i64]) {
        let streams = webhooks::streams(spi);
        self.tidying.look(spi, !streams.is_empty());
        self.fan_outs.retain(|name, _| streams.contains(name));
        for name in streams {
            self.fan_outs
                .entry(name.clone())
                .or_insert_with(|| FanOut::new(name));
        }
        self.pool.clear();
        self.fill(spi, None, held);
    }

    /// Reads which deliveries of endpoints come next, but for those of which the table does not say yet what came of them.
    fn fill(&mut self, spi: &Spi, endpoints: Option<&[String]>, held: &[i64]) {
        if let Some(endpoints) = endpoints {
            endpoints.iter().for_each(|name| self.pool.forget(name));
        }
        for pending in webhooks::pending(spi, endpoints, QUEUE) {
            let deliveries = pending
                .deliveries
                .iter()
                .filter(|(_, id)| !held.contains(id))
                .map(|&(due, id)| (Time(due.unsigned_abs() / 1000), id))
                .collect::<Vec<_>>();
            let more = pending.deliveries.len() == QUEUE;
            self.pool
                .fill(&pending.webhook, &deliveries, more, pending.failing);
        }
    }

    fn hand_over(&mut self, deliveries: Vec<Delivery>, io: Option<&Io>) {
        let courier = self.courier();
        for delivery in deliveries {
            let known = UnderWay {
                webhook: delivery.webhook,
                attempts: delivery.attempts,
            };
            let attempt = Attempt {
                url: delivery.url,
                id: delivery.event_id,
                body: delivery.event,
                secrets: Secrets::new(delivery.secrets),
            };
            self.under_way.insert(delivery.id, known);
            match (&courier, io) {
                (Ok(courier), Some(io)) => io.attempt(delivery.id, courier, attempt),
                (Err(error), _) => self.take(vec![unsent(delivery.id, error)]),
                (_, None) => self.take(vec![unsent(
                    delivery.id,
                    "the I/O thread could not be started",
                )]),
            }
        }
    }

    /// The courier by the settings in force.
    fn courier(&mut self) -> Result<Arc<Courier>, String> {
        let wanted = (settings::webhooks::rules(), settings::webhooks::timeout());
        if self.rules.as_ref() != Some(&wanted) {
            self.courier = None;
        }
        if let Some(courier) = &self.courier {
            return Ok(Arc::clone(courier));
        }
        let courier = Arc::new(Courier::new(wanted.0.clone(), wanted.1)?);
        self.rules = Some(wanted);
        self.courier = Some(Arc::clone(&courier));
        Ok(courier)
    }

    pub(super) fn is_in_flight(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Before the process ends: what attempts came to is not to be tried again.
    pub(super) fn save(&mut self) {
        let saved = in_transaction(|spi| self.records.write(spi));
        if let Err(error) = saved {
            let what = "what came of webhooks last could not be written";
            transaction::log(PgLogLevel::WARNING, what, &error);
        }
    }
}

fn unsent(id: i64, error: &str) -> Attempted {
    Attempted {
        id,
        outcome: Outcome {
            status: None,
            duration: Duration::ZERO,
            verdict: Verdict::Failed {
                error: error.to_owned(),
                retry_after: None,
            },
        },
    }
}
