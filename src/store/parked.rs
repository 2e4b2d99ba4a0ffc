//! outbox.parked: events that a sink isolated by key has not taken yet, and the later ones of their keys behind them.
//!
//! The rows name events and hold none: payloads stay where they are, exact and in one place, and retention leaves alone what a row
//! names. Rows come and go in the transactions that save the sink's cursor, so each undelivered event is either behind that or here.

use crate::dispatch::{Time, Trial};
use crate::envelope::Event;
use crate::pg::spi::{Arg, Spi};

/// A parked event.
#[derive(Debug)]
pub(crate) struct Parked {
    pub(crate) seq: i64,
    pub(crate) source: Option<String>,
    pub(crate) subject: Option<String>,
    pub(crate) trial: Trial,
}

fn microseconds(time: Option<Time>) -> Option<i64> {
    time.map(|time| i64::try_from(time.0.saturating_mul(1000)).unwrap_or(i64::MAX))
}

fn milliseconds(time: Option<i64>) -> Option<Time> {
    time.map(|time| Time(u64::try_from(time / 1000).unwrap_or(0)))
}

/// All that is parked for a sink, in the order in which it was.
pub(crate) fn of(spi: &Spi, sink: &str) -> Vec<Parked> {
    // Not under the snapshot at hand: the last holder of the lease may have parked more since.
    spi.write(
        "select seq, source, subject, attempts, next_attempt_at, error from outbox.parked where sink = $1 order by number",
        &[Arg::Text(Some(sink))],
    )
    .map(|row| Parked {
        seq: row.i64(0).unwrap_or(0),
        source: row.text(1),
        subject: row.text(2),
        trial: Trial {
            attempts: row.i32(3).unwrap_or(0).cast_unsigned(),
            excused: 0,
            due: milliseconds(row.time(4)),
            error: row.text(5),
        },
    })
}

/// Whether anything is parked for a sink.
pub(crate) fn any(spi: &Spi, sink: &str) -> bool {
    spi.write(
        "select from outbox.parked where sink = $1 limit 1",
        &[Arg::Text(Some(sink))],
    )
    .count()
        > 0
}

pub(crate) fn add(spi: &Spi, sink: &str, event: &Event, trial: &Trial) {
    spi.write(
        "insert into outbox.parked (sink, txid, seq, source, subject, \"time\", attempts, next_attempt_at, error)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9) on conflict (sink, seq) do nothing",
        &[
            Arg::Text(Some(sink)),
            Arg::Xid(event.position.txid),
            Arg::I64(Some(event.position.seq)),
            Arg::Text(event.source.as_deref()),
            Arg::Text(event.subject.as_deref()),
            Arg::Time(Some(event.time)),
            attempts(trial),
            Arg::Time(microseconds(trial.due)),
            Arg::Text(trial.error.as_deref()),
        ],
    );
}

/// An event has failed again.
pub(crate) fn failed(spi: &Spi, sink: &str, seq: i64, trial: &Trial) {
    spi.write(
        "update outbox.parked set attempts = $3, next_attempt_at = $4, error = $5 where sink = $1 and seq = $2",
        &[
            Arg::Text(Some(sink)),
            Arg::I64(Some(seq)),
            attempts(trial),
            Arg::Time(microseconds(trial.due)),
            Arg::Text(trial.error.as_deref()),
        ],
    );
}

/// An event is through, dead, or gone. False if it was not there any more.
pub(crate) fn remove(spi: &Spi, sink: &str, seq: i64) -> bool {
    spi.write(
        "delete from outbox.parked where sink = $1 and seq = $2",
        &[Arg::Text(Some(sink)), Arg::I64(Some(seq))],
    )
    .count()
        == 1
}

fn attempts(trial: &Trial) -> Arg<'static> {
    Arg::I32(Some(i32::try_from(trial.attempts).unwrap_or(i32::MAX)))
}
