//! Rows that are lent to statements, and reading them.

use std::ffi::CString;

use pgrx::pg_sys;

use super::super::spi::{Rows, Spi, UserStatement};
use super::{CHANGE, Cell, Side};

/// Rows to be lent to statements.
pub(crate) struct ChangedRows {
    pub(in super::super) store: *mut pg_sys::Tuplestorestate,
    pub(in super::super) descriptor: pg_sys::TupleDesc,
    ours: bool,
}

impl ChangedRows {
    pub(super) fn lent(store: *mut pg_sys::Tuplestorestate, descriptor: pg_sys::TupleDesc) -> Self {
        Self {
            store,
            descriptor,
            ours: false,
        }
    }

    pub(super) fn empty(descriptor: pg_sys::TupleDesc) -> Self {
        // SAFETY: made in the memory of the call, and ended when it goes out of scope, or with the transaction.
        let store = unsafe { pg_sys::tuplestore_begin_heap(false, false, pg_sys::work_mem) };
        Self {
            store,
            descriptor,
            ours: true,
        }
    }

    /// A copy of a table's rows, under another descriptor, with what they do not hold because it was added to the table later.
    pub(super) fn completed(
        store: *mut pg_sys::Tuplestorestate,
        table: pg_sys::TupleDesc,
        descriptor: pg_sys::TupleDesc,
    ) -> Self {
        let rows = Self::empty(descriptor);
        let mut reader = Reader::new(store, table);
        while let Some(slot) = reader.next() {
            // SAFETY: both descriptors have the same columns.
            unsafe { rows.complete(slot) };
        }
        rows
    }

    /// Takes a row with all of its columns.
    ///
    /// # Safety
    /// It has the columns of our descriptor.
    pub(super) unsafe fn complete(&self, slot: *mut pg_sys::TupleTableSlot) {
        // SAFETY: as the caller promises.
        unsafe {
            pg_sys::slot_getallattrs(slot);
            let (values, nulls) = ((*slot).tts_values, (*slot).tts_isnull);
            pg_sys::tuplestore_putvalues(self.store, self.descriptor, values, nulls);
        }
    }

    /// A copy of what a statement has returned; its columns bear the names that statements know.
    pub(crate) fn copied(rows: &Rows) -> Self {
        let (tuples, descriptor) = rows.tuples();
        // SAFETY: the descriptor is that of the tuples; both are copied, for the connection ends before we do.
        unsafe {
            let memory = pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext);
            let copied = Self::empty(pg_sys::CreateTupleDescCopy(descriptor));
            pg_sys::MemoryContextSwitchTo(memory);
            for &tuple in tuples {
                pg_sys::tuplestore_puttuple(copied.store, tuple);
            }
            copied
        }
    }

    /// What a statement returns. Its columns keep their names.
    pub(crate) fn collected(connection: &Spi, statement: &UserStatement) -> Self {
        let (store, descriptor) = connection.collect(statement);
        Self {
            store,
            descriptor,
            ours: true,
        }
    }

    pub(crate) fn count(&self) -> i64 {
        // SAFETY: the store lives as long as we do.
        unsafe { pg_sys::tuplestore_tuple_count(self.store) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Those at these places, which are counted from 1 and in ascending order.
    pub(crate) fn only(&self, places: &[i64]) -> Self {
        let kept = Self::empty(self.descriptor);
        let mut reader = Reader::new(self.store, self.descriptor);
        let mut places = places.iter().copied().peekable();
        let mut place = 0;
        while places.peek().is_some() {
            let Some(slot) = reader.next() else { break };
            place += 1;
            if places.next_if_eq(&place).is_some() {
                // SAFETY: a row of the same descriptor, copied.
                unsafe { pg_sys::tuplestore_puttupleslot(kept.store, slot) };
            }
        }
        kept
    }

    /// Lends them to the statements that are run on this connection.
    pub(crate) fn lend(&self, _connection: &Spi) {
        let name = CString::new(CHANGE).unwrap_or_default();
        // SAFETY: all of it lies in the memory of the connection, which alone refers to it.
        unsafe {
            let relation = pg_sys::palloc0(size_of::<pg_sys::EphemeralNamedRelationData>())
                .cast::<pg_sys::EphemeralNamedRelationData>();
            (*relation).md.name = pg_sys::pstrdup(name.as_ptr());
            (*relation).md.reliddesc = pg_sys::InvalidOid;
            (*relation).md.tupdesc = self.descriptor;
            (*relation).md.enrtype = pg_sys::EphemeralNameRelationType::ENR_NAMED_TUPLESTORE;
            (*relation).md.enrtuples = pg_sys::tuplestore_tuple_count(self.store) as f64;
            (*relation).reldata = self.store.cast();
            let status = pg_sys::SPI_register_relation(relation);
            assert!(status >= 0, "SPI_register_relation failed: {status}");
        }
    }
}

impl Drop for ChangedRows {
    fn drop(&mut self) {
        // After an error its memory and files go with the transaction.
        if self.ours && !std::thread::panicking() {
            // SAFETY: made in `empty`; the connections that it was lent to are closed.
            unsafe { pg_sys::tuplestore_end(self.store) };
        }
    }
}

/// A column of a descriptor, counted from 0.
///
/// # Safety
/// The descriptor is valid, and has it.
pub(in super::super) unsafe fn attribute<'a>(
    descriptor: pg_sys::TupleDesc,
    index: usize,
) -> &'a mut pg_sys::FormData_pg_attribute {
    // SAFETY: as the caller promises.
    #[cfg(feature = "pg18")]
    unsafe {
        &mut *pg_sys::TupleDescAttr(descriptor, index as i32)
    }
    // SAFETY: as the caller promises.
    #[cfg(not(feature = "pg18"))]
    unsafe {
        &mut *(*descriptor).attrs.as_mut_ptr().add(index)
    }
}

/// # Safety
/// Both descriptors are valid, and have these columns, counted from 0.
pub(super) unsafe fn copy_column(
    to: pg_sys::TupleDesc,
    to_index: usize,
    from: pg_sys::TupleDesc,
    from_index: usize,
    name: &str,
) {
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: as the caller promises.
    unsafe {
        pg_sys::TupleDescCopyEntry(
            to,
            to_index as pg_sys::AttrNumber + 1,
            from,
            from_index as pg_sys::AttrNumber + 1,
        );
        pg_sys::namestrcpy(&raw mut attribute(to, to_index).attname, name.as_ptr());
    }
}

/// The descriptor of a table's rows as they are, with the names that statements know.
pub(super) fn named(table: pg_sys::TupleDesc, side: Side) -> pg_sys::TupleDesc {
    // SAFETY: the table's descriptor is valid, and the new one has as many columns.
    unsafe {
        let count = (*table).natts;
        let descriptor = pg_sys::CreateTemplateTupleDesc(count);
        for index in 0..usize::try_from(count).unwrap_or(0) {
            let cell = Cell {
                side,
                number: index as i16 + 1,
            };
            copy_column(descriptor, index, table, index, &cell.name());
        }
        descriptor
    }
}

/// Whether a table's rows may lack columns that were added with a default that is not null.
pub(super) fn has_missing(table: pg_sys::TupleDesc) -> bool {
    // SAFETY: the descriptor is valid.
    unsafe {
        let constraints = (*table).constr;
        !constraints.is_null() && !(*constraints).missing.is_null()
    }
}

/// Reads a tuplestore from its beginning, without disturbing others that read it.
pub(in super::super) struct Reader {
    store: *mut pg_sys::Tuplestorestate,
    pointer: i32,
    slot: *mut pg_sys::TupleTableSlot,
}

impl Reader {
    pub(in super::super) fn new(
        store: *mut pg_sys::Tuplestorestate,
        descriptor: pg_sys::TupleDesc,
    ) -> Self {
        // SAFETY: the store holds rows of this descriptor; a pointer of its own is what the executor takes, too.
        unsafe {
            let pointer =
                pg_sys::tuplestore_alloc_read_pointer(store, pg_sys::EXEC_FLAG_REWIND as i32);
            pg_sys::tuplestore_select_read_pointer(store, pointer);
            pg_sys::tuplestore_rescan(store);
            let slot =
                pg_sys::MakeSingleTupleTableSlot(descriptor, &raw const pg_sys::TTSOpsMinimalTuple);
            Self {
                store,
                pointer,
                slot,
            }
        }
    }

    pub(in super::super) fn next(&mut self) -> Option<*mut pg_sys::TupleTableSlot> {
        // SAFETY: the slot is of the rows' descriptor; the row stays where it is until the next is asked for.
        unsafe {
            pg_sys::tuplestore_select_read_pointer(self.store, self.pointer);
            pg_sys::tuplestore_gettupleslot(self.store, true, false, self.slot).then_some(self.slot)
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: made in `new`.
            unsafe { pg_sys::ExecDropSingleTupleTableSlot(self.slot) };
        }
    }
}
