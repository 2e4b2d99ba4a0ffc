//! `redact`: values of a payload that a destination is not to see.
//!
//! A path names members from the outside in: `customer.email`. After a name, `[]` stands for every element of an array:
//! `cards[].number`; on its own it begins a payload that is an array: `[].number`. A name with other characters than letters, digits,
//! `_` and `-` is written as a JSON string: `"e-mail (private)".value`. Where a path leads to something, that becomes null; where it
//! leads to nothing, it changes nothing.
//!
//! The payload stays text, so that all the rest is sent as it is stored, however deep it is nested and however long its numbers are.

use std::fmt;

use serde_json::Value;

use super::ConfigError;
use super::fields::{listed, shown};

/// The key of a sink's `config`.
pub(super) const KEY: &str = "redact";

/// More than anybody writes by hand.
const MOST_PATHS: usize = 1_000;
const MOST_STEPS: usize = 64;

/// What is taken out of each payload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Redaction(Vec<Vec<Step>>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Member(String),
    EachElement,
}

/// A payload that is not the JSON that Postgres prints.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable;

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("its payload could not be redacted")
    }
}

impl Redaction {
    /// From the `config` of a sink of `kind`.
    pub(super) fn of(kind: &str, config: &Value) -> Result<Self, ConfigError> {
        let invalid = |why: String| {
            ConfigError::new(format!(
                "invalid \"{KEY}\" in the config of a sink of kind \"{}\"",
                shown(kind)
            ))
            .detail(why)
            .hint("It is an array of paths into the payload, such as [\"customer.email\", \"cards[].number\"].")
        };
        let paths = match config.get(KEY) {
            None | Some(Value::Null) => return Ok(Self::default()),
            Some(Value::Array(paths)) if paths.len() <= MOST_PATHS => paths,
            Some(Value::Array(_)) => {
                return Err(invalid(format!("There are more than {MOST_PATHS} paths.")));
            }
            Some(_) => return Err(invalid(format!("\"{KEY}\" must be an array."))),
        };
        paths
            .iter()
            .map(|path| {
                let text = path
                    .as_str()
                    .ok_or_else(|| invalid("A path is no string.".to_owned()))?;
                steps(text).ok_or_else(|| {
                    invalid(format!("Path {} is not readable.", listed(&[&shown(text)])))
                })
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A payload without what is to be taken out.
    pub(crate) fn apply(&self, payload: &str) -> Result<String, Unreadable> {
        let mut walk = Walk {
            text: payload,
            at: 0,
            out: String::with_capacity(payload.len()),
            copied: 0,
        };
        let live: Vec<&[Step]> = self.0.iter().map(Vec::as_slice).collect();
        walk.value(&live)?;
        walk.blanks();
        if walk.at != payload.len() {
            return Err(Unreadable);
        }
        walk.copy();
        Ok(walk.out)
    }
}

fn steps(path: &str) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut rest = path;
    loop {
        if let Some(after) = rest.strip_prefix("[]") {
            steps.push(Step::EachElement);
            rest = after;
        } else {
            // A name begins the path or follows a dot.
            if !steps.is_empty() {
                rest = rest.strip_prefix('.')?;
            }
            let (name, after) = name(rest)?;
            steps.push(Step::Member(name));
            rest = after;
        }
        if rest.is_empty() {
            return (steps.len() <= MOST_STEPS).then_some(steps);
        }
    }
}

fn name(text: &str) -> Option<(String, &str)> {
    if text.starts_with('"') {
        let end = string_end(text.as_bytes(), 0)?;
        let name = serde_json::from_str(&text[..end]).ok()?;
        return Some((name, &text[end..]));
    }
    let plain = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let end = text.find(|c| !plain(c)).unwrap_or(text.len());
    (end > 0).then(|| (text[..end].to_owned(), &text[end..]))
}

/// Where the JSON string ends that begins at `start`.
fn string_end(text: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        match text.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// On its way through a payload. What lies between `copied` and `at` has been passed and not been copied yet.
struct Walk<'t> {
    text: &'t str,
    at: usize,
    out: String,
    copied: usize,
}

impl Walk<'_> {
    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn blanks(&mut self) {
        while self.byte().is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn copy(&mut self) {
        self.out.push_str(&self.text[self.copied..self.at]);
        self.copied = self.at;
    }

    /// Passes a value; `live` is what is left of the paths that lead to it. No deeper than the longest path.
    fn value(&mut self, live: &[&[Step]]) -> Result<(), Unreadable> {
        self.blanks();
        if live.is_empty() {
            return self.skip();
        }
        if live.iter().any(|rest| rest.is_empty()) {
            self.copy();
            self.skip()?;
            self.out.push_str("null");
            self.copied = self.at;
            return Ok(());
        }
        match self.byte() {
            Some(b'{') => self.members(live),
            Some(b'[') => self.elements(live),
            _ => self.skip(),
        }
    }

    fn members(&mut self, live: &[&[Step]]) -> Result<(), Unreadable> {
        self.items(b'}', |walk| {
            let start = walk.at;
            if walk.byte() != Some(b'"') {
                return Err(Unreadable);
            }
            walk.at = string_end(walk.text.as_bytes(), start).ok_or(Unreadable)?;
            let quoted = walk.text.get(start..walk.at).ok_or(Unreadable)?;
            let name: String = serde_json::from_str(quoted).map_err(|_| Unreadable)?;
            walk.blanks();
            if walk.byte() != Some(b':') {
                return Err(Unreadable);
            }
            walk.at += 1;
            let within: Vec<&[Step]> = live
                .iter()
                .filter_map(|rest| match rest.split_first() {
                    Some((Step::Member(wanted), rest)) if *wanted == name => Some(rest),
                    _ => None,
                })
                .collect();
            walk.value(&within)
        })
    }

    fn elements(&mut self, live: &[&[Step]]) -> Result<(), Unreadable> {
        let within: Vec<&[Step]> = live
            .iter()
            .filter_map(|rest| match rest.split_first() {
                Some((Step::EachElement, rest)) => Some(rest),
                _ => None,
            })
            .collect();
        if within.is_empty() {
            return self.skip();
        }
        self.items(b']', |walk| walk.value(&within))
    }

    /// Passes what stands between brackets, separated by commas.
    fn items(
        &mut self,
        end: u8,
        mut item: impl FnMut(&mut Self) -> Result<(), Unreadable>,
    ) -> Result<(), Unreadable> {
        self.at += 1;
        self.blanks();
        if self.byte() == Some(end) {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.blanks();
            item(self)?;
            self.blanks();
            let byte = self.byte();
            self.at += 1;
            match byte {
                Some(b',') => {}
                Some(byte) if byte == end => return Ok(()),
                _ => return Err(Unreadable),
            }
        }
    }

    /// Passes a value of any depth without looking into it.
    fn skip(&mut self) -> Result<(), Unreadable> {
        let start = self.at;
        let mut depth = 0usize;
        while let Some(byte) = self.byte() {
            match byte {
                b'"' => {
                    self.at = string_end(self.text.as_bytes(), self.at).ok_or(Unreadable)?;
                    if depth == 0 {
                        return Ok(());
                    }
                    continue;
                }
                b'{' | b'[' => depth += 1,
                // The end of what this value is in.
                b'}' | b']' | b',' if depth == 0 => break,
                b'}' | b']' => {
                    depth -= 1;
                    if depth == 0 {
                        self.at += 1;
                        return Ok(());
                    }
                }
                _ if depth == 0 && byte.is_ascii_whitespace() => break,
                _ => {}
            }
            self.at += 1;
        }
        match depth == 0 && self.at > start {
            true => Ok(()),
            false => Err(Unreadable),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn redaction(paths: &[&str]) -> Redaction {
        Redaction::of("http", &json!({ "redact": paths })).unwrap()
    }

    #[test]
    fn what_paths_lead_to_becomes_null() {
        for (paths, payload, expected) in [
            (&["a"][..], r#"{"a": 1, "b": 2}"#, r#"{"a": null, "b": 2}"#),
            (
                &["a.b"],
                r#"{"a": {"b": [1, {"c": "}"}]}, "b": 2}"#,
                r#"{"a": {"b": null}, "b": 2}"#,
            ),
            (
                &["c[].n", "c[].m.x"],
                r#"{"c": [{"n": 1}, {"m": {"x": 1.50, "y": 1.50}}, 3, []]}"#,
                r#"{"c": [{"n": null}, {"m": {"x": null, "y": 1.50}}, 3, []]}"#,
            ),
            (&["[]"], "[1, [2], {}]", "[null, null, null]"),
            (
                &["[][].a"],
                r#"[[{"a": 1}], {"a": 1}]"#,
                r#"[[{"a": null}], {"a": 1}]"#,
            ),
            (&["a", "a.b"], r#"{"a": {"b": 1}}"#, r#"{"a": null}"#),
            (
                &[r#""a.b".c"#, r#""q\"""#],
                r#"{"a.b": {"c": 1}, "q\"": 2, "a": {"b": {"c": 3}}}"#,
                r#"{"a.b": {"c": null}, "q\"": null, "a": {"b": {"c": 3}}}"#,
            ),
            (&["é"], r#"{"\u00e9": 1}"#, r#"{"\u00e9": null}"#),
            // What is not there, or is of another shape.
            (
                &["a.b", "x[].y"],
                r#"{"a": [{"b": 1}], "x": {"y": 2}}"#,
                r#"{"a": [{"b": 1}], "x": {"y": 2}}"#,
            ),
            (&["a"], "7", "7"),
            (&["a"], r#""a""#, r#""a""#),
            (&["a"], "{}", "{}"),
            (&["a"], "null", "null"),
        ] {
            assert_eq!(
                redaction(paths).apply(payload).as_deref(),
                Ok(expected),
                "{paths:?}"
            );
        }
    }

    #[test]
    fn depth_is_no_limit() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let payload = format!(r#"{{"a": {deep}, "b": {deep}}}"#);
        let expected = format!(r#"{{"a": null, "b": {deep}}}"#);
        assert_eq!(redaction(&["a"]).apply(&payload), Ok(expected));
    }

    #[test]
    fn what_is_no_json_is_not_sent() {
        for payload in [
            "",
            "{",
            r#"{"a"}"#,
            r#"{"a": }"#,
            r#"{"a": 1"#,
            r#"{"a": "x}"#,
            "1 2",
            "[1,]x",
        ] {
            assert_eq!(
                redaction(&["a"]).apply(payload),
                Err(Unreadable),
                "{payload}"
            );
        }
    }

    #[test]
    fn paths_are_checked() {
        for path in [
            "", ".", "a.", ".a", "a..b", "a b", "a[0]", "a[", "a[]b", "\"a", "\"a\"b", "$.a",
        ] {
            let error = Redaction::of("http", &json!({"redact": [path]})).unwrap_err();
            assert_eq!(
                error.message,
                "invalid \"redact\" in the config of a sink of kind \"http\""
            );
            assert!(
                error.detail.unwrap().ends_with("is not readable."),
                "{path}"
            );
        }
        for (value, detail) in [
            (json!("a"), "\"redact\" must be an array."),
            (json!([1]), "A path is no string."),
            (json!(vec!["a"; 1001]), "There are more than 1000 paths."),
        ] {
            let error = Redaction::of("http", &json!({ "redact": value })).unwrap_err();
            assert_eq!(error.detail.as_deref(), Some(detail));
        }
        assert!(Redaction::of("http", &json!({})).unwrap().is_empty());
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(|n| json!(n)),
            "[a-c\"\\\\,:{}\\[\\]]{0,4}".prop_map(|s| json!(s)),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                prop::collection::vec(("[a-c]", inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    /// The same on a tree of values.
    fn by_tree(value: &mut Value, path: &[Step]) {
        match (path.split_first(), value) {
            (None, value) => *value = Value::Null,
            (Some((Step::Member(name), rest)), Value::Object(members)) => {
                if let Some(member) = members.get_mut(name) {
                    by_tree(member, rest);
                }
            }
            (Some((Step::EachElement, rest)), Value::Array(elements)) => {
                elements
                    .iter_mut()
                    .for_each(|element| by_tree(element, rest));
            }
            _ => {}
        }
    }

    proptest! {
        #[test]
        fn it_does_what_a_tree_of_values_would(
            value in any_json(),
            paths in prop::collection::vec("([a-c]|\\[\\])(\\.[a-c]|\\[\\]){0,3}", 0..4),
        ) {
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            let redaction = redaction(&paths);
            let mut expected = value.clone();
            for path in &redaction.0 {
                by_tree(&mut expected, path);
            }
            let redacted = redaction.apply(&value.to_string()).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&redacted).unwrap(), expected);
        }
    }
}
