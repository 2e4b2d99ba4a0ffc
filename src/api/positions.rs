//! outbox.format_position: called for each row of outbox.poll, and so in Rust.

use std::fmt::Write;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::call::{Arguments, Text};

/// Two numbers of up to 20 digits, and what stands between them.
const USUAL_LENGTH: usize = 44;

/// Declared as strict.
#[pg_extern(sql = false)]
fn format_position(call: pg_sys::FunctionCallInfo) -> Text {
    let args = Arguments::of(call);
    let (txid, seq) = (args.u64(0).unwrap_or(0), args.i64(1).unwrap_or(0));
    let separator = args.text(2).unwrap_or_default();
    let mut text = String::with_capacity(USUAL_LENGTH);
    // Nothing can go wrong in writing to a string.
    let _ = write!(text, "{txid}{separator}{seq}");
    Text::new(&text)
}
