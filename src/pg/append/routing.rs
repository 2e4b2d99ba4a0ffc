//! Which partition a row of a partitioned table is in, by the bounds of the table and of what it is divided into further. It is what the
//! server works out when such a row is inserted, with the operator classes' own functions.

use std::collections::HashMap;

use pgrx::pg_sys;

use super::row::value;

/// How a partitioned table is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strategy {
    Range,
    List,
    Hash,
}

/// A partitioned table, as far as its rows tell the partition: not by expressions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) table: pg_sys::Oid,
    pub(crate) strategy: Strategy,
    /// Places of the key's columns in the rows, counted from 0.
    pub(crate) key: Vec<usize>,
    /// For each of them the function that compares, or hashes, and the collation.
    pub(crate) functions: Vec<pg_sys::Oid>,
    pub(crate) collations: Vec<pg_sys::Oid>,
}

/// A level with its functions looked up.
struct Ready<'a> {
    level: &'a Level,
    functions: Vec<pg_sys::FmgrInfo>,
}

/// Finds partitions for the rows of one statement.
pub(super) struct Router<'a> {
    levels: Vec<Ready<'a>>,
    open: HashMap<pg_sys::Oid, (pg_sys::Relation, pg_sys::PartitionDesc)>,
}

impl<'a> Router<'a> {
    /// `levels` are the partitioned table that is written to, first, and those among its partitions.
    pub(super) fn new(levels: &'a [Level]) -> Self {
        let ready = levels.iter().map(|level| {
            let functions = level.functions.iter().map(|&function| {
                let mut info = pg_sys::FmgrInfo::default();
                // SAFETY: raises an error if there is no such function; what it keeps goes with the call's memory, as we do.
                unsafe { pg_sys::fmgr_info(function, &raw mut info) };
                info
            });
            let functions = functions.collect();
            Ready { level, functions }
        });
        Self {
            levels: ready.collect(),
            open: HashMap::new(),
        }
    }

    /// The partition that holds a row; none if no partition does.
    ///
    /// # Safety
    /// The row is deformed, and has the columns of the keys.
    pub(super) unsafe fn find(&mut self, row: *mut pg_sys::TupleTableSlot) -> Option<pg_sys::Oid> {
        let mut level = 0;
        loop {
            let table = self.levels.get(level)?.level.table;
            let partitions = self.partitions_of(table);
            let ready = &self.levels[level];
            // SAFETY: as the caller promises; what is open is valid, and an index that is found is one of its partitions.
            let (partition, is_leaf) = unsafe {
                let place = usize::try_from(place(ready, (*partitions).boundinfo, row)).ok()?;
                (
                    *(*partitions).oids.add(place),
                    *(*partitions).is_leaf.add(place),
                )
            };
            if is_leaf {
                return Some(partition);
            }
            let mut levels = self.levels.iter();
            level = levels.position(|ready| ready.level.table == partition)?;
        }
    }

    fn partitions_of(&mut self, table: pg_sys::Oid) -> pg_sys::PartitionDesc {
        let open = || {
            // SAFETY: the statement whose rows these are has the table open and locked; it stays open until `close`, or goes with the
            // (sub)transaction after an error, and with it the description.
            unsafe {
                let relation = pg_sys::table_open(table, pg_sys::AccessShareLock as i32);
                (relation, pg_sys::RelationGetPartitionDesc(relation, false))
            }
        };
        self.open.entry(table).or_insert_with(open).1
    }

    pub(super) fn close(self) {
        for (relation, _) in self.open.into_values() {
            // SAFETY: opened by us. The lock stays until the transaction ends.
            unsafe { pg_sys::table_close(relation, pg_sys::NoLock as i32) };
        }
    }
}

/// The index of the partition for a row; negative for none.
///
/// # Safety
/// The bounds are of this level, and the row has the columns of its key.
unsafe fn place(
    ready: &Ready,
    bounds: pg_sys::PartitionBoundInfo,
    row: *mut pg_sys::TupleTableSlot,
) -> i32 {
    let key = ready.level.key.iter();
    // SAFETY: as the caller promises.
    let key = key.map(|&index| unsafe { value(row, index) });
    let key = key.collect::<Vec<_>>();
    let mut nulls = key.iter().map(Option::is_none).collect::<Vec<_>>();
    let values = key
        .iter()
        .map(|value| value.unwrap_or(pg_sys::Datum::from(0)));
    let mut values = values.collect::<Vec<_>>();
    let functions = ready.functions.as_ptr().cast_mut();
    let collations = ready.level.collations.as_ptr().cast_mut();
    let count = values.len() as i32;
    let mut is_equal = false;
    // SAFETY: there is a function, a collation, a value and a mark of null for each column of the key; the bounds are as their strategy
    // has them.
    unsafe {
        let info = &*bounds;
        let at = |place: i32| match usize::try_from(place) {
            Ok(place) => *info.indexes.add(place),
            Err(_) => -1,
        };
        let found = match ready.level.strategy {
            Strategy::Hash => {
                let hash = pg_sys::compute_partition_hash_value(
                    count,
                    functions,
                    collations,
                    values.as_mut_ptr(),
                    nulls.as_mut_ptr(),
                );
                at((hash % u64::try_from(info.nindexes).unwrap_or(1).max(1)) as i32)
            }
            Strategy::List if nulls[0] => info.null_index,
            Strategy::List => {
                let place = pg_sys::partition_list_bsearch(
                    functions,
                    collations,
                    bounds,
                    values[0],
                    &raw mut is_equal,
                );
                if is_equal { at(place) } else { -1 }
            }
            Strategy::Range if nulls.contains(&true) => -1,
            Strategy::Range => {
                let place = pg_sys::partition_range_datum_bsearch(
                    functions,
                    collations,
                    bounds,
                    count,
                    values.as_mut_ptr(),
                    &raw mut is_equal,
                );
                at(place + 1)
            }
        };
        if found < 0 { info.default_index } else { found }
    }
}
