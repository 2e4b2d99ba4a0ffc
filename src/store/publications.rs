//! Publications that hand secrets out: outbox.published_secrets.

use crate::pg::spi::Spi;

/// Their names, each with what it publishes.
pub(crate) fn exposing(spi: &Spi) -> Vec<(String, String)> {
    spi.read(
        "select publication::text, string_agg(published, ', ' order by published) from outbox.published_secrets group by publication",
        &[],
    )
    .map(|row| (row.text(0).unwrap_or_default(), row.text(1).unwrap_or_default()))
}
