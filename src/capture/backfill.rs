//! Rows that are there already, as events.
//!
//! A chunk is one transaction: it locks rows against changes, reads them as they are, and writes their events. A change that was made
//! before is in what it reads, and its event has a smaller number; one that is made after has to wait for the lock, and gets a greater
//! one. So a row's snapshot never comes after a change that it does not contain.
//!
//! Those of a backfill to one sink are in the stream as well, for it is the stream that has the order; they are marked as being for that
//! sink, and other readers pass over them.

use pgrx::PgSqlErrorCode;

use super::programs::{self, Program};
use super::run::run_for_stream;
use super::statement::{self, Stamp, identifier, literal};
use crate::pg::error::Complaint;
use crate::pg::exact::Printed;
use crate::pg::firing::{Cell, ChangedRows, Operation, Side};
use crate::pg::security::as_extension_printing;
use crate::pg::spi::{UserStatement, connected};
use crate::settings;
use crate::store::backfills::{self, Backfill};
use crate::store::captures::Capture;

/// What became of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Taken {
    /// There may be more.
    Chunk,
    Last,
    /// This sink has to catch up first.
    Waiting(String),
    /// It does not run, or somebody else is at it.
    Nothing,
}

/// With so many events undelivered, no more are added.
const MOST_UNDELIVERED: i64 = 10_000;

/// The columns of the key, in the order of the key.
fn key(backfill: &Backfill) -> Vec<String> {
    let columns = backfill.key.iter();
    columns
        .map(|name| format!("t.{}", identifier(name)))
        .collect()
}

/// The key of a row, as it is kept.
fn position(backfill: &Backfill) -> String {
    let printed = key(backfill).into_iter();
    let printed = printed.map(|column| format!("outbox.printed({column})"));
    let printed = printed.collect::<Vec<_>>().join(", ");
    format!("array[{printed}] as position")
}

/// A condition on the key, such as being greater than what was kept.
fn compared(backfill: &Backfill, operator: &str, position: &[String]) -> String {
    let values = position.iter().zip(&backfill.types);
    let values = values.map(|(value, type_)| format!("{}::{type_}", literal(value)));
    let values = values.collect::<Vec<_>>().join(", ");
    format!("({}) {operator} ({values})", key(backfill).join(", "))
}

fn behind(backfill: &Backfill) -> String {
    backfill.position.as_ref().map_or_else(
        || "true".to_owned(),
        |position| compared(backfill, ">", position),
    )
}

/// The key of the last row of a full chunk, and one more if it is not the last chunk.
fn end_sql(backfill: &Backfill) -> String {
    format!(
        "select {} from {} t where {} order by {} offset {} limit 2",
        position(backfill),
        backfill.table,
        behind(backfill),
        key(backfill).join(", "),
        i64::from(backfill.chunk_size) - 1,
    )
}

/// The rows of a chunk that ends with this key, or with the table. Columns bear the names that statements know, in the order of the table.
fn rows_sql(capture: &Capture, backfill: &Backfill, end: Option<&[String]>) -> String {
    let last = capture
        .table_columns
        .iter()
        .map(|column| column.number)
        .max();
    let cells = (1..=last.unwrap_or(0)).map(|number| {
        let name = Cell {
            side: Side::New,
            number,
        }
        .name();
        let mut columns = capture.table_columns.iter();
        match columns.find(|column| column.number == number) {
            Some(column) => format!("t.{} as {name}", identifier(&column.name)),
            None => format!("null::int as {name}"),
        }
    });
    let columns = cells
        .chain([position(backfill)])
        .collect::<Vec<_>>()
        .join(", ");
    let end = end.map_or_else(|| "true".to_owned(), |end| compared(backfill, "<=", end));
    format!(
        "select {columns} from {} t where {} and {end} order by {} for share of t",
        backfill.table,
        behind(backfill),
        key(backfill).join(", "),
    )
}

/// Takes the next chunk of a backfill, of so many rows at the most, in the open transaction.
pub(crate) fn chunk(id: i64, most: i32) -> Taken {
    let taken = as_extension_printing(Printed::BySettings, || {
        connected(|spi| {
            let mut backfill = backfills::take(spi, id)?;
            backfill.chunk_size = backfill.chunk_size.min(most);
            let capture = programs::capture_held(spi, backfill.relation)?;
            let slowest = backfills::slowest(spi, &backfill, MOST_UNDELIVERED);
            Some((backfill, capture, slowest))
        })
    });
    let Some((backfill, capture, slowest)) = taken else {
        return Taken::Nothing;
    };
    if let Some(sink) = slowest {
        return Taken::Waiting(sink);
    }
    let capture = Capture {
        condition: backfill.condition.clone(),
        owner: backfill.owner,
        ..capture
    };
    // Where the chunk ends is settled before a row is locked: one whose lock is waited for may have another key then.
    let (end, rows, positions) = as_extension_printing(Printed::BySettings, || {
        connected(|spi| {
            let ends = spi.write(&end_sql(&backfill), &[]).map(|row| row.texts(0));
            let end = match &ends[..] {
                [Some(end), _] => Some(end.clone()),
                _ => None,
            };
            let found = spi.write(&rows_sql(&capture, &backfill, end.as_deref()), &[]);
            let column = found.width().saturating_sub(1);
            let positions = found.map(|row| row.texts(column));
            (end, ChangedRows::copied(&found), positions)
        })
    });
    let is_last = end.is_none();
    write(&capture, &backfill, &rows, is_last);
    as_extension_printing(Printed::BySettings, || {
        connected(|spi| {
            let last = || positions.last().and_then(Option::as_deref);
            let position = end.as_deref().or_else(last);
            if !backfills::advance(spi, id, position, positions.len() as i64, is_last) {
                let code = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
                Complaint::new(code, format!("backfill {id} has been stopped")).raise();
            }
        });
    });
    if is_last { Taken::Last } else { Taken::Chunk }
}

/// Writes a chunk's events. The last of all says so.
fn write(capture: &Capture, backfill: &Backfill, rows: &ChangedRows, is_last: bool) {
    let number = backfill.chunks + 1;
    let stamp = |last: bool| {
        let members = [
            ("chunk".to_owned(), number.into()),
            ("last".to_owned(), last.into()),
        ];
        Stamp {
            attributes: members.into_iter().collect(),
            for_sink: backfill.for_sink,
        }
    };
    let program = |last| Program::stamped(capture.clone(), Operation::Snapshot, &stamp(last));
    let ordinary = program(false);
    let kept = ordinary.kept(rows);
    let rows = kept.as_ref().unwrap_or(rows);
    let count = rows.count();
    let most = if is_last { count - 1 } else { count };
    if most > 0 {
        ordinary.write(Some(&rows.only(&(1..=most).collect::<Vec<_>>())), None);
    }
    if !is_last {
        return;
    }
    if count > 0 {
        program(true).write(Some(&rows.only(&[count])), None);
    } else {
        // Nothing is left that could say so.
        let sql = statement::marker(
            capture,
            Operation::Snapshot,
            &settings::topic_prefix(),
            &stamp(true),
        );
        as_extension_printing(Printed::BySettings, || {
            run_for_stream(capture, &UserStatement::new(sql));
        });
    }
}
