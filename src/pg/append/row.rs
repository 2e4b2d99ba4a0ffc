//! What of a row goes into its event: texts, and the payload.

use pgrx::pg_sys;

use super::jsonb::{Member, Object, Writer};
use super::value::{Type, bytes_of};
use super::{Field, HEADER, set_size};
use crate::pg::{array, encoding};

/// The shape of a payload.
pub(super) enum Shape {
    Row(Vec<Part>),
    Versions(Option<Vec<Part>>, Option<Vec<Part>>),
}

/// A member of an object.
pub(super) struct Part {
    /// In the database's encoding.
    name: Vec<u8>,
    index: usize,
    pub(super) type_: Type,
    if_changed: bool,
}

/// In the order in which jsonb keeps them.
pub(super) fn parts(fields: &[Field]) -> Vec<Part> {
    let part = |field: &Field| Part {
        name: encoding::to_database(&field.name).into_owned(),
        index: field.source.index,
        type_: Type::of(field.source.type_oid),
        if_changed: field.if_changed,
    };
    let mut parts = fields.iter().map(part).collect::<Vec<_>>();
    parts.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
    parts
}

/// # Safety
/// The row is deformed, and has the column.
pub(super) unsafe fn value(
    row: *mut pg_sys::TupleTableSlot,
    index: usize,
) -> Option<pg_sys::Datum> {
    // SAFETY: as the caller promises.
    unsafe { (!*(*row).tts_isnull.add(index)).then(|| *(*row).tts_values.add(index)) }
}

/// Joins values with colons, as a stored text. False if it is the null of a single one.
///
/// # Safety
/// The row has these columns, of these types.
pub(super) unsafe fn texts(
    columns: &[(usize, Type)],
    row: *mut pg_sys::TupleTableSlot,
    out: &mut Vec<u8>,
) -> bool {
    out.clear();
    out.resize(HEADER, 0);
    for (place, (index, type_)) in columns.iter().enumerate() {
        if place > 0 {
            out.push(b':');
        }
        // SAFETY: as the caller promises.
        unsafe {
            match value(row, *index) {
                Some(value) => type_.text(value, out),
                None if columns.len() == 1 => return false,
                None => {}
            }
        }
    }
    set_size(out);
    true
}

/// Writes the payload of a row. False if it is beyond what jsonb can hold.
///
/// # Safety
/// The row has the columns that the shape names.
pub(super) unsafe fn payload(
    shape: &Shape,
    same: Option<usize>,
    row: *mut pg_sys::TupleTableSlot,
    json: &mut Writer,
) -> bool {
    json.clear();
    // SAFETY: as the caller promises.
    unsafe {
        match shape {
            Shape::Row(parts) => {
                let same = same.map(|index| names(value(row, index)));
                let same = same.unwrap_or_default();
                let is_shown = |part: &&Part| !(part.if_changed && same.contains(&&*part.name));
                let shown = parts.iter().filter(is_shown).collect::<Vec<_>>();
                let object = object(&shown, row, json);
                json.close(&object)
            }
            Shape::Versions(before, after) => {
                let mut whole = json.object(2);
                json.key(&mut whole, b"after");
                json.key(&mut whole, b"before");
                for version in [after, before] {
                    match version {
                        Some(parts) => {
                            let inner = object(&parts.iter().collect::<Vec<_>>(), row, json);
                            json.close_within(&inner, &mut whole);
                        }
                        None => json.value(&mut whole, Member::Null),
                    }
                }
                json.close(&whole)
            }
        }
    }
}

/// # Safety
/// The row has the columns of the parts.
unsafe fn object(parts: &[&Part], row: *mut pg_sys::TupleTableSlot, json: &mut Writer) -> Object {
    let mut object = json.object(parts.len());
    for part in parts {
        json.key(&mut object, &part.name);
    }
    for part in parts {
        // SAFETY: as the caller promises.
        unsafe {
            match value(row, part.index) {
                Some(value) => part
                    .type_
                    .json(value, |member| json.value(&mut object, member)),
                None => json.value(&mut object, Member::Null),
            }
        }
    }
    object
}

/// The texts of an array without nulls.
///
/// # Safety
/// The value is an array of texts.
unsafe fn names<'a>(array: Option<pg_sys::Datum>) -> Vec<&'a [u8]> {
    // SAFETY: as the caller promises; what is taken out lies in the memory in force.
    unsafe {
        let texts = array.map_or_else(Vec::new, |array| array::texts(array));
        let texts = texts.into_iter().flatten();
        texts.map(|text| bytes_of(text)).collect()
    }
}
