//! Headers as CloudEvents extension attributes.
//!
//! An application may put anything into headers, and none of it may break the envelope. The rules:
//! - A name is made lower-case, and what is not an ASCII letter or digit is dropped from it: `X-Trace-Id` is `xtraceid`.
//! - An attribute whose name comes out empty, is one that the envelope uses itself, or was already written, is dropped.
//! - Strings, booleans and 32-bit integers stay what they are; any other value becomes a string of its JSON text; a JSON
//!   null is an absent attribute.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::cloudevent::string;

/// The context attributes of CloudEvents and those that the envelope adds.
const RESERVED: &[&str] = &[
    "data",
    "datacontenttype",
    "dataschema",
    "id",
    "sequence",
    "source",
    "specversion",
    "subject",
    "tenant",
    "time",
    "transaction",
    "transactioncount",
    "transactionindex",
    "type",
];

/// Appends `,"name":value` for each attribute of `headers`, the text of a JSON object; nothing for any other text.
pub(super) fn write(headers: &str, out: &mut Vec<u8>) {
    for (name, json) in read(headers) {
        out.extend_from_slice(b",\"");
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b"\":");
        write_value(json, out);
    }
}

/// The attributes of `headers`, by name and JSON text; none of what is no object, and no half of one either.
pub(super) fn read(headers: &str) -> Vec<(Cow<'_, str>, &str)> {
    let mut reader = serde_json::Deserializer::from_str(headers);
    reader.deserialize_map(Attributes).unwrap_or_default()
}

struct Attributes;

#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Visitor<'de> for Attributes {
    type Value = Vec<(Cow<'de, str>, &'de str)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of headers")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut members: M) -> Result<Self::Value, M::Error> {
        let mut seen: BTreeSet<Cow<'de, str>> = BTreeSet::new();
        let mut attributes = Vec::new();
        while let Some((Name(name), value)) = members.next_entry::<Name<'de>, &'de RawValue>()? {
            let name = attribute_name(name);
            if value.get() == "null"
                || name.is_empty()
                || RESERVED.binary_search(&name.as_ref()).is_ok()
                || !seen.insert(name.clone())
            {
                continue;
            }
            attributes.push((name, value.get()));
        }
        Ok(attributes)
    }
}

fn attribute_name(name: Cow<'_, str>) -> Cow<'_, str> {
    if name
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    {
        return name;
    }
    name.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect::<String>()
        .into()
}

fn write_value(json: &str, out: &mut Vec<u8>) {
    let kept = match json.as_bytes().first() {
        Some(b'"' | b't' | b'f') => true,
        Some(b'{' | b'[') => false,
        // CloudEvents integers are 32 bits wide; a wider or a decimal number keeps its digits as text.
        _ => json.parse::<i32>().is_ok(),
    };
    if kept {
        out.extend_from_slice(json.as_bytes());
    } else {
        string(json, out);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    fn attributes(headers: &str) -> Value {
        let mut out = b"{\"specversion\":\"1.0\"".to_vec();
        super::write(headers, &mut out);
        out.push(b'}');
        let text = String::from_utf8(out).unwrap();
        let mut value: Value =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let members = value.as_object_mut().unwrap();
        assert_eq!(members.remove("specversion"), Some(json!("1.0")));
        value
    }

    #[test]
    fn reserved_names_are_sorted_for_the_search() {
        assert!(super::RESERVED.is_sorted());
    }

    #[test]
    fn values_keep_the_types_that_attributes_have() {
        assert_eq!(
            attributes(
                r#"{"a": "text \"\u0001\"", "b": true, "c": false, "d": -2147483648, "e": 2147483647}"#
            ),
            json!({"a": "text \"\u{1}\"", "b": true, "c": false, "d": -2147483648i64, "e": 2147483647})
        );
    }

    #[test]
    fn other_values_become_their_json_text() {
        assert_eq!(
            attributes(
                r#"{"a": 2147483648, "b": 1.50, "c": {"x": ["\"", 1]}, "d": [], "e": 123456789012345678901234567890}"#
            ),
            json!({"a": "2147483648", "b": "1.50", "c": r#"{"x": ["\"", 1]}"#, "d": "[]", "e": "123456789012345678901234567890"})
        );
    }

    #[test]
    fn a_null_is_an_absent_attribute() {
        assert_eq!(attributes(r#"{"a": null, "b": 1}"#), json!({"b": 1}));
        assert_eq!(
            attributes(r#"{"A": null, "a": 1}"#),
            json!({"a": 1}),
            "and does not take the name from another"
        );
    }

    #[test]
    fn names_are_normalised() {
        assert_eq!(
            attributes(
                r#"{"traceparent": 1, "X-Trace-Id": 2, "größe": 3, "\"\u0000\n": 4, "": 5, "👍": 6}"#
            ),
            json!({"traceparent": 1, "xtraceid": 2, "gre": 3})
        );
    }

    #[test]
    fn the_first_of_equal_names_is_kept() {
        assert_eq!(
            attributes(r#"{"xa": 1, "x-a": 2, "X_A": 3}"#),
            json!({"xa": 1})
        );
    }

    #[test]
    fn the_envelope_is_not_overwritten() {
        let all: String = super::RESERVED
            .iter()
            .flat_map(|name| {
                [
                    name.to_string(),
                    name.to_uppercase(),
                    format!("{}-{}", &name[..1], &name[1..]),
                ]
            })
            .map(|name| format!("{name:?}: 1, "))
            .collect();
        assert_eq!(
            attributes(&format!("{{{all}\"kept\": 1}}")),
            json!({"kept": 1})
        );
    }

    #[test]
    fn what_is_no_object_adds_nothing() {
        for headers in [
            "[]",
            "1",
            "\"x\"",
            "null",
            "",
            r#"{"a": 1, "b"#,
            r#"{"a": 1, "b": tru}"#,
            "{\"a\":",
        ] {
            assert_eq!(attributes(headers), json!({}), "{headers}");
        }
    }

    #[test]
    fn many_headers_cost_no_more_each() {
        let headers: String = (0..50_000).map(|i| format!("\"k{i}\": {i}, ")).collect();
        let value = attributes(&format!("{{{headers}\"last\": 1}}"));
        assert_eq!(value.as_object().unwrap().len(), 50_001);
    }
}
