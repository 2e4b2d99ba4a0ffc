//! Filters and transforms: SQL that a user supplied, run over events with that user's rights.
//!
//! They see events as values only; that they could read the stream's table is not needed. What fails for one event fails that
//! event's delivery, so that the engine which tells a bad event from an outage tells it from what it did not foresee, too. What fails
//! without any event is broken: then the sink cannot run.

use std::collections::HashMap;
use std::rc::Rc;

use pgrx::pg_sys;

use super::user_code::{self, FunctionStatement};
use crate::pg::security::Path;
use crate::pg::spi::{Arg, Record, UserStatement};
use crate::pg::{catalog, expression, transaction};
use crate::store::events::{self, Found};
use crate::store::sinks::SinkRow;

/// A sink's filter and transform.
#[derive(Debug, Clone)]
pub(crate) struct Shaping {
    owner: pg_sys::Oid,
    filter: Option<Rc<UserStatement>>,
    transform: Option<FunctionStatement>,
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
            filter,
            transform: sink
                .transform
                .map(|transform| FunctionStatement::new(transform, transform_sql)),
        }))
    }

    /// Runs it over no events at all.
    ///
    /// # Errors
    /// What then fails would fail whatever the events are: a function that is gone, a right that was taken.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(filter) = &self.filter {
            self.kept(filter, &[])?;
        }
        if let Some(transform) = &self.transform {
            self.made(transform, &[])?;
        }
        Ok(())
    }

    /// Applies it to events that carry their record. An error is found out event by event.
    pub(crate) fn apply(&self, found: Vec<Found>) -> Vec<Shaped> {
        let shaped = found.into_iter().map(|found| (found, None)).collect();
        let shaped = match &self.filter {
            Some(filter) => step(shaped, &|records| self.kept(filter, records)),
            None => shaped,
        };
        match &self.transform {
            Some(transform) => step(shaped, &|records| self.made(transform, records)),
            None => shaped,
        }
    }

    /// The events that pass the filter.
    fn kept(&self, filter: &UserStatement, records: &[Record]) -> Result<Kept, String> {
        let element = events::event_type();
        // Names in it are looked up as they were when it was checked.
        user_code::run(self.owner, Path::Ours, |spi| {
            let rows = spi.run_user(filter, &[Arg::Records(records, element)]);
            let kept = rows.map(|row| (ordinal(row.i64(0)), Made::AsItIs));
            kept.into_iter().collect()
        })
        .map_err(|error| format!("filter: {error}"))
    }

    /// What the transform makes of the events; those that it skips are left out.
    fn made(&self, transform: &FunctionStatement, records: &[Record]) -> Result<Kept, String> {
        let statement = transform.now().ok_or(TRANSFORM_GONE)?;
        let element = events::event_type();
        user_code::run(self.owner, Path::Session, |spi| {
            let rows = spi.run_user(&statement, &[Arg::Records(records, element)]);
            let made = rows.map(|row| {
                let made = Made::Anew(row.json(1), row.record(2));
                (ordinal(row.i64(0)), made)
            });
            made.into_iter().collect()
        })
        .map_err(|error| format!("transform: {error}"))
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

/// Takes events through one step. Those that are not ready stay so; an error is found out event by event.
fn step(shaped: Vec<Shaped>, run: &dyn Fn(&[Record]) -> Result<Kept, String>) -> Vec<Shaped> {
    let ready = shaped.iter().filter(|(_, problem)| problem.is_none());
    let records = ready
        .filter_map(|(found, _)| found.record.clone())
        .collect::<Vec<_>>();
    if records.is_empty() {
        return shaped;
    }
    match run(&records) {
        Ok(kept) => keep(shaped, kept),
        Err(error) if shaped.len() == 1 => shaped
            .into_iter()
            .map(|(found, _)| (found, Some(error.clone())))
            .collect(),
        Err(_) => shaped
            .into_iter()
            .flat_map(|one| step(vec![one], run))
            .collect(),
    }
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
