//! An event as a Kafka message, by the Kafka binding of CloudEvents.

use rdkafka::message::{Header, OwnedHeaders};

use super::config::Mode;
use crate::envelope::{Event, attributes, write_cloudevent};

/// Writes messages one after the other, reusing its memory.
pub(super) struct Writer {
    mode: Mode,
    body: Vec<u8>,
    name: String,
}

/// What a message is made of, besides its key and topic.
pub(super) struct Message<'w> {
    pub(super) headers: OwnedHeaders,
    /// None for an event without data: that is what Kafka deletes a key by.
    pub(super) value: Option<&'w [u8]>,
    /// About as many bytes as it takes, headers and key included.
    pub(super) size: usize,
}

impl Writer {
    pub(super) fn new(mode: Mode) -> Self {
        Self {
            mode,
            body: Vec::new(),
            name: "ce_".to_owned(),
        }
    }

    pub(super) fn write<'w>(&'w mut self, event: &'w Event) -> Message<'w> {
        let mut size = event.subject.as_deref().map_or(0, str::len);
        let mut headers = OwnedHeaders::new_with_capacity(10);
        let mut add = |name: &str, value: &str| {
            size += name.len() + value.len() + 4;
            let header = Header {
                key: name,
                value: Some(value),
            };
            headers = std::mem::take(&mut headers).insert(header);
        };
        let value = match self.mode {
            // It has a form of its own, whatever the mode.
            _ if event.is_record => {
                add("content-type", "application/json");
                event.payload.as_deref().map(str::as_bytes)
            }
            Mode::Structured => {
                add("content-type", "application/cloudevents+json");
                self.body.clear();
                write_cloudevent(event, &mut self.body);
                Some(self.body.as_slice())
            }
            Mode::Binary => {
                if event.payload.is_some() {
                    add("content-type", "application/json");
                }
                let full_name = &mut self.name;
                attributes(event, |name, value| {
                    full_name.truncate(3);
                    full_name.push_str(name);
                    add(full_name, value);
                });
                event.payload.as_deref().map(str::as_bytes)
            }
        };
        Message {
            headers,
            value,
            size: size + value.map_or(0, <[u8]>::len),
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::message::Headers;

    use super::*;
    use crate::envelope::Position;

    fn event(payload: Option<&str>) -> Event {
        Event {
            position: Position { txid: 731, seq: 12 },
            id: "evt_1".into(),
            topic: "order.placed".into(),
            source: Some("public.orders".into()),
            subject: Some("7".into()),
            tenant: None,
            time: 0,
            payload: payload.map(str::to_owned),
            headers: Some(r#"{"X-Trace": "größe"}"#.into()),
            part: None,
            is_record: false,
        }
    }

    fn headers(message: &Message) -> Vec<String> {
        let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.unwrap().to_vec()).unwrap();
        message
            .headers
            .iter()
            .map(|header| format!("{}={}", header.key, text(header.value)))
            .collect()
    }

    #[test]
    fn binary() {
        let mut writer = Writer::new(Mode::Binary);
        for _ in 0..2 {
            let event = event(Some("{\"n\": 1.50}"));
            let message = writer.write(&event);
            assert_eq!(message.value, Some(&b"{\"n\": 1.50}"[..]));
            assert_eq!(
                headers(&message),
                [
                    "content-type=application/json",
                    "ce_specversion=1.0",
                    "ce_id=evt_1",
                    "ce_source=public.orders",
                    "ce_type=order.placed",
                    "ce_subject=7",
                    "ce_time=1970-01-01T00:00:00Z",
                    "ce_sequence=731:12",
                    "ce_xtrace=größe",
                ]
            );
        }
    }

    #[test]
    fn an_event_without_data_has_no_value() {
        let mut writer = Writer::new(Mode::Binary);
        let event = event(None);
        let message = writer.write(&event);
        assert_eq!(message.value, None);
        assert_eq!(headers(&message)[0], "ce_specversion=1.0");
    }

    #[test]
    fn a_record_of_the_audit_trail_is_sent_as_it_is() {
        for mode in [Mode::Binary, Mode::Structured] {
            let mut writer = Writer::new(mode);
            let record = Event {
                is_record: true,
                ..event(Some("{\"n\": 1}"))
            };
            let message = writer.write(&record);
            assert_eq!(message.value, Some(&b"{\"n\": 1}"[..]));
            assert_eq!(headers(&message), ["content-type=application/json"]);
        }
    }

    #[test]
    fn structured() {
        let mut writer = Writer::new(Mode::Structured);
        let event = event(Some("{}"));
        let message = writer.write(&event);
        assert_eq!(
            headers(&message),
            ["content-type=application/cloudevents+json"]
        );
        let body: serde_json::Value = serde_json::from_slice(message.value.unwrap()).unwrap();
        assert_eq!(
            (body["id"].as_str(), body["xtrace"].as_str()),
            (Some("evt_1"), Some("größe"))
        );
        assert!(message.size > message.value.unwrap().len());
    }
}
