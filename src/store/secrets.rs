//! outbox.secrets: values that sign and log in, or where in the server they are. They leave this table for a sink's deliveries and for
//! nothing else.

use crate::pg::spi::{Arg, Spi};

/// What is stored of a secret.
pub(crate) enum Stored {
    Values(Vec<String>),
    /// A file of the server's.
    File(String),
    /// A variable of its environment.
    Variable(String),
}

/// The words of column `source`.
pub(crate) const FILE: &str = "file";
pub(crate) const VARIABLE: &str = "env";

/// A named secret; without values if there is none.
pub(crate) fn named(spi: &Spi, name: &str) -> Stored {
    let found = spi
        .write(
            r#"select "values", source, location from outbox.secrets where name = $1"#,
            &[Arg::Text(Some(name))],
        )
        .first(|row| (row.texts(0), row.text(1), row.text(2)));
    match found {
        Some((_, Some(source), Some(location))) if source == FILE => Stored::File(location),
        Some((_, Some(_), Some(location))) => Stored::Variable(location),
        Some((values, ..)) => Stored::Values(values.unwrap_or_default()),
        None => Stored::Values(Vec::new()),
    }
}

/// Sets the active values of a named secret, or forgets it.
pub(crate) fn set(spi: &Spi, name: &str, values: Option<&[String]>) {
    match values {
        Some(values) => spi.write(
            r#"insert into outbox.secrets (name, "values") values ($1, $2)
               on conflict (name) do update
                  set "values" = excluded."values", source = null, location = null, version = excluded.version, updated_at = now()"#,
            &[Arg::Text(Some(name)), Arg::Texts(Some(values))],
        ),
        None => spi.write("delete from outbox.secrets where name = $1", &[Arg::Text(Some(name))]),
    };
}

/// Says where the values of a named secret are.
pub(crate) fn set_source(spi: &Spi, name: &str, source: &str, location: &str) {
    spi.write(
        r#"insert into outbox.secrets (name, "values", source, location) values ($1, '{}', $2, $3)
           on conflict (name) do update
              set "values" = '{}', source = excluded.source, location = excluded.location, version = excluded.version, updated_at = now()"#,
        &[
            Arg::Text(Some(name)),
            Arg::Text(Some(source)),
            Arg::Text(Some(location)),
        ],
    );
}
