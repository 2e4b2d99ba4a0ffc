//! A CloudEvent read back into an event: what was kept of a dead letter.

use serde_json::{Map, Value};

use super::cloudevent::DEFAULT_SOURCE;
use super::{Event, Position};

/// The event that [`write_cloudevent`](super::write_cloudevent) wrote, so that writing it again gives the same envelope. What the
/// envelope does not tell stays untold: a source that was percent-encoded stays so, headers are attributes. A field that is missing
/// comes out empty.
pub(crate) fn read_cloudevent(json: &str, position: Position) -> Event {
    let mut fields = serde_json::from_str::<Map<String, Value>>(json).unwrap_or_default();
    let mut take = |name: &str| match fields.remove(name) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    let (id, topic, source) = (take("id"), take("type"), take("source"));
    let (subject, tenant, time) = (take("subject"), take("tenant"), take("time"));
    let payload = fields.remove("data").map(|data| data.to_string());
    for written_anew in [
        "specversion",
        "datacontenttype",
        "sequence",
        "transaction",
        "transactionindex",
        "transactioncount",
    ] {
        fields.remove(written_anew);
    }
    Event {
        position,
        id: id.unwrap_or_default(),
        topic: topic.unwrap_or_default(),
        source: source.filter(|source| source != DEFAULT_SOURCE),
        subject,
        tenant,
        time: time.as_deref().map_or(0, microseconds),
        payload,
        headers: (!fields.is_empty()).then(|| Value::Object(fields).to_string()),
        part: None,
    }
}

/// The extremes of RFC 3339 stand for the infinities, and lie beyond what a timestamp of the library can be.
fn microseconds(time: &str) -> i64 {
    match time.parse::<jiff::Timestamp>() {
        Ok(time) => time.as_microsecond(),
        Err(_) if time.starts_with("9999") => i64::MAX,
        Err(_) => i64::MIN,
    }
}

#[cfg(test)]
mod tests {
    use super::super::write_cloudevent;
    use super::*;

    #[test]
    fn what_was_written_is_written_again() {
        let event = Event {
            position: Position { txid: 731, seq: 12 },
            id: "evt_1".to_owned(),
            topic: "order.placed".to_owned(),
            source: Some("public.\"Order Items\"".to_owned()),
            subject: Some("7".to_owned()),
            tenant: Some("acme".to_owned()),
            time: 1_700_000_000_123_456,
            payload: Some(
                r#"{"n": 123456789012345678901234567890.50, "s": "\u0001 ü"}"#.to_owned(),
            ),
            headers: Some(r#"{"X-Trace": "a", "n": 7, "b": true}"#.to_owned()),
            part: None,
        };
        let written = |event: &Event| {
            let mut json = Vec::new();
            write_cloudevent(event, &mut json);
            serde_json::from_slice::<Value>(&json).unwrap()
        };
        for time in [event.time, 0, i64::MIN, i64::MAX] {
            let once = written(&Event {
                time,
                ..event.clone()
            });
            assert_eq!(
                written(&read_cloudevent(&once.to_string(), event.position)),
                once
            );
        }
    }
}
