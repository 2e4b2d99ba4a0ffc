//! Statements: kept plans, typed arguments, rows read without a copy in between.
//!
//! A plan is prepared once per process and statement text and kept. Postgres plans it anew by itself when a table changes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::marker::PhantomData;

use pgrx::{IntoDatum, pg_sys};

use super::error::Complaint;

/// An argument of a statement, with its SQL type.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    Bool(bool),
    I32(Option<i32>),
    I64(Option<i64>),
    Oid(Option<pg_sys::Oid>),
    Text(Option<&'a str>),
    Texts(Option<&'a [String]>),
    /// jsonb, as text.
    Json(Option<&'a str>),
    /// jsonb, as it was handed in.
    RawJson(Option<pg_sys::Datum>),
    /// xid8.
    Xid(u64),
    /// xid8[].
    Xids(&'a [u64]),
    /// pg_snapshot, as text.
    Snapshot(Option<&'a str>),
    /// timestamptz, microseconds since the Unix epoch.
    Time(Option<i64>),
    /// An array of composites.
    Records(&'a [Record], pg_sys::Oid),
}

/// A composite value as Postgres stores it, copied out of its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record(Box<[u64]>);

/// Microseconds between the Unix epoch and Postgres' own, 2000-01-01.
const EPOCH: i64 = 946_684_800_000_000;

fn to_pg_time(unix: i64) -> i64 {
    if unix == i64::MIN || unix == i64::MAX {
        unix
    } else {
        unix.saturating_sub(EPOCH)
    }
}

fn from_pg_time(pg: i64) -> i64 {
    if pg == i64::MIN || pg == i64::MAX {
        pg
    } else {
        pg.saturating_add(EPOCH)
    }
}

fn array_of(element: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: a catalog look-up in an open transaction.
    unsafe { pg_sys::get_array_type(element) }
}

impl Arg<'_> {
    pub(crate) fn type_oid(&self) -> pg_sys::Oid {
        match self {
            Arg::Bool(_) => pg_sys::BOOLOID,
            Arg::I32(_) => pg_sys::INT4OID,
            Arg::I64(_) => pg_sys::INT8OID,
            Arg::Oid(_) => pg_sys::OIDOID,
            Arg::Text(_) => pg_sys::TEXTOID,
            Arg::Texts(_) => pg_sys::TEXTARRAYOID,
            Arg::Json(_) | Arg::RawJson(_) => pg_sys::JSONBOID,
            Arg::Xid(_) => pg_sys::XID8OID,
            Arg::Xids(_) => pg_sys::XID8ARRAYOID,
            Arg::Snapshot(_) => pg_sys::PG_SNAPSHOTOID,
            Arg::Time(_) => pg_sys::TIMESTAMPTZOID,
            Arg::Records(_, element) => array_of(*element),
        }
    }

    fn datum(&self) -> Option<pg_sys::Datum> {
        match self {
            Arg::Bool(value) => value.into_datum(),
            Arg::I32(value) => value.into_datum(),
            Arg::I64(value) => value.into_datum(),
            Arg::Oid(value) => value.into_datum(),
            Arg::Text(value) => value.into_datum(),
            Arg::Texts(value) => value.map(|texts| texts.to_vec()).into_datum(),
            Arg::Json(value) => value.map(|text| input(pg_sys::JSONBOID, text)),
            Arg::RawJson(value) => *value,
            Arg::Xid(value) => Some(pg_sys::Datum::from(*value)),
            Arg::Xids(values) => Some(xid_array(values)),
            Arg::Snapshot(value) => value.map(|text| input(pg_sys::PG_SNAPSHOTOID, text)),
            Arg::Time(value) => value.map(|unix| pg_sys::Datum::from(to_pg_time(unix))),
            Arg::Records(records, element) => Some(record_array(records, *element)),
        }
    }
}

/// A value of any type from its text form.
fn input(oid: pg_sys::Oid, text: &str) -> pg_sys::Datum {
    let text = CString::new(text)
        .unwrap_or_else(|_| Complaint::bad_argument("text holds a zero byte").raise());
    // SAFETY: the type's own input function, on a terminated string; it raises what it cannot read.
    unsafe {
        let mut function = pg_sys::InvalidOid;
        let mut parameter = pg_sys::InvalidOid;
        pg_sys::getTypeInputInfo(oid, &raw mut function, &raw mut parameter);
        pg_sys::OidInputFunctionCall(function, text.as_ptr().cast_mut(), parameter, -1)
    }
}

fn xid_array(values: &[u64]) -> pg_sys::Datum {
    let mut datums = values
        .iter()
        .map(|&xid| pg_sys::Datum::from(xid))
        .collect::<Vec<_>>();
    // SAFETY: xid8 is eight bytes, passed by value, aligned as double.
    unsafe {
        let array = pg_sys::construct_array(
            datums.as_mut_ptr(),
            datums.len() as i32,
            pg_sys::XID8OID,
            8,
            true,
            b'd' as std::ffi::c_char,
        );
        pg_sys::Datum::from(array)
    }
}

fn record_array(records: &[Record], element: pg_sys::Oid) -> pg_sys::Datum {
    let mut datums = records
        .iter()
        .map(|record| pg_sys::Datum::from(record.0.as_ptr()))
        .collect::<Vec<_>>();
    // SAFETY: each record is a whole composite of this type, aligned to eight bytes; construct_array copies them.
    unsafe {
        let array = pg_sys::construct_array(
            datums.as_mut_ptr(),
            datums.len() as i32,
            element,
            -1,
            false,
            b'd' as std::ffi::c_char,
        );
        pg_sys::Datum::from(array)
    }
}

/// A kept plan, with the types of its parameters: those of composites change when the extension is made anew.
struct Kept {
    plan: pg_sys::SPIPlanPtr,
    types: Vec<pg_sys::Oid>,
}

thread_local! {
    static PLANS: RefCell<HashMap<String, Kept>> = RefCell::new(HashMap::new());
}

fn plan(sql: &str, args: &[Arg]) -> pg_sys::SPIPlanPtr {
    let fits = |kept: &Kept| {
        args.iter()
            .map(Arg::type_oid)
            .eq(kept.types.iter().copied())
    };
    let kept = PLANS.with_borrow(|plans| {
        plans
            .get(sql)
            .filter(|kept| fits(kept))
            .map(|kept| kept.plan)
    });
    if let Some(plan) = kept {
        return plan;
    }
    let plan = prepare(sql, args);
    // SAFETY: a plan just prepared, moved out of the transaction's memory so that it outlives it.
    unsafe { pg_sys::SPI_keepplan(plan) };
    let types = args.iter().map(Arg::type_oid).collect();
    let replaced =
        PLANS.with_borrow_mut(|plans| plans.insert(sql.to_owned(), Kept { plan, types }));
    if let Some(replaced) = replaced {
        // SAFETY: a kept plan that nothing refers to any more.
        unsafe { pg_sys::SPI_freeplan(replaced.plan) };
    }
    plan
}

fn prepare(sql: &str, args: &[Arg]) -> pg_sys::SPIPlanPtr {
    let mut types = args.iter().map(Arg::type_oid).collect::<Vec<_>>();
    let text = CString::new(sql)
        .unwrap_or_else(|_| Complaint::bad_argument("a statement holds a zero byte").raise());
    // SAFETY: connected to SPI; the type list is as long as said.
    let plan =
        unsafe { pg_sys::SPI_prepare(text.as_ptr(), types.len() as i32, types.as_mut_ptr()) };
    assert!(!plan.is_null(), "SPI_prepare failed");
    plan
}

/// Whether a statement sees its own transaction's earlier effects and may write, or reads under the snapshot that is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Read,
    Write,
}

/// A connection to SPI. Nested ones are fine.
pub(crate) struct Spi(PhantomData<*const ()>);

/// Connects to SPI for the time of `body`. What it returns must not point into Postgres' memory.
pub(crate) fn connected<R>(body: impl FnOnce(&Spi) -> R) -> R {
    // SAFETY: in a transaction with a snapshot; after an error the end of the (sub)transaction disconnects.
    unsafe {
        pg_sys::SPI_connect();
        let result = body(&Spi(PhantomData));
        pg_sys::SPI_finish();
        result
    }
}

impl Spi {
    /// Runs a statement with a kept plan and returns its rows.
    pub(crate) fn run(&self, mode: Mode, sql: &str, args: &[Arg]) -> Rows<'_> {
        self.execute(plan(sql, args), mode, args)
    }

    /// Plans a statement without running it: raises what is wrong with it.
    pub(crate) fn check(&self, sql: &str, args: &[Arg]) {
        prepare(sql, args);
    }

    pub(crate) fn read(&self, sql: &str, args: &[Arg]) -> Rows<'_> {
        self.run(Mode::Read, sql, args)
    }

    pub(crate) fn write(&self, sql: &str, args: &[Arg]) -> Rows<'_> {
        self.run(Mode::Write, sql, args)
    }

    fn execute(&self, plan: pg_sys::SPIPlanPtr, mode: Mode, args: &[Arg]) -> Rows<'_> {
        let mut values = Vec::with_capacity(args.len());
        let mut nulls = Vec::with_capacity(args.len());
        for arg in args {
            let datum = arg.datum();
            nulls.push(if datum.is_some() { b' ' } else { b'n' } as std::ffi::c_char);
            values.push(datum.unwrap_or(pg_sys::Datum::from(0)));
        }
        // SAFETY: the plan was prepared for these types, and the arrays are as long as its parameter list.
        let status = unsafe {
            pg_sys::SPI_execute_plan(
                plan,
                values.as_mut_ptr(),
                nulls.as_ptr(),
                mode == Mode::Read,
                0,
            )
        };
        assert!(status >= 0, "SPI_execute_plan failed: {status}");
        // SAFETY: both globals describe the statement just run; the table may be null when it returns no rows.
        unsafe {
            Rows {
                table: pg_sys::SPI_tuptable,
                affected: pg_sys::SPI_processed,
                connection: PhantomData,
            }
        }
    }
}

/// What a statement returned.
pub(crate) struct Rows<'spi> {
    table: *mut pg_sys::SPITupleTable,
    affected: u64,
    connection: PhantomData<&'spi Spi>,
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
            let columns = usize::try_from((*descriptor).natts).unwrap_or(0);
            let mut row = Row {
                values: vec![pg_sys::Datum::from(0); columns],
                nulls: vec![false; columns],
            };
            for index in 0..(*self.table).numvals as usize {
                let tuple = *(*self.table).vals.add(index);
                pg_sys::heap_deform_tuple(
                    tuple,
                    descriptor,
                    row.values.as_mut_ptr(),
                    row.nulls.as_mut_ptr(),
                );
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
            let columns = usize::try_from((*descriptor).natts).unwrap_or(0);
            let mut row = Row {
                values: vec![pg_sys::Datum::from(0); columns],
                nulls: vec![false; columns],
            };
            let tuple = *(*self.table).vals.add(count.checked_sub(1)?);
            pg_sys::heap_deform_tuple(
                tuple,
                descriptor,
                row.values.as_mut_ptr(),
                row.nulls.as_mut_ptr(),
            );
            row
        };
        Some(convert(&row))
    }

    /// Hands every row to a tuplestore, for a function that returns a set.
    pub(crate) fn store(&self, store: &super::call::TupleStore) {
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

/// One row; columns are counted from 0. A column must be read as the type it has.
pub(crate) struct Row {
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl Row {
    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        (!self.nulls[column]).then(|| self.values[column])
    }

    pub(crate) fn i64(&self, column: usize) -> Option<i64> {
        self.datum(column).map(|datum| datum.value() as i64)
    }

    pub(crate) fn i32(&self, column: usize) -> Option<i32> {
        self.datum(column).map(|datum| datum.value() as i32)
    }

    pub(crate) fn oid(&self, column: usize) -> Option<pg_sys::Oid> {
        self.datum(column)
            .map(|datum| pg_sys::Oid::from(datum.value() as u32))
    }

    pub(crate) fn bool(&self, column: usize) -> Option<bool> {
        self.datum(column).map(|datum| datum.value() as u8 != 0)
    }

    pub(crate) fn xid(&self, column: usize) -> Option<u64> {
        self.datum(column).map(|datum| datum.value() as u64)
    }

    /// timestamptz, as microseconds since the Unix epoch.
    pub(crate) fn time(&self, column: usize) -> Option<i64> {
        self.i64(column).map(from_pg_time)
    }

    /// text, in UTF-8 whatever the database's encoding. Raises what cannot be converted.
    pub(crate) fn text(&self, column: usize) -> Option<String> {
        // SAFETY: the column is a varlena of characters.
        self.datum(column)
            .map(|datum| unsafe { varlena_text(datum) })
    }

    pub(crate) fn texts(&self, column: usize) -> Option<Vec<String>> {
        use pgrx::FromDatum;
        // SAFETY: the column is text[].
        self.datum(column)
            .and_then(|datum| unsafe { Vec::<Option<String>>::from_datum(datum, false) })
            .map(|texts| texts.into_iter().flatten().collect())
    }

    /// jsonb, as Postgres prints it.
    pub(crate) fn json(&self, column: usize) -> Option<String> {
        // SAFETY: the column is jsonb: a varlena whose content is the root container.
        self.datum(column).map(|datum| unsafe {
            let stored = datum.cast_mut_ptr::<pg_sys::varlena>();
            let plain = pg_sys::pg_detoast_datum(stored);
            let root = plain
                .cast::<u8>()
                .add(pg_sys::VARHDRSZ)
                .cast::<pg_sys::JsonbContainer>();
            let printed =
                pg_sys::JsonbToCString(std::ptr::null_mut(), root, pgrx::varsize(plain) as i32);
            let text = to_utf8(CStr::from_ptr(printed).to_bytes());
            pg_sys::pfree(printed.cast());
            if plain != stored {
                pg_sys::pfree(plain.cast());
            }
            text
        })
    }

    /// Bytes that a variable-length column has once it is fetched and decompressed; cheap, nothing is fetched.
    pub(crate) fn raw_size(&self, column: usize) -> usize {
        // SAFETY: the column is a varlena.
        self.datum(column)
            .map_or(0, |datum| unsafe { pg_sys::toast_raw_datum_size(datum) })
    }

    /// A composite, copied.
    pub(crate) fn record(&self, column: usize) -> Option<Record> {
        // SAFETY: the column is a composite; detoasting copies one that is compressed or stored out of line.
        self.datum(column).map(|datum| unsafe {
            copy_record(pg_sys::Datum::from(pg_sys::pg_detoast_datum(
                datum.cast_mut_ptr(),
            )))
        })
    }
}

/// # Safety
/// The datum is a text or another varlena of characters.
pub(super) unsafe fn varlena_text(datum: pg_sys::Datum) -> String {
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

fn to_utf8(bytes: &[u8]) -> String {
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
            let datum = pg_sys::heap_copy_tuple_as_datum(tuple, of.0);
            let record = copy_record(datum);
            pg_sys::pfree(datum.cast_mut_ptr());
            pg_sys::heap_freetuple(tuple);
            record
        }
    }
}

/// # Safety
/// The datum is a composite, not stored out of line.
unsafe fn copy_record(datum: pg_sys::Datum) -> Record {
    // SAFETY: its length is in its header.
    unsafe {
        let plain = datum.cast_mut_ptr::<pg_sys::varlena>();
        let length = pgrx::varsize(plain);
        let mut copy = vec![0u64; length.div_ceil(8)].into_boxed_slice();
        std::ptr::copy_nonoverlapping(plain.cast::<u8>(), copy.as_mut_ptr().cast::<u8>(), length);
        Record(copy)
    }
}
