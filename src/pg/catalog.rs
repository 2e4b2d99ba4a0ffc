//! What there is: databases, the extension, roles, this cluster and its transaction ids.

use std::cell::RefCell;
use std::ffi::CStr;

use pgrx::pg_sys;

pub(crate) const EXTENSION: &CStr = c"pg_outbox";

/// A database that sessions can connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Database {
    pub(crate) oid: pg_sys::Oid,
    pub(crate) name: String,
}

/// The databases of the cluster that allow connections. Works in a process that is connected to none; a transaction is open.
pub(crate) fn databases() -> Vec<Database> {
    let mut found = Vec::new();
    // SAFETY: the same scan that the autovacuum launcher makes; the relation and the scan are closed in the same transaction.
    unsafe {
        let relation =
            pg_sys::table_open(pg_sys::DatabaseRelationId, pg_sys::AccessShareLock as i32);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let row = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_database>();
            if row.datallowconn && row.datconnlimit != DATCONNLIMIT_INVALID_DB {
                let name = CStr::from_ptr(row.datname.data.as_ptr())
                    .to_string_lossy()
                    .into_owned();
                found.push(Database { oid: row.oid, name });
            }
        }
        let table_am = &*(*(*scan).rs_rd).rd_tableam;
        if let Some(end) = table_am.scan_end {
            end(scan);
        }
        pg_sys::table_close(relation, pg_sys::AccessShareLock as i32);
    }
    found
}

/// A database whose DROP was interrupted (pg_database.datconnlimit).
const DATCONNLIMIT_INVALID_DB: i32 = -2;

/// The extension's oid in this database; a transaction is open.
pub(crate) fn extension() -> Option<pg_sys::Oid> {
    // SAFETY: a catalog look-up; a missing one is InvalidOid.
    let oid = unsafe { pg_sys::get_extension_oid(EXTENSION.as_ptr(), true) };
    (oid != pg_sys::InvalidOid).then_some(oid)
}

/// The database that this process is connected to.
pub(crate) fn current_database() -> pg_sys::Oid {
    // SAFETY: a global of this process.
    unsafe { pg_sys::MyDatabaseId }
}

/// Its name, which cannot change while somebody is connected; a transaction is open.
pub(crate) fn current_database_name() -> String {
    // SAFETY: a catalog look-up; the database exists, since we are connected to it.
    unsafe {
        let name = pg_sys::get_database_name(current_database());
        if name.is_null() {
            return String::new();
        }
        CStr::from_ptr(name).to_string_lossy().into_owned()
    }
}

/// Whether a role exists; a transaction is open.
pub(crate) fn role_exists(role: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up that returns null for a role that is gone.
    unsafe { !pg_sys::GetUserNameFromId(role, true).is_null() }
}

/// The qualified, quoted name that a function has now; a transaction is open.
pub(crate) fn function_name(function: pg_sys::Oid) -> Option<String> {
    // SAFETY: catalog look-ups that return null, or InvalidOid, for what is gone; the strings live as long as the transaction.
    unsafe {
        let name = pg_sys::get_func_name(function);
        let schema = pg_sys::get_namespace_name(pg_sys::get_func_namespace(function));
        if name.is_null() || schema.is_null() {
            return None;
        }
        let qualified = CStr::from_ptr(pg_sys::quote_qualified_identifier(schema, name));
        Some(super::spi::to_utf8(qualified.to_bytes()))
    }
}

/// The name of a sequence in the extension's schema; none if it is something else.
pub(crate) fn our_sequence(relation: pg_sys::Oid) -> Option<String> {
    // SAFETY: catalog look-ups that return null, or InvalidOid, for what is gone.
    unsafe {
        let schema = pg_sys::get_namespace_oid(c"outbox".as_ptr(), true);
        let is_sequence = pg_sys::get_rel_relkind(relation)
            == pg_sys::RELKIND_SEQUENCE as std::ffi::c_char
            && pg_sys::get_rel_namespace(relation) == schema;
        let name = pg_sys::get_rel_name(relation);
        (is_sequence && !name.is_null())
            .then(|| super::spi::to_utf8(CStr::from_ptr(name).to_bytes()))
    }
}

/// The identifier of this cluster, as pg_control_system() shows it.
pub(crate) fn system_identifier() -> i64 {
    // SAFETY: reads shared memory that is set at the server's start.
    unsafe { pg_sys::GetSystemIdentifier() }.cast_signed()
}

/// The transaction id that is given out next. Needs no transaction.
pub(crate) fn next_xid() -> u64 {
    // SAFETY: takes and releases a lightweight lock.
    unsafe { pg_sys::ReadNextFullTransactionId() }.value
}

/// Whether every transaction with an id below `xid` is finished in the snapshot in force, in whatever database.
pub(crate) fn nothing_unfinished_below(xid: u64) -> bool {
    // SAFETY: a transaction is open, with its snapshot pushed. Ids in snapshots lack the epoch.
    let oldest = unsafe { (*pg_sys::GetActiveSnapshot()).xmin };
    u64::from(oldest.into_inner()) == xid & u64::from(u32::MAX)
}

/// The open transaction's id, if it has one.
pub(crate) fn own_xid() -> Option<u64> {
    // SAFETY: reads the state of the open transaction.
    let xid = unsafe { pg_sys::GetTopFullTransactionIdIfAny() }.value;
    (xid != 0).then_some(xid)
}

/// Whether a transaction with this id, which lacks the epoch, is open.
pub(crate) fn is_running(xid: u32) -> bool {
    // SAFETY: looks into shared memory, whatever the number is.
    unsafe { pg_sys::TransactionIdIsInProgress(pg_sys::TransactionId::from_inner(xid)) }
}

/// Whether the server is a standby in recovery: nothing can be written.
pub(crate) fn in_recovery() -> bool {
    // SAFETY: reads shared state.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Randomness is fetched for so many at once: asking for a few bytes costs as much as asking for many.
const RANDOM_AT_ONCE: usize = 64;

/// What has been fetched, and how much of it is left.
struct Randomness {
    bytes: [[u8; 16]; RANDOM_AT_ONCE],
    left: usize,
}

thread_local! {
    /// Filled by nobody but the process that uses it: what a parent has fetched, its children would have in common.
    static RANDOMNESS: RefCell<Randomness> = const {
        RefCell::new(Randomness {
            bytes: [[0; 16]; RANDOM_AT_ONCE],
            left: 0,
        })
    };
}

/// 32 hexadecimal digits of randomness.
pub(crate) fn random_hex() -> Option<[u8; 32]> {
    let bytes = RANDOMNESS.with_borrow_mut(|fetched| {
        if fetched.left == 0 {
            let all = fetched.bytes.as_flattened_mut();
            // SAFETY: fills exactly the buffer it is given.
            if !unsafe { pg_sys::pg_strong_random(all.as_mut_ptr().cast(), all.len()) } {
                return None;
            }
            fetched.left = RANDOM_AT_ONCE;
        }
        fetched.left -= 1;
        Some(fetched.bytes[fetched.left])
    })?;
    let mut digits = [0u8; 32];
    for (pair, byte) in digits.chunks_exact_mut(2).zip(bytes) {
        pair[0] = b"0123456789abcdef"[usize::from(byte >> 4)];
        pair[1] = b"0123456789abcdef"[usize::from(byte & 15)];
    }
    Some(digits)
}
