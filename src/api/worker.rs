//! outbox.start, stop, tick and prune.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::dispatch::Floors;
use crate::pg::call::{Arguments, TupleStore};
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::{Arg, connected};
use crate::pg::{background, catalog, lock, shmem};
use crate::settings;
use crate::store::{retention, streams};
use crate::worker::tick;

/// The dispatchers of this database, by pid.
fn dispatchers() -> Vec<i32> {
    as_extension(|| {
        connected(|spi| {
            spi.write(
                "select pid from pg_catalog.pg_stat_activity where backend_type = $1 and datid = $2",
                &[Arg::Text(Some(background::DISPATCHER_TYPE)), Arg::Oid(Some(catalog::current_database()))],
            )
            .map(|row| row.i32(0).unwrap_or(0))
        })
    })
}

#[pg_extern(sql = false)]
fn start() -> bool {
    if !settings::enabled() {
        Complaint::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "dispatchers are switched off",
        )
        .hint("Set outbox.enabled to on and reload the configuration.")
        .raise();
    }
    let database = catalog::current_database();
    let was_stopped = shmem::is_stopped(database);
    shmem::set_stopped(database, false);
    if !lock::take_lease(0) {
        return was_stopped;
    }
    lock::give_lease_back(0);
    if shmem::is_there() {
        shmem::ask_launcher(database);
        return true;
    }
    let Some(worker) = background::start_dispatcher(database, None) else {
        Complaint::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            "there is no worker slot for a dispatcher",
        )
        .hint("Raise max_worker_processes.")
        .raise()
    };
    worker.wait_for_startup().is_ok()
}

#[pg_extern(sql = false)]
fn stop() -> bool {
    shmem::set_stopped(catalog::current_database(), true);
    shmem::ask_launcher(catalog::current_database());
    let running = dispatchers();
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
    !running.is_empty()
}

#[pg_extern(sql = false)]
fn tick(call: pg_sys::FunctionCallInfo) {
    if security::is_restricted() {
        Complaint::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "outbox.tick cannot run within the code of a sink",
        )
        .raise();
    }
    let wanted = Arguments::of(call).text(0);
    // A function sink has what is deferred checked before its function returns. What the caller has deferred so far is checked
    // here, with the caller's own rights: a trigger must never run with those of the extension, or of a sink's owner.
    connected(|spi| {
        spi.write("set constraints all immediate", &[]);
    });
    let store = TupleStore::of(call);
    as_extension(|| {
        connected(|spi| {
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
fn prune(stream: Option<&str>) -> i64 {
    as_extension(|| {
        connected(|spi| {
            let streams = match stream {
                Some(name) => vec![
                    streams::named(spi, name)
                        .ok_or_else(|| streams::unknown(name))
                        .or_raise(),
                ],
                None => streams::all(spi),
            };
            let mut removed = 0;
            for stream in streams {
                let mut floors = Floors::default();
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
                    if !step.more {
                        break;
                    }
                    pgrx::check_for_interrupts!();
                }
            }
            i64::try_from(removed).unwrap_or(i64::MAX)
        })
    })
}
