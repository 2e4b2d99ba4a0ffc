//! Functions that Postgres calls: arguments taken as they are, and sets given back through a tuplestore.

use pgrx::pg_sys;

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

    pub(crate) fn i32(&self, index: usize) -> Option<i32> {
        self.datum(index).map(|datum| datum.value() as i32)
    }

    /// The datum itself, to be passed on to a statement.
    pub(crate) fn raw(&self, index: usize) -> Option<pg_sys::Datum> {
        self.datum(index)
    }
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

    /// # Safety
    /// The tuple has the columns that the function declares.
    pub(super) unsafe fn put(&self, tuple: pg_sys::HeapTuple) {
        // SAFETY: the store was made in `of` and lives as long as the call.
        unsafe { pg_sys::tuplestore_puttuple((*self.info).setResult, tuple) }
    }
}
