//! Capture: every change of a table becomes an event, in the statement that makes it.
//!
//! Statement triggers hand over what a statement has changed as transition tables, and one INSERT … SELECT writes an event per row.
//! - [`statement`] makes that statement out of what was asked for and what the table looks like. It knows no Postgres.
//! - [`recipe`] says the same for most captures in a form that needs no statement, which is several times as fast.
//! - [`programs`] keeps it with its plan, per session and table, until something about the table changes.
//! - [`order`] sees to it that events get their numbers in the order in which a row has changed, also where the code of triggers
//!   changes rows in the middle of a statement.
//! - [`backfill`] writes the rows that were there before.
//! - [`run`] is what happens when a trigger fires.
//!
//! Whoever writes needs no rights here: the insert is run with those of the extension. For that reason nothing in it may run code that
//! users have made, such as a cast to json (`pg/exact.rs`). What a user supplied, the condition, is run with the rights of that user.

pub(crate) mod backfill;
mod order;
mod programs;
mod recipe;
pub(crate) mod run;
mod statement;
