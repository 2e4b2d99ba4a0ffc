//! Puts rows into a stream's table, many at a time, and into its indexes.
//!
//! It does what an insert of plain rows comes to, as COPY does: no triggers, checks, rules or policies. Whoever uses it has seen that the
//! table has none that matter, while it was locked.

use pgrx::pg_sys;

/// Rows that are put into the table at once.
const AT_ONCE: usize = 100;
/// With so many bytes in them, fewer are.
const MOST_BYTES: usize = 1 << 18;

/// A table that rows are put into, until [`Table::close`].
pub(super) struct Table {
    relation: pg_sys::Relation,
    state: *mut pg_sys::EState,
    target: *mut pg_sys::ResultRelInfo,
    slots: Vec<*mut pg_sys::TupleTableSlot>,
    /// What putting rows takes, such as compressed copies of their values; emptied each time.
    scratch: pg_sys::MemoryContext,
    filled: usize,
    bytes: usize,
}

impl Table {
    /// Everything that this takes hold of goes with the (sub)transaction if an error keeps it from being closed.
    pub(super) fn open(relation: pg_sys::Oid, columns: usize) -> Self {
        // SAFETY: in a transaction; the nodes are made in the memory in force, which outlives the table.
        unsafe {
            let relation = pg_sys::table_open(relation, pg_sys::RowExclusiveLock as i32);
            let width = (*(*relation).rd_att).natts;
            assert_eq!(
                usize::try_from(width),
                Ok(columns),
                "columns of a stream's table"
            );
            let target =
                pg_sys::palloc0(size_of::<pg_sys::ResultRelInfo>()).cast::<pg_sys::ResultRelInfo>();
            (*target).type_ = pg_sys::NodeTag::T_ResultRelInfo;
            pg_sys::InitResultRelInfo(target, relation, 1, std::ptr::null_mut(), 0);
            pg_sys::ExecOpenIndices(target, false);
            Self {
                relation,
                state: pg_sys::CreateExecutorState(),
                target,
                slots: Vec::new(),
                scratch: pg_sys::AllocSetContextCreateInternal(
                    pg_sys::CurrentMemoryContext,
                    c"outbox table".as_ptr(),
                    pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                    pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                    pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
                ),
                filled: 0,
                bytes: 0,
            }
        }
    }

    /// Takes a row. Its values are copied.
    ///
    /// # Safety
    /// There is a value, of the right type, and a mark of null for each column of the table.
    pub(super) unsafe fn put(&mut self, values: &[pg_sys::Datum], nulls: &[bool], bytes: usize) {
        // SAFETY: as the caller promises; slots are of this table, and hold as many columns.
        unsafe {
            if self.filled == self.slots.len() {
                let slot = pg_sys::table_slot_create(self.relation, std::ptr::null_mut());
                self.slots.push(slot);
            }
            let slot = self.slots[self.filled];
            (*slot).tts_values.copy_from(values.as_ptr(), values.len());
            (*slot).tts_isnull.copy_from(nulls.as_ptr(), nulls.len());
            pg_sys::ExecStoreVirtualTuple(slot);
            pg_sys::ExecMaterializeSlot(slot);
        }
        self.filled += 1;
        self.bytes += bytes;
        if self.filled >= AT_ONCE || self.bytes >= MOST_BYTES {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.filled == 0 {
            return;
        }
        // SAFETY: so many slots hold rows of this table. Where it puts them is noted in the slots, and told to the indexes.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(self.scratch);
            pg_sys::heap_multi_insert(
                self.relation,
                self.slots.as_mut_ptr(),
                self.filled as i32,
                pg_sys::GetCurrentCommandId(true),
                0,
                std::ptr::null_mut(),
            );
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::MemoryContextReset(self.scratch);
            for &slot in &self.slots[..self.filled] {
                insert_into_indexes(self.target, slot, self.state);
                let context = (*self.state).es_per_tuple_exprcontext;
                if !context.is_null() {
                    pg_sys::MemoryContextReset((*context).ecxt_per_tuple_memory);
                }
                pg_sys::ExecClearTuple(slot);
            }
        }
        self.filled = 0;
        self.bytes = 0;
    }

    /// What was put is there for the statements that follow.
    pub(super) fn close(mut self) {
        self.flush();
        // SAFETY: all of it was made in `open` and `put`. The lock stays until the transaction ends.
        unsafe {
            for &slot in &self.slots {
                pg_sys::ExecDropSingleTupleTableSlot(slot);
            }
            pg_sys::ExecCloseIndices(self.target);
            pg_sys::FreeExecutorState(self.state);
            pg_sys::MemoryContextDelete(self.scratch);
            pg_sys::table_close(self.relation, pg_sys::NoLock as i32);
            pg_sys::CommandCounterIncrement();
        }
    }
}

/// # Safety
/// The slot holds a row of the target, which is in its table; the target's indexes are open.
unsafe fn insert_into_indexes(
    target: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    state: *mut pg_sys::EState,
) {
    let none = std::ptr::null_mut();
    // SAFETY: as the caller promises. A violation raises an error; there is nothing that would be checked later.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::ExecInsertIndexTuples(target, slot, state, false, false, none, none.cast());
        #[cfg(not(feature = "pg15"))]
        pg_sys::ExecInsertIndexTuples(target, slot, state, false, false, none, none.cast(), false);
    }
}
