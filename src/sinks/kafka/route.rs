//! Which topic an event goes to.

use std::sync::Arc;

use crate::envelope::Event;
use crate::sinks::template::{Template, table};

const LONGEST: usize = 249;

/// How topics are made up: the same for all events of a sink.
pub(super) struct Route {
    template: Option<Template>,
    /// What topics begin with that no template makes up.
    prefix: Arc<str>,
}

impl Route {
    pub(super) fn new(template: Option<Template>, prefix: Arc<str>) -> Self {
        Self { template, prefix }
    }

    /// Makes `out` the topic of an event: by default one for each table, `<prefix>.<schema>.<table>`, and `<prefix>.<topic>`
    /// for an event whose source is no table. What no name of a topic can hold becomes `_`.
    ///
    /// # Errors
    /// When the event has none.
    pub(super) fn topic(&self, event: &Event, out: &mut String) -> Result<(), String> {
        out.clear();
        match &self.template {
            Some(template) => template
                .render(event, out)
                .map_err(|why| format!("no topic \"{template}\": {why}"))?,
            None => {
                if !self.prefix.is_empty() {
                    out.push_str(&self.prefix);
                    out.push('.');
                }
                match event.source.as_deref().and_then(table) {
                    Some((schema, table)) => {
                        out.push_str(&schema);
                        out.push('.');
                        out.push_str(&table);
                    }
                    None => out.push_str(&event.topic),
                }
            }
        }
        if !out.chars().all(is_legal) {
            *out = out
                .chars()
                .map(|c| if is_legal(c) { c } else { '_' })
                .collect();
        }
        match problem(out) {
            None => Ok(()),
            Some(why) => Err(format!("{} {why}", self.named(out))),
        }
    }

    /// The topic, as errors call it: what a template makes of an event may be more than they should tell.
    pub(super) fn named(&self, topic: &str) -> String {
        match &self.template {
            None => format!("topic \"{topic}\""),
            Some(template) => format!("the topic \"{template}\" of this event"),
        }
    }
}

/// Why `topic` can be none, to be read after its name.
pub(super) fn problem(topic: &str) -> Option<&'static str> {
    match topic {
        "" => Some("is empty"),
        "." | ".." => Some("is \".\" or \"..\""),
        _ if topic.len() > LONGEST => Some("is longer than 249 characters"),
        _ if !topic.chars().all(is_legal) => {
            Some("holds other characters than letters, digits and . _ -")
        }
        _ => None,
    }
}

fn is_legal(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::Position;

    fn topic(template: Option<&str>, prefix: &str, source: Option<&str>) -> Result<String, String> {
        let event = Event {
            position: Position { txid: 700, seq: 1 },
            id: "evt_1".into(),
            topic: "order.placed".into(),
            source: source.map(str::to_owned),
            subject: None,
            tenant: None,
            time: 0,
            payload: None,
            headers: None,
            part: None,
            is_record: false,
        };
        let template = template.map(|text| Template::parse(text).unwrap());
        let mut out = "left over".to_owned();
        Route::new(template, prefix.into())
            .topic(&event, &mut out)
            .map(|()| out)
    }

    #[test]
    fn by_default_each_table_has_its_topic() {
        for (prefix, source, expected) in [
            ("outbox", Some("public.orders"), "outbox.public.orders"),
            (
                "outbox",
                Some(r#"public."Order Items""#),
                "outbox.public.Order_Items",
            ),
            ("", Some("public.orders"), "public.orders"),
            ("cdc/eu", Some("public.größe"), "cdc_eu.public.gr__e"),
            ("outbox", Some("billing"), "outbox.order.placed"),
            ("outbox", None, "outbox.order.placed"),
        ] {
            assert_eq!(topic(None, prefix, source).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn a_template_says_it_all() {
        assert_eq!(topic(Some("all"), "outbox", None).as_deref(), Ok("all"));
        let source = Some("public.orders");
        assert_eq!(
            topic(Some("{table}-{topic}"), "outbox", source).as_deref(),
            Ok("orders-order.placed")
        );
        assert_eq!(
            topic(Some("{tenant}"), "outbox", None).unwrap_err(),
            "no topic \"{tenant}\": the event has no {tenant}"
        );
    }

    #[test]
    fn a_name_can_be_too_long() {
        let long = format!("public.{}", "x".repeat(300));
        let error = topic(None, "outbox", Some(&long)).unwrap_err();
        assert!(error.ends_with("is longer than 249 characters"), "{error}");
        let error = topic(Some("{table}"), "outbox", Some(&long)).unwrap_err();
        assert_eq!(
            error,
            "the topic \"{table}\" of this event is longer than 249 characters"
        );
    }
}
