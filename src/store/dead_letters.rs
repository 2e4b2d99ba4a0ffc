//! outbox.dead_letters: events set aside.

use sha2::{Digest, Sha256};

use crate::envelope::{Event, Position};
use crate::pg::error::PgError;
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

/// Keeps a letter from being changed by anybody else until the transaction ends. False if somebody else holds it, or it is gone.
pub(crate) fn hold(spi: &Spi, sink: &str, position: Position) -> bool {
    spi.write(
        "select from outbox.dead_letters where sink = $1 and txid = $2 and seq = $3 for update skip locked",
        &[Arg::Text(Some(sink)), Arg::Xid(position.txid), Arg::I64(Some(position.seq))],
    )
    .count()
        == 1
}

/// Does something to a letter, unless a transaction that is still open holds it: nothing waits for that. False if one does.
fn settle(spi: &Spi, sql: &str, sink: &str, position: Position, error: Option<&str>) -> bool {
    let sql = format!(
        "with free as materialized (
             select txid, seq from outbox.dead_letters where sink = $1 and txid = $2 and seq = $3 for update skip locked
         ), settled as (
             {sql} where d.sink = $1 and d.txid = f.txid and d.seq = f.seq
         )
         select $4 from outbox.dead_letters d where d.sink = $1 and d.txid = $2 and d.seq = $3 and not exists (select from free)"
    );
    let args = [
        Arg::Text(Some(sink)),
        Arg::Xid(position.txid),
        Arg::I64(Some(position.seq)),
        Arg::Text(error),
    ];
    spi.write(&sql, &args).count() == 0
}

/// A redelivered event is through: its letter goes. False if somebody else holds it, as with the others.
pub(crate) fn redelivered(spi: &Spi, sink: &str, position: Position) -> bool {
    let sql = "delete from outbox.dead_letters d using free f";
    settle(spi, sql, sink, position, None)
}

/// A redelivery failed. The letter stays queued: it may be for an outage.
pub(crate) fn failed_again(spi: &Spi, sink: &str, position: Position, error: &str) -> bool {
    let sql = "update outbox.dead_letters d set error = $4, attempts = d.attempts + 1 from free f";
    settle(spi, sql, sink, position, Some(error))
}

/// Redeliveries failed although the sink is up: the letter stays, no longer queued.
pub(crate) fn given_up(spi: &Spi, sink: &str, position: Position) -> bool {
    let sql = "update outbox.dead_letters d set redeliver_at = null from free f";
    settle(spi, sql, sink, position, None)
}

/// Whether a letter was not written for what is in it: a limit of Postgres, data that jsonb does not take, or more memory than one value
/// may have. Not for a cancel request, a lock, a full disk and the like.
pub(crate) fn cannot_hold(error: &PgError) -> bool {
    let code = error.sqlstate();
    ["22", "54", "53200", "XX000"]
        .iter()
        .any(|of_the_event| code.starts_with(of_the_event))
}

/// The JSON text that stands for an event which is too large for a letter: where it was, how many bytes its text has, and their SHA-256.
pub(crate) fn stand_in(event: &Event, json: &[u8]) -> Vec<u8> {
    let digest = Sha256::digest(json);
    let digest = digest.iter().map(|byte| format!("{byte:02x}"));
    let text = serde_json::json!({
        "sequence": event.position.to_string(),
        "bytes": json.len(),
        "sha256": digest.collect::<String>(),
    });
    text.to_string().into_bytes()
}
