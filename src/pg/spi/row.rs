//! Rows that a statement returned, read without a copy in between.

use std::cell::Cell;
use std::ffi::CStr;
use std::marker::PhantomData;

use pgrx::pg_sys;

use super::super::error::Complaint;
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

    /// The last row, turned into a value.
    pub(crate) fn last<T>(&self, convert: impl FnOnce(&Row) -> T) -> Option<T> {
        if self.table.is_null() {
            return None;
        }
        // SAFETY: as in `each`.
        let row = unsafe {
            let count = (*self.table).numvals as usize;
            let descriptor = (*self.table).tupdesc;
            let mut row = Row::of(descriptor);
            row.take(*(*self.table).vals.add(count.checked_sub(1)?), descriptor);
            row
        };
        Some(convert(&row))
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
        use pgrx::FromDatum;
        // SAFETY: the column is text[].
        self.datum(column, pg_sys::TEXTARRAYOID)
            .and_then(|datum| unsafe { Vec::<Option<String>>::from_datum(datum, false) })
            .map(|texts| texts.into_iter().flatten().collect())
    }

    /// jsonb, as Postgres prints it.
    pub(crate) fn json(&self, column: usize) -> Option<String> {
        // SAFETY: the column is jsonb: a varlena whose content is the root container.
        self.datum(column, pg_sys::JSONBOID).map(|datum| unsafe {
            let stored = datum.cast_mut_ptr::<pg_sys::varlena>();
            let plain = pg_sys::pg_detoast_datum(stored);
            let root = plain
                .cast::<u8>()
                .add(pg_sys::VARHDRSZ)
                .cast::<pg_sys::JsonbContainer>();
            let buffer = self.json_buffer();
            pg_sys::JsonbToCString(buffer, root, pgrx::varsize(plain) as i32);
            let length = usize::try_from((*buffer).len).unwrap_or(0);
            let text = to_utf8(std::slice::from_raw_parts(
                (*buffer).data.cast::<u8>(),
                length,
            ));
            if plain != stored {
                pg_sys::pfree(plain.cast());
            }
            text
        })
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
/// The datum is a text or another varlena of characters.
pub(in super::super) unsafe fn varlena_text(datum: pg_sys::Datum) -> String {
    // SAFETY: as the caller promises; what detoasting made is freed.
    unsafe {
        let stored = datum.cast_mut_ptr::<pg_sys::varlena>();
        let plain = pg_sys::pg_detoast_datum_packed(stored);
        let bytes = std::slice::from_raw_parts(
            pgrx::vardata_any(plain).cast::<u8>(),
            pgrx::varsize_any_exhdr(plain),
        );
        let text = to_utf8(bytes);
        if plain != stored {
            pg_sys::pfree(plain.cast());
        }
        text
    }
}

pub(in super::super) fn to_utf8(bytes: &[u8]) -> String {
    const UTF8: i32 = pg_sys::pg_enc::PG_UTF8 as i32;
    // SAFETY: reads a setting of the database.
    if unsafe { pg_sys::GetDatabaseEncoding() } != UTF8 {
        // SAFETY: the bytes are valid for the call; the result is the same pointer or a terminated string.
        unsafe {
            let source = bytes.as_ptr().cast::<std::ffi::c_char>().cast_mut();
            let converted = pg_sys::pg_server_to_any(source, bytes.len() as i32, UTF8);
            if converted != source {
                return String::from_utf8_lossy(CStr::from_ptr(converted).to_bytes()).into_owned();
            }
        }
    }
    String::from_utf8(bytes.to_vec()).unwrap_or_else(|_| {
        Complaint::new(
            pgrx::PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
            "an event holds text that is not valid UTF-8",
        )
        .raise()
    })
}
