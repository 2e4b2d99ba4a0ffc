//! Numbers of sequences, drawn without the session's noticing: `lastval()` and `currval()` are the client's.
//!
//! It does to the sequence's page what `nextval` does, and is logged in the same way, so both can be used side by side. What differs: the
//! step is always one, and no session keeps numbers back, whatever the sequence's options say. So a number that is drawn later, in whatever
//! session, is a greater one, which is what the order of events rests on.

use std::cell::Cell;

use pgrx::{PgSqlErrorCode, pg_sys};

use super::error::Complaint;

/// What a sequence's only row holds (`FormData_pg_sequence_data`).
#[repr(C)]
struct State {
    last: i64,
    /// So many numbers behind `last` are logged as given out.
    logged: i64,
    is_called: bool,
}

/// How many numbers are logged as given out beforehand, so that not each needs a record.
const AHEAD: i64 = 32;
/// The record of a sequence's new state, and where its row begins.
const LOG: u8 = 0;
const ROW: pg_sys::OffsetNumber = 1;

#[cfg(feature = "pg15")]
type Locator = pg_sys::RelFileNode;
#[cfg(not(feature = "pg15"))]
type Locator = pg_sys::RelFileLocator;

thread_local! {
    static LAST: Cell<Option<i64>> = const { Cell::new(None) };
}

/// Whether a number is the last that this session has drawn, of whatever sequence.
pub(crate) fn is_last(number: i64) -> bool {
    LAST.get() == Some(number)
}

/// Draws so many numbers, which follow one another, and returns the first. The transaction has its id before it has its first number.
pub(crate) fn draw(sequence: pg_sys::Oid, count: i64) -> i64 {
    // SAFETY: the relation is open and locked against those who change it, and is a sequence, so its first page holds one row. The page is
    // changed while nobody else looks at it. Between START and END nothing raises an error, as in `nextval`.
    unsafe {
        pg_sys::PreventCommandIfReadOnly(c"nextval()".as_ptr());
        pg_sys::PreventCommandIfParallelMode(c"nextval()".as_ptr());
        pg_sys::GetTopTransactionId();
        let relation = pg_sys::relation_open(sequence, pg_sys::RowExclusiveLock as i32);
        let form = &*(*relation).rd_rel;
        if form.relkind != pg_sys::RELKIND_SEQUENCE as std::ffi::c_char {
            Complaint::bad_argument("no sequence is there to draw a number from")
                .detail("The relation is of another kind.")
                .raise();
        }
        let is_logged = form.relpersistence == pg_sys::RELPERSISTENCE_PERMANENT as std::ffi::c_char;
        let buffer = pg_sys::ReadBuffer(relation, 0);
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_EXCLUSIVE as i32);
        let page = pg_sys::BufferGetPage(buffer);
        let item = &*pg_sys::PageGetItemId(page, ROW);
        let row = page.add(item.lp_off() as usize);
        let length = item.lp_len();
        let header = &*row.cast::<pg_sys::HeapTupleHeaderData>();
        let state = &mut *row.add(usize::from(header.t_hoff)).cast::<State>();

        let first = if state.is_called {
            state.last.checked_add(1)
        } else {
            Some(state.last)
        };
        let last = first.and_then(|first| first.checked_add(count - 1));
        let (Some(first), Some(last)) = (first, last) else {
            pg_sys::UnlockReleaseBuffer(buffer);
            let code = PgSqlErrorCode::ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED;
            Complaint::new(code, "the sequence of a stream has come to its end").raise()
        };
        // After a checkpoint the first one logs anew: what was logged before may not be read again.
        let must_log = !state.is_called
            || state.logged < last - state.last
            || (*page.cast::<pg_sys::PageHeaderData>()).pd_lsn_value() <= pg_sys::GetRedoRecPtr();

        pg_sys::CritSectionCount += 1;
        pg_sys::MarkBufferDirty(buffer);
        if must_log && is_logged {
            *state = State {
                last: last.saturating_add(AHEAD),
                logged: 0,
                is_called: true,
            };
            #[cfg(feature = "pg15")]
            let mut locator: Locator = (*relation).rd_node;
            #[cfg(not(feature = "pg15"))]
            let mut locator: Locator = (*relation).rd_locator;
            pg_sys::XLogBeginInsert();
            pg_sys::XLogRegisterBuffer(0, buffer, pg_sys::REGBUF_WILL_INIT as u8);
            pg_sys::XLogRegisterData((&raw mut locator).cast(), size_of::<Locator>() as _);
            pg_sys::XLogRegisterData(row.cast(), length as _);
            let end = pg_sys::XLogInsert(pg_sys::RmgrIds::RM_SEQ_ID as u8, LOG);
            (*page.cast::<pg_sys::PageHeaderData>()).set_pd_lsn_value(end);
        }
        *state = State {
            last,
            logged: if must_log {
                AHEAD
            } else {
                state.logged - (last - state.last)
            },
            is_called: true,
        };
        pg_sys::CritSectionCount -= 1;
        pg_sys::UnlockReleaseBuffer(buffer);
        pg_sys::relation_close(relation, pg_sys::NoLock as i32);
        LAST.set(Some(last));
        first
    }
}

/// Where a page says up to which record it is logged.
trait Lsn {
    fn pd_lsn_value(&self) -> u64;
    fn set_pd_lsn_value(&mut self, lsn: u64);
}

impl Lsn for pg_sys::PageHeaderData {
    fn pd_lsn_value(&self) -> u64 {
        u64::from(self.pd_lsn.xlogid) << 32 | u64::from(self.pd_lsn.xrecoff)
    }

    fn set_pd_lsn_value(&mut self, lsn: u64) {
        self.pd_lsn.xlogid = (lsn >> 32) as u32;
        self.pd_lsn.xrecoff = lsn as u32;
    }
}
