//! Templates: where an event goes, spelt with what the event says of itself, as in `orders.{tenant}.{header.region}`.
//!
//! Owns the spelling and the filling in. What makes a legal subject or topic is for each kind to say.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde_json::value::RawValue;

use super::fields::shown;
use crate::envelope::Event;

/// What can stand between braces, but for `{header.…}`.
const FIELDS: &[(&str, Field)] = &[
    ("topic", Field::Topic),
    ("source", Field::Source),
    ("subject", Field::Subject),
    ("tenant", Field::Tenant),
    ("schema", Field::Schema),
    ("table", Field::Table),
];

/// A text with places that each event fills in.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Field(Field),
    /// A member of the event's headers.
    Header(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Topic,
    Source,
    Subject,
    Tenant,
    /// The first part of a source that is a qualified table.
    Schema,
    /// The second.
    Table,
}

impl Template {
    /// Reads `text`; `{{` and `}}` stand for braces themselves.
    ///
    /// # Errors
    /// What is wrong with it, to be read after the name of the key.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            plain.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            let after = &rest[at + 1..];
            if let Some(after) = after.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err("has a } that closes nothing; a brace itself is written }}".to_owned());
            }
            let Some((name, after)) = after.split_once('}') else {
                return Err("has a { that is not closed; a brace itself is written {{".to_owned());
            };
            if !plain.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut plain)));
            }
            parts.push(place(name)?);
            rest = after;
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }

    /// Appends what `event` makes of it.
    ///
    /// # Errors
    /// What the event lacks. Names a place of the template, never a value.
    pub(super) fn render(&self, event: &Event, out: &mut String) -> Result<(), String> {
        for part in &self.parts {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Field(field) => match field.of(event).filter(|value| !value.is_empty()) {
                    Some(value) => out.push_str(&value),
                    None => return Err(format!("the event has no {{{}}}", field.name())),
                },
                Part::Header(name) => match header(event, name) {
                    Some(value) => out.push_str(&value),
                    None => return Err(format!("the event has no {{header.{name}}}")),
                },
            }
        }
        Ok(())
    }

    /// The template with `sample` in each place, to check what stands around them.
    pub(super) fn sample(&self, sample: &str) -> String {
        self.parts
            .iter()
            .map(|part| match part {
                Part::Text(text) => text,
                Part::Field(_) | Part::Header(_) => sample,
            })
            .collect()
    }
}

/// As it was written.
impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

impl Field {
    fn name(self) -> &'static str {
        let found = FIELDS.iter().find(|(_, field)| *field == self);
        found.map_or("", |(name, _)| name)
    }

    fn of(self, event: &Event) -> Option<Cow<'_, str>> {
        let source = event.source.as_deref();
        match self {
            Field::Topic => Some(Cow::Borrowed(&event.topic)),
            Field::Source => source.map(Cow::Borrowed),
            Field::Subject => event.subject.as_deref().map(Cow::Borrowed),
            Field::Tenant => event.tenant.as_deref().map(Cow::Borrowed),
            Field::Schema => source.and_then(table).map(|(schema, _)| schema),
            Field::Table => source.and_then(table).map(|(_, table)| table),
        }
    }
}

fn place(name: &str) -> Result<Part, String> {
    if let Some(header) = name.strip_prefix("header.").filter(|name| !name.is_empty()) {
        return Ok(Part::Header(header.to_owned()));
    }
    match FIELDS.iter().find(|(known, _)| *known == name) {
        Some((_, field)) => Ok(Part::Field(*field)),
        None => {
            let known: Vec<_> = FIELDS
                .iter()
                .map(|(name, _)| format!("{{{name}}}"))
                .collect();
            Err(format!(
                "has an unknown place {{{}}}; there are {} and {{header.<name>}}",
                shown(name),
                known.join(", ")
            ))
        }
    }
}

/// A header that is a text, a number or a boolean.
fn header(event: &Event, name: &str) -> Option<String> {
    let headers = event.headers.as_deref()?;
    let members: HashMap<Cow<'_, str>, &RawValue> = serde_json::from_str(headers).ok()?;
    let json = members.get(name)?.get();
    match json.as_bytes().first()? {
        b'"' => serde_json::from_str::<String>(json)
            .ok()
            .filter(|text| !text.is_empty()),
        b'{' | b'[' | b'n' => None,
        _ => Some(json.to_owned()),
    }
}

/// Schema and table of a source that is a qualified table as Postgres writes it, such as `public."Order Items"`.
pub(super) fn table(source: &str) -> Option<(Cow<'_, str>, Cow<'_, str>)> {
    let (schema, rest) = identifier(source)?;
    let (table, rest) = identifier(rest.strip_prefix('.')?)?;
    rest.is_empty().then_some((schema, table))
}

/// The identifier at the beginning of `text`, and what follows it.
fn identifier(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let starts = |c: char| c.is_alphabetic() || c == '_';
        let goes_on = |c: char| c.is_alphanumeric() || matches!(c, '_' | '$');
        let end = text.find(|c| !goes_on(c)).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        return name
            .starts_with(starts)
            .then_some((Cow::Borrowed(name), rest));
    };
    let mut from = 0;
    loop {
        let at = from + quoted[from..].find('"')?;
        if quoted[at + 1..].starts_with('"') {
            from = at + 2;
            continue;
        }
        let name = &quoted[..at];
        let name = match name.contains('"') {
            true => Cow::Owned(name.replace("\"\"", "\"")),
            false => Cow::Borrowed(name),
        };
        return (!name.is_empty()).then_some((name, &quoted[at + 1..]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::Position;

    fn event() -> Event {
        Event {
            position: Position { txid: 700, seq: 1 },
            id: "evt_1".into(),
            topic: "order.placed".into(),
            source: Some("public.orders".into()),
            subject: Some("7".into()),
            tenant: Some("acme".into()),
            time: 0,
            payload: None,
            headers: Some(r#"{"region": "eu", "n": 1.50, "on": true, "none": null, "list": [], "": "x", "e": ""}"#.into()),
            part: None,
            is_record: false,
        }
    }

    fn rendered(template: &str, event: &Event) -> Result<String, String> {
        let mut out = String::new();
        let template = Template::parse(template).unwrap_or_else(|error| panic!("{error}"));
        template.render(event, &mut out).map(|()| out)
    }

    #[test]
    fn every_place_is_filled_in() {
        for (template, expected) in [
            ("fixed", "fixed"),
            ("{topic}", "order.placed"),
            ("a.{topic}.z", "a.order.placed.z"),
            ("{source}/{subject}@{tenant}", "public.orders/7@acme"),
            ("{schema}-{table}", "public-orders"),
            ("{header.region}.{header.n}.{header.on}", "eu.1.50.true"),
            ("{{{topic}}}", "{order.placed}"),
        ] {
            assert_eq!(rendered(template, &event()).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn what_an_event_lacks_is_named() {
        let bare = Event {
            source: Some("billing".into()),
            subject: Some(String::new()),
            tenant: None,
            headers: None,
            ..event()
        };
        for place in [
            "{subject}",
            "{tenant}",
            "{schema}",
            "{table}",
            "{header.region}",
        ] {
            assert_eq!(
                rendered(&format!("x.{place}"), &bare),
                Err(format!("the event has no {place}"))
            );
        }
        for header in ["none", "list", "e", "absent"] {
            assert!(rendered(&format!("{{header.{header}}}"), &event()).is_err());
        }
    }

    #[test]
    fn what_is_no_template() {
        for (template, why) in [
            (
                "{topic",
                "has a { that is not closed; a brace itself is written {{",
            ),
            (
                "topic}",
                "has a } that closes nothing; a brace itself is written }}",
            ),
            (
                "{topci}",
                "has an unknown place {topci}; there are {topic}, {source}, {subject}, {tenant}, {schema}, {table} and {header.<name>}",
            ),
        ] {
            assert_eq!(Template::parse(template).unwrap_err(), why);
        }
        for template in ["{}", "{header.}", "{header}", "{ topic }", "{a{topic}"] {
            assert!(Template::parse(template).is_err(), "{template}");
        }
    }

    #[test]
    fn a_sample_shows_what_stands_around() {
        let template = Template::parse("a b.{topic}.{header.x}{{").unwrap();
        assert_eq!(template.sample("x"), "a b.x.x{");
        assert_eq!(template.to_string(), "a b.{topic}.{header.x}{{");
    }

    #[test]
    fn qualified_tables() {
        for (source, expected) in [
            ("public.orders", Some(("public", "orders"))),
            (r#"public."Order Items""#, Some(("public", "Order Items"))),
            (r#""a.b"."c""d""#, Some(("a.b", "c\"d"))),
            ("größe._t$1", Some(("größe", "_t$1"))),
            ("orders", None),
            ("a.b.c", None),
            ("a.", None),
            (".b", None),
            ("a.1b", None),
            (r#"a."b"#, None),
            (r#"a."""#, None),
            ("https://example.com", None),
            ("", None),
        ] {
            let found = table(source);
            let found = found.as_ref().map(|(schema, table)| (&**schema, &**table));
            assert_eq!(found, expected, "{source}");
        }
    }
}
