//! Rows that a statement returned, read without a copy in between.

use std::cell::Cell;
use std::marker::PhantomData;

use pgrx::pg_sys;

use super::super::error::Complaint;
use super::super::{array, encoding};
use super::record::copy_record;
use super::{Record, RecordType, Spi, from_pg_time};

/// What a statement returned.
pub(crate) struct Rows<'spi> {
    pub(super) table: *mut pg_sys::SPITupleTable,
    pub(super) affected: u64,
    pub(super) connection: PhantomData<&'spi Spi>,
}

impl Rows<'_> {
    /// How many rows were returned or changed.
    pub(crate) fn count(&self) -> u64 {
        self.affected
    }

    /// How many columns they have.
    pub(crate) fn width(&self) -> usize {
        if self.table.is_null() {
            return 0;
        }
        // SAFETY: the table belongs to the open connection.
        usize::try_from(unsafe { (*(*self.table).tupdesc).natts }).unwrap_or(0)
    }

    /// The rows as Postgres has them.
    pub(in super::super) fn tuples(&self) -> (&[pg_sys::HeapTuple], pg_sys::TupleDesc) {
        assert!(!self.table.is_null(), "the statement returns no rows");
        // SAFETY: as in `each`.
        unsafe {
            let count = (*self.table).numvals as usize;
            let tuples = std::slice::from_raw_parts((*self.table).vals, count);
            (tuples, (*self.table).tupdesc)
        }
    }

    /// Walks over the rows; the row lent to `visit` is overwritten by the next. Stops when `visit` says so.
    pub(crate) fn each(&self, mut visit: impl FnMut(&Row) -> std::ops::ControlFlow<()>) {
        if self.table.is_null() {
            return;
        }
        // SAFETY: the table belongs to the open connection and holds `numvals` tuples of its descriptor.
        unsafe {
            let descriptor = (*self.table).tupdesc;
            let mut row = Row::of(descriptor);
            for index in 0..(*self.table).numvals as usize {
                row.take(*(*self.table).vals.add(index), descriptor);
                if visit(&row).is_break() {
                    break;
                }
            }
        }
    }

    /// All rows, each turned into a value.
    pub(crate) fn map<T>(&self, mut convert: impl FnMut(&Row) -> T) -> Vec<T> {
        let mut all = Vec::with_capacity(usize::try_from(self.affected).unwrap_or(0));
        self.each(|row| {
            all.push(convert(row));
            std::ops::ControlFlow::Continue(())
        });
        all
    }

    /// The first row, turned into a value.
    pub(crate) fn first<T>(&self, convert: impl FnOnce(&Row) -> T) -> Option<T> {
        let mut convert = Some(convert);
        let mut first = None;
        self.each(|row| {
            first = convert.take().map(|convert| convert(row));
            std::ops::ControlFlow::Break(())
        });
        first
    }

    /// Hands every row to a tuplestore, for a function that returns a set.
    pub(crate) fn store(&self, store: &super::super::call::TupleStore) {
        if self.table.is_null() {
            return;
        }
        // SAFETY: as in `each`; the store copies the tuple.
        unsafe {
            for index in 0..(*self.table).numvals as usize {
                store.put(*(*self.table).vals.add(index));
            }
        }
    }
}

/// One row; columns are counted from 0. To read a column as a type that it does not have is a mistake in our own SQL, and panics.
pub(crate) struct Row {
    pub(super) values: Vec<pg_sys::Datum>,
    pub(super) nulls: Vec<bool>,
    types: Vec<pg_sys::Oid>,
    /// For printing json, one after the other.
    json_buffer: Cell<pg_sys::StringInfo>,
}

impl Row {
    /// # Safety
    /// The descriptor is valid.
    unsafe fn of(descriptor: pg_sys::TupleDesc) -> Self {
        // SAFETY: as the caller promises; columns are counted from 1 here.
        let types = unsafe {
            (1..=(*descriptor).natts)
                .map(|column| pg_sys::SPI_gettypeid(descriptor, column))
                .collect::<Vec<_>>()
        };
        Self {
            values: vec![pg_sys::Datum::from(0); types.len()],
            nulls: vec![false; types.len()],
            types,
            json_buffer: Cell::new(std::ptr::null_mut()),
        }
    }

    /// # Safety
    /// Connected to SPI, whose memory the buffer is in: as long as there are rows.
    unsafe fn json_buffer(&self) -> pg_sys::StringInfo {
        // SAFETY: as the caller promises; made at the first call, and emptied at each.
        unsafe {
            if self.json_buffer.get().is_null() {
                self.json_buffer.set(pg_sys::makeStringInfo());
            }
            pg_sys::resetStringInfo(self.json_buffer.get());
            self.json_buffer.get()
        }
    }

    /// # Safety
    /// The tuple is of the descriptor that the row was made of.
    unsafe fn take(&mut self, tuple: pg_sys::HeapTuple, descriptor: pg_sys::TupleDesc) {
        // SAFETY: both arrays are as long as the descriptor says.
        unsafe {
            pg_sys::heap_deform_tuple(
                tuple,
                descriptor,
                self.values.as_mut_ptr(),
                self.nulls.as_mut_ptr(),
            );
        }
    }

    fn datum(&self, column: usize, of: pg_sys::Oid) -> Option<pg_sys::Datum> {
        let is = self.types[column];
        assert!(is == of, "column {column} is of type {is:?}, not {of:?}");
        (!self.nulls[column]).then(|| self.values[column])
    }

    pub(crate) fn i64(&self, column: usize) -> Option<i64> {
        self.datum(column, pg_sys::INT8OID)
            .map(|datum| datum.value() as i64)
    }

    pub(crate) fn i32(&self, column: usize) -> Option<i32> {
        self.datum(column, pg_sys::INT4OID)
            .map(|datum| datum.value() as i32)
    }

    pub(crate) fn oid(&self, column: usize) -> Option<pg_sys::Oid> {
        self.datum(column, pg_sys::OIDOID)
            .map(|datum| pg_sys::Oid::from(datum.value() as u32))
    }

    pub(crate) fn bool(&self, column: usize) -> Option<bool> {
        self.datum(column, pg_sys::BOOLOID)
            .map(|datum| datum.value() as u8 != 0)
    }

    pub(crate) fn xid(&self, column: usize) -> Option<u64> {
        self.datum(column, pg_sys::XID8OID)
            .map(|datum| datum.value() as u64)
    }

    /// timestamptz, as microseconds since the Unix epoch.
    pub(crate) fn time(&self, column: usize) -> Option<i64> {
        self.datum(column, pg_sys::TIMESTAMPTZOID)
            .map(|datum| from_pg_time(datum.value() as i64))
    }

    /// text, in UTF-8 whatever the database's encoding. Raises what cannot be converted.
    pub(crate) fn text(&self, column: usize) -> Option<String> {
        // SAFETY: the column is text.
        self.datum(column, pg_sys::TEXTOID)
            .map(|datum| unsafe { varlena_text(datum) })
    }

    pub(crate) fn texts(&self, column: usize) -> Option<Vec<String>> {
        // SAFETY: the column is text[].
        self.datum(column, pg_sys::TEXTARRAYOID)
            .map(|datum| unsafe { text_array(datum) })
            .map(|texts| texts.into_iter().flatten().collect())
    }

    /// text as far as it can be said in UTF-8; `exact` becomes false where it cannot.
    pub(crate) fn text_as_said(&self, column: usize, exact: &mut bool) -> Option<String> {
        // SAFETY: the column is text.
        self.datum(column, pg_sys::TEXTOID).map(|datum| unsafe {
            with_bytes(datum, |bytes| {
                let said = encoding::from_database(bytes);
                *exact &= said.exact;
                said.text
            })
        })
    }

    /// jsonb, as Postgres prints it. Raises what cannot be converted.
    pub(crate) fn json(&self, column: usize) -> Option<String> {
        self.printed(column, to_utf8)
    }

    /// jsonb, as Postgres prints it, as far as it can be said in UTF-8; `exact` becomes false where it cannot.
    pub(crate) fn json_as_said(&self, column: usize, exact: &mut bool) -> Option<String> {
        self.printed(column, |bytes| {
            let said = encoding::from_database(bytes);
            *exact &= said.exact;
            said.text
        })
    }

    fn printed(&self, column: usize, read: impl FnOnce(&[u8]) -> String) -> Option<String> {
        // SAFETY: the column is jsonb.
        self.datum(column, pg_sys::JSONBOID)
            .map(|datum| unsafe { printed(datum, self.json_buffer(), read) })
    }

    /// Bytes that a jsonb column has once it is fetched and decompressed; cheap, nothing is fetched.
    pub(crate) fn raw_json_size(&self, column: usize) -> usize {
        // SAFETY: the column is a varlena.
        self.datum(column, pg_sys::JSONBOID)
            .map_or(0, |datum| unsafe { pg_sys::toast_raw_datum_size(datum) })
    }

    /// A value of type outbox.event, copied.
    pub(crate) fn record(&self, column: usize) -> Option<Record> {
        // SAFETY: the column is a composite; detoasting copies one that is compressed or stored out of line.
        self.datum(column, RecordType::event_oid())
            .map(|datum| unsafe {
                copy_record(pg_sys::Datum::from(pg_sys::pg_detoast_datum(
                    datum.cast_mut_ptr(),
                )))
            })
    }
}

/// # Safety
/// The datum is a jsonb.
pub(in super::super) unsafe fn json_text(datum: pg_sys::Datum) -> String {
    // SAFETY: as the caller promises.
    unsafe { printed(datum, pg_sys::makeStringInfo(), to_utf8) }
}

/// # Safety
/// The datum is a jsonb, and the buffer an empty one.
unsafe fn printed(
    datum: pg_sys::Datum,
    buffer: pg_sys::StringInfo,
    read: impl FnOnce(&[u8]) -> String,
) -> String {
    // SAFETY: as the caller promises; the content of a jsonb is its root container. What detoasting made is freed.
    unsafe {
        let stored = datum.cast_mut_ptr::<pg_sys::varlena>();
        let plain = pg_sys::pg_detoast_datum(stored);
        let root = plain
            .cast::<u8>()
            .add(pg_sys::VARHDRSZ)
            .cast::<pg_sys::JsonbContainer>();
        pg_sys::JsonbToCString(buffer, root, pgrx::varsize(plain) as i32);
        let length = usize::try_from((*buffer).len).unwrap_or(0);
        let text = read(std::slice::from_raw_parts(
            (*buffer).data.cast::<u8>(),
            length,
        ));
        if plain != stored {
            pg_sys::pfree(plain.cast());
        }
        text
    }
}

/// # Safety
/// The datum is a text[].
pub(in super::super) unsafe fn text_array(datum: pg_sys::Datum) -> Vec<Option<String>> {
    // SAFETY: as the caller promises.
    unsafe {
        let texts = array::texts(datum).into_iter();
        texts
            .map(|text| text.map(|text| varlena_text(text)))
            .collect()
    }
}

/// # Safety
/// The datum is a text or another varlena of characters.
pub(in super::super) unsafe fn varlena_text(datum: pg_sys::Datum) -> String {
    // SAFETY: as the caller promises.
    unsafe { with_bytes(datum, to_utf8) }
}

/// # Safety
/// The datum is a varlena.
unsafe fn with_bytes<R>(datum: pg_sys::Datum, read: impl FnOnce(&[u8]) -> R) -> R {
    // SAFETY: as the caller promises; what detoasting made is freed.
    unsafe {
        let stored = datum.cast_mut_ptr::<pg_sys::varlena>();
        let plain = pg_sys::pg_detoast_datum_packed(stored);
        let result = read(std::slice::from_raw_parts(
            pgrx::vardata_any(plain).cast::<u8>(),
            pgrx::varsize_any_exhdr(plain),
        ));
        if plain != stored {
            pg_sys::pfree(plain.cast());
        }
        result
    }
}

/// Raises what is not to be said in UTF-8.
pub(in super::super) fn to_utf8(bytes: &[u8]) -> String {
    let said = encoding::from_database(bytes);
    if !said.exact {
        Complaint::new(
            pgrx::PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
            "a text is not valid UTF-8",
        )
        .raise()
    }
    said.text
}
