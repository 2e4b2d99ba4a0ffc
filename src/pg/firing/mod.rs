//! One firing of a trigger: what happened to which relation, and the rows that it concerns.
//!
//! The rows are lent to statements as a relation named [`CHANGE`]. Its columns are named after the side and the number of the table's
//! column, `o3` and `n3`, so that no name of a user's column can get in the way, and values stay as they are stored: what lies out of
//! line is not fetched unless a statement asks for it.

mod pairs;
mod rows;

use pgrx::pg_sys;

use self::pairs::Pairs;
pub(crate) use self::rows::ChangedRows;
pub(super) use self::rows::{Reader, attribute};
use self::rows::{has_missing, named};
use super::error::Complaint;

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
            // A row of before a column was added does not hold it, and only the table's own descriptor knows what it is then.
            return match has_missing(self.descriptor()) {
                true => ChangedRows::completed(store, self.descriptor(), descriptor),
                false => ChangedRows::lent(store, descriptor),
            };
        }
        let rows = ChangedRows::empty(descriptor);
        // SAFETY: a row trigger has the row in its first slot.
        unsafe { rows.complete(data.tg_trigslot) };
        rows
    }

    /// The same, for readers that ask for columns by their places.
    pub(crate) fn rows_unnamed(&self) -> ChangedRows {
        let data = self.data();
        let store = match self.operation() {
            Operation::Insert => data.tg_newtable,
            _ => data.tg_oldtable,
        };
        match self.is_row() {
            true => self.rows(),
            false => ChangedRows::lent(store, self.descriptor()),
        }
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
