//! outbox.secrets: values that sign. They leave this table for a sink's signature and for nothing else.

use crate::pg::spi::{Arg, Spi};

/// The active values of a named secret; empty if there are none.
pub(crate) fn values(spi: &Spi, name: &str) -> Vec<String> {
    spi.write(
        r#"select "values" from outbox.secrets where name = $1"#,
        &[Arg::Text(Some(name))],
    )
    .first(|row| row.texts(0))
    .flatten()
    .unwrap_or_default()
}

/// Sets the active values of a named secret, or forgets it.
pub(crate) fn set(spi: &Spi, name: &str, values: Option<&[String]>) {
    match values {
        Some(values) => spi.write(
            r#"insert into outbox.secrets (name, "values") values ($1, $2)
               on conflict (name) do update set "values" = excluded."values", version = excluded.version, updated_at = now()"#,
            &[Arg::Text(Some(name)), Arg::Texts(Some(values))],
        ),
        None => spi.write("delete from outbox.secrets where name = $1", &[Arg::Text(Some(name))]),
    };
}
