//! The functions of schema outbox that are written in Rust: arguments checked, errors with their SQLSTATE, and no more. Their SQL
//! declarations stand in sql/.

mod audit;
mod capture;
mod emit;
mod positions;
mod pull;
mod rebase;
mod replication;
mod secrets;
mod sinks;
mod usage;
mod webhooks;
mod worker;
