//! What to do about a privilege that is missing: Postgres says which one, and cannot know how it is given.
//!
//! Where the library is preloaded every session has this, before the extension's first function is called.

use std::ffi::CStr;
use std::sync::OnceLock;

use pgrx::{PgSqlErrorCode, pg_sys};

static NEXT: OnceLock<pg_sys::emit_log_hook_type> = OnceLock::new();

/// Called while the library is loaded.
pub(crate) fn watch_denials() {
    // SAFETY: on the main thread; the hook is a static function of a library that is never unloaded.
    unsafe {
        NEXT.get_or_init(|| pg_sys::emit_log_hook);
        pg_sys::emit_log_hook = Some(on_message);
    }
}

/// Called by Postgres with each message that is about to be logged, and sent. It must not fail.
unsafe extern "C-unwind" fn on_message(message: *mut pg_sys::ErrorData) {
    // SAFETY: Postgres hands over a message of its own, whose texts are null or terminated strings. The copy lies where the message's
    // own texts do, in the memory in force.
    unsafe {
        if is_of_our_schema(&*message) && (*message).hint.is_null() {
            let hint = c"A superuser gives it: select outbox.grant('role', 'emit'), or 'read', 'operate', 'secrets'.";
            (*message).hint = pg_sys::pstrdup(hint.as_ptr());
        }
        if let Some(next) = NEXT.get().copied().flatten() {
            next(message);
        }
    }
}

/// Whether somebody may not use schema `outbox`. The server's language does not matter: the name comes last, or is quoted, in all.
///
/// # Safety
/// The texts of the message are null or terminated strings.
unsafe fn is_of_our_schema(message: &pg_sys::ErrorData) -> bool {
    let code = PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE as i32;
    if message.sqlerrcode != code || message.message.is_null() || message.funcname.is_null() {
        return false;
    }
    // SAFETY: as the caller promises.
    let (text, function) = unsafe {
        (
            CStr::from_ptr(message.message).to_bytes(),
            CStr::from_ptr(message.funcname).to_bytes(),
        )
    };
    let mut words = text.split(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
    function == b"aclcheck_error" && words.any(|word| word == b"outbox")
}
