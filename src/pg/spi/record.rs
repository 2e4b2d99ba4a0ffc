//! Composite values, carried between statements as Postgres stores them.

use std::rc::Rc;

use pgrx::pg_sys;

use super::Row;

/// A composite value as Postgres stores it, copied out of its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record(pub(super) Rc<[u64]>);

/// A composite type, to make values of.
pub(crate) struct RecordType(pg_sys::TupleDesc);

impl RecordType {
    /// The oid of outbox.event.
    pub(crate) fn event_oid() -> pg_sys::Oid {
        // SAFETY: catalog look-ups in an open transaction; a missing schema or type is InvalidOid.
        unsafe {
            let schema = pg_sys::get_namespace_oid(c"outbox".as_ptr(), true);
            pg_sys::GetSysCacheOid(
                pg_sys::SysCacheIdentifier::TYPENAMENSP.cast_signed(),
                pg_sys::Anum_pg_type_oid as i16,
                pg_sys::Datum::from(c"event".as_ptr()),
                pg_sys::Datum::from(schema),
                pg_sys::Datum::from(0),
                pg_sys::Datum::from(0),
            )
        }
    }

    /// outbox.event.
    pub(crate) fn event() -> Self {
        // SAFETY: raises an error if there is no such type; the reference is given back on drop, or by the transaction's end.
        Self(unsafe { pg_sys::lookup_rowtype_tupdesc(Self::event_oid(), -1) })
    }
}

impl Drop for RecordType {
    fn drop(&mut self) {
        // After an error the transaction's end has given the reference back, or will.
        if !std::thread::panicking() {
            // SAFETY: taken in `event`, in the same transaction.
            unsafe {
                if (*self.0).tdrefcount >= 0 {
                    pg_sys::DecrTupleDescRefCount(self.0);
                }
            }
        }
    }
}

impl Row {
    /// The first `width` columns as a composite of this type, with everything in it that was stored out of line.
    pub(crate) fn record_of(&self, of: &RecordType, width: usize) -> Record {
        let mut values = self.values[..width].to_vec();
        let mut nulls = self.nulls[..width].to_vec();
        // SAFETY: the type has `width` columns of the types that the row has, in the same order.
        unsafe {
            let tuple = pg_sys::heap_form_tuple(of.0, values.as_mut_ptr(), nulls.as_mut_ptr());
            let record = if (*(*tuple).t_data).t_infomask & pg_sys::HEAP_HASEXTERNAL as u16 == 0 {
                // Its header is that of a composite value already.
                copy_bytes((*tuple).t_data.cast(), (*tuple).t_len as usize)
            } else {
                let datum = pg_sys::heap_copy_tuple_as_datum(tuple, of.0);
                let record = copy_record(datum);
                pg_sys::pfree(datum.cast_mut_ptr());
                record
            };
            pg_sys::heap_freetuple(tuple);
            record
        }
    }
}

/// # Safety
/// The datum is a composite, not stored out of line.
pub(super) unsafe fn copy_record(datum: pg_sys::Datum) -> Record {
    // SAFETY: its length is in its header.
    unsafe {
        let plain = datum.cast_mut_ptr::<pg_sys::varlena>();
        copy_bytes(plain.cast(), pgrx::varsize(plain))
    }
}

/// # Safety
/// There are `length` bytes at `source`.
unsafe fn copy_bytes(source: *const u8, length: usize) -> Record {
    let mut copy = Rc::<[u64]>::new_uninit_slice(length.div_ceil(8));
    // SAFETY: nobody else has the copy yet; it has room for the bytes, and what they leave of the last word is set before them.
    unsafe {
        if let Some(words) = Rc::get_mut(&mut copy) {
            if let Some(last) = words.last_mut() {
                last.write(0);
            }
            std::ptr::copy_nonoverlapping(source, words.as_mut_ptr().cast::<u8>(), length);
        }
        Record(copy.assume_init())
    }
}
