//! Statements whose text holds secrets: kept out of pg_stat_activity and of the server's log.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use pgrx::{PgLogLevel, PgSqlErrorCode, pg_sys};

/// Whatever calls this holds secrets.
const FUNCTION: &[u8] = b"set_secret";
/// What stands where such a statement would.
const INSTEAD: &CStr = c"select outbox.set_secret(...)";

/// The text of the running statement is not to be seen: replaces it, where pg_stat_activity and the log take it from.
pub(crate) fn hide() {
    // SAFETY: a static string outlives the statement; Postgres resets the pointer with the next one.
    unsafe {
        pg_sys::debug_query_string = INSTEAD.as_ptr();
        pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, INSTEAD.as_ptr());
    }
}

static NEXT: OnceLock<pg_sys::emit_log_hook_type> = OnceLock::new();

thread_local! {
    /// A message of our own is under way, in place of one that is not to be seen.
    static REPLACING: Cell<bool> = const { Cell::new(false) };
}

/// From now on this process logs nothing of such statements: settings such as log_statement, log_min_duration_statement and
/// log_min_error_statement would have it log their text, or their parameters.
pub(crate) fn watch_log() {
    // SAFETY: called while the library is loaded, on the main thread; the hook is a static function of a library that is never
    // unloaded.
    unsafe {
        NEXT.get_or_init(|| pg_sys::emit_log_hook);
        pg_sys::emit_log_hook = Some(on_message);
    }
}

/// Called by Postgres with each message that is about to be logged. It must not fail.
unsafe extern "C-unwind" fn on_message(message: *mut pg_sys::ErrorData) {
    // SAFETY: Postgres hands over a message of its own, whose texts are null or terminated strings.
    unsafe {
        if REPLACING.get() {
            (*message).hide_stmt = true;
            (*message).context = std::ptr::null_mut();
        } else if gives_away(&*message) {
            (*message).output_to_server = false;
            replace();
            return;
        } else if is_hidden(pg_sys::debug_query_string) {
            // Where parameters are told.
            (*message).context = std::ptr::null_mut();
        }
        if let Some(next) = NEXT.get().copied().flatten() {
            next(message);
        }
    }
}

fn replace() {
    REPLACING.set(true);
    pgrx::ereport!(
        PgLogLevel::LOG,
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        "pg_outbox: what was to be logged here is left out: a statement that calls outbox.set_secret"
    );
    REPLACING.set(false);
}

/// # Safety
/// The texts of the message, and that of the running statement, are null or terminated strings.
unsafe fn gives_away(message: &pg_sys::ErrorData) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        let statement = pg_sys::debug_query_string;
        let texts = [
            message.message,
            message.detail,
            message.detail_log,
            message.context,
            message.internalquery,
        ];
        texts.iter().any(|text| mentions(*text)) || (mentions(statement) && !is_hidden(statement))
    }
}

/// Whether it is the text that stands in place of a statement.
///
/// # Safety
/// The text is null or a terminated string.
unsafe fn is_hidden(text: *const c_char) -> bool {
    // SAFETY: as the caller promises.
    !text.is_null() && unsafe { CStr::from_ptr(text) } == INSTEAD
}

/// # Safety
/// The text is null or a terminated string.
unsafe fn mentions(text: *const c_char) -> bool {
    if text.is_null() {
        return false;
    }
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(text) }.to_bytes();
    text.windows(FUNCTION.len())
        .any(|piece| piece.eq_ignore_ascii_case(FUNCTION))
}
