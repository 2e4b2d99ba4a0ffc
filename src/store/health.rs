//! outbox.sink_health: how a sink that fails is doing.

use crate::pg::spi::{Arg, Spi};

/// What is kept of a sink's troubles.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Health {
    pub(crate) state: String,
    pub(crate) attempts: u32,
    pub(crate) last_error: Option<String>,
    /// Microseconds since the Unix epoch.
    pub(crate) next_attempt_at: Option<i64>,
    /// The engine's memory, JSON text.
    pub(crate) checkpoint: Option<String>,
}

impl Health {
    /// Whether nothing is wrong, as far as is known.
    pub(crate) fn is_well(&self) -> bool {
        matches!(self.state.as_str(), "" | "flowing")
    }
}

pub(crate) fn load(spi: &Spi, sink: &str) -> Option<Health> {
    spi.write(
        "select state, attempts, last_error, next_attempt_at, checkpoint from outbox.sink_health where sink = $1",
        &[Arg::Text(Some(sink))],
    )
    .first(|row| Health {
        state: row.text(0).unwrap_or_default(),
        attempts: row.i32(1).unwrap_or(0).cast_unsigned(),
        last_error: row.text(2),
        next_attempt_at: row.time(3),
        checkpoint: row.json(4),
    })
}

/// Writes how a sink is doing. One that was dropped has no health, also while the transaction that drops it is open, and what somebody
/// else holds stays as it is: this waits for nobody.
pub(crate) fn save(spi: &Spi, sink: &str, health: &Health) {
    spi.write(
        "insert into outbox.sink_health as h (sink, state, attempts, last_error, next_attempt_at, checkpoint)
         select s.id, $2, $3, $4, $5, $6 from outbox.sinks s where s.id = $1
            and (not exists (select from outbox.sink_health t where t.sink = $1)
                 or exists (select from (select from outbox.sink_health t where t.sink = $1 for no key update skip locked) free))
            for key share of s skip locked
         on conflict (sink) do update
            set state = excluded.state, attempts = excluded.attempts, last_error = excluded.last_error,
                next_attempt_at = excluded.next_attempt_at, checkpoint = excluded.checkpoint, updated_at = clock_timestamp()",
        &[
            Arg::Text(Some(sink)),
            Arg::Text(Some(&health.state)),
            Arg::I32(Some(i32::try_from(health.attempts).unwrap_or(i32::MAX))),
            Arg::Text(health.last_error.as_deref()),
            Arg::Time(health.next_attempt_at),
            Arg::Json(health.checkpoint.as_deref()),
        ],
    );
}
