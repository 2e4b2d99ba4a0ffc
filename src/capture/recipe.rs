//! The captures whose events can be written without a statement, and what is written then.
//!
//! It says the same as [`super::statement`], for the captures that it covers. Others need SQL: adopted outboxes, whose columns are
//! converted; tables without a key; and streams whose table somebody has changed.

use super::statement::{self, Stamp, captured, identity, known_by, named, now};
use crate::pg::append::{Field, Level, Partitions, Payload, Plan, Source};
use crate::pg::firing::{Cell, Operation, Side};
use crate::store::captures::{self, Capture, Column};

/// None where it takes a statement. `cells` are the columns that updates come with.
pub(super) fn of(
    capture: &Capture,
    operation: Operation,
    prefix: &str,
    stamp: &Stamp,
    cells: &[Cell],
) -> Option<Plan> {
    let is_covered = capture.stream_is_plain
        && capture.mapping.is_empty()
        && !capture.key.is_empty()
        && operation != Operation::Truncate;
    let topic = statement::topic(capture, operation, prefix);
    if !is_covered || topic.is_empty() {
        return None;
    }
    let rows = Rows { operation, cells };
    let subject = identity(capture)
        .into_iter()
        .map(|column| rows.source(known_by(operation), column));
    let tenant = capture.tenant_column.as_deref();
    let tenant = tenant.and_then(|name| named(capture, name));
    let mut attributes = statement::attributes(capture, operation);
    attributes.extend(stamp.attributes.clone());
    let says_same = operation == Operation::Update && capture.payload == captures::Payload::Changed;
    Some(Plan {
        table: capture.stream_oid,
        sequence: capture.sequence_oid,
        topic,
        source: capture.source.clone(),
        subject: subject.collect::<Option<_>>()?,
        tenant: match tenant {
            Some(column) => Some(rows.source(now(operation), column)?),
            None => None,
        },
        payload: payload(capture, &rows)?,
        // Behind the cells.
        same: says_same.then_some(cells.len()),
        headers: (!attributes.is_empty())
            .then(|| serde_json::Value::Object(attributes).to_string()),
        for_sink: stamp.for_sink,
        partitions: match capture.partitions.is_empty() {
            true => None,
            false => Some(partitions(capture, &rows)?),
        },
    })
}

fn partitions(capture: &Capture, rows: &Rows) -> Option<Partitions> {
    let side = now(rows.operation);
    let level = |division: &captures::Division| {
        let key = division.key.iter();
        let key = key.map(|name| Some(rows.source(side, named(capture, name)?)?.index));
        Some(Level {
            table: division.table,
            strategy: division.strategy,
            key: key.collect::<Option<_>>()?,
            functions: division.functions.clone(),
            collations: division.collations.clone(),
        })
    };
    let names = capture.partitions.iter();
    Some(Partitions {
        levels: capture.divisions.iter().map(level).collect::<Option<_>>()?,
        names: names.map(|it| (it.oid, it.name.clone())).collect(),
    })
}

/// The rows that an operation comes with.
struct Rows<'a> {
    operation: Operation,
    cells: &'a [Cell],
}

impl Rows<'_> {
    fn source(&self, side: Side, column: &Column) -> Option<Source> {
        let index = match self.operation {
            Operation::Update => self
                .cells
                .iter()
                .position(|cell| cell.side == side && cell.number == column.number)?,
            _ => usize::try_from(column.number).ok()?.checked_sub(1)?,
        };
        Some(Source {
            index,
            type_oid: column.type_oid,
        })
    }

    fn fields(&self, side: Side, columns: &[&Column]) -> Option<Vec<Field>> {
        let field = |column: &&Column| {
            Some(Field {
                name: column.name.clone(),
                source: self.source(side, column)?,
                if_changed: false,
            })
        };
        columns.iter().map(field).collect()
    }
}

fn payload(capture: &Capture, rows: &Rows) -> Option<Payload> {
    let operation = rows.operation;
    let shown = captured(capture);
    let side = now(operation);
    let is_new = matches!(operation, Operation::Insert | Operation::Snapshot);
    Some(match capture.payload {
        captures::Payload::Keys => Payload::Row(rows.fields(side, &identity(capture))?),
        captures::Payload::Full => Payload::Row(rows.fields(side, &shown)?),
        captures::Payload::Changed if is_new => Payload::Row(rows.fields(side, &shown)?),
        captures::Payload::Changed if operation == Operation::Update => {
            let field = |column: &&Column| {
                let of_key = capture.key.contains(&column.name);
                let side = if of_key { Side::New } else { Side::Changed };
                Some(Field {
                    name: column.name.clone(),
                    source: rows.source(side, column)?,
                    if_changed: !of_key,
                })
            };
            Payload::Row(shown.iter().map(field).collect::<Option<_>>()?)
        }
        captures::Payload::Changed => Payload::Row(rows.fields(side, &identity(capture))?),
        captures::Payload::BeforeAfter => {
            let version = |side| rows.fields(side, &shown);
            Payload::Versions(
                if is_new {
                    None
                } else {
                    Some(version(Side::Old)?)
                },
                if operation == Operation::Delete {
                    None
                } else {
                    Some(version(Side::New)?)
                },
            )
        }
    })
}
