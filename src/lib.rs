//! pg_outbox: a transactional outbox for PostgreSQL, and everything that carries its events out.
//!
//! This file only wires. Imports point downwards: `api` and `worker` use `capture`, `store`, `sinks`, `envelope`, `dispatch` and `pg`; `sinks`,
//! `envelope` and `dispatch` know nothing of Postgres.

use pgrx::prelude::*;

mod api;
mod capture;
mod dispatch;
mod envelope;
mod pg;
mod settings;
mod sinks;
mod store;
mod worker;

pgrx::pg_module_magic!(name, version);

extension_sql_file!("../sql/schema.sql", name = "schema", bootstrap);
extension_sql_file!(
    "../sql/streams.sql",
    name = "streams",
    requires = ["schema"]
);
extension_sql_file!(
    "../sql/positions.sql",
    name = "positions",
    requires = ["streams"]
);
extension_sql_file!(
    "../sql/cursors.sql",
    name = "cursors",
    requires = ["positions"]
);
extension_sql_file!("../sql/sinks.sql", name = "sinks", requires = ["cursors"]);
extension_sql_file!("../sql/parked.sql", name = "parked", requires = ["sinks"]);
extension_sql_file!(
    "../sql/dead_letters.sql",
    name = "dead_letters",
    requires = ["parked"]
);
extension_sql_file!(
    "../sql/worker.sql",
    name = "worker",
    requires = ["dead_letters"]
);
extension_sql_file!("../sql/audit.sql", name = "audit", requires = ["worker"]);
extension_sql_file!("../sql/usage.sql", name = "usage", requires = ["audit"]);
extension_sql_file!(
    "../sql/webhooks.sql",
    name = "webhooks",
    requires = ["usage"]
);
extension_sql_file!(
    "../sql/webhook_status.sql",
    name = "webhook_status",
    requires = ["webhooks"]
);
extension_sql_file!(
    "../sql/publications.sql",
    name = "publications",
    requires = ["webhook_status"]
);
extension_sql_file!(
    "../sql/status.sql",
    name = "status",
    requires = ["publications"]
);
extension_sql_file!(
    "../sql/capture.sql",
    name = "capture",
    requires = ["status"]
);
extension_sql_file!("../sql/adopt.sql", name = "adopt", requires = ["capture"]);
extension_sql_file!(
    "../sql/backfill.sql",
    name = "backfill",
    requires = ["adopt"]
);
extension_sql_file!("../sql/ddl.sql", name = "ddl", requires = ["backfill"]);
extension_sql_file!(
    "../sql/privileges.sql",
    name = "privileges",
    requires = ["ddl"]
);
extension_sql_file!(
    "../sql/finish.sql",
    name = "finish",
    requires = ["privileges"],
    finalize
);

/// Called when the library is loaded: into the postmaster if it is preloaded, else into each session that uses it.
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    pg::error::keep_backtraces_back();
    settings::define();
    pg::statement::watch_log();
    pg::hint::watch_denials();
    // While pg_upgrade runs, nothing is delivered.
    if pg::background::is_preloading() && !pg::background::is_upgrading() {
        pg::shmem::reserve();
        pg::culprits::reserve();
        pg::background::register_launcher();
    }
}
