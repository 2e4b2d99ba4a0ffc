//! A CloudEvent read back into an event: what was kept of a dead letter.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::cloudevent::{DEFAULT_SOURCE, string};
use super::{Event, Position};

/// The event that [`write_cloudevent`](super::write_cloudevent) wrote, so that writing it again gives the same envelope. What the
/// envelope does not tell stays untold: a source that was percent-encoded stays so, headers are attributes. Nothing for what is no
/// CloudEvent.
///
/// Payload and headers stay text: they may be nested deeper than a parser of values goes.
pub(crate) fn read_cloudevent(json: &str, position: Position) -> Option<Event> {
    let mut fields = serde_json::from_str::<BTreeMap<String, &RawValue>>(json).ok()?;
    let payload = fields.remove("data").map(|data| data.get().to_owned());
    let mut take = |name: &str| {
        let text = fields.remove(name)?;
        serde_json::from_str::<String>(text.get()).ok()
    };
    let event = Event {
        position,
        id: take("id")?,
        topic: take("type")?,
        source: take("source").filter(|source| source != DEFAULT_SOURCE),
        subject: take("subject"),
        tenant: take("tenant"),
        time: take("time").as_deref().map_or(0, microseconds),
        payload,
        headers: None,
        part: None,
        is_record: false,
    };
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
    Some(Event {
        headers: (!fields.is_empty()).then(|| object(&fields)),
        ..event
    })
}

/// The JSON text of an object.
fn object(members: &BTreeMap<String, &RawValue>) -> String {
    let mut json = Vec::from(*b"{");
    for (name, value) in members {
        if json.len() > 1 {
            json.push(b',');
        }
        string(name, &mut json);
        json.push(b':');
        json.extend_from_slice(value.get().as_bytes());
    }
    json.push(b'}');
    String::from_utf8_lossy(&json).into_owned()
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
    use serde_json::Value;

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
            is_record: false,
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
                written(&read_cloudevent(&once.to_string(), event.position).unwrap()),
                once
            );
        }
    }

    #[test]
    fn what_is_deep_is_kept() {
        let payload = format!("{}1{}", "[".repeat(3000), "]".repeat(3000));
        let json = format!(
            r#"{{"id": "a", "type": "b", "source": "c", "data": {payload}, "h": {payload}}}"#
        );
        let event = read_cloudevent(&json, Position::default()).unwrap();
        assert_eq!(event.payload, Some(payload.clone()));
        assert_eq!(event.headers, Some(format!(r#"{{"h":{payload}}}"#)));
    }

    #[test]
    fn what_is_no_event_is_none() {
        for json in [
            "",
            "[]",
            "1",
            "{}",
            r#"{"id": "a"}"#,
            r#"{"id": 1, "type": "b"}"#,
        ] {
            assert_eq!(read_cloudevent(json, Position::default()), None, "{json}");
        }
    }
}
