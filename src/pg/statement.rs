//! Statements whose text holds secrets: kept out of pg_stat_activity and of the server's log.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use pgrx::{PgLogLevel, PgSqlErrorCode, pg_sys};

/// A function whose calls hold secrets: values that sign, or a sink's credentials.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Holder {
    SetSecret,
    CreateSink,
    AlterSink,
    CreateWebhook,
    RotateWebhookSecret,
}

const HOLDERS: [Holder; 5] = [
    Holder::SetSecret,
    Holder::CreateSink,
    Holder::AlterSink,
    Holder::CreateWebhook,
    Holder::RotateWebhookSecret,
];

impl Holder {
    fn name(self) -> &'static [u8] {
        match self {
            Holder::SetSecret => b"set_secret",
            Holder::CreateSink => b"create_sink",
            Holder::AlterSink => b"alter_sink",
            Holder::CreateWebhook => b"create_webhook",
            Holder::RotateWebhookSecret => b"rotate_webhook_secret",
        }
    }

    /// What stands where such a statement would.
    fn instead(self) -> &'static CStr {
        match self {
            Holder::SetSecret => c"select outbox.set_secret(...)",
            Holder::CreateSink => c"select outbox.create_sink(...)",
            Holder::AlterSink => c"select outbox.alter_sink(...)",
            Holder::CreateWebhook => c"select outbox.create_webhook(...)",
            Holder::RotateWebhookSecret => c"select outbox.rotate_webhook_secret(...)",
        }
    }
}

/// The text of the running statement, which calls that function, is not to be seen: replaces it, where pg_stat_activity and the log
/// take it from.
pub(crate) fn hide(holder: Holder) {
    let instead = holder.instead().as_ptr();
    // SAFETY: a static string outlives the statement; Postgres resets the pointer with the next one.
    unsafe {
        pg_sys::debug_query_string = instead;
        pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, instead);
    }
}

static NEXT: OnceLock<pg_sys::emit_log_hook_type> = OnceLock::new();

thread_local! {
    /// A message of our own is under way, in place of one that is not to be seen.
    static REPLACING: Cell<bool> = const { Cell::new(false) };
    /// A warning of our own is under way that stands in the log as an error.
    static AS_ERROR: Cell<bool> = const { Cell::new(false) };
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
        if AS_ERROR.get() && !(*message).output_to_client {
            // What a message does is decided by now; this is how it is called. A client would take it for the end of its statement.
            (*message).elevel = PgLogLevel::ERROR as i32;
        }
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

/// Writes a message to the log that stands there as an error, and goes on: something is given up for good. A session's client gets it as
/// a warning.
pub(crate) fn log_as_error(message: &str) {
    AS_ERROR.set(true);
    pgrx::warning!("{message}");
    AS_ERROR.set(false);
}

fn replace() {
    REPLACING.set(true);
    pgrx::ereport!(
        PgLogLevel::LOG,
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        "pg_outbox: what was to be logged here is left out: a statement that holds secrets"
    );
    REPLACING.set(false);
}

/// # Safety
/// The texts of the message, and that of the running statement, are null or terminated strings.
unsafe fn gives_away(message: &pg_sys::ErrorData) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        let statement = pg_sys::debug_query_string;
        // Whatever the function was called by, such as EXECUTE: what is logged of its text.
        let tells_statement = message.elevel == PgLogLevel::LOG as i32 && message.hide_stmt;
        if is_hidden(statement) {
            return tells_statement;
        }
        let texts = [
            message.message,
            message.detail,
            message.detail_log,
            message.context,
            message.internalquery,
            statement,
        ];
        texts.iter().any(|text| mentions(*text))
    }
}

/// Whether it is the text that stands in place of a statement.
///
/// # Safety
/// The text is null or a terminated string.
unsafe fn is_hidden(text: *const c_char) -> bool {
    // SAFETY: as the caller promises.
    !text.is_null()
        && HOLDERS
            .iter()
            .any(|holder| unsafe { CStr::from_ptr(text) } == holder.instead())
}

/// # Safety
/// The text is null or a terminated string.
unsafe fn mentions(text: *const c_char) -> bool {
    if text.is_null() {
        return false;
    }
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(text) }.to_bytes();
    HOLDERS.iter().map(|holder| holder.name()).any(|name| {
        let mut pieces = text.windows(name.len());
        pieces.any(|piece| piece.eq_ignore_ascii_case(name))
    })
}
