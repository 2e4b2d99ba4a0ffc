//! Any value as JSON, exactly and without running anybody's code.
//!
//! `to_jsonb` calls the casts to json that users define for their types, and raises for what jsonb cannot hold. What captures a table
//! runs with the rights of the extension and must not fail for a value. So types that are not Postgres' own, and those that are made
//! of others, go through here. The shapes are those of `to_jsonb`, with two differences: a type that is not built in is written as its
//! text, and json that jsonb cannot hold (`\u0000`, half of a surrogate pair, a number out of range) is written as a string of its text.

use std::ffi::CStr;
use std::panic::AssertUnwindSafe;

use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};

use super::firing::attribute;

/// A value as jsonb.
pub(crate) fn to_jsonb(value: pg_sys::Datum, type_: pg_sys::Oid) -> pg_sys::Datum {
    let mut text = Vec::new();
    write(value, type_, &mut text);
    text.push(0);
    parse(&text).unwrap_or_else(|| {
        // Its parts are fine; as a whole it is beyond what jsonb can hold.
        let mut whole = Vec::new();
        quote(output(value, type_), &mut whole);
        whole.push(0);
        read(&whole)
    })
}

/// The jsonb that a text says, or the text as a string where it says none.
pub(crate) fn read_text(text: pg_sys::Datum) -> pg_sys::Datum {
    let mut json = Vec::new();
    write_json(output(text, pg_sys::TEXTOID), &mut json);
    json.push(0);
    read(&json)
}

/// A value as its type prints it. No cast is asked.
pub(crate) fn to_text(value: pg_sys::Datum, type_: pg_sys::Oid) -> pg_sys::Datum {
    let text = output(value, type_);
    // SAFETY: copies that many bytes.
    pg_sys::Datum::from(unsafe {
        pg_sys::cstring_to_text_with_len(text.as_ptr().cast(), text.len() as i32)
    })
}

/// The types that `to_jsonb` itself writes exactly, whatever the value, without looking for anybody's casts.
pub(crate) fn is_plain(type_: pg_sys::Oid) -> bool {
    // SAFETY: catalog look-ups.
    unsafe {
        let base = pg_sys::getBaseType(type_);
        let element = pg_sys::get_element_type(base);
        if element != pg_sys::InvalidOid {
            return is_plain(element);
        }
        base.to_u32() < pg_sys::FirstNormalObjectId
            && base != pg_sys::JSONOID
            && base != pg_sys::JSONARRAYOID
            && !pg_sys::type_is_rowtype(base)
    }
}

/// Which settings of a session show in how a value is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Printed {
    Always,
    ByZone,
    BySettings,
}

/// What the text of values of a type depends on. That of dates and times has DateStyle; in JSON they are always the same.
pub(crate) fn printed_as_text(type_: pg_sys::Oid) -> Printed {
    // SAFETY: catalog look-ups.
    let base = unsafe {
        let base = pg_sys::getBaseType(type_);
        let element = pg_sys::get_element_type(base);
        if element == pg_sys::InvalidOid {
            base
        } else {
            pg_sys::getBaseType(element)
        }
    };
    match base {
        pg_sys::DATEOID | pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID => Printed::BySettings,
        _ => printed(type_),
    }
}

/// What the way in which values of a type are printed depends on.
pub(crate) fn printed(type_: pg_sys::Oid) -> Printed {
    // SAFETY: catalog look-ups.
    unsafe {
        let base = pg_sys::getBaseType(type_);
        let element = pg_sys::get_element_type(base);
        if element != pg_sys::InvalidOid {
            return printed(element);
        }
        match base {
            pg_sys::BOOLOID
            | pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID
            | pg_sys::NUMERICOID
            | pg_sys::TEXTOID
            | pg_sys::VARCHAROID
            | pg_sys::BPCHAROID
            | pg_sys::NAMEOID
            | pg_sys::UUIDOID
            | pg_sys::JSONOID
            | pg_sys::JSONBOID
            | pg_sys::DATEOID
            | pg_sys::TIMESTAMPOID
            | pg_sys::TIMEOID
            | pg_sys::INETOID
            | pg_sys::CIDROID => Printed::Always,
            pg_sys::TIMESTAMPTZOID => Printed::ByZone,
            _ if is_enum(base) => Printed::Always,
            _ => Printed::BySettings,
        }
    }
}

fn is_enum(type_: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up.
    unsafe { pg_sys::get_typtype(type_) as u8 == pg_sys::TYPTYPE_ENUM }
}

/// What the type's own output function says, in the database's encoding.
fn output<'a>(value: pg_sys::Datum, type_: pg_sys::Oid) -> &'a [u8] {
    // SAFETY: the value is of the type; what is printed lies in the memory of the call.
    unsafe {
        let mut function = pg_sys::InvalidOid;
        let mut varlena = false;
        pg_sys::getTypeOutputInfo(type_, &raw mut function, &raw mut varlena);
        CStr::from_ptr(pg_sys::OidOutputFunctionCall(function, value)).to_bytes()
    }
}

fn write(value: pg_sys::Datum, type_: pg_sys::Oid, out: &mut Vec<u8>) {
    // SAFETY: raises an error when nesting goes too deep.
    unsafe { pg_sys::check_stack_depth() };
    // SAFETY: catalog look-ups; the value is of the type.
    unsafe {
        let base = pg_sys::getBaseType(type_);
        let element = pg_sys::get_element_type(base);
        if element != pg_sys::InvalidOid {
            return write_array(value, element, out);
        }
        match base {
            pg_sys::JSONBOID => out.extend_from_slice(output(value, base)),
            pg_sys::JSONOID => write_json(output(value, base), out),
            pg_sys::BOOLOID => {
                let text: &[u8] = if value.value() as u8 != 0 {
                    b"true"
                } else {
                    b"false"
                };
                out.extend_from_slice(text);
            }
            pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID
            | pg_sys::NUMERICOID
            | pg_sys::FLOAT4OID
            | pg_sys::FLOAT8OID => write_number(output(value, base), out),
            pg_sys::DATEOID | pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID => {
                let mut buffer = [0 as std::ffi::c_char; pg_sys::MAXDATELEN as usize + 1];
                let text =
                    pg_sys::JsonEncodeDateTime(buffer.as_mut_ptr(), value, base, std::ptr::null());
                quote(CStr::from_ptr(text).to_bytes(), out);
            }
            _ if pg_sys::type_is_rowtype(base) => write_row(value, out),
            _ => quote(output(value, base), out),
        }
    }
}

/// Digits are a number; `NaN` and the infinities are strings.
fn write_number(text: &[u8], out: &mut Vec<u8>) {
    if text.last().is_some_and(u8::is_ascii_digit) {
        out.extend_from_slice(text);
    } else {
        quote(text, out);
    }
}

fn write_json(text: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    let mut whole = text.to_vec();
    whole.push(0);
    if parse(&whole).is_some() {
        out.extend_from_slice(text);
    } else {
        out.truncate(start);
        quote(text, out);
    }
}

/// # Safety
/// The value is an array of the element type.
unsafe fn write_array(value: pg_sys::Datum, element: pg_sys::Oid, out: &mut Vec<u8>) {
    let mut values = std::ptr::null_mut();
    let mut nulls = std::ptr::null_mut();
    let mut count = 0;
    // SAFETY: as the caller promises; the arrays that are made are as long as is said.
    unsafe {
        let mut length = 0;
        let mut by_value = false;
        let mut align = 0;
        pg_sys::get_typlenbyvalalign(element, &raw mut length, &raw mut by_value, &raw mut align);
        let array = pg_sys::pg_detoast_datum(value.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        pg_sys::deconstruct_array(
            array,
            element,
            length.into(),
            by_value,
            align,
            &raw mut values,
            &raw mut nulls,
            &raw mut count,
        );
        let count = usize::try_from(count).unwrap_or(0);
        let dimensions = usize::try_from((*array).ndim).unwrap_or(0);
        let sizes = std::slice::from_raw_parts(array.add(1).cast::<i32>(), dimensions);
        let mut next = 0;
        let mut item = |out: &mut Vec<u8>| {
            if next >= count || *nulls.add(next) {
                out.extend_from_slice(b"null");
            } else {
                write(*values.add(next), element, out);
            }
            next += 1;
        };
        write_dimension(sizes, &mut item, out);
    }
}

fn write_dimension(sizes: &[i32], item: &mut impl FnMut(&mut Vec<u8>), out: &mut Vec<u8>) {
    out.push(b'[');
    if let Some((&size, inner)) = sizes.split_first() {
        for index in 0..size {
            if index > 0 {
                out.push(b',');
            }
            if inner.is_empty() {
                item(out);
            } else {
                write_dimension(inner, item, out);
            }
        }
    }
    out.push(b']');
}

/// # Safety
/// The value is a composite.
unsafe fn write_row(value: pg_sys::Datum, out: &mut Vec<u8>) {
    // SAFETY: as the caller promises; a composite says of what type it is.
    unsafe {
        let header =
            pg_sys::pg_detoast_datum(value.cast_mut_ptr()).cast::<pg_sys::HeapTupleHeaderData>();
        let fields = (*header).t_choice.t_datum;
        let descriptor = pg_sys::lookup_rowtype_tupdesc(fields.datum_typeid, fields.datum_typmod);
        let width = usize::try_from((*descriptor).natts).unwrap_or(0);
        let mut tuple = pg_sys::HeapTupleData {
            t_len: pgrx::varsize(header.cast()) as u32,
            t_data: header,
            ..Default::default()
        };
        let mut values = vec![pg_sys::Datum::from(0); width];
        let mut nulls = vec![true; width];
        pg_sys::heap_deform_tuple(
            &raw mut tuple,
            descriptor,
            values.as_mut_ptr(),
            nulls.as_mut_ptr(),
        );
        out.push(b'{');
        let mut first = true;
        for index in 0..width {
            let column = attribute(descriptor, index);
            if column.attisdropped {
                continue;
            }
            if !first {
                out.push(b',');
            }
            first = false;
            quote(CStr::from_ptr(column.attname.data.as_ptr()).to_bytes(), out);
            out.push(b':');
            if nulls[index] {
                out.extend_from_slice(b"null");
            } else {
                write(values[index], column.atttypid, out);
            }
        }
        out.push(b'}');
        if (*descriptor).tdrefcount >= 0 {
            pg_sys::DecrTupleDescRefCount(descriptor);
        }
    }
}

/// A text as a JSON string. The encodings of databases leave ASCII alone.
fn quote(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for &byte in text {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0..0x20 => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

/// The jsonb of a terminated text. Raises what it cannot hold.
pub(super) fn read(text: &[u8]) -> pg_sys::Datum {
    // SAFETY: the text is terminated, and the type's own input function reads it.
    unsafe {
        let mut function = pg_sys::InvalidOid;
        let mut parameter = pg_sys::InvalidOid;
        pg_sys::getTypeInputInfo(pg_sys::JSONBOID, &raw mut function, &raw mut parameter);
        pg_sys::OidInputFunctionCall(function, text.as_ptr().cast_mut().cast(), parameter, -1)
    }
}

/// The jsonb of a terminated text; none if jsonb cannot hold it.
fn parse(text: &[u8]) -> Option<pg_sys::Datum> {
    // SAFETY: reads a global.
    let memory = unsafe { pg_sys::CurrentMemoryContext };
    let refused = |_| {
        // SAFETY: parsing takes memory and nothing else, so there is nothing to undo but where memory comes from.
        unsafe { pg_sys::MemoryContextSwitchTo(memory) };
        None
    };
    PgTryBuilder::new(AssertUnwindSafe(|| Some(read(text))))
        .catch_when(PgSqlErrorCode::ERRCODE_UNTRANSLATABLE_CHARACTER, refused)
        .catch_when(PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE, refused)
        .catch_when(PgSqlErrorCode::ERRCODE_INVALID_TEXT_REPRESENTATION, refused)
        .catch_when(PgSqlErrorCode::ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE, refused)
        .catch_when(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, refused)
        .execute()
}
