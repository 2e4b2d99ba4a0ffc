//! Text between the database's encoding and UTF-8, which is all that Rust and JSON know.
//!
//! Nothing here raises an error: one text that cannot be said must not stop what goes with it. What has no form on the other side is
//! replaced, and the caller is told.

use std::borrow::Cow;
use std::ffi::c_int;

use pgrx::pg_sys;

const UTF8: c_int = pg_sys::pg_enc::PG_UTF8 as c_int;
/// Not an encoding: bytes of whatever encoding the clients speak.
const SQL_ASCII: c_int = pg_sys::pg_enc::PG_SQL_ASCII as c_int;
/// What stands for what has no form in UTF-8.
const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

fn of_database() -> c_int {
    // SAFETY: reads a setting of the database.
    unsafe { pg_sys::GetDatabaseEncoding() }
}

/// A text of the database.
pub(crate) struct Said {
    pub(crate) text: String,
    /// Nothing had to be replaced.
    pub(crate) exact: bool,
}

/// A text of the database, in UTF-8.
pub(crate) fn from_database(bytes: &[u8]) -> Said {
    let encoding = of_database();
    let (bytes, converted) = if encoding == UTF8 || encoding == SQL_ASCII {
        (Cow::Borrowed(bytes), true)
    } else {
        convert(bytes, encoding, UTF8, REPLACEMENT)
    };
    match String::from_utf8(bytes.into_owned()) {
        Ok(text) => Said {
            text,
            exact: converted,
        },
        Err(error) => Said {
            text: String::from_utf8_lossy(error.as_bytes()).into_owned(),
            exact: false,
        },
    }
}

/// A text for the database. Characters that its encoding does not have become question marks.
pub(crate) fn to_database(text: &str) -> Cow<'_, [u8]> {
    let encoding = of_database();
    if encoding == UTF8 || encoding == SQL_ASCII || text.is_ascii() {
        Cow::Borrowed(text.as_bytes())
    } else {
        convert(text.as_bytes(), UTF8, encoding, b"?").0
    }
}

/// A text for a message, which goes to Postgres by way of a `String`.
pub(crate) fn for_message(text: String) -> String {
    if of_database() == UTF8 || text.is_ascii() {
        text
    } else {
        text.replace(|c: char| !c.is_ascii(), "?")
    }
}

/// Converts character by character where not all can be converted at once. True if nothing was replaced.
fn convert<'a>(
    bytes: &'a [u8],
    from: c_int,
    to: c_int,
    replacement: &[u8],
) -> (Cow<'a, [u8]>, bool) {
    if bytes.is_ascii() {
        return (Cow::Borrowed(bytes), true);
    }
    // SAFETY: a catalog look-up in an open transaction.
    let conversion = unsafe { pg_sys::FindDefaultConversionProc(from, to) };
    let mut converted = Vec::with_capacity(bytes.len() * 2);
    let mut exact = true;
    let mut rest = bytes;
    while !rest.is_empty() {
        let piece = &rest[..rest.len().min(PIECE)];
        let done = if conversion == pg_sys::InvalidOid {
            0
        } else {
            convert_piece(conversion, from, to, piece, &mut converted)
        };
        let left = piece.len() - done;
        let is_cut_off = left < LONGEST_CHARACTER && piece.len() < rest.len();
        rest = &rest[done..];
        if left > 0 && !is_cut_off {
            exact = false;
            converted.extend_from_slice(replacement);
            rest = &rest[character(from, rest)..];
        }
    }
    (Cow::Owned(converted), exact)
}

/// Bytes that are converted at once; the last character of a piece may be cut off.
const PIECE: usize = 1 << 20;
const LONGEST_CHARACTER: usize = 8;
/// The most that a byte can grow to, as Postgres reckons (MAX_CONVERSION_GROWTH).
const GROWTH: usize = 4;

/// Converts from the beginning as far as that goes, and says how many bytes that was.
fn convert_piece(
    conversion: pg_sys::Oid,
    from: c_int,
    to: c_int,
    bytes: &[u8],
    converted: &mut Vec<u8>,
) -> usize {
    let mut source = bytes.to_vec();
    let mut target = vec![0u8; source.len() * GROWTH + 1];
    // SAFETY: both buffers are as long as said, and the target is as long as can be needed; with `noError` the function stops at what
    // it cannot convert, and terminates what it wrote.
    let done = unsafe {
        pg_sys::pg_do_encoding_conversion_buf(
            conversion,
            from,
            to,
            source.as_mut_ptr(),
            source.len() as c_int,
            target.as_mut_ptr(),
            target.len() as c_int,
            true,
        )
    };
    let length = target.iter().position(|&byte| byte == 0).unwrap_or(0);
    converted.extend_from_slice(&target[..length]);
    usize::try_from(done).unwrap_or(0).min(bytes.len())
}

/// The bytes of the first character, at least one.
fn character(encoding: c_int, bytes: &[u8]) -> usize {
    // SAFETY: looks at the first byte only, as those of the encodings that a database may have allow.
    let length = unsafe { pg_sys::pg_encoding_mblen(encoding, bytes.as_ptr().cast()) };
    usize::try_from(length).unwrap_or(1).clamp(1, bytes.len())
}
