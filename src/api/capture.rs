//! outbox.capture and what goes with it: arguments and rights; what triggers call.

use std::cell::Cell;

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::capture::backfill::{self, Taken};
use crate::capture::run;
use crate::pg::call::{Arguments, Text};
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::firing::{Firing, Operation};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::{Arg, Spi, connected};
use crate::pg::{background, exact as values, expression, invalidation, transaction};
use crate::store::captures;

/// Positions of the arguments in the SQL declarations.
mod argument {
    pub(super) const RELATION: usize = 0;
    pub(super) const OPERATIONS: usize = 1;
    pub(super) const PAYLOAD: usize = 2;
    pub(super) const COLUMNS: usize = 3;
    pub(super) const REDACT: usize = 4;
    pub(super) const KEY: usize = 5;
    pub(super) const TENANT_COLUMN: usize = 6;
    pub(super) const CONDITION: usize = 7;
    pub(super) const TOPIC: usize = 8;
    pub(super) const STREAM: usize = 9;
    pub(super) const REPLICATED: usize = 10;
}

#[pg_extern(sql = false)]
fn capture(call: pg_sys::FunctionCallInfo) {
    put(Arguments::of(call), "set_capture");
}

#[pg_extern(sql = false)]
fn alter_capture(call: pg_sys::FunctionCallInfo) {
    put(Arguments::of(call), "change_capture");
}

fn put(args: Arguments, function: &str) {
    let _busy = Busy::begin();
    let caller = security::current_role();
    let Some(relation) = args.oid(argument::RELATION) else {
        Complaint::bad_argument("a capture needs a table")
            .detail("The relation is null.")
            .raise()
    };
    let names = |position, what: &str| checked_names(args.texts(position), what).or_raise();
    let operations = names(argument::OPERATIONS, "operations");
    let columns = names(argument::COLUMNS, "columns");
    let redact = names(argument::REDACT, "redact");
    let key = names(argument::KEY, "key");
    let text = |position| Arg::RawText(args.raw(position));
    let replicated = args.bool(argument::REPLICATED).map(Arg::Bool);
    let sql = format!(
        "select outbox.{function}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {})",
        if replicated.is_some() { "$12" } else { "null" }
    );
    let mut values = vec![
        Arg::Oid(Some(caller)),
        Arg::Oid(Some(relation)),
        Arg::Texts(operations.as_deref()),
        text(argument::PAYLOAD),
        Arg::Texts(columns.as_deref()),
        Arg::Texts(redact.as_deref()),
        Arg::Texts(key.as_deref()),
        text(argument::TENANT_COLUMN),
        text(argument::CONDITION),
        text(argument::TOPIC),
        text(argument::STREAM),
    ];
    values.extend(replicated);
    as_extension(|| {
        connected(|spi| {
            spi.write(&sql, &values);
        });
    });
    if let Err(problem) = tried(relation) {
        problem
            .hint("For example: new.total > 100 and old.state is distinct from new.state. Names outside pg_catalog need their schema.")
            .raise();
    }
}

/// What is wrong with the statements that a capture comes to.
fn tried(relation: pg_sys::Oid) -> Result<(), Complaint> {
    transaction::nested(|| try_statements(relation)).map_err(|error| {
        if error.code == PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE {
            return Complaint::denied(error.message);
        }
        Complaint::bad_argument("the condition is not an SQL boolean expression over new and old")
            .detail(error.message.replace(char::is_control, " "))
    })
}

#[pg_extern(sql = false)]
fn adopt_stream(call: pg_sys::FunctionCallInfo) {
    let caller = security::current_role();
    let args = Arguments::of(call);
    let Some(relation) = args.oid(1) else {
        Complaint::bad_argument("an adopted stream needs a table")
            .detail("The relation is null.")
            .raise()
    };
    as_extension(|| {
        connected(|spi| {
            let values = [
                Arg::Oid(Some(caller)),
                Arg::RawText(args.raw(0)),
                Arg::Oid(Some(relation)),
                Arg::RawJson(args.raw(2)),
            ];
            spi.write("select outbox.adopt($1, $2, $3, $4)", &values);
        });
    });
    if let Err(problem) = tried(relation) {
        Complaint {
            message: "the columns of the table do not fit those of an event".to_owned(),
            ..problem
        }
        .hint("Map other columns, or none: columns => '{\"time\": null}'")
        .raise();
    }
}

#[pg_extern(sql = false)]
fn backfill(call: pg_sys::FunctionCallInfo) -> i64 {
    let caller = security::current_role();
    let args = Arguments::of(call);
    let condition = args.text(2).filter(|condition| !condition.is_empty());
    let id = as_extension(|| {
        connected(|spi| {
            let chunk_size = args.i32(3);
            let values = [
                Arg::Oid(Some(caller)),
                Arg::Oid(args.oid(0)),
                Arg::RawText(args.raw(1)),
                Arg::RawText(args.raw(2)),
                Arg::I32(chunk_size),
            ];
            spi.write("select outbox.start_backfill($1, $2, $3, $4, $5)", &values)
                .first(|row| row.i64(0))
                .flatten()
                .unwrap_or(0)
        })
    });
    let tried = transaction::nested(|| {
        let relation = args.oid(0)?;
        let capture = captured(relation)?;
        if let Some(condition) = &condition {
            expression::check(condition).or_raise();
        }
        let capture = captures::Capture {
            condition,
            owner: caller,
            ..capture
        };
        run::try_out(&capture, Operation::Snapshot).or_raise();
        Some(())
    });
    if let Err(error) = tried {
        Complaint::bad_argument("the condition is not an SQL boolean expression over new")
            .detail(error.message.replace(char::is_control, " "))
            .hint("For example: new.total > 100. Names outside pg_catalog need their schema.")
            .raise();
    }
    id
}

#[pg_extern(sql = false)]
fn backfill_chunk(call: pg_sys::FunctionCallInfo) -> Text {
    let id = Arguments::of(call)
        .raw(0)
        .map_or(0, |datum| datum.value() as i64);
    Text::new(match backfill::chunk(id, i32::MAX) {
        Taken::Chunk => "taken",
        Taken::Last => "done",
        Taken::Waiting(_) => "waiting",
        Taken::Nothing => "nothing",
    })
}

#[pg_extern(sql = false)]
fn read_json(call: pg_sys::FunctionCallInfo) -> Text {
    Text::of_datum(values::read_text(Arguments::of(call).any(0)))
}

fn checked_names(
    names: Option<Vec<Option<String>>>,
    what: &str,
) -> Result<Option<Vec<String>>, Complaint> {
    let null = || Complaint::bad_argument(format!("{what} of a capture holds a null"));
    names
        .map(|names| {
            names
                .into_iter()
                .map(|name| name.ok_or_else(null))
                .collect()
        })
        .transpose()
}

fn captured(relation: pg_sys::Oid) -> Option<captures::Capture> {
    transaction::under_latest_snapshot(|| {
        as_extension(|| connected(|spi| captures::of(spi, relation)))
    })
}

/// Raises what is wrong with the statements that a capture comes to.
fn try_statements(relation: pg_sys::Oid) {
    let Some(capture) = captured(relation) else {
        return;
    };
    if let Some(condition) = &capture.condition {
        expression::check(condition).or_raise();
    }
    for operation in [
        Operation::Insert,
        Operation::Update,
        Operation::Delete,
        Operation::Truncate,
    ] {
        if capture
            .operations
            .iter()
            .any(|wanted| wanted == operation.name())
        {
            run::try_out(&capture, operation).or_raise();
        }
    }
}

#[pg_extern(sql = false)]
fn try_capture(call: pg_sys::FunctionCallInfo) {
    if let Some(relation) = Arguments::of(call).oid(0) {
        try_statements(relation);
    }
}

#[pg_extern(sql = false)]
fn forget_relation(call: pg_sys::FunctionCallInfo) {
    if let Some(relation) = Arguments::of(call).oid(0) {
        invalidation::announce(relation);
    }
}

fn fired(call: pg_sys::FunctionCallInfo) -> Firing {
    Firing::of(call).unwrap_or_else(|| {
        let code = PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED;
        Complaint::new(
            code,
            "it is a trigger function, and was not called by a trigger",
        )
        .raise()
    })
}

#[pg_extern(sql = false)]
fn capture_begin(call: pg_sys::FunctionCallInfo) {
    run::begin(fired(call));
}

#[pg_extern(sql = false)]
fn capture_change(call: pg_sys::FunctionCallInfo) {
    run::change(fired(call));
}

#[pg_extern(sql = false)]
fn exact(call: pg_sys::FunctionCallInfo) -> Text {
    let args = Arguments::of(call);
    Text::of_datum(values::to_jsonb(args.any(0), args.type_of(0)))
}

#[pg_extern(sql = false)]
fn printed(call: pg_sys::FunctionCallInfo) -> Text {
    let args = Arguments::of(call);
    Text::of_datum(values::to_text(args.any(0), args.type_of(0)))
}

#[pg_extern(sql = false)]
fn follow_ddl(_call: pg_sys::FunctionCallInfo) {
    follow("select outbox.settle_after_ddl()");
}

#[pg_extern(sql = false)]
fn follow_drop(_call: pg_sys::FunctionCallInfo) {
    follow("select outbox.settle_after_drop()");
}

thread_local! {
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
}

/// While triggers are arranged, what that does to tables is our own doing, and nothing to follow.
struct Busy;

impl Busy {
    fn begin() -> Option<Self> {
        // Not made before it is known that it is needed: its end would be that of the one that is there.
        (!IS_BUSY.replace(true)).then(|| Self)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        IS_BUSY.set(false);
    }
}

/// Whatever changes tables without a search_path restores a dump, which brings the triggers, too.
fn follow(sql: &str) {
    let Some(_busy) = Busy::begin().filter(|_| !background::is_upgrading()) else {
        return;
    };
    as_extension(|| {
        connected(|spi: &Spi| {
            spi.write("select outbox.follow_functions()", &[]);
        });
    });
    if security::has_no_path() {
        return;
    }
    as_extension(|| {
        connected(|spi: &Spi| {
            let any = spi
                .read("select exists (select from outbox.captures)", &[])
                .first(|row| row.bool(0).unwrap_or(false));
            if any == Some(true) {
                spi.write(sql, &[]);
            }
        });
    });
}
