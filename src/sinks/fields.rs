//! Reading the members of a sink's `config` one by one, so that each kind's errors sound the same.

use serde_json::{Map, Value};

use super::ConfigError;
use super::plain_text::one_line;
use super::redact;

/// The members of one `config`. Values never get into an error: any of them may be a credential.
pub(super) struct Fields<'a> {
    kind: &'static str,
    members: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// # Errors
    /// When `config` is no object, or has a key that is not one of `known`.
    pub(super) fn new(
        kind: &'static str,
        config: &'a Value,
        known: &[&'static str],
    ) -> Result<Self, ConfigError> {
        let Value::Object(members) = config else {
            return Err(ConfigError::new(format!(
                "the config of a sink of kind \"{kind}\" must be a JSON object, not {}",
                type_of(config)
            )));
        };
        // What leaves the database goes through the envelope, and there its payload can be redacted.
        let known = match kind {
            "function" | "pull" => known.to_vec(),
            _ => [known, &[redact::KEY]].concat(),
        };
        if let Some(key) = members.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(unknown(kind, key, &known));
        }
        Ok(Self { kind, members })
    }

    /// A member that is missing or null is `None`.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.members.get(key).filter(|value| !value.is_null())
    }

    /// A string that is not empty.
    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_str() {
            Some("") => Err(self.invalid(key, "must not be empty")),
            Some(text) => Ok(Some(text)),
            None => Err(self.wrong_type(key, "a string", value)),
        }
    }

    pub(super) fn required_string(&self, key: &str) -> Result<&'a str, ConfigError> {
        self.string(key)?.ok_or_else(|| {
            ConfigError::new(format!(
                "the config of a sink of kind \"{}\" needs \"{key}\"",
                self.kind
            ))
        })
    }

    /// A whole number within `from..=to`.
    pub(super) fn integer(
        &self,
        key: &str,
        from: u64,
        to: u64,
    ) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        if !value.is_number() {
            return Err(self.wrong_type(key, "a number", value));
        }
        match value.as_u64() {
            Some(number) if (from..=to).contains(&number) => Ok(Some(number)),
            _ => Err(self.invalid(
                key,
                &format!("must be a whole number between {from} and {to}"),
            )),
        }
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(
        &self,
        key: &str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let Some(word) = self.string(key)? else {
            return Ok(None);
        };
        match choices.iter().find(|(name, _)| *name == word) {
            Some((_, choice)) => Ok(Some(*choice)),
            None => {
                let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
                Err(self.invalid(key, &format!("must be one of {}", listed(&names))))
            }
        }
    }

    /// An object of strings.
    pub(super) fn strings(&self, key: &str) -> Result<Vec<(&'a str, &'a str)>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let Value::Object(members) = value else {
            return Err(self.wrong_type(key, "an object of strings", value));
        };
        members
            .iter()
            .map(|(name, value)| match value.as_str() {
                Some(text) => Ok((name.as_str(), text)),
                None => Err(self.wrong_type(&format!("{key}.{}", shown(name)), "a string", value)),
            })
            .collect()
    }

    pub(super) fn invalid(&self, key: &str, why: &str) -> ConfigError {
        ConfigError::new(format!(
            "invalid \"{key}\" in the config of a sink of kind \"{}\"",
            self.kind
        ))
        .detail(format!("\"{key}\" {why}."))
    }

    fn wrong_type(&self, key: &str, wanted: &str, value: &Value) -> ConfigError {
        self.invalid(key, &format!("must be {wanted}, not {}", type_of(value)))
    }
}

fn unknown(kind: &str, key: &str, known: &[&'static str]) -> ConfigError {
    let error = ConfigError::new(format!(
        "unknown key \"{}\" in the config of a sink of kind \"{kind}\"",
        shown(key)
    ));
    if known.is_empty() {
        return error.detail(format!("A sink of kind \"{kind}\" takes no config."));
    }
    let error = error.detail(format!("The keys are {}.", listed(known)));
    match nearest(key, known) {
        Some(near) => error.hint(format!("Perhaps \"{near}\" is meant.")),
        None => error,
    }
}

/// The name that is meant when one or two characters of it are wrong.
pub(super) fn nearest(name: &str, known: &[&'static str]) -> Option<&'static str> {
    const LONGEST: usize = 64;
    if name.len() > LONGEST {
        return None;
    }
    let name = name.to_lowercase();
    known
        .iter()
        .map(|known| (distance(&name, known), *known))
        .filter(|(distance, known)| *distance <= 2 && *distance < known.len())
        .min()
        .map(|(_, known)| known)
}

/// How many characters have to be put in, taken out or replaced to get from one to the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// `"a", "b" and "c"`.
pub(super) fn listed(names: &[&str]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

/// A name as given, fit for an error.
pub(super) fn shown(name: &str) -> String {
    one_line(name, 64)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name() {
        let known = ["url", "mode", "timeout_ms"];
        assert_eq!(nearest("ulr", &known), Some("url"));
        assert_eq!(nearest("URL", &known), Some("url"));
        assert_eq!(nearest("timeout", &known), None);
        assert_eq!(nearest("timeoutms", &known), Some("timeout_ms"));
        assert_eq!(nearest("node", &known), Some("mode"));
        assert_eq!(nearest("x", &known), None);
        assert_eq!(nearest(&"url".repeat(1000), &known), None);
    }

    #[test]
    fn lists_read_like_prose() {
        assert_eq!(listed(&["a"]), "\"a\"");
        assert_eq!(listed(&["a", "b", "c"]), "\"a\", \"b\" and \"c\"");
    }
}
