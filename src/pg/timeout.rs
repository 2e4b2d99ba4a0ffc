//! A time limit for code that runs in this process: what statement_timeout is for the statements of a client.
//!
//! The timer is one of its own, beside those of the server, so that in a session statement_timeout goes on counting.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use pgrx::pg_sys;

// From utils/timeout.h, which pgrx does not bind.
unsafe extern "C-unwind" {
    fn RegisterTimeout(id: c_int, handler: Option<unsafe extern "C-unwind" fn()>) -> c_int;
    fn enable_timeout_after(id: c_int, delay_ms: c_int);
    fn disable_timeout(id: c_int, keep_indicator: bool);
}

/// The first id that is free for extensions, in the enum TimeoutId.
const USER_TIMEOUT: c_int = if cfg!(any(feature = "pg15", feature = "pg16")) {
    12
} else {
    13
};

const UNREGISTERED: c_int = -1;
static TIMER: AtomicI32 = AtomicI32::new(UNREGISTERED);
static EXPIRED: AtomicBool = AtomicBool::new(false);

/// In a signal handler.
unsafe extern "C-unwind" fn expire() {
    EXPIRED.store(true, Ordering::SeqCst);
    // SAFETY: made for signal handlers: it sets flags and the latch.
    unsafe { pg_sys::StatementCancelHandler(pg_sys::SIGINT.cast_signed()) };
}

/// Of this process.
fn timer() -> c_int {
    let registered = TIMER.load(Ordering::SeqCst);
    if registered != UNREGISTERED {
        return registered;
    }
    // SAFETY: the first call in this process; there is room for ten such timers.
    let id = unsafe { RegisterTimeout(USER_TIMEOUT, Some(expire)) };
    TIMER.store(id, Ordering::SeqCst);
    id
}

/// Switches the timer off when it goes out of scope, also while an error goes up.
struct Off(c_int);

impl Drop for Off {
    fn drop(&mut self) {
        // SAFETY: takes a timer off the list, if it is on it. A cancel request that nobody has seen any more would hit what
        // comes next; it was for what is over.
        unsafe {
            disable_timeout(self.0, false);
            if has_expired() {
                pg_sys::QueryCancelPending = 0;
            }
        }
    }
}

/// Runs `body`, which is cancelled if it takes longer than `limit`. [`take_expired`] is to be asked afterwards.
pub(crate) fn within<R>(limit: Option<Duration>, body: impl FnOnce() -> R) -> R {
    EXPIRED.store(false, Ordering::SeqCst);
    let Some(limit) = limit else {
        return body();
    };
    let id = timer();
    let off = Off(id);
    let milliseconds = c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: a timer that was registered, and a delay that is greater than zero.
    unsafe { enable_timeout_after(id, milliseconds.max(1)) };
    let value = body();
    drop(off);
    value
}

/// Whether what ran last with a limit has come to it.
pub(super) fn has_expired() -> bool {
    EXPIRED.load(Ordering::SeqCst)
}

/// The same, once.
pub(crate) fn take_expired() -> bool {
    EXPIRED.swap(false, Ordering::SeqCst)
}
