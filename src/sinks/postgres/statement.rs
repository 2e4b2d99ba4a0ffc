//! What is run over there: the checkpoint table, the look at it, and the statements that apply events.

use std::sync::Arc;

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use super::names::{TableName, literal, quoted};
use crate::envelope::{Event, timestamp_text, write_cloudevent};
use crate::sinks::batch::Origin;

/// How often old notes are looked for.
pub(super) const FORGET_EVERY: std::time::Duration = std::time::Duration::from_secs(3600);

/// Whether a table is there. $1 its name.
pub(super) const EXISTS: &str = "select pg_catalog.to_regclass($1) is not null";

/// Makes the checkpoint table.
pub(super) fn create_checkpoint(table: &TableName) -> String {
    format!(
        "create table if not exists {table} (
             batch bigint generated always as identity primary key,
             sink uuid not null,
             name text not null,
             first_seq bigint not null,
             last_seq bigint not null,
             events bytea not null,
             applied_at timestamptz not null default now(),
             unique (sink, last_seq, batch),
             unique (sink, applied_at, batch));
         comment on table {table} is
             'pg_outbox: which events were applied here, a row per delivery; do not remove rows while their sink lives'"
    )
}

/// Begins a transaction, waits for any other of the same sink, and looks at what is noted of events with such numbers.
///
/// A commit that the server could lose in a crash would lose the events: by then, the cursor is saved elsewhere.
pub(super) fn begin(
    table: &TableName,
    origin: &Origin,
    spans: &[Span],
    timeout_ms: u128,
) -> String {
    let life = literal(&origin.life);
    let spans: Vec<_> = spans
        .iter()
        .map(|(first, last)| format!("({first}::bigint, {last}::bigint)"))
        .collect();
    let spans = spans.join(", ");
    format!(
        "begin isolation level read committed read write;
         set local statement_timeout = {timeout_ms};
         set local idle_in_transaction_session_timeout = {timeout_ms};
         select pg_catalog.set_config('synchronous_commit', 'on', true)
          where pg_catalog.current_setting('synchronous_commit') = 'off';
         select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('pg_outbox ' || {life}, 0));
         select pg_catalog.encode(c.events, 'hex') as {NOTED}
           from (values {spans}) as s (first, last)
           join {table} c on c.sink = {life} and c.last_seq between s.first and s.last + {WIDEST} and c.first_seq <= s.last"
    )
}

/// The column of [`begin`]'s last statement.
pub(super) const NOTED: &str = "outbox_noted";

/// Notes events as applied, a row for each span. $1 and $2 the spans' ends, $3 the marks of the events in each.
pub(super) fn note(table: &TableName, origin: &Origin) -> String {
    format!(
        "insert into {table} (sink, name, first_seq, last_seq, events)
         select {}, {}, n.* from unnest($1::bigint[], $2::bigint[], $3::bytea[]) as n",
        literal(&origin.life),
        literal(&origin.sink)
    )
}

/// The lowest and the greatest number of events that are noted together.
pub(super) type Span = (i64, i64);

/// No row spans more numbers, so that few rows need be looked at.
const WIDEST: i64 = 100_000;
/// A batch may hold the events of a transaction that was open for long, whose numbers are far below all others.
const GAP: i64 = 1_000;

/// Events by spans of neighbouring numbers.
pub(super) fn spans(events: &[Arc<Event>]) -> Vec<(Span, Vec<&Event>)> {
    let mut sorted: Vec<&Event> = events.iter().map(Arc::as_ref).collect();
    sorted.sort_by_key(|event| event.position.seq);
    let mut spans: Vec<(Span, Vec<&Event>)> = Vec::new();
    for event in sorted {
        let seq = event.position.seq;
        match spans.last_mut() {
            Some(((first, last), members)) if seq - *last <= GAP && seq - *first < WIDEST => {
                *last = seq;
                members.push(event);
            }
            _ => spans.push(((seq, seq), vec![event])),
        }
    }
    spans
}

/// Removes the oldest of the notes that are older than asked for, [`FORGET_AT_ONCE`] at most.
pub(super) fn forget(table: &TableName, origin: &Origin, hours: u64) -> String {
    format!(
        "delete from {table} where batch in (
             select batch from {table} where sink = {} and applied_at < now() - interval '{hours} hours'
              order by applied_at limit {FORGET_AT_ONCE})",
        literal(&origin.life)
    )
}

/// What takes no time; the rest goes before the next delivery.
pub(super) const FORGET_AT_ONCE: u64 = 1_000;

/// The columns of a table that can be written, and their types. $1 its name.
pub(super) const COLUMNS: &str = "
    select a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
      from pg_catalog.pg_attribute a
     where a.attrelid = pg_catalog.to_regclass($1) and a.attnum > 0 and not a.attisdropped
       and a.attgenerated = '' and a.attidentity <> 'a'";

/// What of an event goes into the column of that name, as text that Postgres reads.
type Part = fn(&Event) -> Option<String>;

const PARTS: &[(&str, Part)] = &[
    ("id", |event| Some(event.id.clone())),
    ("topic", |event| Some(event.topic.clone())),
    ("payload", |event| event.payload.clone()),
    ("source", |event| event.source.clone()),
    ("subject", |event| event.subject.clone()),
    ("tenant", |event| event.tenant.clone()),
    ("time", |event| Some(timestamp_text(event.time))),
    ("headers", |event| event.headers.clone()),
    ("txid", |event| Some(event.position.txid.to_string())),
    ("seq", |event| Some(event.position.seq.to_string())),
    ("position", |event| Some(event.position.to_string())),
];

/// A table must have these, or it holds nothing worth having.
const NEEDED: [&str; 3] = ["id", "topic", "payload"];

/// An insert into a table.
#[derive(Clone)]
pub(super) struct Insert {
    pub(super) sql: String,
    parts: Vec<Part>,
}

impl Insert {
    /// Into those of a table's columns that an event has something for. The types are SQL.
    ///
    /// # Errors
    /// The columns that it lacks.
    pub(super) fn into(table: &TableName, columns: &[(String, String)]) -> Result<Self, String> {
        let lacks: Vec<_> = NEEDED
            .iter()
            .filter(|needed| !columns.iter().any(|(name, _)| name == *needed))
            .map(|needed| quoted(needed))
            .collect();
        if !lacks.is_empty() {
            return Err(format!(
                "table {table} has no column {} that can be written",
                lacks.join(", ")
            ));
        }
        let (mut names, mut values, mut arrays, mut aliases) = (vec![], vec![], vec![], vec![]);
        let mut parts = Vec::new();
        for (name, part) in PARTS {
            let Some((_, of_type)) = columns.iter().find(|(column, _)| column == name) else {
                continue;
            };
            parts.push(*part);
            let number = parts.len();
            names.push(quoted(name));
            values.push(format!("e.v{number}::{of_type}"));
            arrays.push(format!("${number}::text[]"));
            aliases.push(format!("v{number}"));
        }
        Ok(Self {
            sql: format!(
                "insert into {table} ({}) select {} from unnest({}) as e ({})",
                names.join(", "),
                values.join(", "),
                arrays.join(", "),
                aliases.join(", ")
            ),
            parts,
        })
    }

    /// The parameters for these events: an array for each column.
    pub(super) fn parameters(&self, events: &[Arc<Event>]) -> Vec<Vec<Option<String>>> {
        let of_part = |part: &Part| events.iter().map(|event| part(event)).collect();
        self.parts.iter().map(of_part).collect()
    }
}

/// JSON text as a parameter of type jsonb.
#[derive(Debug)]
pub(super) struct Jsonb(Vec<u8>);

impl Jsonb {
    /// Events as an array of CloudEvents.
    pub(super) fn of(events: &[Arc<Event>]) -> Self {
        let mut json = vec![b'['];
        for event in events {
            if json.len() > 1 {
                json.push(b',');
            }
            write_cloudevent(event, &mut json);
        }
        json.push(b']');
        Self(json)
    }
}

impl ToSql for Jsonb {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        // The version of the binary form.
        out.put_u8(1);
        out.put_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(of_type: &Type) -> bool {
        *of_type == Type::JSONB
    }

    to_sql_checked!();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sinks::http::tests::event;

    #[test]
    fn numbers_that_lie_far_apart_are_noted_apart() {
        let at = |seq| {
            let mut event = event(1);
            event.position.seq = seq;
            Arc::new(event)
        };
        let events = [at(5_000), at(5_010), at(7), at(6_010), at(7_011)];
        let found: Vec<_> = spans(&events)
            .into_iter()
            .map(|(span, members)| (span, members.len()))
            .collect();
        assert_eq!(
            found,
            [((7, 7), 1), ((5_000, 6_010), 3), ((7_011, 7_011), 1)]
        );
        let many: Vec<_> = (0..300).map(|n| at(n * 1_000)).collect();
        assert!(
            spans(&many)
                .iter()
                .all(|((first, last), _)| last - first < WIDEST)
        );
    }

    #[test]
    fn columns_are_found_by_name() {
        let table = TableName::parse("raw.events").unwrap();
        let column = |name: &str, of_type: &str| (name.to_owned(), of_type.to_owned());
        let columns = [
            column("payload", "json"),
            column("more", "text"),
            column("id", "character varying(40)"),
            column("topic", "text"),
            column("seq", "bigint"),
        ];
        let insert = Insert::into(&table, &columns).unwrap();
        assert_eq!(
            insert.sql,
            "insert into \"raw\".\"events\" (\"id\", \"topic\", \"payload\", \"seq\") \
             select e.v1::character varying(40), e.v2::text, e.v3::json, e.v4::bigint \
             from unnest($1::text[], $2::text[], $3::text[], $4::text[]) as e (v1, v2, v3, v4)"
        );
        let parameters = insert.parameters(&[Arc::new(event(1)), Arc::new(event(2))]);
        assert_eq!(
            parameters[0],
            [Some("evt_1".to_owned()), Some("evt_2".to_owned())]
        );
        assert_eq!(parameters[3], [Some("1".to_owned()), Some("2".to_owned())]);
        assert_eq!(
            Insert::into(&table, &columns[1..3]).err().unwrap(),
            "table \"raw\".\"events\" has no column \"topic\", \"payload\" that can be written"
        );
    }
}
