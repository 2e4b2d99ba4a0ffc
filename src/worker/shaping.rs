//! Filters and transforms: SQL that a user supplied, run over events with that user's rights.
//!
//! They see events as values only; that they could read the stream's table is not needed. What fails for one event fails that
//! event's delivery, so that the engine which tells a bad event from an outage tells it from what it did not foresee, too. What fails
//! without any event is broken: then the sink cannot run. What takes long beside other sinks is broken off, and the sink moves to a
//! process of its own.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use pgrx::pg_sys;

use super::user_code::{self, FunctionStatement, Stopped};
use crate::pg::culprits::Culprit;
use crate::pg::security::Path;
use crate::pg::spi::{Arg, Record, UserStatement};
use crate::pg::timeout::Limit;
use crate::pg::{catalog, expression, transaction};
use crate::store::events::{self, Found};
use crate::store::sinks::SinkRow;

/// A sink's filter and transform.
#[derive(Debug, Clone)]
pub(crate) struct Shaping {
    owner: pg_sys::Oid,
    /// The sink's.
    number: i32,
    filter: Option<Rc<UserStatement>>,
    transform: Option<FunctionStatement>,
    patience: Patience,
    /// It took longer than others can wait.
    too_slow: Cell<bool>,
}

/// How long a filter or transform may take for the events of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As long as whoever called has: a session.
    Callers,
    /// Other sinks are waiting.
    Shared,
    /// Nobody else is, but a sink that hangs has to say so.
    Own,
}

impl Patience {
    fn limit(self) -> Option<Duration> {
        match self {
            Patience::Callers => None,
            Patience::Shared => Some(Duration::from_secs(1)),
            Patience::Own => Some(Duration::from_secs(30)),
        }
    }
}

/// An event as it came out: wanted, and perhaps not ready.
pub(crate) type Shaped = (Found, Option<String>);

/// The row that a filter's names refer to. The ordinal's name is nobody's column.
const ROW: &str = r#"pg_catalog.unnest($1) with ordinality as event (txid, seq, id, topic, source, subject, tenant, "time", payload, headers, outbox_ordinal)"#;

const TRANSFORM_GONE: &str = "its transform does not exist any more";

/// The statement that checks, or applies, a filter. The filter is one expression: [`expression::check`] has said so.
pub(crate) fn filter_sql(filter: &str) -> String {
    // The line break ends a comment that the filter may end with.
    format!("select event.outbox_ordinal from {ROW} where (\n{filter}\n)")
}

/// The statement that applies a transform, given as a qualified name.
fn transform_sql(function: &str) -> String {
    format!(
        r#"select t.outbox_ordinal, t.outbox_payload,
                  row(t.txid, t.seq, t.id, t.topic, t.source, t.subject, t.tenant, t."time", t.outbox_payload, t.headers)::outbox.event
             from (select event.*,
                          {function}(row(event.txid, event.seq, event.id, event.topic, event.source, event.subject, event.tenant,
                                         event."time", event.payload, event.headers)::outbox.event) as outbox_payload
                     from {ROW} offset 0) t
            where t.outbox_payload is not null"#
    )
}

impl Shaping {
    /// What a sink asks for; none if it takes events as they are.
    ///
    /// # Errors
    /// If the transform is gone or the filter is no filter.
    pub(crate) fn of(sink: &SinkRow) -> Result<Option<Self>, String> {
        if sink.filter.is_none() && sink.transform.is_none() {
            return Ok(None);
        }
        let filter = sink.filter.as_deref().map(filter_statement).transpose()?;
        if sink
            .transform
            .is_some_and(|transform| catalog::function_name(transform).is_none())
        {
            return Err(TRANSFORM_GONE.to_owned());
        }
        Ok(Some(Self {
            owner: sink.owner,
            number: sink.number,
            filter,
            transform: sink
                .transform
                .map(|transform| FunctionStatement::new(transform, transform_sql)),
            patience: Patience::Callers,
            too_slow: Cell::new(false),
        }))
    }

    pub(crate) fn set_patience(&mut self, patience: Patience) {
        self.patience = patience;
        self.too_slow.set(false);
    }

    /// Whether it took longer than others can wait. What it was applied to since is not to be used.
    pub(crate) fn is_too_slow(&self) -> bool {
        self.too_slow.get()
    }

    /// Runs it over no events at all.
    ///
    /// # Errors
    /// What then fails would fail whatever the events are: a function that is gone, a right that was taken.
    pub(crate) fn check(&self) -> Result<(), String> {
        let sound = |tried: Result<Kept, Fault>| match tried {
            Err(Fault::Of(error)) => Err(error),
            // Over no events at all: what they wait for may come.
            Err(Fault::Late(_)) | Ok(_) => Ok(()),
        };
        if let Some(filter) = &self.filter {
            sound(self.kept(filter, &[]))?;
        }
        if let Some(transform) = &self.transform {
            sound(self.made(transform, &[]))?;
        }
        Ok(())
    }

    /// Applies it to events that carry their record. An error is found out event by event.
    pub(crate) fn apply(&self, found: Vec<Found>) -> Vec<Shaped> {
        let shaped = found.into_iter().map(|found| (found, None)).collect();
        let shaped = match &self.filter {
            Some(filter) => self.step(shaped, &|records| self.kept(filter, records)),
            None => shaped,
        };
        match &self.transform {
            Some(transform) => self.step(shaped, &|records| self.made(transform, records)),
            None => shaped,
        }
    }

    /// Takes events through one step. Those that are not ready stay so.
    fn step(
        &self,
        shaped: Vec<Shaped>,
        run: &dyn Fn(&[Record]) -> Result<Kept, Fault>,
    ) -> Vec<Shaped> {
        let ready = shaped.iter().filter(|(_, problem)| problem.is_none());
        let records = ready
            .filter_map(|(found, _)| found.record.clone())
            .collect::<Vec<_>>();
        if records.is_empty() || self.is_too_slow() {
            return shaped;
        }
        match run(&records) {
            Ok(kept) => keep(shaped, kept),
            Err(Fault::Late(_)) if self.patience == Patience::Shared => {
                self.too_slow.set(true);
                shaped
            }
            // One by one they could take as long each. The engine tries fewer.
            Err(Fault::Late(error)) => unready(shaped, &error),
            Err(Fault::Of(error)) if shaped.len() == 1 => unready(shaped, &error),
            Err(Fault::Of(_)) => shaped
                .into_iter()
                .flat_map(|one| self.step(vec![one], run))
                .collect(),
        }
    }

    fn limit(&self) -> Option<Limit> {
        let culprit = Culprit::Sink(self.number);
        let time = self.patience.limit();
        time.map(|time| Limit { time, culprit })
    }

    /// The events that pass the filter.
    fn kept(&self, filter: &UserStatement, records: &[Record]) -> Result<Kept, Fault> {
        let element = events::event_type();
        // Names in it are looked up as they were when it was checked.
        let limit = self.limit();
        user_code::run(limit, self.owner, Path::Ours, |spi| {
            let rows = spi.run_user(filter, &[Arg::Records(records, element)]);
            let kept = rows.map(|row| (ordinal(row.i64(0)), Made::AsItIs));
            kept.into_iter().collect()
        })
        .map_err(|stopped| Fault::in_step("filter", stopped))
    }

    /// What the transform makes of the events; those that it skips are left out.
    fn made(&self, transform: &FunctionStatement, records: &[Record]) -> Result<Kept, Fault> {
        let statement = transform
            .now()
            .ok_or_else(|| Fault::Of(TRANSFORM_GONE.to_owned()))?;
        let element = events::event_type();
        let limit = self.limit();
        user_code::run(limit, self.owner, Path::Session, |spi| {
            let rows = spi.run_user(&statement, &[Arg::Records(records, element)]);
            let made = rows.map(|row| {
                let made = Made::Anew(row.json(1), row.record(2));
                (ordinal(row.i64(0)), made)
            });
            made.into_iter().collect()
        })
        .map_err(|stopped| Fault::in_step("transform", stopped))
    }
}

/// A filter as the sink's row has it, which is looked at once more before it is put into a statement.
fn filter_statement(filter: &str) -> Result<Rc<UserStatement>, String> {
    match transaction::nested(|| expression::check(filter)) {
        Ok(Ok(())) => Ok(Rc::new(UserStatement::new(filter_sql(filter)))),
        Ok(Err(complaint)) => Err(format!("filter: {}", complaint.message)),
        Err(error) => Err(format!("filter: {}", error.summary())),
    }
}

/// What is left of the events that a step was given, by their place among them, counted from 1.
type Kept = HashMap<usize, Made>;

enum Made {
    AsItIs,
    Anew(Option<String>, Option<Record>),
}

fn ordinal(value: Option<i64>) -> usize {
    value
        .and_then(|value| usize::try_from(value).ok())
        .unwrap_or(0)
}

/// What went wrong with some events.
enum Fault {
    Late(String),
    Of(String),
}

impl Fault {
    fn in_step(step: &str, stopped: Stopped) -> Self {
        match stopped {
            Stopped::Expired(limit) => {
                Fault::Late(format!("{step}: it took longer than {limit:?}"))
            }
            Stopped::Failed(error) => Fault::Of(format!("{step}: {error}")),
        }
    }
}

fn unready(shaped: Vec<Shaped>, error: &str) -> Vec<Shaped> {
    let say = |(found, problem): Shaped| (found, problem.or_else(|| Some(error.to_owned())));
    shaped.into_iter().map(say).collect()
}

fn keep(shaped: Vec<Shaped>, mut kept: Kept) -> Vec<Shaped> {
    let mut left = Vec::with_capacity(shaped.len());
    let mut ordinal = 0;
    for (mut found, problem) in shaped {
        if problem.is_none() {
            ordinal += 1;
            match kept.remove(&ordinal) {
                Some(Made::AsItIs) => {}
                Some(Made::Anew(payload, record)) => {
                    found.event.payload = payload;
                    found.record = record;
                }
                None => continue,
            }
        }
        left.push((found, problem));
    }
    left
}
