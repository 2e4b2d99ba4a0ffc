//! One firing of a trigger: what happened to which relation, and the rows that it concerns.
//!
//! The rows are lent to statements as a relation named [`CHANGE`]. Its columns are named after the side and the number of the table's
//! column, `o3` and `n3`, so that no name of a user's column can get in the way, and values stay as they are stored: what lies out of
//! line is not fetched unless a statement asks for it.

use std::ffi::CString;

use pgrx::pg_sys;

use super::error::Complaint;
use super::spi::{Rows, Spi};

/// The name under which statements find the rows.
pub(crate) const CHANGE: &str = "outbox_change";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Operation {
    Insert,
    Update,
    Delete,
    Truncate,
    /// No operation of a trigger: a row that is there already.
    Snapshot,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Update => "update",
            Self::Delete => "delete",
            Self::Truncate => "truncate",
            Self::Snapshot => "snapshot",
        }
    }
}

/// Which version of a row a column is of. `Changed` is the new value where it differs from the old one, and null elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Side {
    Old,
    New,
    Changed,
}

/// A column of the lent rows: of which version, and which of the table, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) side: Side,
    pub(crate) number: i16,
}

impl Cell {
    /// The name that statements know it by.
    pub(crate) fn name(self) -> String {
        let side = match self.side {
            Side::Old => 'o',
            Side::New => 'n',
            Side::Changed => 'd',
        };
        format!("{side}{}", self.number)
    }
}

/// The column that names, as text[], those of `compared` that an update has left as they were.
pub(crate) const SAME: &str = "same";

/// How updates become rows with both versions.
pub(crate) struct Pairing<'a> {
    /// The columns of a row, in this order.
    pub(crate) cells: &'a [Cell],
    /// An update that has changed none of these is left out.
    pub(crate) compared: &'a [i16],
    /// Adds [`SAME`]: these names stand for the columns in `compared`; without a name one is not mentioned.
    pub(crate) names: Option<&'a [Option<String>]>,
}

/// What Postgres tells a trigger function.
#[derive(Clone, Copy)]
pub(crate) struct Firing(*mut pg_sys::TriggerData);

impl Firing {
    /// Of the call that a trigger function was given; none if it was called in another way.
    pub(crate) fn of(call: pg_sys::FunctionCallInfo) -> Option<Self> {
        // SAFETY: the context of a call is null or a node.
        unsafe {
            let context = (*call).context;
            (!context.is_null() && (*context).type_ == pg_sys::NodeTag::T_TriggerData)
                .then(|| Self(context.cast()))
        }
    }

    fn data(&self) -> &pg_sys::TriggerData {
        // SAFETY: lives as long as the call.
        unsafe { &*self.0 }
    }

    pub(crate) fn operation(&self) -> Operation {
        match self.data().tg_event & pg_sys::TRIGGER_EVENT_OPMASK {
            pg_sys::TRIGGER_EVENT_INSERT => Operation::Insert,
            pg_sys::TRIGGER_EVENT_DELETE => Operation::Delete,
            pg_sys::TRIGGER_EVENT_UPDATE => Operation::Update,
            _ => Operation::Truncate,
        }
    }

    fn is_row(&self) -> bool {
        self.data().tg_event & pg_sys::TRIGGER_EVENT_ROW != 0
    }

    /// The table whose trigger it is.
    pub(crate) fn relation(&self) -> pg_sys::Oid {
        // SAFETY: the relation is open while its trigger runs.
        unsafe { (*self.data().tg_relation).rd_id }
    }

    /// Whether somebody's code runs before each row that this operation touches.
    pub(crate) fn has_code_before_rows(&self) -> bool {
        // SAFETY: a relation whose trigger runs has triggers.
        let triggers = unsafe { &*(*self.data().tg_relation).trigdesc };
        match self.operation() {
            Operation::Insert => triggers.trig_insert_before_row,
            Operation::Update => triggers.trig_update_before_row,
            Operation::Delete => triggers.trig_delete_before_row,
            Operation::Truncate | Operation::Snapshot => false,
        }
    }

    fn descriptor(&self) -> pg_sys::TupleDesc {
        // SAFETY: as in `relation`.
        unsafe { (*self.data().tg_relation).rd_att }
    }

    /// The rows that were inserted or deleted.
    pub(crate) fn rows(&self) -> ChangedRows {
        let data = self.data();
        let (store, side) = match self.operation() {
            Operation::Insert => (data.tg_newtable, Side::New),
            _ => (data.tg_oldtable, Side::Old),
        };
        let descriptor = named(self.descriptor(), side);
        if !self.is_row() {
            return ChangedRows::lent(store, descriptor);
        }
        let rows = ChangedRows::empty(descriptor);
        // SAFETY: a row trigger has the row in its first slot.
        unsafe { pg_sys::tuplestore_puttupleslot(rows.store, data.tg_trigslot) };
        rows
    }

    /// The rows that were updated, each with its old and its new version.
    pub(crate) fn pairs(&self, pairing: &Pairing) -> ChangedRows {
        let data = self.data();
        let mut pairs = Pairs::new(self.descriptor(), pairing);
        if self.is_row() {
            // SAFETY: an update's row trigger has both versions.
            unsafe { pairs.put(data.tg_trigslot, data.tg_newslot) };
        } else {
            // Both tables were filled by the same statement, version by version. Only where a trigger has kept a row from arriving in
            // the partition that it was moved to, there is an old version without a new one; then nobody can say which it is.
            // SAFETY: transition tables live as long as the call.
            let (olds, news) = unsafe {
                (
                    pg_sys::tuplestore_tuple_count(data.tg_oldtable),
                    pg_sys::tuplestore_tuple_count(data.tg_newtable),
                )
            };
            if olds != news {
                Complaint::new(
                    pgrx::PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    "an update of a captured table has moved rows to a partition that did not take them",
                )
                .detail("A trigger before insert on that partition has returned null.")
                .hint("Delete such rows instead of moving them.")
                .raise();
            }
            let mut old = Reader::new(data.tg_oldtable, self.descriptor());
            let mut new = Reader::new(data.tg_newtable, self.descriptor());
            while let (Some(old), Some(new)) = (old.next(), new.next()) {
                // SAFETY: slots of the table's rows.
                unsafe { pairs.put(old, new) };
            }
        }
        pairs.rows
    }

    /// How many rows the statement has touched.
    pub(crate) fn count(&self) -> i64 {
        if self.is_row() {
            return 1;
        }
        let data = self.data();
        let store = match self.operation() {
            Operation::Insert => data.tg_newtable,
            _ => data.tg_oldtable,
        };
        // SAFETY: transition tables live as long as the call.
        unsafe {
            if store.is_null() {
                0
            } else {
                pg_sys::tuplestore_tuple_count(store)
            }
        }
    }
}

/// No rows, of the shape in which those of a table would be lent: to try statements on.
pub(crate) fn no_rows(
    relation: pg_sys::Oid,
    operation: Operation,
    pairing: &Pairing,
) -> ChangedRows {
    // SAFETY: opened and closed here; the descriptor is copied.
    unsafe {
        let relation = pg_sys::relation_open(relation, pg_sys::AccessShareLock as i32);
        let rows = match operation {
            Operation::Update => Pairs::new((*relation).rd_att, pairing).rows,
            Operation::Insert | Operation::Snapshot => {
                ChangedRows::empty(named((*relation).rd_att, Side::New))
            }
            _ => ChangedRows::empty(named((*relation).rd_att, Side::Old)),
        };
        pg_sys::relation_close(relation, pg_sys::NoLock as i32);
        rows
    }
}

/// Rows to be lent to statements.
pub(crate) struct ChangedRows {
    store: *mut pg_sys::Tuplestorestate,
    descriptor: pg_sys::TupleDesc,
    ours: bool,
}

impl ChangedRows {
    fn lent(store: *mut pg_sys::Tuplestorestate, descriptor: pg_sys::TupleDesc) -> Self {
        Self {
            store,
            descriptor,
            ours: false,
        }
    }

    fn empty(descriptor: pg_sys::TupleDesc) -> Self {
        // SAFETY: made in the memory of the call, and ended when it goes out of scope, or with the transaction.
        let store = unsafe { pg_sys::tuplestore_begin_heap(false, false, pg_sys::work_mem) };
        Self {
            store,
            descriptor,
            ours: true,
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
pub(super) unsafe fn attribute<'a>(
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
unsafe fn copy_column(
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
fn named(table: pg_sys::TupleDesc, side: Side) -> pg_sys::TupleDesc {
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

/// Reads a tuplestore from its beginning, without disturbing others that read it.
struct Reader {
    store: *mut pg_sys::Tuplestorestate,
    pointer: i32,
    slot: *mut pg_sys::TupleTableSlot,
}

impl Reader {
    fn new(store: *mut pg_sys::Tuplestorestate, descriptor: pg_sys::TupleDesc) -> Self {
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

    fn next(&mut self) -> Option<*mut pg_sys::TupleTableSlot> {
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

/// Puts the versions of updated rows side by side.
struct Pairs {
    rows: ChangedRows,
    /// For each column where it comes from.
    from: Vec<From>,
    compared: Vec<Compared>,
    with_same: bool,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
    scratch: pg_sys::MemoryContext,
}

struct From {
    side: Side,
    index: usize,
    /// Its place among the compared ones, if it is one.
    compared: Option<usize>,
}

struct Compared {
    index: usize,
    kind: Kind,
    name: Option<pg_sys::Datum>,
    same: bool,
}

/// How the values of a type are stored.
#[derive(Clone, Copy)]
enum Kind {
    ByValue,
    Fixed(usize),
    Varlena,
}

impl Pairs {
    fn new(table: pg_sys::TupleDesc, pairing: &Pairing) -> Self {
        let with_same = pairing.names.is_some();
        let width = pairing.cells.len() + usize::from(with_same);
        // SAFETY: the table's descriptor is valid, and the cells are of its columns.
        let descriptor = unsafe {
            let descriptor = pg_sys::CreateTemplateTupleDesc(width as i32);
            for (index, cell) in pairing.cells.iter().enumerate() {
                copy_column(
                    descriptor,
                    index,
                    table,
                    cell.number as usize - 1,
                    &cell.name(),
                );
            }
            if with_same {
                let name = CString::new(SAME).unwrap_or_default();
                pg_sys::TupleDescInitEntry(
                    descriptor,
                    width as pg_sys::AttrNumber,
                    name.as_ptr(),
                    pg_sys::TEXTARRAYOID,
                    -1,
                    0,
                );
            }
            descriptor
        };
        let compared = pairing.compared.iter().enumerate().map(|(place, number)| {
            let index = *number as usize - 1;
            // SAFETY: as above.
            let column = unsafe { attribute(table, index) };
            Compared {
                index,
                kind: match (column.attbyval, column.attlen) {
                    (true, _) => Kind::ByValue,
                    (false, -1) => Kind::Varlena,
                    (false, length) => Kind::Fixed(usize::try_from(length).unwrap_or(0)),
                },
                name: pairing
                    .names
                    .and_then(|names| names[place].as_deref())
                    .map(super::spi::text_datum),
                same: false,
            }
        });
        // SAFETY: a child of the call's memory.
        let scratch = unsafe {
            pg_sys::AllocSetContextCreateInternal(
                pg_sys::CurrentMemoryContext,
                c"outbox capture".as_ptr(),
                pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            )
        };
        Self {
            from: pairing
                .cells
                .iter()
                .map(|cell| From {
                    side: cell.side,
                    index: cell.number as usize - 1,
                    compared: pairing.compared.iter().position(|&it| it == cell.number),
                })
                .collect(),
            compared: compared.collect(),
            with_same,
            values: vec![pg_sys::Datum::from(0); width],
            nulls: vec![true; width],
            rows: ChangedRows::empty(descriptor),
            scratch,
        }
    }

    /// Takes an update, unless it has changed nothing of interest.
    ///
    /// # Safety
    /// Both slots hold rows of the table.
    unsafe fn put(&mut self, old: *mut pg_sys::TupleTableSlot, new: *mut pg_sys::TupleTableSlot) {
        // SAFETY: as the caller promises; what comparing fetches and what is formed lies in memory that is emptied with each row.
        unsafe {
            pg_sys::slot_getallattrs(old);
            pg_sys::slot_getallattrs(new);
            let before = pg_sys::MemoryContextSwitchTo(self.scratch);
            let mut differs = false;
            for column in &mut self.compared {
                column.same = is_same(
                    column.kind,
                    value(old, column.index),
                    value(new, column.index),
                );
                differs |= !column.same;
            }
            if differs {
                for (place, from) in self.from.iter().enumerate() {
                    let same = || from.compared.is_some_and(|place| self.compared[place].same);
                    let value = match from.side {
                        Side::Old => value(old, from.index),
                        Side::New => value(new, from.index),
                        Side::Changed => value(new, from.index).filter(|_| !same()),
                    };
                    self.nulls[place] = value.is_none();
                    self.values[place] = value.unwrap_or(pg_sys::Datum::from(0));
                }
                if self.with_same {
                    let place = self.from.len();
                    let names = self.compared.iter().filter(|column| column.same);
                    let mut names = names.filter_map(|column| column.name).collect::<Vec<_>>();
                    self.nulls[place] = false;
                    self.values[place] = pg_sys::Datum::from(pg_sys::construct_array(
                        names.as_mut_ptr(),
                        names.len() as i32,
                        pg_sys::TEXTOID,
                        -1,
                        false,
                        b'i' as std::ffi::c_char,
                    ));
                }
                pg_sys::tuplestore_putvalues(
                    self.rows.store,
                    self.rows.descriptor,
                    self.values.as_mut_ptr(),
                    self.nulls.as_mut_ptr(),
                );
            }
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::MemoryContextReset(self.scratch);
        }
    }
}

/// # Safety
/// The slot's row is deformed, and has the column.
unsafe fn value(slot: *mut pg_sys::TupleTableSlot, index: usize) -> Option<pg_sys::Datum> {
    // SAFETY: as the caller promises.
    unsafe { (!*(*slot).tts_isnull.add(index)).then(|| *(*slot).tts_values.add(index)) }
}

/// Whether two values are the same to the byte. No code of a type is run.
///
/// # Safety
/// Both are values of a type that is stored so.
unsafe fn is_same(kind: Kind, old: Option<pg_sys::Datum>, new: Option<pg_sys::Datum>) -> bool {
    let (old, new) = match (old, new) {
        (Some(old), Some(new)) => (old, new),
        (None, None) => return true,
        _ => return false,
    };
    // SAFETY: as the caller promises.
    unsafe {
        match kind {
            Kind::ByValue => old.value() == new.value(),
            Kind::Fixed(length) => {
                bytes(old.cast_mut_ptr(), length) == bytes(new.cast_mut_ptr(), length)
            }
            Kind::Varlena => is_same_varlena(old.cast_mut_ptr(), new.cast_mut_ptr()),
        }
    }
}

/// # Safety
/// Both are valid.
unsafe fn is_same_varlena(old: *mut pg_sys::varlena, new: *mut pg_sys::varlena) -> bool {
    // SAFETY: as the caller promises. What detoasting copies goes with the memory in force.
    unsafe {
        // One that an update has not touched is still stored in the same place: the pointers say so, and it need not be fetched.
        let stored = |value| {
            pgrx::varatt_is_1b_e(value)
                && u32::from(pgrx::vartag_external(value)) == pg_sys::vartag_external::VARTAG_ONDISK
        };
        if stored(old) && stored(new) {
            let size = pgrx::varsize_external(old);
            if bytes(old.cast(), size) == bytes(new.cast(), size) {
                return true;
            }
        }
        let size =
            |value: *mut pg_sys::varlena| pg_sys::toast_raw_datum_size(pg_sys::Datum::from(value));
        if size(old) != size(new) {
            return false;
        }
        let old = pg_sys::pg_detoast_datum_packed(old);
        let new = pg_sys::pg_detoast_datum_packed(new);
        pgrx::varlena_to_byte_slice(old) == pgrx::varlena_to_byte_slice(new)
    }
}

/// # Safety
/// There are that many.
unsafe fn bytes<'a>(from: *const u8, length: usize) -> &'a [u8] {
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(from, length) }
}
