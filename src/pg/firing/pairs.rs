//! The versions of updated rows, side by side, and whether they differ.

use std::ffi::CString;

use pgrx::pg_sys;

use super::super::spi::text_datum;
use super::rows::{ChangedRows, attribute, copy_column};
use super::{Pairing, SAME, Side};

/// Puts the versions of updated rows side by side.
pub(super) struct Pairs {
    pub(super) rows: ChangedRows,
    /// For each column where it comes from.
    from: Vec<From>,
    compared: Vec<Compared>,
    with_same: bool,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
    scratch: pg_sys::MemoryContext,
}

struct From {
    side: Side,
    index: usize,
    /// Its place among the compared ones, if it is one.
    compared: Option<usize>,
}

struct Compared {
    index: usize,
    kind: Kind,
    name: Option<pg_sys::Datum>,
    same: bool,
}

/// How the values of a type are stored.
#[derive(Clone, Copy)]
enum Kind {
    ByValue,
    Fixed(usize),
    Varlena,
}

impl Pairs {
    pub(super) fn new(table: pg_sys::TupleDesc, pairing: &Pairing) -> Self {
        let with_same = pairing.names.is_some();
        let width = pairing.cells.len() + usize::from(with_same);
        // SAFETY: the table's descriptor is valid, and the cells are of its columns.
        let descriptor = unsafe {
            let descriptor = pg_sys::CreateTemplateTupleDesc(width as i32);
            for (index, cell) in pairing.cells.iter().enumerate() {
                copy_column(
                    descriptor,
                    index,
                    table,
                    cell.number as usize - 1,
                    &cell.name(),
                );
            }
            if with_same {
                let name = CString::new(SAME).unwrap_or_default();
                pg_sys::TupleDescInitEntry(
                    descriptor,
                    width as pg_sys::AttrNumber,
                    name.as_ptr(),
                    pg_sys::TEXTARRAYOID,
                    -1,
                    0,
                );
            }
            descriptor
        };
        let compared = pairing.compared.iter().enumerate().map(|(place, number)| {
            let index = *number as usize - 1;
            // SAFETY: as above.
            let column = unsafe { attribute(table, index) };
            Compared {
                index,
                kind: match (column.attbyval, column.attlen) {
                    (true, _) => Kind::ByValue,
                    (false, -1) => Kind::Varlena,
                    (false, length) => Kind::Fixed(usize::try_from(length).unwrap_or(0)),
                },
                name: pairing
                    .names
                    .and_then(|names| names[place].as_deref())
                    .map(text_datum),
                same: false,
            }
        });
        // SAFETY: a child of the call's memory.
        let scratch = unsafe {
            pg_sys::AllocSetContextCreateInternal(
                pg_sys::CurrentMemoryContext,
                c"outbox capture".as_ptr(),
                pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            )
        };
        Self {
            from: pairing
                .cells
                .iter()
                .map(|cell| From {
                    side: cell.side,
                    index: cell.number as usize - 1,
                    compared: pairing.compared.iter().position(|&it| it == cell.number),
                })
                .collect(),
            compared: compared.collect(),
            with_same,
            values: vec![pg_sys::Datum::from(0); width],
            nulls: vec![true; width],
            rows: ChangedRows::empty(descriptor),
            scratch,
        }
    }

    /// Takes an update, unless it has changed nothing of interest.
    ///
    /// # Safety
    /// Both slots hold rows of the table.
    pub(super) unsafe fn put(
        &mut self,
        old: *mut pg_sys::TupleTableSlot,
        new: *mut pg_sys::TupleTableSlot,
    ) {
        // SAFETY: as the caller promises; what comparing fetches and what is formed lies in memory that is emptied with each row.
        unsafe {
            pg_sys::slot_getallattrs(old);
            pg_sys::slot_getallattrs(new);
            let before = pg_sys::MemoryContextSwitchTo(self.scratch);
            let mut differs = false;
            for column in &mut self.compared {
                column.same = is_same(
                    column.kind,
                    value(old, column.index),
                    value(new, column.index),
                );
                differs |= !column.same;
            }
            if differs {
                for (place, from) in self.from.iter().enumerate() {
                    let same = || from.compared.is_some_and(|place| self.compared[place].same);
                    let value = match from.side {
                        Side::Old => value(old, from.index),
                        Side::New => value(new, from.index),
                        Side::Changed => value(new, from.index).filter(|_| !same()),
                    };
                    self.nulls[place] = value.is_none();
                    self.values[place] = value.unwrap_or(pg_sys::Datum::from(0));
                }
                if self.with_same {
                    let place = self.from.len();
                    let names = self.compared.iter().filter(|column| column.same);
                    let mut names = names.filter_map(|column| column.name).collect::<Vec<_>>();
                    self.nulls[place] = false;
                    self.values[place] = pg_sys::Datum::from(pg_sys::construct_array(
                        names.as_mut_ptr(),
                        names.len() as i32,
                        pg_sys::TEXTOID,
                        -1,
                        false,
                        b'i' as std::ffi::c_char,
                    ));
                }
                pg_sys::tuplestore_putvalues(
                    self.rows.store,
                    self.rows.descriptor,
                    self.values.as_mut_ptr(),
                    self.nulls.as_mut_ptr(),
                );
            }
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::MemoryContextReset(self.scratch);
        }
    }
}

/// # Safety
/// The slot's row is deformed, and has the column.
unsafe fn value(slot: *mut pg_sys::TupleTableSlot, index: usize) -> Option<pg_sys::Datum> {
    // SAFETY: as the caller promises.
    unsafe { (!*(*slot).tts_isnull.add(index)).then(|| *(*slot).tts_values.add(index)) }
}

/// Whether two values are the same to the byte. No code of a type is run.
///
/// # Safety
/// Both are values of a type that is stored so.
unsafe fn is_same(kind: Kind, old: Option<pg_sys::Datum>, new: Option<pg_sys::Datum>) -> bool {
    let (old, new) = match (old, new) {
        (Some(old), Some(new)) => (old, new),
        (None, None) => return true,
        _ => return false,
    };
    // SAFETY: as the caller promises.
    unsafe {
        match kind {
            Kind::ByValue => old.value() == new.value(),
            Kind::Fixed(length) => {
                bytes(old.cast_mut_ptr(), length) == bytes(new.cast_mut_ptr(), length)
            }
            Kind::Varlena => is_same_varlena(old.cast_mut_ptr(), new.cast_mut_ptr()),
        }
    }
}

/// # Safety
/// Both are valid.
unsafe fn is_same_varlena(old: *mut pg_sys::varlena, new: *mut pg_sys::varlena) -> bool {
    // SAFETY: as the caller promises. What detoasting copies goes with the memory in force.
    unsafe {
        // One that an update has not touched is still stored in the same place: the pointers say so, and it need not be fetched.
        let stored = |value| {
            pgrx::varatt_is_1b_e(value)
                && u32::from(pgrx::vartag_external(value)) == pg_sys::vartag_external::VARTAG_ONDISK
        };
        if stored(old) && stored(new) {
            let size = pgrx::varsize_external(old);
            if bytes(old.cast(), size) == bytes(new.cast(), size) {
                return true;
            }
        }
        let size =
            |value: *mut pg_sys::varlena| pg_sys::toast_raw_datum_size(pg_sys::Datum::from(value));
        if size(old) != size(new) {
            return false;
        }
        let old = pg_sys::pg_detoast_datum_packed(old);
        let new = pg_sys::pg_detoast_datum_packed(new);
        pgrx::varlena_to_byte_slice(old) == pgrx::varlena_to_byte_slice(new)
    }
}

/// # Safety
/// There are that many.
unsafe fn bytes<'a>(from: *const u8, length: usize) -> &'a [u8] {
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(from, length) }
}
