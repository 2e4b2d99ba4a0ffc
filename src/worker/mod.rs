//! Processes and their loops: the launcher, one for the cluster; a dispatcher per database, and one per function sink.
//!
//! A dispatcher has two sides that share nothing but channels. The main thread is the only one that calls Postgres: it reads
//! events, saves cursors and writes dead letters, in short transactions. The I/O thread runs the sinks' network clients. No
//! transaction is open while a delivery is in flight.

mod announcements;
mod backfilling;
mod course;
mod dispatcher;
mod entry;
pub(crate) mod function;
mod helpers;
mod io;
mod launcher;
mod maintenance;
mod parking;
pub(crate) mod pull;
mod reader;
mod redelivery;
mod sealing;
pub(crate) mod shaping;
pub(crate) mod tick;
pub(crate) mod usage;
mod user_code;
pub(crate) mod webhooks;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pgrx::pg_sys;

use crate::dispatch::Time;

/// The time, as engines count it.
pub(crate) fn now() -> Time {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// From now until then.
pub(crate) fn until(time: Time, now: Time) -> Duration {
    Duration::from_millis(time.0.saturating_sub(now.0))
}

/// Entry of the launcher, called by name.
#[pgrx::pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn outbox_launcher_main(_arg: pg_sys::Datum) {
    launcher::main()
}

/// Entry of a dispatcher, called by name; the argument is the database's oid, the extra data a sink's id or nothing.
#[pgrx::pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn outbox_dispatcher_main(arg: pg_sys::Datum) {
    let sink = pgrx::bgworkers::BackgroundWorker::get_extra();
    let sink = (!sink.is_empty()).then(|| sink.to_owned());
    let database = pg_sys::Oid::from(arg.value() as u32);
    if sink.as_deref() == Some(usage::PROCESS) {
        usage::main(database);
    }
    dispatcher::main(database, sink)
}
