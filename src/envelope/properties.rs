//! The envelope over random events: a parser that is not ours reads back what went in.

use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{Event, Part, Position, write_cloudevent};

/// Any text, and often such as has to be escaped.
fn text() -> impl Strategy<Value = String> + Clone {
    prop_oneof![
        "[a-z.:]{1,12}",
        any::<String>(),
        vec(
            prop_oneof![
                Just('"'),
                Just('\\'),
                Just('/'),
                Just('\u{7f}'),
                Just('\u{2028}'),
                Just('👍'),
                proptest::char::range('\0', '\u{1f}'),
            ],
            0..8
        )
        .prop_map(String::from_iter),
    ]
}

/// The text of a JSON value as `jsonb` may hold it: numbers of any length, no NUL in strings.
fn payload() -> impl Strategy<Value = String> {
    let string = text().prop_map(|s| json!(s.replace('\0', "")).to_string());
    let leaf = prop_oneof![
        Just("null".to_owned()),
        any::<bool>().prop_map(|b| b.to_string()),
        "-?[1-9][0-9]{0,400}(\\.[0-9]{1,300})?",
        string.clone(),
    ];
    leaf.prop_recursive(6, 48, 6, move |inner| {
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(|items| format!("[{}]", items.join(", "))),
            vec((string.clone(), inner), 0..6).prop_map(|members| {
                let members: Vec<_> = members.iter().map(|(k, v)| format!("{k}: {v}")).collect();
                format!("{{{}}}", members.join(", "))
            }),
        ]
    })
}

fn headers() -> impl Strategy<Value = String> {
    prop_oneof![
        btree_map(text(), payload(), 0..6).prop_map(|members: BTreeMap<String, String>| {
            let members: Vec<_> = members
                .iter()
                .map(|(k, v)| format!("{}: {v}", json!(k)))
                .collect();
            format!("{{{}}}", members.join(", "))
        }),
        payload(),
    ]
}

prop_compose! {
    fn event()(
        txid in any::<u64>(),
        seq in 0..=i64::MAX,
        (id, topic) in (text(), text()),
        (source, subject, tenant) in (option::of(text()), option::of(text()), option::of(text())),
        time in any::<i64>(),
        payload in option::of(payload()),
        headers in option::of(headers()),
        part in option::of((any::<u32>(), any::<u32>()).prop_map(|(index, count)| Part { index, count })),
    ) -> Event {
        Event { position: Position { txid, seq }, id, topic, source, subject, tenant, time, payload, headers, part, is_record: false }
    }
}

fn written(event: &Event) -> String {
    let mut out = Vec::new();
    write_cloudevent(event, &mut out);
    String::from_utf8(out).unwrap()
}

proptest! {
    #[test]
    fn every_value_is_read_back(event in event()) {
        let text = written(&event);
        let read: BTreeMap<String, &RawValue> = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("{text}: {e}"));
        let string = |name: &str| read.get(name).map(|raw| {
            serde_json::from_str::<String>(raw.get()).unwrap()
        });
        let given = |value: &Option<String>| value.clone().filter(|v| !v.is_empty());

        prop_assert_eq!(string("specversion"), Some("1.0".to_owned()));
        prop_assert_eq!(string("id"), Some(event.id.clone()));
        prop_assert_eq!(string("type"), Some(event.topic.clone()));
        prop_assert_eq!(string("subject"), given(&event.subject));
        prop_assert_eq!(string("tenant"), given(&event.tenant));
        prop_assert_eq!(string("sequence"), Some(event.position.to_string()));
        prop_assert_eq!(read.get("data").map(|raw| raw.get()), event.payload.as_deref());
        prop_assert_eq!(
            string("datacontenttype"),
            event.payload.as_ref().map(|_| "application/json".to_owned())
        );
        prop_assert_eq!(string("transaction"), event.part.map(|_| event.position.txid.to_string()));
        let number = |name: &str| read.get(name).map(|raw| raw.get().parse::<u32>().unwrap());
        prop_assert_eq!(number("transactionindex"), event.part.map(|part| part.index));
        prop_assert_eq!(number("transactioncount"), event.part.map(|part| part.count));
        // jiff's instants end some hours before the year does.
        let time = string("time").unwrap();
        prop_assert!(time.strip_suffix('Z').unwrap().parse::<jiff::civil::DateTime>().is_ok());
    }

    #[test]
    fn the_attributes_are_those_of_a_cloudevent(event in event()) {
        let text = written(&event);
        let read: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
        for (name, value) in &read {
            prop_assert!(!name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()));
            let attribute = match value {
                Value::String(_) | Value::Bool(_) => true,
                Value::Number(number) => number.as_i64().is_some_and(|n| n.abs() <= i64::from(u32::MAX)),
                _ => false,
            };
            prop_assert!(attribute || name == "data", "{}: {}", name, value);
        }
        // A parser keeps one of equal names, so that a second one would show as a difference in number.
        let mut names = 0;
        struct Count<'c>(&'c mut usize);
        impl<'de> serde::de::Visitor<'de> for Count<'_> {
            type Value = ();
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<M: serde::de::MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
                while map.next_entry::<String, serde::de::IgnoredAny>()?.is_some() {
                    *self.0 += 1;
                }
                Ok(())
            }
        }
        serde::Deserializer::deserialize_map(
            &mut serde_json::Deserializer::from_str(&text),
            Count(&mut names),
        ).unwrap();
        prop_assert_eq!(names, read.len());
    }

    #[test]
    fn the_source_is_a_uri_reference(event in event()) {
        let read: Value = serde_json::from_str(&written(&event)).unwrap();
        let source = read["source"].as_str().unwrap();
        prop_assert!(!source.is_empty());
        prop_assert!(source.bytes().all(|b| b.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&b)), "{}", source);
        if let Some(given) = event.source.filter(|given| !given.is_empty() && !given.contains('%')) {
            prop_assert_eq!(decoded(source), given);
        }
    }
}

fn decoded(source: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = source.as_bytes();
    while let [first, tail @ ..] = rest {
        if *first == b'%' {
            let hex = std::str::from_utf8(&tail[..2]).unwrap();
            bytes.push(u8::from_str_radix(hex, 16).unwrap());
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn plain() -> Event {
    Event {
        position: Position { txid: 731, seq: 12 },
        id: "evt_1".into(),
        topic: "order.placed".into(),
        source: None,
        subject: None,
        tenant: None,
        time: 0,
        payload: None,
        headers: None,
        part: None,
        is_record: false,
    }
}

#[test]
fn the_least_and_the_most() {
    assert_eq!(
        written(&plain()),
        r#"{"specversion":"1.0","id":"evt_1","source":"outbox","type":"order.placed","time":"1970-01-01T00:00:00Z","sequence":"731:12"}"#
    );
    let full = Event {
        source: Some("public.orders".into()),
        subject: Some("42".into()),
        tenant: Some("acme".into()),
        time: 1_700_000_000_000_001,
        payload: Some(r#"{"total": 10.50}"#.into()),
        headers: Some(r#"{"traceparent": "00-1"}"#.into()),
        part: Some(Part { index: 1, count: 3 }),
        ..plain()
    };
    assert_eq!(
        written(&full),
        concat!(
            r#"{"specversion":"1.0","id":"evt_1","source":"public.orders","type":"order.placed","subject":"42","#,
            r#""time":"2023-11-14T22:13:20.000001Z","datacontenttype":"application/json","sequence":"731:12","#,
            r#""tenant":"acme","transaction":"731","transactionindex":1,"transactioncount":3,"#,
            r#""traceparent":"00-1","data":{"total": 10.50}}"#
        )
    );
}

#[test]
fn a_json_null_is_data_and_an_sql_null_is_none() {
    let event = Event {
        payload: Some("null".into()),
        ..plain()
    };
    assert!(
        written(&event)
            .ends_with(r#""datacontenttype":"application/json","sequence":"731:12","data":null}"#)
    );
    assert!(!written(&plain()).contains("data"));
}

#[test]
fn events_are_appended() {
    let mut out = b"[".to_vec();
    write_cloudevent(&plain(), &mut out);
    out.push(b',');
    write_cloudevent(&plain(), &mut out);
    out.push(b']');
    let read: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(read.as_array().unwrap().len(), 2);
}
