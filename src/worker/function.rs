//! Deliveries to a sink of kind function: a call in the transaction that saves the cursor, with the rights of the sink's owner.

use super::user_code::{self, FunctionStatement};
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::pg::security::Path;
use crate::pg::spi::{Arg, Record, Spi};
use crate::store::events;
use crate::store::sinks::SinkRow;

/// How to call a sink's function.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    statement: FunctionStatement,
    owner: pgrx::pg_sys::Oid,
    /// It returns rows (seq, result, error), one for each event that it has something to say about.
    reports: bool,
}

const GONE: &str = "its function does not exist any more";

/// The columns by which a function reports on single events.
const REPORT: [&str; 3] = ["seq", "result", "error"];

impl Call {
    /// Fails if the function is gone.
    pub(crate) fn of(spi: &Spi, sink: &SinkRow) -> Result<Self, String> {
        let function = sink.function.ok_or(GONE)?;
        let (set, columns) = spi
            .read(
                "select p.proretset, coalesce(p.proargnames[1 + p.pronargs :], '{}') from pg_catalog.pg_proc p where p.oid = $1",
                &[Arg::Oid(Some(function))],
            )
            .first(|row| (row.bool(0).unwrap_or(false), row.texts(1).unwrap_or_default()))
            .ok_or(GONE)?;
        let reports = set
            && REPORT
                .iter()
                .all(|wanted| columns.iter().any(|column| column == wanted));
        let sql = if reports { reporting_sql } else { silent_sql };
        Ok(Self {
            statement: FunctionStatement::new(function, sql),
            owner: sink.owner,
            reports,
        })
    }

    /// Why it cannot be called, whatever the events are.
    pub(crate) fn unfit(&self) -> Option<String> {
        if self.statement.now().is_none() {
            return Some(GONE.to_owned());
        }
        user_code::check_owner(self.owner).err()
    }

    /// Calls it with events; `seqs` are theirs, in the same order. What it did is undone if it fails.
    pub(crate) fn deliver(&self, records: &[Record], seqs: &[i64]) -> Outcome {
        let Some(statement) = self.statement.now() else {
            return failed(GONE.to_owned());
        };
        let element = events::event_type();
        let called = user_code::run(self.owner, Path::Session, |spi| {
            // A constraint that is deferred would be checked at commit, with other rights than the owner's: Postgres does not
            // allow that from in here. So it is checked at once. Nothing is deferred yet that this could fire: outbox.tick has
            // seen to what its caller had deferred.
            spi.write("set constraints all immediate", &[]);
            let rows = spi.run_user(&statement, &[Arg::Records(records, element)]);
            if self.reports {
                rows.map(|row| (row.i64(0), row.text(1), row.text(2)))
            } else {
                Vec::new()
            }
        });
        match called {
            Err(error) => failed(error),
            Ok(reports) => {
                let failures = reports.into_iter().filter_map(|(seq, result, error)| {
                    let index = seqs.iter().position(|&candidate| Some(candidate) == seq)?;
                    let permanent = result.as_deref() == Some("permanent");
                    Some(Failure {
                        index,
                        error: error?,
                        permanent,
                    })
                });
                let failures = failures.collect::<Vec<_>>();
                if failures.is_empty() {
                    Outcome::Delivered
                } else {
                    Outcome::Partial(failures)
                }
            }
        }
    }
}

fn silent_sql(function: &str) -> String {
    format!("select from {function}($1)")
}

fn reporting_sql(function: &str) -> String {
    format!("select r.seq::bigint, r.result::text, r.error::text from {function}($1) as r")
}

fn failed(error: String) -> Outcome {
    Outcome::Failed(Refusal {
        error,
        retry_after: None,
    })
}
