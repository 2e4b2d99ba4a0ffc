//! outbox.dead_letters: events set aside.

use crate::envelope::Position;
use crate::pg::spi::{Arg, Spi};

/// An event to be set aside.
pub(crate) struct DeadLetter<'a> {
    pub(crate) sink: &'a str,
    pub(crate) position: Position,
    /// The event as delivered, JSON text.
    pub(crate) event: &'a str,
    pub(crate) error: &'a str,
    pub(crate) attempts: u32,
}

pub(crate) fn write(spi: &Spi, letter: &DeadLetter) {
    spi.write(
        "insert into outbox.dead_letters as d (sink, txid, seq, event, error, attempts) values ($1, $2, $3, $4, $5, $6)
         on conflict (sink, txid, seq) do update
            set event = excluded.event, error = excluded.error, attempts = d.attempts + excluded.attempts, dead_at = clock_timestamp()",
        &[
            Arg::Text(Some(letter.sink)),
            Arg::Xid(letter.position.txid),
            Arg::I64(Some(letter.position.seq)),
            Arg::Json(Some(letter.event)),
            Arg::Text(Some(letter.error)),
            Arg::I32(Some(i32::try_from(letter.attempts.max(1)).unwrap_or(i32::MAX))),
        ],
    );
}

/// A dead letter that was queued again.
#[derive(Debug, Clone)]
pub(crate) struct Queued {
    pub(crate) position: Position,
    /// JSON text.
    pub(crate) event: String,
}

/// The first dead letters of a sink that are queued for redelivery.
pub(crate) fn queued(spi: &Spi, sink: &str, limit: i64) -> Vec<Queued> {
    spi.read(
        "select txid, seq, event from outbox.dead_letters where sink = $1 and redeliver_at is not null order by txid, seq limit $2",
        &[Arg::Text(Some(sink)), Arg::I64(Some(limit))],
    )
    .map(|row| Queued {
        position: Position { txid: row.xid(0).unwrap_or(0), seq: row.i64(1).unwrap_or(0) },
        event: row.json(2).unwrap_or_default(),
    })
}

/// A redelivered event is through: its letter goes.
pub(crate) fn redelivered(spi: &Spi, sink: &str, position: Position) {
    spi.write(
        "delete from outbox.dead_letters where sink = $1 and txid = $2 and seq = $3",
        &[
            Arg::Text(Some(sink)),
            Arg::Xid(position.txid),
            Arg::I64(Some(position.seq)),
        ],
    );
}

/// A redelivery failed. The letter stays queued: it may be for an outage.
pub(crate) fn failed_again(spi: &Spi, sink: &str, position: Position, error: &str) {
    spi.write(
        "update outbox.dead_letters set error = $4, attempts = attempts + 1 where sink = $1 and txid = $2 and seq = $3",
        &[
            Arg::Text(Some(sink)),
            Arg::Xid(position.txid),
            Arg::I64(Some(position.seq)),
            Arg::Text(Some(error)),
        ],
    );
}

/// Redeliveries failed although the sink is up: the letter stays, no longer queued.
pub(crate) fn given_up(spi: &Spi, sink: &str, position: Position) {
    spi.write(
        "update outbox.dead_letters set redeliver_at = null where sink = $1 and txid = $2 and seq = $3",
        &[
            Arg::Text(Some(sink)),
            Arg::Xid(position.txid),
            Arg::I64(Some(position.seq)),
        ],
    );
}
