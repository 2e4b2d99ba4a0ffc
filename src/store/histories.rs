//! What tells whether a position belongs to the history of this database.

use super::events::{self, Want};
use super::streams::Stream;
use crate::envelope::{Event, Position};
use crate::pg::spi::{Arg, Spi};

/// The event of that number, as the sink of that number gets it.
pub(crate) fn event_at(spi: &Spi, stream: &Stream, sink: i32, seq: i64) -> Option<Event> {
    let want = Want {
        text: true,
        sink: Some(sink),
        ..Want::default()
    };
    let found = events::these(spi, stream, &[seq], &want);
    found.into_iter().next().map(|found| found.event)
}

/// Raises 22023 if the stream has not given out a position, and events could be passed over by it.
pub(crate) fn check(spi: &Spi, stream: &str, position: Position) {
    spi.write(
        "select outbox.check_position(s, $2, $3) from outbox.streams s where s.name = $1",
        &[
            Arg::Text(Some(stream)),
            Arg::Xid(position.txid),
            Arg::I64(Some(position.seq)),
        ],
    );
}
