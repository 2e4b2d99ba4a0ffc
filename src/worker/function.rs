//! Deliveries to a sink of kind function: a call in the transaction that saves the cursor, with the rights of the sink's owner.

use crate::dispatch::{Failure, Outcome, Refusal};
use crate::pg::security::{self, Path};
use crate::pg::spi::{Arg, Record, Spi, connected};
use crate::pg::{catalog, latch, transaction};
use crate::store::events;
use crate::store::sinks::SinkRow;

/// How to call a sink's function.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    sql: String,
    owner: pgrx::pg_sys::Oid,
    /// It returns rows (seq, result, error), one for each event that it has something to say about.
    reports: bool,
}

/// The columns by which a function reports on single events.
const REPORT: [&str; 3] = ["seq", "result", "error"];

impl Call {
    /// Fails if the function is gone.
    pub(crate) fn of(spi: &Spi, sink: &SinkRow) -> Result<Self, String> {
        let gone = || "its function does not exist any more".to_owned();
        let oid = sink.function.ok_or_else(gone)?;
        let (name, set, columns) = spi
            .read(
                "select format('%I.%I', n.nspname, p.proname), p.proretset,
                        coalesce(p.proargnames[1 + p.pronargs :], '{}')
                   from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace where p.oid = $1",
                &[Arg::Oid(Some(oid))],
            )
            .first(|row| (row.text(0).unwrap_or_default(), row.bool(1).unwrap_or(false), row.texts(2).unwrap_or_default()))
            .ok_or_else(gone)?;
        let reports = set
            && REPORT
                .iter()
                .all(|wanted| columns.iter().any(|column| column == wanted));
        let sql = if reports {
            format!("select r.seq::bigint, r.result::text, r.error::text from {name}($1) as r")
        } else {
            format!("select from {name}($1)")
        };
        Ok(Self {
            sql,
            owner: sink.owner,
            reports,
        })
    }

    /// Calls it with events; `seqs` are theirs, in the same order. What it did is undone if it fails.
    pub(crate) fn deliver(&self, records: &[Record], seqs: &[i64]) -> Outcome {
        if !catalog::role_exists(self.owner) {
            return failed("the role that owns the sink does not exist any more".to_owned());
        }
        let element = events::event_type();
        let called = transaction::nested(|| {
            latch::interruptible(|| {
                // Deferred constraints would be checked at commit with other rights than the owner's; so they are checked here.
                connected(|spi| {
                    spi.write("set constraints all immediate", &[]);
                });
                security::as_role(self.owner, Path::Session, || {
                    connected(|spi| {
                        let rows = spi.write(&self.sql, &[Arg::Records(records, element)]);
                        if self.reports {
                            rows.map(|row| (row.i64(0), row.text(1), row.text(2)))
                        } else {
                            Vec::new()
                        }
                    })
                })
            })
        });
        match called {
            Err(error) => failed(error.summary()),
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

fn failed(error: String) -> Outcome {
    Outcome::Failed(Refusal {
        error,
        retry_after: None,
    })
}
