//! The `config` of kind `postgres`.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::dsn::Dsn;
use super::names::TableName;
use crate::sinks::ConfigError;
use crate::sinks::fields::Fields;

#[cfg(test)]
mod tests;

const KEYS: &[&str] = &[
    "dsn",
    "secret",
    "table",
    "statement",
    "checkpoint",
    "remember_hours",
    "timeout_ms",
    "ca_file",
];

const LONGEST_TIMEOUT_MS: u64 = 3_600_000;
const DEFAULT_CHECKPOINT: &str = "outbox_checkpoint";
/// A week: a dump that is restored is rarely older.
const DEFAULT_REMEMBER_HOURS: u64 = 168;
const MOST_HOURS: u64 = 24 * 3660;

/// Words that would end, or begin, the transaction that a statement runs in.
const TRANSACTION_WORDS: &[&str] = &[
    "abort",
    "begin",
    "commit",
    "end",
    "prepare",
    "release",
    "rollback",
    "savepoint",
    "start",
];

/// A valid `config`. It holds no password: that is in the secret.
#[derive(Clone, Debug)]
pub(crate) struct PostgresConfig {
    pub(super) server: Server,
    pub(super) apply: Apply,
    pub(super) checkpoint: TableName,
    /// How long it is noted which events were applied.
    pub(super) remember_hours: u64,
    pub(super) timeout: Option<Duration>,
    /// PEM certificates that are trusted beside the system's.
    pub(super) ca_file: Option<PathBuf>,
    /// Whether a server is accepted that asks for no password: it would take the server process for whoever runs it.
    passwordless: bool,
}

/// Where the connection string is.
#[derive(Clone, Debug)]
pub(super) enum Server {
    Dsn(String),
    /// The name of the secret.
    Secret(String),
}

/// What is done with events.
#[derive(Clone, Debug)]
pub(super) enum Apply {
    Table(TableName),
    Statement(String),
}

impl PostgresConfig {
    pub(in crate::sinks) fn parse(config: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new("postgres", config, KEYS)?;
        let ca_file = fields.string("ca_file")?.map(PathBuf::from);
        if ca_file.as_ref().is_some_and(|file| !file.is_absolute()) {
            return Err(fields.invalid("ca_file", "must be an absolute path"));
        }
        let name = |key: &str, text: &str| {
            TableName::parse(text).ok_or_else(|| {
                fields
                    .invalid(key, "is no name of a table")
                    .hint("As in orders, sales.orders or \"Sales\".\"Orders\".")
            })
        };
        let checkpoint = fields.string("checkpoint")?.unwrap_or(DEFAULT_CHECKPOINT);
        Ok(Self {
            server: server(&fields)?,
            apply: match (fields.string("table")?, fields.string("statement")?) {
                (Some(table), None) => Apply::Table(name("table", table)?),
                (None, Some(statement)) => Apply::Statement(checked_statement(&fields, statement)?),
                (None, None) => {
                    return Err(ConfigError::new(
                        "the config of a sink of kind \"postgres\" needs \"table\" or \"statement\""
                            .to_owned(),
                    ));
                }
                (Some(_), Some(_)) => {
                    return Err(fields.invalid("statement", "cannot be there beside \"table\""));
                }
            },
            checkpoint: name("checkpoint", checkpoint)?,
            remember_hours: fields
                .integer("remember_hours", 1, MOST_HOURS)?
                .unwrap_or(DEFAULT_REMEMBER_HOURS),
            timeout: fields
                .integer("timeout_ms", 1, LONGEST_TIMEOUT_MS)?
                .map(Duration::from_millis),
            ca_file,
            passwordless: false,
        })
    }

    pub(in crate::sinks) fn secret(&self) -> Option<&str> {
        match &self.server {
            Server::Secret(name) => Some(name),
            Server::Dsn(_) => None,
        }
    }

    pub(in crate::sinks) fn file(&self) -> Option<&'static str> {
        self.ca_file.as_ref().map(|_| "ca_file")
    }

    /// Its owner may do as whoever runs the server.
    pub(crate) fn allow_passwordless(&mut self) {
        self.passwordless = true;
    }

    pub(super) fn is_passwordless(&self) -> bool {
        self.passwordless
    }
}

fn server(fields: &Fields) -> Result<Server, ConfigError> {
    match (fields.string("dsn")?, fields.string("secret")?) {
        (Some(text), None) => {
            let dsn = Dsn::parse(text).map_err(|why| fields.invalid("dsn", &why))?;
            if dsn.has_password() {
                return Err(fields.invalid("dsn", "must not hold a password").hint(
                    "Store the whole of it with outbox.set_secret, and name that as \"secret\".",
                ));
            }
            Ok(Server::Dsn(text.to_owned()))
        }
        (None, Some(secret)) => Ok(Server::Secret(secret.to_owned())),
        (Some(_), Some(_)) => Err(fields.invalid("dsn", "cannot be there beside \"secret\"")),
        (None, None) => Err(ConfigError::new(
            "the config of a sink of kind \"postgres\" needs \"dsn\" or \"secret\"".to_owned(),
        )
        .hint("\"secret\" names a secret whose value is the connection string.")),
    }
}

/// Whether it fits its tables is for the other server to say; that it leaves the transaction alone is for us.
fn checked_statement(fields: &Fields, statement: &str) -> Result<String, ConfigError> {
    let first = statement
        .trim_start()
        .split(|c: char| !c.is_ascii_alphabetic())
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    if TRANSACTION_WORDS.contains(&first.as_str()) {
        return Err(fields.invalid("statement", "must not begin or end a transaction"));
    }
    if !statement.contains("$1") {
        return Err(fields
            .invalid("statement", "does not use its parameter")
            .hint("$1 is a jsonb array of CloudEvents, as in insert into … select … from jsonb_array_elements($1) e."));
    }
    Ok(statement.to_owned())
}
