//! Waiting: for a wake-up, a signal, a descriptor or a time, with interrupts served; and the signals of a worker.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pgrx::{PgTryBuilder, pg_sys};

static TERMINATED: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);

/// What runs is cancelled, for it may wait for a lock that is not given up for hours.
unsafe extern "C-unwind" fn on_sigterm(signal: i32) {
    TERMINATED.store(true, Ordering::SeqCst);
    // SAFETY: made for signal handlers: it sets flags and the latch.
    unsafe { pg_sys::StatementCancelHandler(signal) };
}

unsafe extern "C-unwind" fn on_sighup(_signal: i32) {
    RELOAD.store(true, Ordering::SeqCst);
    // SAFETY: SetLatch is made for signal handlers; pgrx' wrapper around it neither allocates nor locks.
    unsafe { pg_sys::SetLatch(pg_sys::MyLatch) };
}

/// As the server's own backends do it.
unsafe extern "C-unwind" fn on_sigterm_at_once(signal: i32) {
    // SAFETY: made for signal handlers: it sets flags and the latch.
    unsafe { pg_sys::die(signal) };
}

/// Nothing that runs is cancelled any more.
unsafe extern "C-unwind" fn on_late_sigterm(_signal: i32) {
    TERMINATED.store(true, Ordering::SeqCst);
}

type Handler = unsafe extern "C-unwind" fn(i32);

fn handle(signal: u32, handler: Handler) {
    // SAFETY: the handlers do nothing but store a flag and set a latch.
    #[cfg(not(feature = "pg18"))]
    unsafe {
        pg_sys::pqsignal(signal.cast_signed(), Some(handler));
    }
    // SAFETY: as above.
    #[cfg(feature = "pg18")]
    unsafe {
        pg_sys::pqsignal_be(signal.cast_signed(), Some(handler));
    }
}

/// Installs a worker's handlers: SIGTERM asks it to end in order, SIGHUP to read its settings again.
pub(crate) fn attach_signals() {
    handle(pg_sys::SIGTERM, on_sigterm);
    handle(pg_sys::SIGHUP, on_sighup);
    // SAFETY: the first thing a worker does once its handlers stand.
    unsafe { pg_sys::BackgroundWorkerUnblockSignals() };
}

/// Runs user code in a worker: while it runs, SIGTERM ends the process at its next interrupt check instead of waiting for it.
pub(crate) fn interruptible<R>(body: impl FnOnce() -> R) -> R {
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            handle(pg_sys::SIGTERM, on_sigterm);
        }
    }
    // SAFETY: reads a pointer that is set once, when a worker starts.
    if unsafe { pg_sys::MyBgworkerEntry.is_null() } {
        return body();
    }
    handle(pg_sys::SIGTERM, on_sigterm_at_once);
    let _back = Back;
    body()
}

/// The worker is about to end by itself: a SIGTERM that comes now, or came a moment ago, must not cancel what it still has to save.
pub(crate) fn end_in_order() {
    handle(pg_sys::SIGTERM, on_late_sigterm);
    serve_interrupts();
}

/// Whether the worker has been asked to end.
pub(crate) fn terminated() -> bool {
    TERMINATED.load(Ordering::SeqCst)
}

/// Reads the configuration again if that was asked for. True if it did.
pub(crate) fn reload_if_asked() -> bool {
    let asked = RELOAD.swap(false, Ordering::SeqCst);
    if asked {
        // SAFETY: on the main thread, outside a transaction.
        unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) };
    }
    asked
}

/// Serves what has come in for a worker that is between two transactions: barriers, and cancel requests, which have nothing to
/// cancel here and must not end the process.
fn serve_interrupts() {
    let check = || {
        pgrx::check_for_interrupts!();
    };
    PgTryBuilder::new(check).catch_others(|_| ()).execute();
}

/// A worker's wait between two transactions: as [`wait`], but a cancel request only ends the wait, and what is waited for is
/// made known to the kernel once and not at every wait.
pub(crate) fn rest(timeout: Duration, readable: Option<&EventFd>) -> bool {
    let set = wait_set(readable);
    // SAFETY: the set was made for this process' latch and a descriptor that is open as long as `readable` is borrowed.
    let woken = unsafe {
        let mut happened = pg_sys::WaitEvent::default();
        let count = pg_sys::WaitEventSetWait(
            set,
            milliseconds(timeout),
            &raw mut happened,
            1,
            pg_sys::PG_WAIT_EXTENSION,
        );
        count > 0 && happened.events & pg_sys::WL_LATCH_SET != 0
    };
    reset_after(woken);
    serve_interrupts();
    woken
}

/// The kernel's side of a worker's waits, for the latch and one descriptor.
struct WaitSet {
    readable: Option<u64>,
    set: *mut pg_sys::WaitEventSet,
}

thread_local! {
    static WAIT_SET: RefCell<Option<WaitSet>> = const { RefCell::new(None) };
}

fn wait_set(readable: Option<&EventFd>) -> *mut pg_sys::WaitEventSet {
    let wanted = readable.map(|readable| readable.number);
    WAIT_SET.with_borrow_mut(|kept| {
        if let Some(kept) = kept.as_ref().filter(|kept| kept.readable == wanted) {
            return kept.set;
        }
        // SAFETY: on the main thread. The old set, if any, is nobody else's; the new one lives until it is replaced.
        let set = unsafe {
            if let Some(old) = kept.take() {
                pg_sys::FreeWaitEventSet(old.set);
            }
            #[cfg(any(feature = "pg15", feature = "pg16"))]
            let set = pg_sys::CreateWaitEventSet(pg_sys::TopMemoryContext, 3);
            #[cfg(any(feature = "pg17", feature = "pg18"))]
            let set = pg_sys::CreateWaitEventSet(std::ptr::null_mut(), 3);
            let add = |events, descriptor, latch| {
                pg_sys::AddWaitEventToSet(set, events, descriptor, latch, std::ptr::null_mut())
            };
            add(pg_sys::WL_LATCH_SET, NO_DESCRIPTOR, pg_sys::MyLatch);
            add(
                pg_sys::WL_EXIT_ON_PM_DEATH,
                NO_DESCRIPTOR,
                std::ptr::null_mut(),
            );
            if let Some(readable) = readable {
                add(
                    pg_sys::WL_SOCKET_READABLE,
                    readable.descriptor(),
                    std::ptr::null_mut(),
                );
            }
            set
        };
        *kept = Some(WaitSet {
            readable: wanted,
            set,
        });
        set
    })
}

const NO_DESCRIPTOR: i32 = -1;

/// Waits for the latch, for `readable` to become readable, or for the time to pass; true if it was the latch. Ends the process if
/// the postmaster is gone; raises an error for a cancel request.
pub(crate) fn wait(timeout: Duration, readable: Option<&EventFd>) -> bool {
    let mut events = pg_sys::WL_LATCH_SET | pg_sys::WL_EXIT_ON_PM_DEATH | pg_sys::WL_TIMEOUT;
    if readable.is_some() {
        events |= pg_sys::WL_SOCKET_READABLE;
    }
    // SAFETY: on the main thread; the descriptor is open as long as `readable` is borrowed.
    let happened = unsafe {
        pg_sys::WaitLatchOrSocket(
            pg_sys::MyLatch,
            events.cast_signed(),
            readable.map_or(NO_DESCRIPTOR, EventFd::descriptor),
            milliseconds(timeout),
            pg_sys::PG_WAIT_EXTENSION,
        )
    };
    let woken = happened.cast_unsigned() & pg_sys::WL_LATCH_SET != 0;
    reset_after(woken);
    pgrx::check_for_interrupts!();
    woken
}

/// Rounded up: waking a moment too early would spin.
fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_micros().div_ceil(1000))
        .unwrap_or(i64::MAX)
        .min(i64::from(i32::MAX))
}

/// Only after it was the latch that ended a wait: one that is set after something else has ended the wait ends the next one, and no
/// wake-up is lost.
fn reset_after(woken: bool) {
    if woken {
        // SAFETY: on the main thread.
        unsafe { pg_sys::ResetLatch(pg_sys::MyLatch) };
    }
}

/// A descriptor by which another thread wakes the main one.
pub(crate) struct EventFd {
    descriptor: OwnedFd,
    /// Unlike the descriptor's, this process never gives it to another.
    number: u64,
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: eventfd has no preconditions; the descriptor it returns is nobody else's.
        unsafe {
            let descriptor = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            if descriptor < 0 {
                Err(io::Error::last_os_error())
            } else {
                Ok(Self {
                    descriptor: OwnedFd::from_raw_fd(descriptor),
                    number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
                })
            }
        }
    }

    fn descriptor(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }

    /// Makes it readable. From any thread.
    pub(crate) fn set(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes from a live variable; it fails only when the counter is full, and then it is readable already.
        unsafe { libc::write(self.descriptor(), (&raw const one).cast(), size_of::<u64>()) };
    }

    /// Makes it unreadable again.
    pub(crate) fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a live variable; fails only when there is nothing to read.
        unsafe { libc::read(self.descriptor(), (&raw mut count).cast(), size_of::<u64>()) };
    }
}

/// Runs `body`, which starts a thread, with all signals blocked, so that Postgres' handlers run on the main thread alone.
pub(crate) fn without_signals<R>(body: impl FnOnce() -> R) -> R {
    // SAFETY: plain calls on local sets; the old mask is put back on the same thread.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = body();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}
