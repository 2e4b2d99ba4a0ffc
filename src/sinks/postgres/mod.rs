//! Kind `postgres`: events applied to another PostgreSQL, once each.
//!
//! A delivery is one transaction over there: it looks up which of the events are applied already, inserts the others into a table or
//! hands them to a statement, and notes them in the checkpoint table. So an event takes effect and is noted, or neither, and what the
//! cursor says does not matter: neither after a crash between that commit and the save of the cursor, nor when the cursor is lost or
//! comes from an old dump (`sinks/checkpoint.rs` says why a note per event is what it takes).
//!
//! A transaction begins with an advisory lock in the sink's name. The connection of a dispatcher that was killed may live on over
//! there until its statement is through, and then commit; whoever carries on waits for it, and sees what it noted.

mod client;
mod config;
mod dsn;
mod names;
mod refusal;
mod session;
mod statement;
mod tls;
mod trust;

pub(crate) use client::Postgres;
pub(crate) use config::PostgresConfig;
