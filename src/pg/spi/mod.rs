//! Statements: kept plans, typed arguments, rows read without a copy in between.
//!
//! A plan is prepared once per process and statement text and kept. Postgres plans it anew by itself when a table changes.

mod arg;
mod receiver;
mod record;
mod row;
mod user;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CString;
use std::marker::PhantomData;

pub(crate) use arg::Arg;
pub(super) use arg::text_datum;
use pgrx::pg_sys;
pub(crate) use record::{Record, RecordType};
pub(super) use row::to_utf8;
pub(crate) use row::{Row, Rows};
pub(super) use row::{json_text, text_array, varlena_text};
pub(crate) use user::UserStatement;

use super::encoding;
use super::error::Complaint;

/// A kept plan, with the types of its parameters: those of composites change when the extension is made anew.
struct Kept {
    plan: pg_sys::SPIPlanPtr,
    types: Vec<pg_sys::Oid>,
}

impl Kept {
    fn new(sql: &str, args: &[Arg]) -> Self {
        let plan = prepare(sql, args);
        // SAFETY: a plan just prepared, moved out of the transaction's memory so that it outlives it.
        unsafe { pg_sys::SPI_keepplan(plan) };
        let types = args.iter().map(Arg::type_oid).collect();
        Self { plan, types }
    }

    fn fits(&self, args: &[Arg]) -> bool {
        args.iter()
            .map(Arg::type_oid)
            .eq(self.types.iter().copied())
    }

    /// Not `Drop`: a process must be able to end without calling Postgres once more.
    fn free(self) {
        // SAFETY: a kept plan that nothing refers to any more.
        unsafe { pg_sys::SPI_freeplan(self.plan) };
    }
}

thread_local! {
    static PLANS: RefCell<HashMap<String, Kept>> = RefCell::new(HashMap::new());
}

fn plan(sql: &str, args: &[Arg]) -> pg_sys::SPIPlanPtr {
    let kept = PLANS.with_borrow(|plans| {
        plans
            .get(sql)
            .filter(|kept| kept.fits(args))
            .map(|kept| kept.plan)
    });
    if let Some(plan) = kept {
        return plan;
    }
    let kept = Kept::new(sql, args);
    let plan = kept.plan;
    if let Some(replaced) = PLANS.with_borrow_mut(|plans| plans.insert(sql.to_owned(), kept)) {
        replaced.free();
    }
    plan
}

fn prepare(sql: &str, args: &[Arg]) -> pg_sys::SPIPlanPtr {
    let mut types = args.iter().map(Arg::type_oid).collect::<Vec<_>>();
    let text = CString::new(encoding::to_database(sql))
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

    /// Runs a user's statement, which may write.
    pub(crate) fn run_user(&self, statement: &UserStatement, args: &[Arg]) -> Rows<'_> {
        self.execute(statement.plan(args), Mode::Write, args)
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

/// Microseconds between the Unix epoch and Postgres' own, 2000-01-01.
const EPOCH: i64 = 946_684_800_000_000;

fn to_pg_time(unix: i64) -> i64 {
    if unix == i64::MIN || unix == i64::MAX {
        unix
    } else {
        unix.saturating_sub(EPOCH)
    }
}

pub(super) fn from_pg_time(pg: i64) -> i64 {
    if pg == i64::MIN || pg == i64::MAX {
        pg
    } else {
        pg.saturating_add(EPOCH)
    }
}
