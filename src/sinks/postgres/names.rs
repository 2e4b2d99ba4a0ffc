//! Names of tables, as people write them in SQL.

use std::fmt;

/// A table's name, with a schema or without. Prints as SQL, quoted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableName {
    schema: Option<String>,
    name: String,
}

/// The longest identifier that PostgreSQL keeps in full.
const LONGEST: usize = 63;

impl TableName {
    /// Reads `name`, `schema.name` or `"Schema"."Name"`; what is not quoted is in lower case, as in SQL.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut rest = text.chars().peekable();
        let mut parts = Vec::new();
        loop {
            parts.push(identifier(&mut rest)?);
            match rest.next() {
                None => break,
                Some('.') => {}
                Some(_) => return None,
            }
        }
        let name = parts.pop()?;
        let schema = parts.pop();
        parts.is_empty().then_some(Self { schema, name })
    }
}

fn identifier(rest: &mut std::iter::Peekable<std::str::Chars>) -> Option<String> {
    let mut name = String::new();
    if rest.next_if_eq(&'"').is_some() {
        loop {
            match rest.next()? {
                '"' if rest.next_if_eq(&'"').is_none() => break,
                '\0' => return None,
                c => name.push(c),
            }
        }
    } else {
        let begins = |c: &char| c.is_alphabetic() || *c == '_';
        name.push(rest.next_if(begins)?);
        while let Some(c) = rest.next_if(|c| begins(c) || c.is_ascii_digit() || *c == '$') {
            name.push(c);
        }
        name.make_ascii_lowercase();
    }
    (1..=LONGEST).contains(&name.len()).then_some(name)
}

/// A name as an SQL identifier.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as an SQL literal.
pub(super) fn literal(text: &str) -> String {
    // Whatever standard_conforming_strings says.
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            write!(f, "{}.", quoted(schema))?;
        }
        f.write_str(&quoted(&self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_sql_reads_them() {
        for (text, sql) in [
            ("events", r#""events""#),
            ("Public.Events_2", r#""public"."events_2""#),
            (r#""Sales Data"."a""b""#, r#""Sales Data"."a""b""#),
            (r#"x."y.z""#, r#""x"."y.z""#),
        ] {
            assert_eq!(TableName::parse(text).unwrap().to_string(), sql);
        }
        let long = "x".repeat(64);
        for text in [
            "", ".", "a.", ".a", "a.b.c", "a b", "a;b", "1a", "\"a", "\"\"", "a\"b\"", " a", &long,
        ] {
            assert_eq!(TableName::parse(text), None, "{text}");
        }
    }

    #[test]
    fn literals_hold_anything() {
        assert_eq!(literal(r"it's a \"), r"E'it''s a \\'");
    }
}
