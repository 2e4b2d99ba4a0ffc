//! Background workers: registering them, and what each does first.

use std::ffi::{CStr, CString};
use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime, DynamicBackgroundWorker};
use pgrx::{IntoDatum, pg_sys};

use super::{latch, security};

const LIBRARY: &str = "pg_outbox";
/// As pg_stat_activity shows them in backend_type.
pub(crate) const LAUNCHER_TYPE: &str = "pg_outbox launcher";
pub(crate) const DISPATCHER_TYPE: &str = "pg_outbox dispatcher";

/// Whether pg_upgrade has started this server: for itself alone.
pub(crate) fn is_upgrading() -> bool {
    // SAFETY: a plain global, set by the server's command line.
    unsafe { pg_sys::IsBinaryUpgrade }
}

/// Registers the launcher, while the library is being preloaded. It starts when recovery is over: a standby is quiet.
pub(crate) fn register_launcher() {
    BackgroundWorkerBuilder::new(LAUNCHER_TYPE)
        .set_type(LAUNCHER_TYPE)
        .set_library(LIBRARY)
        .set_function("outbox_launcher_main")
        .enable_shmem_access(None)
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(Duration::from_secs(5)))
        .load();
}

/// Starts a dispatcher in a database: the one for all its sinks, or one for a single sink. It is not restarted by the
/// postmaster; the caller is told when it ends.
pub(crate) fn start_dispatcher(
    database: pg_sys::Oid,
    sink: Option<&str>,
) -> Option<DynamicBackgroundWorker> {
    // Names are cut by the server at 96 bytes.
    let name = match sink {
        Some(sink) => format!("{DISPATCHER_TYPE} for sink {}", &sink[..sink.len().min(50)]),
        None => format!("{DISPATCHER_TYPE} for database {}", database.to_u32()),
    };
    BackgroundWorkerBuilder::new(&name)
        .set_type(DISPATCHER_TYPE)
        .set_library(LIBRARY)
        .set_function("outbox_dispatcher_main")
        .enable_shmem_access(None)
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(None)
        .set_argument(database.into_datum())
        .set_extra(sink.unwrap_or(""))
        .set_notify_pid(std::process::id().cast_signed())
        .load_dynamic()
        .ok()
}

/// First steps of the launcher: it is connected to no database, so that it stands in nobody's way.
pub(crate) fn begin_launcher() {
    latch::attach_signals();
    // SAFETY: called once, first, in a worker that asked for a database connection.
    unsafe { pg_sys::BackgroundWorkerInitializeConnection(std::ptr::null(), std::ptr::null(), 0) };
    set(c"application_name", LAUNCHER_TYPE);
}

/// First steps of a dispatcher: connects it as the bootstrap superuser, with settings under which the plans of our own
/// statements are the same whatever the statistics say.
pub(crate) fn begin_dispatcher(database: pg_sys::Oid, sink: Option<&str>) {
    latch::attach_signals();
    // SAFETY: called once, first, in a worker that asked for a database connection.
    unsafe {
        pg_sys::BackgroundWorkerInitializeConnectionByOid(database, pg_sys::InvalidOid, 0);
    }
    for (name, value) in [
        // What SQL of our own means: as security::as_extension sets it in other sessions.
        (c"search_path", "pg_catalog, outbox, pg_temp"),
        (c"standard_conforming_strings", "on"),
        (c"transform_null_equals", "off"),
        (c"default_transaction_isolation", "read committed"),
        (c"default_transaction_read_only", "off"),
        (c"statement_timeout", "0"),
        (c"lock_timeout", "0"),
        (c"idle_in_transaction_session_timeout", "0"),
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        (c"transaction_timeout", "0"),
    ] {
        set(name, value);
    }
    for (name, value) in security::OUR_PLANNING
        .into_iter()
        .chain([security::OUR_PATIENCE])
    {
        set_in_session(name, value);
    }
    match sink {
        Some(sink) => set(c"application_name", &format!("pg_outbox sink {sink}")),
        None => set(c"application_name", DISPATCHER_TYPE),
    }
}

/// How many worker processes the server has room for.
pub(crate) fn slots() -> usize {
    // SAFETY: a setting that is fixed when the server starts.
    usize::try_from(unsafe { pg_sys::max_worker_processes }).unwrap_or(0)
}

/// Asks a worker that this process has started to end. The caller has seen that it runs.
pub(crate) fn terminate(pid: i32) {
    // SAFETY: sends a signal.
    unsafe { libc::kill(pid, libc::SIGTERM) };
}

/// Whether the process that has started this worker is still there.
pub(crate) fn starter_lives() -> bool {
    // SAFETY: reads what the postmaster has set up before the worker ran; no signal is sent.
    unsafe {
        let entry = pg_sys::MyBgworkerEntry;
        let starter = if entry.is_null() {
            0
        } else {
            (*entry).bgw_notify_pid
        };
        starter == 0 || libc::kill(starter, 0) == 0
    }
}

/// A setting of the worker's own session, whatever the configuration says now or later.
fn set(name: &CStr, value: &str) {
    set_from(pg_sys::GucSource::PGC_S_OVERRIDE, name, value);
}

/// The same, but what the configuration says is kept, to be gone back to.
fn set_in_session(name: &CStr, value: &str) {
    set_from(pg_sys::GucSource::PGC_S_SESSION, name, value);
}

fn set_from(source: pg_sys::GucSource::Type, name: &CStr, value: &str) {
    let Ok(value) = CString::new(value) else {
        return;
    };
    // SAFETY: the strings are copied; the session is nobody else's.
    unsafe {
        pg_sys::SetConfigOption(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            source,
        );
    }
}

/// The commit of the open transaction need not be flushed: if a crash undoes it, the cursor stands where it stood, and what was
/// delivered since is delivered again.
pub(crate) fn relax_commit() {
    // SAFETY: static strings; it ends with the transaction.
    unsafe {
        pg_sys::set_config_option(
            c"synchronous_commit".as_ptr(),
            c"off".as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            pg_sys::GucAction::GUC_ACTION_LOCAL,
            true,
            0,
            false,
        );
    }
}

/// What the worker shows in pg_stat_activity: a query when busy, or that it is idle.
pub(crate) fn report_activity(activity: Option<&str>) {
    let text = activity.and_then(|text| CString::new(text).ok());
    // SAFETY: the string is copied by the callee.
    unsafe {
        match &text {
            Some(text) => {
                pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, text.as_ptr())
            }
            None => {
                pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, std::ptr::null())
            }
        }
    }
}

/// What the worker shows in pg_stat_activity that rests most of the time.
pub(crate) fn report_rest(activity: &str) {
    let Ok(text) = CString::new(activity) else {
        return;
    };
    // SAFETY: the string is copied by the callee.
    unsafe { pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, text.as_ptr()) };
}

/// Sends the statistics of what was done, as a backend does between statements.
pub(crate) fn report_statistics() {
    // SAFETY: outside a transaction, on the main thread.
    unsafe { pg_sys::pgstat_report_stat(false) };
}

/// Ends the process so that the postmaster does not start it again.
#[allow(
    unreachable_code,
    reason = "the bindings of version 18 do not say that it never returns"
)]
pub(crate) fn end(code: i32) -> ! {
    // SAFETY: the regular way out of a process of Postgres.
    unsafe { pg_sys::proc_exit(code) };
    unreachable!("proc_exit returns to nobody")
}

/// Whether the library is being loaded by shared_preload_libraries.
pub(crate) fn is_preloading() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}
