//! outbox.start, stop, tick, tick_usage and prune.

use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::dispatch::Floors;
use crate::pg::call::{Arguments, TupleStore};
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::{Arg, connected};
use crate::pg::{background, catalog, latch, lock, shmem};
use crate::settings;
use crate::store::{rebase, retention, streams, webhooks};
use crate::worker::{tick, usage};

/// How long start and stop wait for what they have asked for.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same where there is no worker slot: another database may be about to give its own.
const IN_VAIN: Duration = Duration::from_secs(4);
const LOOK: Duration = Duration::from_millis(20);

/// The dispatchers of this database, by pid, those of single sinks among them.
fn dispatchers() -> Vec<i32> {
    as_extension(|| {
        connected(|spi| {
            spi.write("select pg_catalog.pg_stat_clear_snapshot()", &[]);
            spi.write(
                "select pid from pg_catalog.pg_stat_activity where backend_type = $1 and datid = $2",
                &[Arg::Text(Some(background::DISPATCHER_TYPE)), Arg::Oid(Some(catalog::current_database()))],
            )
            .map(|row| row.i32(0).unwrap_or(0))
        })
    })
}

/// Looks again and again until it is so, but not for ever. Whether it came to be.
fn until(mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if is_so() {
            return true;
        }
        if start.elapsed() > PATIENCE {
            return false;
        }
        latch::wait(LOOK, None);
    }
}

/// The code of a sink must not run the process that it runs in.
fn check_outside_of_sinks(function: &str) -> Result<(), Complaint> {
    if !security::is_restricted() {
        return Ok(());
    }
    let code = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
    let message = format!("outbox.{function} cannot run within the code of a sink");
    Err(Complaint::new(code, message))
}

/// Why no dispatcher may run here, if so.
fn check_allowed() -> Result<(), Complaint> {
    let refused = |why: &str, hint: &str| {
        let code = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
        Err(Complaint::new(code, why).hint(hint))
    };
    if catalog::in_recovery() {
        return refused(
            "a standby has no dispatcher",
            "The primary delivers; this server will once it is promoted.",
        );
    }
    if !settings::enabled() {
        return refused(
            "dispatchers are switched off",
            "Set outbox.enabled to on and reload the configuration.",
        );
    }
    if !settings::serves(&catalog::current_database_name()) {
        return refused(
            "this database is not among those that get a dispatcher",
            "Add it to outbox.databases and reload the configuration.",
        );
    }
    Ok(())
}

fn no_slot() -> ! {
    Complaint::new(
        PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
        "there is no worker slot for a dispatcher",
    )
    .hint("Raise max_worker_processes.")
    .raise()
}

/// Whether the launcher has no slot for the dispatcher of a database, or has had none for itself.
fn is_short(database: pg_sys::Oid) -> bool {
    shmem::is_there() && (shmem::is_short(database) || !shmem::launcher_lives())
}

#[pg_extern(sql = false)]
fn lacks_slot() -> bool {
    is_short(catalog::current_database())
}

#[pg_extern(sql = false)]
fn start() -> bool {
    check_outside_of_sinks("start").or_raise();
    check_allowed().or_raise();
    let database = catalog::current_database();
    shmem::set_stopped(database, false);
    if lock::dispatcher_runs_in(database) {
        return false;
    }
    if shmem::is_there() {
        shmem::ask_launcher(database);
        let (mut runs, mut short_since) = (false, None);
        until(|| {
            runs = lock::dispatcher_runs_in(database);
            let short = is_short(database).then(|| short_since.unwrap_or_else(Instant::now));
            short_since = short;
            let in_vain = short.is_some_and(|since| since.elapsed() > IN_VAIN);
            runs || in_vain || shmem::is_absent(database)
        });
        if !runs && is_short(database) {
            no_slot();
        }
        return runs;
    }
    let Some(worker) = background::start_dispatcher(database, None) else {
        no_slot()
    };
    if worker.wait_for_startup().is_err() {
        return false;
    }
    let mut runs = false;
    until(|| {
        runs = lock::dispatcher_runs_in(database);
        runs || worker.pid().is_err()
    });
    runs
}

#[pg_extern(sql = false)]
fn stop() -> bool {
    check_outside_of_sinks("stop").or_raise();
    let database = catalog::current_database();
    shmem::set_stopped(database, true);
    let running = dispatchers();
    if running.is_empty() {
        return false;
    }
    shmem::ask_launcher(database);
    as_extension(|| {
        connected(|spi| {
            for &pid in &running {
                spi.write(
                    "select pg_catalog.pg_terminate_backend($1)",
                    &[Arg::I32(Some(pid))],
                );
            }
        });
    });
    // One that calls a function may take a moment.
    until(|| dispatchers().is_empty());
    true
}

#[pg_extern(sql = false)]
fn tick(call: pg_sys::FunctionCallInfo) {
    check_outside_of_sinks("tick").or_raise();
    let wanted = Arguments::of(call).text(0);
    // A function sink has what is deferred checked before its function returns. What the caller has deferred so far is checked
    // here, with the caller's own rights: a trigger must never run with those of the extension, or of a sink's owner.
    connected(|spi| {
        spi.write("set constraints all immediate", &[]);
    });
    let store = TupleStore::of(call);
    if catalog::in_recovery() {
        // What it delivered could not be saved.
        Complaint::new(
            PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION,
            "a standby delivers nothing",
        )
        .raise();
    }
    as_extension(|| {
        connected(|spi| {
            rebase::settle(spi).or_raise();
            let passed = tick::run(spi, wanted.as_deref())
                .ok_or_else(|| super::sinks::unknown(wanted.as_deref().unwrap_or_default()))
                .or_raise();
            for pass in passed {
                let delivered = i64::try_from(pass.delivered).unwrap_or(i64::MAX);
                spi.read(
                    "select $1, $2, $3, $4",
                    &[
                        Arg::Text(Some(&pass.sink)),
                        Arg::I64(Some(delivered)),
                        Arg::Text(Some(pass.outcome)),
                        Arg::Text(pass.error.as_deref()),
                    ],
                )
                .store(&store);
            }
        });
    });
}

#[pg_extern(sql = false)]
fn tick_usage(call: pg_sys::FunctionCallInfo) {
    check_outside_of_sinks("tick_usage").or_raise();
    connected(|spi| {
        spi.write("set constraints all immediate", &[]);
    });
    let store = TupleStore::of(call);
    as_extension(|| {
        connected(|spi| {
            let passed = usage::pass(spi);
            let count = |number: usize| Arg::I64(i64::try_from(number).ok());
            spi.read(
                "select $1, $2, $3",
                &[
                    count(passed.recorded),
                    count(passed.dead_lettered),
                    Arg::Text(passed.error.as_deref()),
                ],
            )
            .store(&store);
        });
    });
}

#[pg_extern(sql = false)]
fn prune(call: pg_sys::FunctionCallInfo) -> i64 {
    let stream = Arguments::of(call).text(0);
    as_extension(|| {
        connected(|spi| {
            rebase::settle(spi).or_raise();
            let streams = match stream.clone() {
                Some(name) => vec![
                    streams::named(spi, &name)
                        .ok_or_else(|| streams::unknown(&name))
                        .or_raise(),
                ],
                None => streams::all(spi),
            };
            // All are sampled before this transaction gets an id.
            let sampled = streams.into_iter().map(|stream| {
                let mut floors = Floors::default();
                if lock::hold_table(stream.oid) {
                    stream.look(spi, &mut floors);
                }
                (stream, floors)
            });
            let mut removed = 0;
            for (mut stream, mut floors) in sampled.collect::<Vec<_>>() {
                let mut behind = stream.pruned_seq;
                loop {
                    let step = retention::step(
                        spi,
                        &stream,
                        behind,
                        settings::retention_min_age(),
                        &mut floors,
                    );
                    removed += step.removed;
                    behind = step.upto;
                    stream.pruned_seq = step.pruned_seq;
                    if !step.more {
                        break;
                    }
                    pgrx::check_for_interrupts!();
                }
            }
            if stream.is_none() {
                let age = settings::webhooks::retention();
                let mut pruned_to = None;
                loop {
                    pruned_to = webhooks::prune(spi, age, pruned_to);
                    if pruned_to.is_none() {
                        break;
                    }
                    pgrx::check_for_interrupts!();
                }
            }
            i64::try_from(removed).unwrap_or(i64::MAX)
        })
    })
}
