//! Locks: the lease of a sink, the mark of a session that restores a dump, and two looks at whether somebody wants this database or
//! the extension gone.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::CStr;

use pgrx::pg_sys;

thread_local! {
    /// Leases that this session has taken and not given back. It may have lost some since.
    static LEASES: RefCell<BTreeSet<i32>> = const { RefCell::new(BTreeSet::new()) };
}

/// A lease is an advisory lock of a kind (fourth field 3) that no SQL function can take, so that no user is able to hold it by
/// accident or on purpose. It shows in pg_locks as `advisory` with objsubid 3.
const LEASE_KIND: u16 = 3;
pub(crate) const LEASE_CLASS: u32 = 0x6f75_7462;
const BACKFILL_CLASS: u32 = LEASE_CLASS + 1;
const ADVISORY: u8 = pg_sys::LockTagType::LOCKTAG_ADVISORY as u8;
const USER_METHOD: u8 = 2;
const DEFAULT_METHOD: u8 = 1;

/// The lease of a database's dispatcher; those of sinks have their numbers, from 1 on.
pub(crate) const DISPATCHER: i32 = 0;
/// No lease: see [`mark_restore`].
const RESTORE: i32 = -1;

fn lease_tag(number: i32) -> pg_sys::LOCKTAG {
    // SAFETY: a plain global of this process.
    lease_tag_in(unsafe { pg_sys::MyDatabaseId }, number)
}

fn lease_tag_in(database: pg_sys::Oid, number: i32) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        locktag_field1: database.to_u32(),
        locktag_field2: LEASE_CLASS,
        locktag_field3: number.cast_unsigned(),
        locktag_field4: LEASE_KIND,
        locktag_type: ADVISORY,
        locktag_lockmethodid: USER_METHOD,
    }
}

fn try_acquire(tag: &pg_sys::LOCKTAG, mode: i32, session: bool) -> pg_sys::LockAcquireResult::Type {
    // SAFETY: the tag is well formed and outlives the call; dontWait means that nothing is waited for.
    unsafe { pg_sys::LockAcquire(tag, mode, session, true) }
}

fn release(tag: &pg_sys::LOCKTAG, mode: i32, session: bool) {
    // SAFETY: as above; releasing what is not held is a warning, not a fault.
    unsafe { pg_sys::LockRelease(tag, mode, session) };
}

const EXCLUSIVE: i32 = pg_sys::ExclusiveLock as i32;

/// Takes the lease of the sink with this number for the session, without waiting. True if it is held now.
pub(crate) fn take_lease(number: i32) -> bool {
    let tag = lease_tag(number);
    if holds_lease(number) {
        return true;
    }
    let taken =
        try_acquire(&tag, EXCLUSIVE, true) != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL;
    if taken {
        LEASES.with_borrow_mut(|leases| leases.insert(number));
    }
    taken
}

/// Runs what a user supplied, and takes the leases again that it may have given away: pg_advisory_unlock_all() is everybody's to
/// call. One that another session was quick enough to take is lost, which whoever holds it notices before the next save.
pub(crate) fn keeping_leases<R>(body: impl FnOnce() -> R) -> R {
    let held = LEASES.with_borrow(|leases| {
        let held = leases.iter().filter(|&&number| holds_lease(number));
        held.copied().collect::<Vec<_>>()
    });
    let result = body();
    for number in held {
        take_lease(number);
    }
    result
}

/// Whether this session holds the lease.
pub(crate) fn holds_lease(number: i32) -> bool {
    // SAFETY: looks into this process' own lock table.
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    unsafe {
        pg_sys::LockHeldByMe(&lease_tag(number), EXCLUSIVE)
    }
    // SAFETY: as above.
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    unsafe {
        pg_sys::LockHeldByMe(&lease_tag(number), EXCLUSIVE, false)
    }
}

/// The same for the open transaction: the next holder sees what this one commits, and what it takes back has never been held.
pub(crate) fn take_lease_for_transaction(number: i32) -> bool {
    holds_lease(number)
        || try_acquire(&lease_tag(number), EXCLUSIVE, false)
            != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// Keeps others from carrying on the backfill with this id until the open transaction ends. True if nobody else does.
pub(crate) fn take_backfill_for_transaction(id: i64) -> bool {
    let tag = pg_sys::LOCKTAG {
        locktag_field2: BACKFILL_CLASS,
        // Of two that are so far apart one may have to wait for the other.
        locktag_field3: u32::try_from(id & i64::from(u32::MAX)).unwrap_or(0),
        ..lease_tag(0)
    };
    try_acquire(&tag, EXCLUSIVE, false) != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// Gives back what the session holds.
pub(crate) fn give_lease_back(number: i32) {
    let taken = LEASES.with_borrow_mut(|leases| leases.remove(&number));
    if taken && holds_lease(number) {
        release(&lease_tag(number), EXCLUSIVE, true);
    }
}

/// Turns the session's lease into one that ends with the open transaction, so that the next holder sees what this one committed.
pub(crate) fn give_lease_back_at_commit(number: i32) {
    let tag = lease_tag(number);
    try_acquire(&tag, EXCLUSIVE, false);
    release(&tag, EXCLUSIVE, true);
    LEASES.with_borrow_mut(|leases| leases.remove(&number));
}

/// Whether a dispatcher runs in that database, whoever has started it. Its lease is tried for an instant; one that starts at that very
/// moment tries again.
pub(crate) fn dispatcher_runs_in(database: pg_sys::Oid) -> bool {
    is_taken(&lease_tag_in(database, DISPATCHER), EXCLUSIVE)
}

/// Until this session ends, what is in this database is not complete: see store/rebase.rs.
pub(crate) fn mark_restore() {
    // SAFETY: the tag is well formed; nobody waits for long with a conflicting lock.
    unsafe { pg_sys::LockAcquire(&lease_tag(RESTORE), RESTORING, true, false) };
}

/// Whether another session that restores a dump into this database is still there.
pub(crate) fn restore_goes_on() -> bool {
    is_taken(&lease_tag(RESTORE), LOOKING)
}

/// Two that restore do not exclude each other, and neither do two that look.
const RESTORING: i32 = pg_sys::RowExclusiveLock as i32;
const LOOKING: i32 = pg_sys::ShareLock as i32;

/// Whether somebody else holds a lock against this mode: it is tried for an instant.
fn is_taken(tag: &pg_sys::LOCKTAG, mode: i32) -> bool {
    let taken = try_acquire(tag, mode, true) == pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL;
    if !taken {
        release(tag, mode, true);
    }
    taken
}

/// The tag of a database object; of one that all share, the database is 0.
fn object_tag(database: u32, class: pg_sys::Oid, object: pg_sys::Oid) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        locktag_field1: database,
        locktag_field2: class.to_u32(),
        locktag_field3: object.to_u32(),
        locktag_field4: 0,
        locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
        locktag_lockmethodid: DEFAULT_METHOD,
    }
}

/// Whether DROP DATABASE, RENAME or CREATE DATABASE … TEMPLATE waits for this database's sessions to leave. Needs no
/// transaction: the lock that every session takes while it connects is tried for an instant.
pub(crate) fn database_is_wanted(database: pg_sys::Oid) -> bool {
    let tag = object_tag(0, pg_sys::DatabaseRelationId, database);
    is_taken(&tag, pg_sys::RowExclusiveLock as i32)
}

/// Whether somebody holds the extension, or waits for it, to drop or alter it. Needs no transaction.
pub(crate) fn extension_is_wanted(extension: pg_sys::Oid) -> bool {
    // SAFETY: a plain global of this process.
    let database = unsafe { pg_sys::MyDatabaseId }.to_u32();
    let tag = object_tag(database, pg_sys::ExtensionRelationId, extension);
    is_taken(&tag, pg_sys::AccessShareLock as i32)
}

/// Holds a table for reading until the open transaction ends; false if somebody holds it, or waits for it, against readers: whoever
/// drops or rewrites one stream's table must not stop those who read another's.
pub(crate) fn hold_table(table: u32) -> bool {
    let mode = pg_sys::AccessShareLock as i32;
    // SAFETY: a transaction is open; does not wait. A table that is gone can be locked like any other.
    unsafe { pg_sys::ConditionalLockRelationOid(pg_sys::Oid::from(table), mode) }
}

/// What a table is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Reading,
    Writing,
}

/// Holds tables of schema outbox until the open transaction ends; false if somebody holds one of them against that, or waits for it:
/// an administrator who has altered, truncated or locked it, and has not committed yet.
pub(crate) fn hold_ours(tables: &[&CStr], purpose: Use) -> bool {
    let mode = match purpose {
        Use::Reading => pg_sys::AccessShareLock,
        Use::Writing => pg_sys::RowExclusiveLock,
    };
    // SAFETY: catalog look-ups in a transaction; locks are tried, and not waited for.
    unsafe {
        let schema = pg_sys::get_namespace_oid(c"outbox".as_ptr(), true);
        tables.iter().all(|table| {
            let table = pg_sys::get_relname_relid(table.as_ptr(), schema);
            pg_sys::ConditionalLockRelationOid(table, mode.cast_signed())
        })
    }
}

/// Holds a table until the open transaction ends, as whoever writes to it does: what it is like stays as it is. Waits for those who change
/// that, and they may have dropped it. What this session has kept in mind of it is stale then.
pub(crate) fn hold_for_writing(table: pg_sys::Oid) {
    // SAFETY: a transaction is open. A table that is gone can be locked like any other.
    unsafe { pg_sys::LockRelationOid(table, pg_sys::RowExclusiveLock as i32) };
}

/// The same for whoever locks rows of it.
pub(crate) fn hold_for_locking_rows(table: pg_sys::Oid) {
    // SAFETY: as above.
    unsafe { pg_sys::LockRelationOid(table, pg_sys::RowShareLock as i32) };
}

/// Holds the extension against DROP EXTENSION until the open transaction ends; false if it is being dropped just now. Taken
/// first in every transaction of a worker, so that a drop never meets one halfway through its locks.
pub(crate) fn hold_extension(extension: pg_sys::Oid) -> bool {
    let mode = pg_sys::AccessShareLock as i32;
    // SAFETY: a transaction is open; does not wait.
    unsafe {
        pg_sys::ConditionalLockDatabaseObject(pg_sys::ExtensionRelationId, extension, 0, mode)
    }
}
