//! Transactions of a worker, and subtransactions of any caller, that survive an error inside them.

use std::panic::AssertUnwindSafe;

use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgLogLevel, PgSqlErrorCode, PgTryBuilder};

use super::error::{PgError, is_cancel};
use super::{latch, timeout};

/// Runs `body` in a transaction of its own, in a process that has none open. An error rolls it back and is returned.
pub(crate) fn run<R>(body: impl FnOnce() -> R) -> Result<R, PgError> {
    // SAFETY: called on the main thread of a connected worker, outside a transaction; the snapshot is popped before the commit,
    // and an error leads to AbortCurrentTransaction, which cleans up whatever was left.
    let attempt = AssertUnwindSafe(|| unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        let value = body();
        pg_sys::PopActiveSnapshot();
        pg_sys::CommitTransactionCommand();
        Ok(value)
    });
    PgTryBuilder::new(attempt)
        .catch_others(|caught| {
            // SAFETY: PgTryBuilder has cleared the error state; aborting is what the server's own main loop does here.
            unsafe { pg_sys::AbortCurrentTransaction() };
            Err(PgError::from_caught(&caught))
        })
        .catch_rust_panic(|caught| {
            // SAFETY: as above.
            unsafe { pg_sys::AbortCurrentTransaction() };
            Err(PgError::from_caught(&caught))
        })
        .execute()
}

/// Runs `body` under a snapshot of this moment, where the open transaction takes more than one. What a statement sees is as old as the
/// statement: a lease that is taken in the middle of it may have been held since, and what its holder has read and saved is newer.
pub(crate) fn under_new_snapshot<R>(body: impl FnOnce() -> R) -> R {
    // SAFETY: a transaction is open. The snapshot is popped after the body, or by the end of the (sub)transaction after an error.
    unsafe {
        pg_sys::CommandCounterIncrement();
        pg_sys::PushCopiedSnapshot(pg_sys::GetTransactionSnapshot());
        pg_sys::UpdateActiveSnapshotCommandId();
        let value = body();
        pg_sys::PopActiveSnapshot();
        value
    }
}

/// Runs `body` under a snapshot of this moment whatever the transaction's isolation: for what is remembered beyond it.
pub(crate) fn under_latest_snapshot<R>(body: impl FnOnce() -> R) -> R {
    // SAFETY: a transaction is open. The snapshot is popped after the body, or by the end of the (sub)transaction after an error.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetLatestSnapshot());
        let value = body();
        pg_sys::PopActiveSnapshot();
        value
    }
}

/// The number of the command that runs in the open transaction. One that runs within another has a greater one.
pub(crate) fn command() -> u32 {
    // SAFETY: reads the state of the open transaction.
    unsafe { pg_sys::GetCurrentCommandId(false) }
}

/// A subtransaction, or the transaction itself, among all that the session has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subtransaction {
    /// When its transaction began.
    since: i64,
    id: pg_sys::SubTransactionId,
}

impl Subtransaction {
    pub(crate) fn current() -> Self {
        // SAFETY: reads the state of the open transaction.
        unsafe {
            Self {
                since: pg_sys::GetCurrentTransactionStartTimestamp(),
                id: pg_sys::GetCurrentSubTransactionId(),
            }
        }
    }

    /// Whether it is the one in force or encloses it.
    pub(crate) fn is_open(self) -> bool {
        // SAFETY: as above; numbers of subtransactions begin anew with each transaction.
        unsafe {
            self.since == pg_sys::GetCurrentTransactionStartTimestamp()
                && pg_sys::SubTransactionIsActive(self.id)
        }
    }
}

/// Runs `body` in a subtransaction of the open transaction: an error undoes only what `body` did, and is returned.
/// A cancel request is not swallowed: it goes on upwards, unless it comes from a time limit within `body`.
pub(crate) fn nested<R>(body: impl FnOnce() -> R) -> Result<R, PgError> {
    // SAFETY: a transaction is open; context and resource owner are put back after the subtransaction as PL/pgSQL does it.
    unsafe {
        let context = pg_sys::CurrentMemoryContext;
        let owner = pg_sys::CurrentResourceOwner;
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        let attempt = AssertUnwindSafe(|| {
            let value = body();
            pg_sys::ReleaseCurrentSubTransaction();
            pg_sys::MemoryContextSwitchTo(context);
            pg_sys::CurrentResourceOwner = owner;
            Ok(value)
        });
        let undo = |caught: CaughtError| {
            pg_sys::RollbackAndReleaseCurrentSubTransaction();
            pg_sys::MemoryContextSwitchTo(context);
            pg_sys::CurrentResourceOwner = owner;
            let for_others = is_cancel(&caught) && !timeout::has_expired();
            if for_others && pg_sys::MyBgworkerEntry.is_null() {
                caught.rethrow();
            }
            Err(PgError::from_caught(&caught))
        };
        PgTryBuilder::new(attempt)
            .catch_others(undo)
            .catch_rust_panic(undo)
            .execute()
    }
}

/// Writes a caught error to the server's log; but a worker that is asked to end is cancelled in what it does, which is no news.
pub(crate) fn log(level: PgLogLevel, context: &str, error: &PgError) {
    if latch::terminated() && error.code == PgSqlErrorCode::ERRCODE_QUERY_CANCELED {
        return;
    }
    pgrx::ereport!(
        level,
        error.code,
        format!("pg_outbox: {context}: {}", error.summary())
    );
}
