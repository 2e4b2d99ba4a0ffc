//! Functions that Postgres calls: arguments taken as they are, and sets given back through a tuplestore.

use pgrx::callconv::{BoxRet, FcInfo};
use pgrx::pg_sys;
use pgrx::pgrx_sql_entity_graph::metadata::{
    ArgumentError, ReturnsError, ReturnsRef, SqlMappingRef, SqlTranslatable, TypeOrigin,
};

/// The arguments of the function being called.
#[derive(Clone, Copy)]
pub(crate) struct Arguments(pg_sys::FunctionCallInfo);

impl Arguments {
    /// Of the call that a `#[pg_extern]` function with a `FunctionCallInfo` parameter was given.
    pub(crate) fn of(call: pg_sys::FunctionCallInfo) -> Self {
        Self(call)
    }

    fn datum(&self, index: usize) -> Option<pg_sys::Datum> {
        // SAFETY: Postgres hands over `nargs` arguments, as the SQL declaration says, before it calls the function.
        unsafe {
            let call = &*self.0;
            assert!(
                index < usize::try_from(call.nargs).unwrap_or(0),
                "argument {index} is not declared"
            );
            let argument = &*call.args.as_ptr().add(index);
            (!argument.isnull).then_some(argument.value)
        }
    }

    pub(crate) fn text(&self, index: usize) -> Option<String> {
        // SAFETY: declared as text.
        self.datum(index)
            .map(|datum| unsafe { super::spi::varlena_text(datum) })
    }

    /// Bytes of a text.
    pub(crate) fn text_size(&self, index: usize) -> Option<usize> {
        // SAFETY: declared as text; the size is as if its header were the long one.
        self.datum(index)
            .map(|datum| unsafe { pg_sys::toast_raw_datum_size(datum) - pg_sys::VARHDRSZ })
    }

    pub(crate) fn texts(&self, index: usize) -> Option<Vec<Option<String>>> {
        // SAFETY: declared as text[].
        self.datum(index)
            .map(|datum| unsafe { super::spi::text_array(datum) })
    }

    /// jsonb, as Postgres prints it.
    pub(crate) fn json(&self, index: usize) -> Option<String> {
        // SAFETY: declared as jsonb.
        self.datum(index)
            .map(|datum| unsafe { super::spi::json_text(datum) })
    }

    pub(crate) fn oid(&self, index: usize) -> Option<pg_sys::Oid> {
        self.datum(index)
            .map(|datum| pg_sys::Oid::from(datum.value() as u32))
    }

    pub(crate) fn bool(&self, index: usize) -> Option<bool> {
        self.datum(index).map(|datum| datum.value() as u8 != 0)
    }

    pub(crate) fn i32(&self, index: usize) -> Option<i32> {
        self.datum(index).map(|datum| datum.value() as i32)
    }

    /// The type of an argument that is declared as any.
    pub(crate) fn type_of(&self, index: usize) -> pg_sys::Oid {
        // SAFETY: the call knows the expression that it is made by.
        unsafe { pg_sys::get_fn_expr_argtype((*self.0).flinfo, index as i32) }
    }

    /// An argument of a strict function, of whatever type.
    pub(crate) fn any(&self, index: usize) -> pg_sys::Datum {
        self.datum(index).unwrap_or(pg_sys::Datum::from(0))
    }

    pub(crate) fn i64(&self, index: usize) -> Option<i64> {
        self.datum(index).map(|datum| datum.value() as i64)
    }

    /// timestamptz, microseconds since the Unix epoch.
    pub(crate) fn time(&self, index: usize) -> Option<i64> {
        self.datum(index)
            .map(|datum| super::spi::from_pg_time(datum.value() as i64))
    }

    /// An xid8.
    pub(crate) fn u64(&self, index: usize) -> Option<u64> {
        self.datum(index).map(|datum| datum.value() as u64)
    }

    /// The datum itself, to be passed on to a statement.
    pub(crate) fn raw(&self, index: usize) -> Option<pg_sys::Datum> {
        self.datum(index)
    }
}

/// A text to return, in the database's encoding.
pub(crate) struct Text(pg_sys::Datum);

impl Text {
    pub(crate) fn new(text: &str) -> Self {
        Self(super::spi::text_datum(text))
    }

    /// What is a text, or what the SQL declaration says that the function returns.
    pub(crate) fn of_datum(datum: pg_sys::Datum) -> Self {
        Self(datum)
    }
}

// SAFETY: the datum is a text in memory that outlives the call.
unsafe impl BoxRet for Text {
    unsafe fn box_into<'fcx>(self, call: &mut FcInfo<'fcx>) -> pgrx::datum::Datum<'fcx> {
        // SAFETY: as above.
        unsafe { call.return_raw_datum(self.0) }
    }
}

// SAFETY: the functions that return it are declared in sql/ as returning text.
unsafe impl SqlTranslatable for Text {
    const TYPE_IDENT: &'static str = <&str as SqlTranslatable>::TYPE_IDENT;
    const TYPE_ORIGIN: TypeOrigin = <&str as SqlTranslatable>::TYPE_ORIGIN;
    const ARGUMENT_SQL: Result<SqlMappingRef, ArgumentError> =
        <&str as SqlTranslatable>::ARGUMENT_SQL;
    const RETURN_SQL: Result<ReturnsRef, ReturnsError> = <&str as SqlTranslatable>::RETURN_SQL;
}

/// Where a set-returning function puts its rows.
pub(crate) struct TupleStore {
    info: *mut pg_sys::ReturnSetInfo,
}

impl TupleStore {
    /// Sets the call up to return a set all at once, of the columns that the SQL declaration names.
    pub(crate) fn of(call: pg_sys::FunctionCallInfo) -> Self {
        // SAFETY: the call is of a set-returning function; the server checks that the caller accepts a materialised set.
        unsafe {
            pg_sys::InitMaterializedSRF(call, 0);
            Self {
                info: (*call).resultinfo.cast(),
            }
        }
    }

    pub(super) fn state(&self) -> *mut pg_sys::Tuplestorestate {
        // SAFETY: the store was made in `of` and lives as long as the call.
        unsafe { (*self.info).setResult }
    }

    /// # Safety
    /// The tuple has the columns that the function declares.
    pub(super) unsafe fn put(&self, tuple: pg_sys::HeapTuple) {
        // SAFETY: as the caller promises.
        unsafe { pg_sys::tuplestore_puttuple(self.state(), tuple) }
    }
}
