//! Filters and transforms: SQL that a user supplied, run over events with that user's rights.
//!
//! They see events as values only; that they could read the stream's table is not needed. What fails for one event fails that
//! event's delivery, so that a bad event and a broken filter are told apart by the same engine that tells a bad event from an
//! outage.

use crate::pg::catalog;
use crate::pg::security::{self, Path};
use crate::pg::spi::{Arg, Record, Spi, connected};
use crate::pg::transaction;
use crate::store::events::{self, Found};
use crate::store::sinks::SinkRow;

/// The SQL of a sink's filter and transform.
#[derive(Debug, Clone)]
pub(crate) struct Shaping {
    sql: String,
    owner: pgrx::pg_sys::Oid,
    transforms: bool,
    path: Path,
}

/// An event as it came out: wanted, and perhaps not ready.
pub(crate) type Shaped = (Found, Option<String>);

/// The row that a filter's names refer to. The ordinal's name is nobody's column.
const ROW: &str = r#"unnest($1) with ordinality as event (txid, seq, id, topic, source, subject, tenant, "time", payload, headers, outbox_ordinal)"#;

/// The statement that checks, or applies, a filter.
pub(crate) fn filter_sql(filter: &str) -> String {
    // The line break ends a comment that the filter may end with.
    format!("select event.outbox_ordinal from {ROW} where (\n{filter}\n)")
}

/// The statement that applies a transform, given as a qualified name, and a filter.
fn transform_sql(function: &str, filter: Option<&str>) -> String {
    let condition = filter
        .map(|filter| format!("where (\n{filter}\n)"))
        .unwrap_or_default();
    format!(
        r#"select t.outbox_ordinal, t.outbox_payload,
                  row(t.txid, t.seq, t.id, t.topic, t.source, t.subject, t.tenant, t."time", t.outbox_payload, t.headers)::outbox.event
             from (select event.*,
                          {function}(row(event.txid, event.seq, event.id, event.topic, event.source, event.subject, event.tenant,
                                         event."time", event.payload, event.headers)::outbox.event) as outbox_payload
                     from {ROW} {condition} offset 0) t
            where t.outbox_payload is not null"#
    )
}

impl Shaping {
    /// What a sink asks for; none if it takes events as they are. Fails if the transform is gone.
    pub(crate) fn of(spi: &Spi, sink: &SinkRow) -> Result<Option<Self>, String> {
        let transform = match sink.transform {
            Some(oid) => {
                Some(function_name(spi, oid).ok_or("its transform does not exist any more")?)
            }
            None => None,
        };
        let sql = match (&transform, &sink.filter) {
            (None, None) => return Ok(None),
            (None, Some(filter)) => filter_sql(filter),
            (Some(function), filter) => transform_sql(function, filter.as_deref()),
        };
        let transforms = transform.is_some();
        let path = if transforms {
            Path::Session
        } else {
            Path::Ours
        };
        Ok(Some(Self {
            sql,
            owner: sink.owner,
            transforms,
            path,
        }))
    }

    /// Applies it to events that carry their record. An error is found out event by event.
    pub(crate) fn apply(&self, found: Vec<Found>) -> Vec<Shaped> {
        if found.is_empty() {
            return Vec::new();
        }
        match self.run(&found) {
            Ok(kept) => self.keep(found, kept),
            Err(_) if found.len() > 1 => {
                let mut shaped = Vec::with_capacity(found.len());
                for one in found {
                    shaped.extend(self.apply(vec![one]));
                }
                shaped
            }
            Err(error) => found
                .into_iter()
                .map(|one| (one, Some(error.clone())))
                .collect(),
        }
    }

    /// Ordinals of the events that are wanted, with what a transform made of each.
    fn run(&self, found: &[Found]) -> Result<Vec<Kept>, String> {
        if !catalog::role_exists(self.owner) {
            return Err("the role that owns the sink does not exist any more".to_owned());
        }
        let records = found
            .iter()
            .filter_map(|found| found.record.clone())
            .collect::<Vec<_>>();
        let element = events::event_type();
        let what = if self.transforms {
            "transform"
        } else {
            "filter"
        };
        transaction::nested(|| {
            crate::pg::latch::interruptible(|| {
                security::as_role(self.owner, self.path, || {
                    connected(|spi| {
                        spi.write(&self.sql, &[Arg::Records(&records, element)])
                            .map(|row| Kept {
                                ordinal: usize::try_from(row.i64(0).unwrap_or(0)).unwrap_or(0),
                                made: self.transforms.then(|| (row.json(1), row.record(2))),
                            })
                    })
                })
            })
        })
        .map_err(|error| format!("{what}: {}", error.summary()))
    }

    fn keep(&self, found: Vec<Found>, kept: Vec<Kept>) -> Vec<Shaped> {
        let mut kept = kept
            .into_iter()
            .map(|kept| (kept.ordinal, kept.made))
            .collect::<std::collections::HashMap<_, _>>();
        let mut shaped = Vec::with_capacity(kept.len());
        for (index, mut one) in found.into_iter().enumerate() {
            let Some(made) = kept.remove(&(index + 1)) else {
                continue;
            };
            if let Some((payload, record)) = made {
                one.event.payload = payload;
                one.record = record;
            }
            shaped.push((one, None));
        }
        shaped
    }
}

struct Kept {
    ordinal: usize,
    made: Option<(Option<String>, Option<Record>)>,
}

/// The qualified, quoted name of a function.
pub(crate) fn function_name(spi: &Spi, oid: pgrx::pg_sys::Oid) -> Option<String> {
    spi.read(
        "select format('%I.%I', n.nspname, p.proname) from pg_catalog.pg_proc p
           join pg_catalog.pg_namespace n on n.oid = p.pronamespace where p.oid = $1",
        &[Arg::Oid(Some(oid))],
    )
    .first(|row| row.text(0))
    .flatten()
}
