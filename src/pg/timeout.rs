//! A time limit for code that runs in this process: what statement_timeout is for the statements of a client.
//!
//! The timer is one of its own, beside those of the server, so that in a session statement_timeout goes on counting. Code may catch a
//! cancel request and go on: it is cancelled again and again, and a worker, for which nobody else may wait, ends in the end.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use pgrx::pg_sys;

use super::culprits::{self, Culprit};

// From utils/timeout.h, which pgrx does not bind.
unsafe extern "C-unwind" {
    fn RegisterTimeout(id: c_int, handler: Option<unsafe extern "C-unwind" fn()>) -> c_int;
    fn enable_timeout_every(id: c_int, fin_time: pg_sys::TimestampTz, delay_ms: c_int);
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

/// Code that is over its limit is cancelled so often, at such intervals, before the worker that runs it ends.
const CANCELS: u32 = 6;
const INTERVAL_MS: c_int = 1000;
static CANCELLED: AtomicU32 = AtomicU32::new(0);
static CULPRIT: AtomicI64 = AtomicI64::new(0);

/// In a signal handler.
unsafe extern "C-unwind" fn expire() {
    EXPIRED.store(true, Ordering::SeqCst);
    let cancelled = CANCELLED.fetch_add(1, Ordering::SeqCst) + 1;
    // SAFETY: reads pointers and numbers that are set once, when a process starts; the handlers are made to be called here: they set
    // flags and the latch.
    unsafe {
        if cancelled <= CANCELS || pg_sys::MyBgworkerEntry.is_null() {
            pg_sys::StatementCancelHandler(pg_sys::SIGINT.cast_signed());
            return;
        }
        if cancelled == CANCELS + 1 {
            culprits::note(pg_sys::MyDatabaseId, CULPRIT.load(Ordering::SeqCst));
        }
        pg_sys::die(pg_sys::SIGTERM.cast_signed());
    }
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

/// How long something may take, and whose it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) time: Duration,
    pub(crate) culprit: Culprit,
}

/// Runs `body`, which is cancelled if it takes longer than `limit`. [`take_expired`] is to be asked afterwards.
pub(crate) fn within<R>(limit: Option<Limit>, body: impl FnOnce() -> R) -> R {
    EXPIRED.store(false, Ordering::SeqCst);
    let Some(limit) = limit else {
        return body();
    };
    CANCELLED.store(0, Ordering::SeqCst);
    CULPRIT.store(limit.culprit.code(), Ordering::SeqCst);
    let id = timer();
    let off = Off(id);
    let microseconds = i64::try_from(limit.time.as_micros()).unwrap_or(i64::MAX / 4);
    // SAFETY: a timer that was registered, a time to come, and an interval that is greater than zero.
    unsafe {
        let end = pg_sys::GetCurrentTimestamp().saturating_add(microseconds.max(1000));
        enable_timeout_every(id, end, INTERVAL_MS);
    }
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
