//! The context attributes of an event as texts, for transports that carry them beside the data and not around it.

use super::cloudevent::{DEFAULT_SOURCE, present};
use super::{Event, extensions, rfc3339, uri_reference};

/// Calls `visit` with name and value of each attribute that [`write_cloudevent`](super::write_cloudevent) writes, but for
/// `datacontenttype`: a transport has its own way to say that.
pub(crate) fn attributes(event: &Event, mut visit: impl FnMut(&str, &str)) {
    visit("specversion", "1.0");
    visit("id", &event.id);
    let mut text = Vec::with_capacity(64);
    uri_reference::write(present(&event.source).unwrap_or(DEFAULT_SOURCE), &mut text);
    // A JSON string without escapes: only its quotes are too much.
    visit("source", ascii(&text[1..text.len() - 1]));
    visit("type", &event.topic);
    if let Some(subject) = present(&event.subject) {
        visit("subject", subject);
    }
    text.clear();
    rfc3339::write(event.time, &mut text);
    visit("time", ascii(&text));
    visit("sequence", &event.position.to_string());
    if let Some(tenant) = present(&event.tenant) {
        visit("tenant", tenant);
    }
    if let Some(part) = event.part {
        visit("transaction", &event.position.txid.to_string());
        visit("transactionindex", &part.index.to_string());
        visit("transactioncount", &part.count.to_string());
    }
    if let Some(headers) = &event.headers {
        for (name, json) in extensions::read(headers) {
            match serde_json::from_str::<String>(json) {
                Ok(value) => visit(&name, &value),
                Err(_) => visit(&name, json),
            }
        }
    }
}

/// What was written here is ASCII.
fn ascii(text: &[u8]) -> &str {
    std::str::from_utf8(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::{Part, Position};
    use super::*;

    fn all(event: &Event) -> Vec<String> {
        let mut all = Vec::new();
        attributes(event, |name, value| all.push(format!("{name}={value}")));
        all
    }

    #[test]
    fn everything_that_an_event_says_of_itself() {
        let event = Event {
            position: Position { txid: 731, seq: 12 },
            id: "evt_1".into(),
            topic: "order.placed".into(),
            source: Some(r#"public."Order Items""#.into()),
            subject: Some("7".into()),
            tenant: Some("acme".into()),
            time: 1_700_000_000_500_000,
            payload: Some("{}".into()),
            headers: Some(r#"{"X-Trace": "a\nb", "n": 1.50, "on": true, "list": ["x"], "none": null, "id": "no"}"#.into()),
            part: Some(Part { index: 1, count: 2 }),
            is_record: false,
        };
        assert_eq!(
            all(&event),
            [
                "specversion=1.0",
                "id=evt_1",
                "source=public.%22Order%20Items%22",
                "type=order.placed",
                "subject=7",
                "time=2023-11-14T22:13:20.500000Z",
                "sequence=731:12",
                "tenant=acme",
                "transaction=731",
                "transactionindex=1",
                "transactioncount=2",
                "xtrace=a\nb",
                "n=1.50",
                "on=true",
                "list=[\"x\"]",
            ]
        );
    }

    #[test]
    fn what_an_event_does_not_say_is_absent() {
        let event = Event {
            position: Position { txid: 1, seq: 1 },
            id: "e".into(),
            topic: "t".into(),
            source: None,
            subject: Some(String::new()),
            tenant: None,
            time: 0,
            payload: None,
            headers: Some("[]".into()),
            part: None,
            is_record: false,
        };
        let expected = [
            "specversion=1.0",
            "id=e",
            "source=outbox",
            "type=t",
            "time=1970-01-01T00:00:00Z",
            "sequence=1:1",
        ];
        assert_eq!(all(&event), expected);
    }
}
