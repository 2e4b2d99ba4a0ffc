//! Deliveries to a sink of kind function: a call in the transaction that saves the cursor, with the rights of the sink's owner.

use std::collections::HashMap;

use pgrx::{PgSqlErrorCode, pg_sys};

use super::user_code::{self, FunctionStatement, Stopped};
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::pg::culprits::Culprit;
use crate::pg::error::Complaint;
use crate::pg::security::Path;
use crate::pg::spi::{Arg, Record, Spi};
use crate::pg::timeout::Limit;
use crate::pg::transaction;
use crate::sinks::{FunctionConfig, LONGEST, one_line};
use crate::store::events;
use crate::store::sinks::{self, SinkRow};

/// How to call a sink's function.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    statement: FunctionStatement,
    owner: pg_sys::Oid,
    /// The sink's.
    number: i32,
    limit: Option<Limit>,
    reports: bool,
}

const DROPS_SINK: &str = "it drops the sink that it is called for";

const GONE: &str = "its function does not exist any more";

/// What a function gives back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Returns {
    /// void: if it returns, it has taken all of its events.
    Nothing,
    /// Rows (seq, result, error), one for each event that it has something to say about.
    Reports,
    /// Something of which it is not known what it means.
    Other,
}

/// What a function gives back; none if it is gone.
pub(crate) fn returns(spi: &Spi, function: pg_sys::Oid) -> Option<Returns> {
    // Columns are those of returns table, of arguments that are marked as out, or of a composite type.
    spi.read(
        "select p.prorettype = 'void'::regtype and not p.proretset,
                (select count(*) = 3 and bool_and(c.name <> 'seq' or c.type in ('bigint'::regtype, 'integer'::regtype))
                   from (select a.name, a.type from unnest(p.proargnames, p.proallargtypes, p.proargmodes::text[]) a (name, type, mode)
                          where a.mode in ('o', 'b', 't')
                         union all
                         select a.attname::text, a.atttypid from pg_type t join pg_attribute a on a.attrelid = t.typrelid
                          where t.oid = p.prorettype and t.typrelid <> 0 and a.attnum > 0 and not a.attisdropped) c
                  where c.name in ('seq', 'result', 'error'))
           from pg_proc p where p.oid = $1",
        &[Arg::Oid(Some(function))],
    )
    .first(|row| match (row.bool(0), row.bool(1)) {
        (Some(true), _) => Returns::Nothing,
        (_, Some(true)) => Returns::Reports,
        _ => Returns::Other,
    })
}

impl Call {
    /// Fails if the function is gone.
    pub(crate) fn of(spi: &Spi, sink: &SinkRow, config: &FunctionConfig) -> Result<Self, String> {
        let function = sink.function.ok_or(GONE)?;
        let reports = returns(spi, function).ok_or(GONE)? == Returns::Reports;
        let sql = if reports { reporting_sql } else { silent_sql };
        Ok(Self {
            statement: FunctionStatement::new(function, sql),
            owner: sink.owner,
            number: sink.number,
            limit: config.timeout.map(|time| Limit {
                time,
                culprit: Culprit::Sink(sink.number),
            }),
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
    pub(crate) fn deliver(&self, spi: &Spi, records: &[Record], seqs: &[i64]) -> Outcome {
        let Some(statement) = self.statement.now() else {
            return failed(GONE.to_owned());
        };
        let element = events::event_type();
        let called = transaction::nested(|| {
            let called = user_code::run(self.limit, self.owner, Path::Session, |spi| {
                // A constraint that is deferred would be checked at commit, with other rights than the owner's: Postgres does not
                // allow that from in here. So it is checked at once. Nothing is deferred yet that this could fire: outbox.tick has
                // seen to what its caller had deferred.
                spi.write("set constraints all immediate", &[]);
                let rows = spi.run_user(&statement, &[Arg::Records(records, element)]);
                if self.reports {
                    rows.map(|row| (row.i64(0), Said::of(row.text(1), row.text(2))))
                } else {
                    Vec::new()
                }
            });
            if called.is_ok() && !sinks::is_there(spi, self.number) {
                // If somebody else has dropped it, that is found out when the cursor is saved.
                Complaint::new(PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, DROPS_SINK).raise();
            }
            called
        });
        let called = called.unwrap_or_else(|error| Err(Stopped::Failed(error.summary())));
        match called {
            Err(Stopped::Expired(limit)) => failed(format!(
                "it took longer than timeout_ms, {} ms",
                limit.as_millis()
            )),
            Err(Stopped::Failed(error)) => failed(error),
            Ok(reports) => outcome(seqs, reports),
        }
    }
}

/// What a function says of one event.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Taken,
    Failed { error: String, permanent: bool },
    NotTried,
}

impl Said {
    /// An error is a failure whatever the result is called, and so are the results that say so; any other result is a success.
    fn of(result: Option<String>, error: Option<String>) -> Self {
        let result = result.unwrap_or_default();
        let permanent = matches!(result.as_str(), "permanent" | "rejected");
        match error {
            _ if result == "skipped" => Said::NotTried,
            None if !permanent && result != "failed" => Said::Taken,
            error => {
                let mut error = one_line(&error.unwrap_or_default(), LONGEST);
                if error.is_empty() {
                    error.push_str("reported as failed, without a reason");
                }
                Said::Failed { error, permanent }
            }
        }
    }
}

/// What the reports come to for events with these seqs. An event that nothing is said of is through; of what is said several times,
/// the first counts.
fn outcome(seqs: &[i64], reports: Vec<(Option<i64>, Said)>) -> Outcome {
    let places = seqs.iter().enumerate();
    let mut places: HashMap<i64, usize> = places.map(|(index, seq)| (*seq, index)).collect();
    let mut failures = Vec::new();
    let mut untried = Vec::new();
    for (seq, said) in reports {
        let Some(index) = seq.and_then(|seq| places.remove(&seq)) else {
            continue;
        };
        match said {
            Said::Taken => {}
            Said::NotTried => untried.push(index),
            Said::Failed { error, permanent } => failures.push(Failure {
                index,
                error,
                permanent,
            }),
        }
    }
    if !untried.is_empty() {
        return Outcome::Cut {
            failures,
            untried,
            retry_after: None,
        };
    }
    match failures.is_empty() {
        true => Outcome::Delivered,
        false => Outcome::Partial(failures),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn said(result: &str, error: Option<&str>) -> Said {
        Said::of(Some(result.to_owned()), error.map(str::to_owned))
    }

    fn failed(error: &str, permanent: bool) -> Said {
        let error = error.to_owned();
        Said::Failed { error, permanent }
    }

    #[test]
    fn what_is_said_of_an_event() {
        for taken in ["recorded", "duplicate", "ok", ""] {
            assert_eq!(said(taken, None), Said::Taken);
            assert_eq!(said(taken, Some("no")), failed("no", false));
        }
        assert_eq!(Said::of(None, None), Said::Taken);
        assert_eq!(Said::of(None, Some("no".into())), failed("no", false));
        let unexplained = "reported as failed, without a reason";
        for (result, permanent) in [("failed", false), ("permanent", true), ("rejected", true)] {
            assert_eq!(said(result, Some("a\nb")), failed("a b", permanent));
            assert_eq!(said(result, None), failed(unexplained, permanent));
            assert_eq!(said(result, Some(" ")), failed(unexplained, permanent));
        }
        assert_eq!(said("skipped", None), Said::NotTried);
        assert_eq!(said("skipped", Some("behind another one")), Said::NotTried);
    }

    #[test]
    fn reports_find_their_events() {
        let failure = Failure {
            index: 1,
            error: "no".to_owned(),
            permanent: false,
        };
        let reports = vec![
            (Some(20), failed("no", false)),
            (Some(20), failed("no, never", true)),
            (Some(99), failed("who?", true)),
            (None, failed("who?", true)),
            (Some(10), Said::Taken),
        ];
        assert_eq!(
            outcome(&[10, 20, 30], reports),
            Outcome::Partial(vec![failure.clone()])
        );
        assert_eq!(outcome(&[10, 20], vec![]), Outcome::Delivered);
        assert_eq!(
            outcome(
                &[10, 20, 30],
                vec![(Some(20), failed("no", false)), (Some(30), Said::NotTried)]
            ),
            Outcome::Cut {
                failures: vec![failure],
                untried: vec![2],
                retry_after: None,
            }
        );
    }
}
