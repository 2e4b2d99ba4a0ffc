//! Arguments of statements.

use std::ffi::CString;

use pgrx::{IntoDatum, pg_sys};

use super::super::encoding;
use super::super::error::Complaint;
use super::{Record, to_pg_time};

/// An argument of a statement, with its SQL type.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    Bool(bool),
    I32(Option<i32>),
    I64(Option<i64>),
    Oid(Option<pg_sys::Oid>),
    Text(Option<&'a str>),
    /// text, as it was handed in.
    RawText(Option<pg_sys::Datum>),
    Texts(Option<&'a [String]>),
    /// jsonb, as text.
    Json(Option<&'a str>),
    /// jsonb, as it was handed in.
    RawJson(Option<pg_sys::Datum>),
    /// xid8.
    Xid(u64),
    /// xid8[].
    Xids(&'a [u64]),
    /// pg_snapshot, as text.
    Snapshot(Option<&'a str>),
    /// interval, as it was handed in.
    RawInterval(Option<pg_sys::Datum>),
    /// timestamptz, microseconds since the Unix epoch.
    Time(Option<i64>),
    /// An array of composites.
    Records(&'a [Record], pg_sys::Oid),
}

fn array_of(element: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: a catalog look-up in an open transaction.
    unsafe { pg_sys::get_array_type(element) }
}

impl Arg<'_> {
    pub(crate) fn type_oid(&self) -> pg_sys::Oid {
        match self {
            Arg::Bool(_) => pg_sys::BOOLOID,
            Arg::I32(_) => pg_sys::INT4OID,
            Arg::I64(_) => pg_sys::INT8OID,
            Arg::Oid(_) => pg_sys::OIDOID,
            Arg::Text(_) | Arg::RawText(_) => pg_sys::TEXTOID,
            Arg::Texts(_) => pg_sys::TEXTARRAYOID,
            Arg::Json(_) | Arg::RawJson(_) => pg_sys::JSONBOID,
            Arg::Xid(_) => pg_sys::XID8OID,
            Arg::Xids(_) => pg_sys::XID8ARRAYOID,
            Arg::Snapshot(_) => pg_sys::PG_SNAPSHOTOID,
            Arg::RawInterval(_) => pg_sys::INTERVALOID,
            Arg::Time(_) => pg_sys::TIMESTAMPTZOID,
            Arg::Records(_, element) => array_of(*element),
        }
    }

    pub(super) fn datum(&self) -> Option<pg_sys::Datum> {
        match self {
            Arg::Bool(value) => value.into_datum(),
            Arg::I32(value) => value.into_datum(),
            Arg::I64(value) => value.into_datum(),
            Arg::Oid(value) => value.into_datum(),
            Arg::Text(value) => value.map(text_datum),
            Arg::Texts(value) => value.map(text_array),
            Arg::Json(value) => value.map(|text| input(pg_sys::JSONBOID, text)),
            Arg::RawText(value) | Arg::RawJson(value) | Arg::RawInterval(value) => *value,
            Arg::Xid(value) => Some(pg_sys::Datum::from(*value)),
            Arg::Xids(values) => Some(xid_array(values)),
            Arg::Snapshot(value) => value.map(|text| input(pg_sys::PG_SNAPSHOTOID, text)),
            Arg::Time(value) => value.map(|unix| pg_sys::Datum::from(to_pg_time(unix))),
            Arg::Records(records, element) => Some(record_array(records, *element)),
        }
    }
}

/// A text, in the memory of the statement.
pub(in super::super) fn text_datum(text: &str) -> pg_sys::Datum {
    let bytes = encoding::to_database(text);
    let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    // SAFETY: copies that many bytes; longer ones than Postgres allows are refused there.
    let text = unsafe { pg_sys::cstring_to_text_with_len(bytes.as_ptr().cast(), length) };
    pg_sys::Datum::from(text)
}

fn text_array(texts: &[String]) -> pg_sys::Datum {
    let mut datums = texts
        .iter()
        .map(|text| text_datum(text))
        .collect::<Vec<_>>();
    // SAFETY: texts are varlena, aligned as int; construct_array copies them.
    unsafe {
        let array = pg_sys::construct_array(
            datums.as_mut_ptr(),
            datums.len() as i32,
            pg_sys::TEXTOID,
            -1,
            false,
            b'i' as std::ffi::c_char,
        );
        pg_sys::Datum::from(array)
    }
}

/// A value of any type from its text form.
fn input(oid: pg_sys::Oid, text: &str) -> pg_sys::Datum {
    let text = CString::new(encoding::to_database(text))
        .unwrap_or_else(|_| Complaint::bad_argument("text holds a zero byte").raise());
    // SAFETY: the type's own input function, on a terminated string; it raises what it cannot read.
    unsafe {
        let mut function = pg_sys::InvalidOid;
        let mut parameter = pg_sys::InvalidOid;
        pg_sys::getTypeInputInfo(oid, &raw mut function, &raw mut parameter);
        pg_sys::OidInputFunctionCall(function, text.as_ptr().cast_mut(), parameter, -1)
    }
}

fn xid_array(values: &[u64]) -> pg_sys::Datum {
    let mut datums = values
        .iter()
        .map(|&xid| pg_sys::Datum::from(xid))
        .collect::<Vec<_>>();
    // SAFETY: xid8 is eight bytes, passed by value, aligned as double.
    unsafe {
        let array = pg_sys::construct_array(
            datums.as_mut_ptr(),
            datums.len() as i32,
            pg_sys::XID8OID,
            8,
            true,
            b'd' as std::ffi::c_char,
        );
        pg_sys::Datum::from(array)
    }
}

fn record_array(records: &[Record], element: pg_sys::Oid) -> pg_sys::Datum {
    let mut datums = records
        .iter()
        .map(|record| pg_sys::Datum::from(record.0.as_ptr()))
        .collect::<Vec<_>>();
    // SAFETY: each record is a whole composite of this type, aligned to eight bytes; construct_array copies them.
    unsafe {
        let array = pg_sys::construct_array(
            datums.as_mut_ptr(),
            datums.len() as i32,
            element,
            -1,
            false,
            b'd' as std::ffi::c_char,
        );
        pg_sys::Datum::from(array)
    }
}
