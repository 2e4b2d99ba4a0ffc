//! Values of columns as members of jsonb and as text, with what there is to know of their types worked out before.
//!
//! What comes out is what `to_jsonb` and the types' own output make of them, but for the exceptions that `pg/exact.rs` makes.

use std::ffi::{CStr, c_char};
use std::io::Write;

use pgrx::pg_sys;

use super::super::exact::{self, Printed, printed, printed_as_text};
use super::jsonb::Member;

/// How values of a type become JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bool,
    Int2,
    Int4,
    Int8,
    Numeric,
    Float,
    Text,
    Time,
    Jsonb,
    /// As a string of what the type prints.
    Printed,
    /// Arrays, composites, json, and what is not built in.
    Other,
}

/// A type, as far as it matters here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Type {
    kind: Kind,
    oid: pg_sys::Oid,
    /// Without the domains around it.
    base: pg_sys::Oid,
    output: pg_sys::Oid,
}

impl Type {
    pub(super) fn of(oid: pg_sys::Oid) -> Self {
        // SAFETY: catalog look-ups.
        let (base, output, is_array, is_row, is_enum) = unsafe {
            let base = pg_sys::getBaseType(oid);
            let mut output = pg_sys::InvalidOid;
            let mut varlena = false;
            pg_sys::getTypeOutputInfo(oid, &raw mut output, &raw mut varlena);
            (
                base,
                output,
                pg_sys::get_element_type(base) != pg_sys::InvalidOid,
                pg_sys::type_is_rowtype(base),
                pg_sys::get_typtype(base) as u8 == pg_sys::TYPTYPE_ENUM,
            )
        };
        let kind = match base {
            pg_sys::BOOLOID => Kind::Bool,
            pg_sys::INT2OID => Kind::Int2,
            pg_sys::INT4OID => Kind::Int4,
            pg_sys::INT8OID => Kind::Int8,
            pg_sys::NUMERICOID => Kind::Numeric,
            pg_sys::FLOAT4OID | pg_sys::FLOAT8OID => Kind::Float,
            pg_sys::TEXTOID | pg_sys::VARCHAROID | pg_sys::BPCHAROID => Kind::Text,
            pg_sys::DATEOID | pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID => Kind::Time,
            pg_sys::JSONBOID => Kind::Jsonb,
            pg_sys::JSONOID => Kind::Other,
            _ if is_array || is_row => Kind::Other,
            _ if is_enum || base.to_u32() < pg_sys::FirstNormalObjectId => Kind::Printed,
            _ => Kind::Other,
        };
        Self {
            kind,
            oid,
            base,
            output,
        }
    }

    /// What the JSON of its values depends on.
    pub(super) fn json_depends_on(&self) -> Printed {
        match self.kind {
            Kind::Time => Printed::Always,
            _ => printed(self.oid),
        }
    }

    pub(super) fn text_depends_on(&self) -> Printed {
        printed_as_text(self.oid)
    }

    /// Hands a value over as JSON. What is made for that lies in the memory in force.
    ///
    /// # Safety
    /// The value is of this type.
    pub(super) unsafe fn json<R>(&self, value: pg_sys::Datum, take: impl FnOnce(Member) -> R) -> R {
        // SAFETY: as the caller promises; each kind is read as its type is stored.
        unsafe {
            match self.kind {
                Kind::Bool => take(Member::Bool(value.value() as u8 != 0)),
                Kind::Int2 => take(whole(i64::from(value.value() as i16))),
                Kind::Int4 => take(whole(i64::from(value.value() as i32))),
                Kind::Int8 => take(whole(value.value() as i64)),
                Kind::Numeric => {
                    let stored = pg_sys::pg_detoast_datum(value.cast_mut_ptr());
                    let number = stored.cast::<pg_sys::NumericData>();
                    if pg_sys::numeric_is_nan(number) || pg_sys::numeric_is_inf(number) {
                        take(Member::String(self.print(value).to_bytes()))
                    } else {
                        take(Member::Numeric(with_header(stored)))
                    }
                }
                Kind::Float => {
                    let text = self.print(value);
                    // Neither NaN nor an infinity.
                    if text.to_bytes().last().is_some_and(u8::is_ascii_digit) {
                        take(read_number(text))
                    } else {
                        take(Member::String(text.to_bytes()))
                    }
                }
                Kind::Text => take(Member::String(bytes_of(value))),
                Kind::Time => {
                    let mut buffer = [0 as c_char; pg_sys::MAXDATELEN as usize + 1];
                    // In UTC, whatever the session says.
                    let zone = 0;
                    let text = pg_sys::JsonEncodeDateTime(
                        buffer.as_mut_ptr(),
                        value,
                        self.base,
                        &raw const zone,
                    );
                    take(Member::String(CStr::from_ptr(text).to_bytes()))
                }
                Kind::Jsonb => take(root_of(value)),
                Kind::Printed => take(Member::String(self.print(value).to_bytes())),
                Kind::Other => take(root_of(exact::to_jsonb(value, self.oid))),
            }
        }
    }

    /// Writes a value as the type prints it.
    ///
    /// # Safety
    /// The value is of this type.
    pub(super) unsafe fn text(&self, value: pg_sys::Datum, out: &mut Vec<u8>) {
        // Writing to memory cannot fail.
        let mut number = |number: i64| {
            let _ = write!(out, "{number}");
        };
        // SAFETY: as the caller promises.
        unsafe {
            match self.kind {
                Kind::Int2 => number(i64::from(value.value() as i16)),
                Kind::Int4 => number(i64::from(value.value() as i32)),
                Kind::Int8 => number(value.value() as i64),
                Kind::Text => out.extend_from_slice(bytes_of(value)),
                _ => out.extend_from_slice(self.print(value).to_bytes()),
            }
        }
    }

    /// # Safety
    /// The value is of this type. What is returned lies in the memory in force.
    unsafe fn print<'a>(&self, value: pg_sys::Datum) -> &'a CStr {
        // SAFETY: as the caller promises.
        unsafe { CStr::from_ptr(pg_sys::OidOutputFunctionCall(self.output, value)) }
    }
}

/// # Safety
/// What is returned lies in the memory in force.
unsafe fn whole<'a>(number: i64) -> Member<'a> {
    // SAFETY: makes a numeric.
    Member::Numeric(unsafe { with_header(pg_sys::int64_to_numeric(number).cast()) })
}

/// `numeric_in`.
const READ_NUMBER: pg_sys::Oid = pg_sys::Oid::from_u32(1701);

/// # Safety
/// The text is that of a number. What is returned lies in the memory in force.
unsafe fn read_number<'a>(text: &CStr) -> Member<'a> {
    // SAFETY: the function reads a text and does not change it.
    unsafe {
        let number = pg_sys::OidInputFunctionCall(
            READ_NUMBER,
            text.as_ptr().cast_mut(),
            pg_sys::InvalidOid,
            -1,
        );
        Member::Numeric(with_header(number.cast_mut_ptr()))
    }
}

/// # Safety
/// The value is in one piece, with a header of four bytes.
unsafe fn with_header<'a>(stored: *mut pg_sys::varlena) -> &'a [u8] {
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(stored.cast::<u8>(), pgrx::varsize(stored)) }
}

/// # Safety
/// The value is a varlena. What is fetched lies in the memory in force.
pub(super) unsafe fn bytes_of<'a>(value: pg_sys::Datum) -> &'a [u8] {
    // SAFETY: as the caller promises.
    unsafe { pgrx::varlena_to_byte_slice(pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr())) }
}

/// # Safety
/// The value is a jsonb. What is fetched lies in the memory in force.
unsafe fn root_of<'a>(value: pg_sys::Datum) -> Member<'a> {
    // SAFETY: as the caller promises; it must be aligned, so its header is one of four bytes.
    Member::of_root(unsafe {
        pgrx::varlena_to_byte_slice(pg_sys::pg_detoast_datum(value.cast_mut_ptr()))
    })
}
