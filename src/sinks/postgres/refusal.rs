//! Why another PostgreSQL did not take a delivery, in words, and whether that is the fault of the events.
//!
//! A server's message and detail may quote the row, so they are repeated only where no event was involved yet: on connecting, and on
//! preparing our statements. Otherwise its SQLSTATE speaks, with the names that it gives.

use std::error::Error;

use tokio_postgres::error::DbError;

use crate::sinks::plain_text::{LONGEST, one_line};
use crate::sinks::tls::{causes, describe};

/// A delivery that did not go through.
#[derive(Debug)]
pub(super) struct Setback {
    pub(super) error: String,
    pub(super) blame: Blame,
}

/// What a setback is laid to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// What the events hold.
    Events,
    /// The server, the table or the statement: other events would fare no better.
    Server,
    /// The connection has broken: on another one, it may go through.
    Connection,
}

impl Setback {
    pub(super) fn of_server(error: String) -> Self {
        Self {
            error: one_line(&error, LONGEST),
            blame: Blame::Server,
        }
    }

    /// While connecting to `place`.
    pub(super) fn on_connecting(error: &tokio_postgres::Error, place: &str) -> Self {
        let chain: Vec<&(dyn Error + 'static)> = causes(error).collect();
        let text = if let Some(tls) = chain.iter().find_map(|cause| cause.downcast_ref()) {
            describe(tls, place)
        } else if let Some(db) = error.as_db_error() {
            format!("cannot log in to {place}: {}", with_message(db))
        } else {
            format!("cannot connect to {place}: {}", innermost(&chain))
        };
        Self::of_server(text)
    }

    /// While making ready at `place` what is ours to say, before any event is.
    pub(super) fn on_preparing(error: &tokio_postgres::Error, what: &str, place: &str) -> Self {
        match error.as_db_error() {
            Some(db) => Self::of_server(format!("{what}: {}", with_message(db))),
            None => Self::broken(error, place),
        }
    }

    /// While events are applied.
    pub(super) fn on_applying(error: &tokio_postgres::Error, place: &str) -> Self {
        match error.as_db_error() {
            Some(db) => Self {
                error: one_line(&without_message(db), LONGEST),
                blame: blame(db.code().code()),
            },
            None => Self::broken(error, place),
        }
    }

    fn broken(error: &tokio_postgres::Error, place: &str) -> Self {
        let chain: Vec<&(dyn Error + 'static)> = causes(error).collect();
        Self {
            error: one_line(
                &format!("the connection to {place} broke: {}", innermost(&chain)),
                LONGEST,
            ),
            blame: Blame::Connection,
        }
    }
}

/// Data that does not fit, constraints that it violates, and what code over there raises about it.
fn blame(code: &str) -> Blame {
    match code.get(..2).unwrap_or_default() {
        "22" | "23" | "21" | "P0" => Blame::Events,
        "54" => Blame::Events,
        "08" => Blame::Connection,
        // The server is going down, or this connection of it.
        "57" if code.starts_with("57P") => Blame::Connection,
        _ => Blame::Server,
    }
}

fn with_message(db: &DbError) -> String {
    format!("{} ({})", db.message(), db.code().code())
}

fn without_message(db: &DbError) -> String {
    let code = db.code().code();
    let mut text = format!("{code} {}", condition(code));
    let table = db.table().map(|table| match db.schema() {
        Some(schema) => format!("{schema}.{table}"),
        None => table.to_owned(),
    });
    let names = [
        ("constraint", db.constraint().map(str::to_owned)),
        ("column", db.column().map(str::to_owned)),
        ("type", db.datatype().map(str::to_owned)),
        ("table", table),
    ];
    for (what, name) in names {
        if let Some(name) = name {
            text.push_str(&format!(", {what} \"{}\"", one_line(&name, 130)));
        }
    }
    text
}

/// What an SQLSTATE stands for.
fn condition(code: &str) -> &'static str {
    match code {
        "22001" => "value too long",
        "22003" => "number out of range",
        "22007" | "22008" => "date or time out of range",
        "22P02" => "invalid text representation",
        "22P05" => "character that the encoding lacks",
        "23502" => "not-null violation",
        "23503" => "foreign-key violation",
        "23505" => "unique violation",
        "23514" => "check violation",
        "23P01" => "exclusion violation",
        "25006" => "the server is read-only",
        "40001" => "serialization failure",
        "40P01" => "deadlock",
        "42501" => "permission denied",
        "42703" => "a column does not exist",
        "42883" => "a function does not exist",
        "42P01" => "a table does not exist",
        "55P03" => "a lock was not available",
        "57014" => "cancelled, or longer than the time-out",
        "57P01" | "57P02" => "the server is shutting down",
        "57P03" => "the server does not accept connections now",
        "57P05" => "the session was idle for too long",
        "P0001" => "raised by code of the server",
        _ => match code.get(..2).unwrap_or_default() {
            "08" => "connection exception",
            "21" => "cardinality violation",
            "22" => "data exception",
            "23" => "constraint violation",
            "25" => "invalid transaction state",
            "28" => "login refused",
            "40" => "transaction rolled back",
            "42" => "the statement or a right to it is wrong",
            "53" => "insufficient resources",
            "54" => "a limit of the server was exceeded",
            "55" => "not in the state that is needed",
            "57" => "an operator intervened",
            "58" | "XX" => "the server is in trouble",
            "P0" => "raised by code of the server",
            _ => "refused",
        },
    }
}

/// What it comes down to: the outer errors only say where it passed.
fn innermost(chain: &[&(dyn Error + 'static)]) -> String {
    chain
        .last()
        .map_or_else(String::new, |error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_events_are_to_blame_for() {
        for (code, expected) in [
            ("22P02", Blame::Events),
            ("23505", Blame::Events),
            ("P0001", Blame::Events),
            ("54000", Blame::Events),
            ("42P01", Blame::Server),
            ("42501", Blame::Server),
            ("40001", Blame::Server),
            ("53100", Blame::Server),
            ("55P03", Blame::Server),
            ("57014", Blame::Server),
            ("25006", Blame::Server),
            ("57P01", Blame::Connection),
            ("08006", Blame::Connection),
            ("", Blame::Server),
        ] {
            assert_eq!(blame(code), expected, "{code}");
            assert!(!condition(code).is_empty());
        }
    }
}
