//! The order of events of one row, where statements nest.
//!
//! A statement's events are written when it is through, by a trigger that fires last. By then the code of other triggers may have
//! changed the same rows once more, in statements of its own that were through, and written their events, before. So it is kept in mind
//! which statements on captured tables are under way, and where the events begin that were written in the middle of one; when its own
//! are written, those are moved behind them.
//!
//! Which comes first? A row that a statement updates or deletes cannot have been changed in its middle before: Postgres refuses that. So
//! the statement's own change is the first. Only a row that it inserts may have been deleted before, by code that makes room for it
//! and that runs before each row.

use std::cell::RefCell;

use pgrx::pg_sys;

use crate::pg::firing::Operation;
use crate::pg::transaction::{self, Subtransaction};

/// A statement under way.
struct Frame {
    within: Subtransaction,
    relation: pg_sys::Oid,
    root: pg_sys::Oid,
    operation: Operation,
    /// The same for the parts of one statement, which may insert some rows and update others.
    command: u32,
    has_code_before_rows: bool,
    /// The last number before the first event that was written in the middle.
    mark: Option<i64>,
}

/// A TRUNCATE under way on a table.
struct Truncation {
    within: Subtransaction,
    relation: pg_sys::Oid,
}

#[derive(Default)]
struct UnderWay {
    frames: Vec<Frame>,
    truncated: Vec<Truncation>,
    /// The tables are empty, and the last triggers fire.
    truncation_done: bool,
}

thread_local! {
    static UNDER_WAY: RefCell<UnderWay> = RefCell::new(UnderWay::default());
}

fn with_current<R>(body: impl FnOnce(&mut UnderWay) -> R) -> R {
    UNDER_WAY.with_borrow_mut(|under_way| {
        // What an error has ended is not under way any more.
        under_way.frames.retain(|frame| frame.within.is_open());
        under_way
            .truncated
            .retain(|truncation| truncation.within == Subtransaction::current());
        body(under_way)
    })
}

/// A statement begins.
pub(super) fn begin(
    relation: pg_sys::Oid,
    root: pg_sys::Oid,
    operation: Operation,
    has_code_before_rows: bool,
) {
    let within = transaction::Subtransaction::current();
    with_current(|under_way| {
        under_way.frames.push(Frame {
            within,
            relation,
            root,
            operation,
            command: transaction::command(),
            has_code_before_rows,
            mark: None,
        });
    });
}

/// A statement that is through.
pub(super) struct Ended {
    root: pg_sys::Oid,
    operation: Operation,
    command: u32,
    /// Set in its middle: what has a greater number belongs behind its own events.
    pub(super) mark: Option<i64>,
}

/// A statement is through. None if it was not seen to begin.
pub(super) fn end(relation: pg_sys::Oid, operation: Operation) -> Option<Ended> {
    with_current(|under_way| {
        let is_it = |frame: &Frame| frame.relation == relation && frame.operation == operation;
        let place = under_way.frames.iter().rposition(is_it)?;
        let frame = under_way.frames.remove(place);
        Some(Ended {
            root: frame.root,
            operation,
            command: frame.command,
            mark: frame.mark,
        })
    })
}

impl Ended {
    /// Whether its events belong behind those of a statement that is still under way.
    fn is_behind(&self, frame: &Frame) -> bool {
        frame.root == self.root
            && frame.command != self.command
            && !(self.operation == Operation::Delete && frame.has_code_before_rows)
    }

    /// Whether there is such a statement, and it has no mark yet.
    pub(super) fn wants_mark(&self) -> bool {
        with_current(|under_way| {
            let mut frames = under_way.frames.iter();
            frames.any(|frame| frame.mark.is_none() && self.is_behind(frame))
        })
    }

    /// Sets the mark of those statements.
    pub(super) fn set_mark(&self, last_seq: i64) {
        with_current(|under_way| {
            for frame in &mut under_way.frames {
                if self.is_behind(frame) {
                    frame.mark.get_or_insert(last_seq);
                }
            }
        });
    }
}

/// A TRUNCATE of a table begins.
pub(super) fn begin_truncation(relation: pg_sys::Oid) {
    let within = Subtransaction::current();
    with_current(|under_way| {
        // All tables of a statement are announced before the first is empty.
        if std::mem::take(&mut under_way.truncation_done) {
            under_way.truncated.clear();
        }
        under_way.truncated.push(Truncation { within, relation });
    });
}

/// Whether a table was emptied by itself, and not as a part of one of those.
pub(super) fn truncated_by_itself(ancestors: &[u32]) -> bool {
    with_current(|under_way| {
        under_way.truncation_done = true;
        let mut truncated = under_way.truncated.iter();
        !truncated.any(|truncation| ancestors.contains(&truncation.relation.to_u32()))
    })
}
