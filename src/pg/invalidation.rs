//! What a session remembers of relations, and how it learns that it is stale: by the same messages that keep the server's own caches.

use std::cell::{Cell, RefCell};

use pgrx::pg_sys;

thread_local! {
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
    /// Relations of which something has changed since [`take`].
    static STALE: RefCell<Vec<pg_sys::Oid>> = const { RefCell::new(Vec::new()) };
    static ALL_STALE: Cell<bool> = const { Cell::new(false) };
}

/// With more, it is simpler to forget all.
const MANY: usize = 256;

/// What has become stale.
pub(crate) enum Stale {
    Nothing,
    These(Vec<pg_sys::Oid>),
    Everything,
}

/// Begins to listen. Can be asked for again and again.
pub(crate) fn watch() {
    if !REGISTERED.replace(true) {
        // SAFETY: the callback is a static function of a library that is never unloaded.
        unsafe {
            pg_sys::CacheRegisterRelcacheCallback(Some(heard), pg_sys::Datum::from(0));
            pg_sys::CacheRegisterSyscacheCallback(
                pg_sys::SysCacheIdentifier::NAMESPACEOID.cast_signed(),
                Some(heard_of_schema),
                pg_sys::Datum::from(0),
            );
        };
    }
}

/// What has become stale since the last time, by changes that were committed before this moment, or made by this session.
pub(crate) fn take() -> Stale {
    // SAFETY: in a transaction; it is what the server does with each lock that it takes.
    unsafe { pg_sys::AcceptInvalidationMessages() };
    if ALL_STALE.replace(false) {
        STALE.with_borrow_mut(Vec::clear);
        return Stale::Everything;
    }
    let these = STALE.with_borrow_mut(|stale| {
        if stale.is_empty() {
            Vec::new()
        } else {
            std::mem::take(stale)
        }
    });
    if these.is_empty() {
        Stale::Nothing
    } else {
        Stale::These(these)
    }
}

/// Called at any moment, in the middle of whatever else: it only notes.
unsafe extern "C-unwind" fn heard(_argument: pg_sys::Datum, relation: pg_sys::Oid) {
    if relation == pg_sys::InvalidOid {
        ALL_STALE.set(true);
        return;
    }
    STALE.with_borrow_mut(|stale| {
        if stale.len() >= MANY {
            ALL_STALE.set(true);
        } else if !stale.contains(&relation) {
            stale.push(relation);
        }
    });
}

/// A schema has another name: so has all that is in it.
unsafe extern "C-unwind" fn heard_of_schema(_argument: pg_sys::Datum, _cache: i32, _hash: u32) {
    ALL_STALE.set(true);
}

/// Tells every session that what it remembers of a relation is stale, once this transaction commits; and this session now.
pub(crate) fn announce(relation: pg_sys::Oid) {
    // SAFETY: a look-up that does nothing for a relation that is gone.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(
            pg_sys::SysCacheIdentifier::RELOID.cast_signed(),
            pg_sys::Datum::from(relation),
        );
        if !tuple.is_null() {
            pg_sys::CacheInvalidateRelcacheByTuple(tuple);
            pg_sys::ReleaseSysCache(tuple);
        }
    }
}
