//! What is published: a subject, a few headers, and the event as a CloudEvent.

use std::io::Write;

use crate::envelope::{Event, write_cloudevent};
use crate::sinks::plain_text::visible;
use crate::sinks::template::Template;

use super::subject;

/// By which JetStream knows an event that it has.
const ID: &str = "Nats-Msg-Id";
/// What makes a stream of another name refuse.
const STREAM: &str = "Nats-Expected-Stream";

/// How events are published: the same for all of them.
pub(super) struct Route {
    template: Option<Template>,
    /// The headers behind the id, and the line that ends them: of an event, and of a record of the audit trail, which has a
    /// form of its own.
    event: Vec<u8>,
    record: Vec<u8>,
}

impl Route {
    pub(super) fn new(template: Option<Template>, stream: Option<&str>) -> Self {
        let stream = stream.map(|name| format!("{STREAM}: {name}\r\n"));
        let stream = stream.unwrap_or_default();
        let headers = |form: &str| format!("\r\ncontent-type: {form}\r\n{stream}\r\n").into_bytes();
        Self {
            event: headers("application/cloudevents+json"),
            record: headers("application/json"),
            template,
        }
    }

    /// Appends the subject of an event.
    ///
    /// # Errors
    /// When the event has no legal one.
    pub(super) fn subject(&self, event: &Event, out: &mut String) -> Result<(), String> {
        match &self.template {
            None => out.push_str(&event.topic),
            Some(template) => template
                .render(event, out)
                .map_err(|why| format!("no subject \"{template}\": {why}"))?,
        }
        match subject::problem(out) {
            None => Ok(()),
            Some(why) => Err(format!("{} {why}", self.named())),
        }
    }

    /// The subject, as errors call it: what a template makes of an event may be more than they should tell.
    pub(super) fn named(&self) -> String {
        match &self.template {
            None => "the topic of this event".to_owned(),
            Some(template) => format!("the subject \"{template}\" of this event"),
        }
    }
}

/// Writes messages one behind the other, reusing its memory.
#[derive(Default)]
pub(super) struct Writer {
    subject: String,
    body: Vec<u8>,
}

impl Writer {
    /// Appends `event` as it is published; `reply` is where to answer to, an inbox and a number in it.
    ///
    /// # Errors
    /// Why this event can never be published, to a server that takes `largest` bytes.
    pub(super) fn write(
        &mut self,
        event: &Event,
        route: &Route,
        reply: (&str, u64),
        largest: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        self.subject.clear();
        route.subject(event, &mut self.subject)?;
        self.body.clear();
        write_cloudevent(event, &mut self.body);
        let id = visible(&event.id);
        let first = "NATS/1.0\r\n".len() + ID.len() + 2;
        let rest = match event.is_record {
            true => &route.record,
            false => &route.event,
        };
        let headers = first + id.len() + rest.len();
        let total = headers + self.body.len();
        if total > largest {
            return Err(format!(
                "larger than the server takes: {total} bytes with its headers, of {largest}"
            ));
        }
        let (inbox, number) = reply;
        out.reserve(total + self.subject.len() + 96);
        // A Vec gives nothing to fail on.
        let _ = write!(
            out,
            "HPUB {} {inbox}.{number} {headers} {total}\r\nNATS/1.0\r\n{ID}: {id}",
            self.subject
        );
        out.extend_from_slice(rest);
        out.extend_from_slice(&self.body);
        out.extend_from_slice(b"\r\n");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::Position;

    fn event() -> Event {
        Event {
            position: Position { txid: 700, seq: 1 },
            id: "evt 1".into(),
            topic: "order.placed".into(),
            source: None,
            subject: None,
            tenant: None,
            time: 0,
            payload: Some("1".into()),
            headers: None,
            part: None,
            is_record: false,
        }
    }

    fn written(event: &Event, route: &Route, largest: usize) -> Result<String, String> {
        let mut out = Vec::new();
        Writer::default()
            .write(event, route, ("_INBOX.a", 7), largest, &mut out)
            .map(|()| String::from_utf8(out).unwrap())
    }

    #[test]
    fn the_sizes_are_those_of_what_follows() {
        let template = Template::parse("events.{topic}").unwrap();
        let route = Route::new(Some(template), Some("EVENTS"));
        let message = written(&event(), &route, 1000).unwrap();
        let (line, rest) = message.split_once("\r\n").unwrap();
        let words: Vec<_> = line.split(' ').collect();
        assert_eq!(words[..3], ["HPUB", "events.order.placed", "_INBOX.a.7"]);
        let headers: usize = words[3].parse().unwrap();
        let total: usize = words[4].parse().unwrap();
        assert_eq!(
            &rest[..headers],
            "NATS/1.0\r\nNats-Msg-Id: evt%201\r\ncontent-type: application/cloudevents+json\r\n\
             Nats-Expected-Stream: EVENTS\r\n\r\n"
        );
        let body: serde_json::Value = serde_json::from_str(&rest[headers..total]).unwrap();
        assert_eq!(body["id"], "evt 1");
        assert_eq!(&rest[total..], "\r\n");

        assert!(written(&event(), &route, total).is_ok());
        assert_eq!(
            written(&event(), &route, total - 1).unwrap_err(),
            format!(
                "larger than the server takes: {total} bytes with its headers, of {}",
                total - 1
            )
        );
    }

    #[test]
    fn what_has_no_legal_subject() {
        let topic = |topic: &str| Event {
            topic: topic.into(),
            ..event()
        };
        let route = Route::new(None, None);
        assert_eq!(
            written(&topic("order placed"), &route, 1000).unwrap_err(),
            "the topic of this event has white space or control characters in it"
        );
        let route = Route::new(Some(Template::parse("{topic}.{tenant}").unwrap()), None);
        assert_eq!(
            written(&topic("a"), &route, 1000).unwrap_err(),
            "no subject \"{topic}.{tenant}\": the event has no {tenant}"
        );
        let route = Route::new(Some(Template::parse("x.{topic}").unwrap()), None);
        assert_eq!(
            written(&topic("a."), &route, 1000).unwrap_err(),
            "the subject \"x.{topic}\" of this event is empty or has an empty token"
        );
    }
}
