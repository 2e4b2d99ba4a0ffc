//! What happens at the commit of a transaction that wrote events: one wake-up, however many events there were.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;

use pgrx::pg_sys;

use super::{lock, shmem};

thread_local! {
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
    static WROTE: Cell<bool> = const { Cell::new(false) };
    static CHANGED: Cell<bool> = const { Cell::new(false) };
    static ANNOUNCES: Cell<bool> = const { Cell::new(false) };
    static LEASES: RefCell<Vec<i32>> = const { RefCell::new(Vec::new()) };
}

fn register() {
    if !REGISTERED.replace(true) {
        // SAFETY: the callback is a static function of a library that is never unloaded.
        unsafe { pg_sys::RegisterXactCallback(Some(at_end), std::ptr::null_mut()) };
    }
}

/// The commit of the open transaction is to wake this database's dispatchers.
pub(crate) fn wake_at_commit() {
    register();
    WROTE.set(true);
}

/// The commit of the open transaction is to tell dispatchers that sinks, or the like, have changed, and to wake this database's.
pub(crate) fn change_at_commit() {
    CHANGED.set(true);
    wake_at_commit();
}

/// The commit of the open transaction is to tell the launcher that this database has the extension.
pub(crate) fn announce_at_commit() {
    register();
    ANNOUNCES.set(true);
}

/// A lease taken in the open transaction is to outlive it only if it commits.
pub(crate) fn give_back_at_abort(number: i32) {
    register();
    LEASES.with_borrow_mut(|leases| leases.push(number));
}

/// Called by Postgres at every end of a transaction in a backend that has written events once. It must not fail: an error here
/// would take the whole server down. Nothing in it allocates or locks.
unsafe extern "C-unwind" fn at_end(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    use pg_sys::XactEvent::*;
    match event {
        XACT_EVENT_COMMIT | XACT_EVENT_PARALLEL_COMMIT => {
            // SAFETY: MyDatabaseId is a plain global of this process.
            let database = unsafe { pg_sys::MyDatabaseId };
            LEASES.with_borrow_mut(Vec::clear);
            // First, so that whoever is woken sees it.
            let changed = CHANGED.replace(false);
            if changed {
                shmem::count_change();
            }
            if WROTE.replace(false) {
                shmem::wake_database(database, !changed);
            }
            if ANNOUNCES.replace(false) {
                shmem::announce(database);
            }
        }
        // A prepared transaction commits in some other session: the dispatcher finds it with its next look.
        XACT_EVENT_ABORT | XACT_EVENT_PARALLEL_ABORT | XACT_EVENT_PREPARE => {
            WROTE.set(false);
            CHANGED.set(false);
            ANNOUNCES.set(false);
            for number in LEASES.take() {
                lock::give_lease_back(number);
            }
        }
        _ => {}
    }
}
