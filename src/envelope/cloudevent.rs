//! CloudEvents 1.0 in the JSON format, written straight into a buffer.
//!
//! On the path of every event of every network sink: no tree of values, no formatting machinery, the payload copied as it
//! is stored so that a number keeps each of its digits.

use std::io::Write;

use super::{Event, extensions, rfc3339, uri_reference};

/// The `source` of an event that has none: CloudEvents requires one, and this one claims nothing about the event.
pub(super) const DEFAULT_SOURCE: &str = "outbox";

/// Appends `event` as one JSON object.
///
/// An empty source, subject or tenant counts as none, for CloudEvents has no empty attributes. An event with an SQL null as
/// payload carries no data: `data` and `datacontenttype` are left out, while a JSON null is `"data":null`. A record of the audit
/// trail is written as it is, without an envelope.
pub(crate) fn write_cloudevent(event: &Event, out: &mut Vec<u8>) {
    let payload = event.payload.as_deref();
    out.reserve(512 + payload.map_or(0, str::len));
    if event.is_record {
        out.extend_from_slice(payload.unwrap_or("null").as_bytes());
        return;
    }

    out.extend_from_slice(br#"{"specversion":"1.0","id":"#);
    string(&event.id, out);
    out.extend_from_slice(br#","source":"#);
    uri_reference::write(present(&event.source).unwrap_or(DEFAULT_SOURCE), out);
    out.extend_from_slice(br#","type":"#);
    string(&event.topic, out);
    if let Some(subject) = present(&event.subject) {
        out.extend_from_slice(br#","subject":"#);
        string(subject, out);
    }
    out.extend_from_slice(br#","time":""#);
    rfc3339::write(event.time, out);
    out.push(b'"');
    if payload.is_some() {
        out.extend_from_slice(br#","datacontenttype":"application/json""#);
    }
    out.extend_from_slice(br#","sequence":""#);
    decimal(event.position.txid, out);
    out.push(b':');
    // A seq comes from an identity column and is never negative; were it so, the text stays right.
    if event.position.seq < 0 {
        out.push(b'-');
    }
    decimal(event.position.seq.unsigned_abs(), out);
    out.push(b'"');
    if let Some(tenant) = present(&event.tenant) {
        out.extend_from_slice(br#","tenant":"#);
        string(tenant, out);
    }
    if let Some(part) = event.part {
        out.extend_from_slice(br#","transaction":""#);
        decimal(event.position.txid, out);
        out.extend_from_slice(br#"","transactionindex":"#);
        decimal(part.index.into(), out);
        out.extend_from_slice(br#","transactioncount":"#);
        decimal(part.count.into(), out);
    }
    if let Some(headers) = &event.headers {
        extensions::write(headers, out);
    }
    if let Some(payload) = payload {
        out.extend_from_slice(br#","data":"#);
        out.extend_from_slice(payload.as_bytes());
    }
    out.push(b'}');
}

/// An empty text counts as none.
pub(super) fn present(value: &Option<String>) -> Option<&str> {
    value.as_deref().filter(|value| !value.is_empty())
}

/// Appends `value` as a JSON string.
pub(super) fn string(value: &str, out: &mut Vec<u8>) {
    // Neither a str nor a Vec gives serde_json anything to fail on.
    let _ = serde_json::to_writer(out, value);
}

fn decimal(value: u64, out: &mut Vec<u8>) {
    let _ = write!(out, "{value}");
}
