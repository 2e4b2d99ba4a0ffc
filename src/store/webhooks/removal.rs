//! What goes: finished deliveries that are old, all of a webhook that was deleted, and cursors that no webhook needs.

use crate::pg::spi::{Arg, Spi};

/// Deliveries removed in one step.
const STEP: i64 = 2_000;

/// Removes deliveries that were finished that long ago, a few thousand at a time, from the time on that the step before has come to.
/// Returns the time that it has come to itself, in microseconds since the Unix epoch; None if there are no more.
pub(crate) fn prune(spi: &Spi, age: std::time::Duration, from: Option<i64>) -> Option<i64> {
    spi.write(
        "with gone as (
             delete from outbox.webhook_deliveries where id = any (array(
                 select d.id from outbox.webhook_deliveries d
                  where d.state <> 'pending' and d.finished_at < clock_timestamp() - $1 * interval '1 second'
                    and d.finished_at >= coalesce($3, '-infinity')
                  order by d.finished_at limit $2 for update skip locked)) returning id, finished_at
         ), attempts as (
             delete from outbox.webhook_attempts a using gone g where a.delivery = g.id
         )
         select count(*), max(finished_at) from gone",
        &[
            Arg::I64(i64::try_from(age.as_secs()).ok()),
            Arg::I64(Some(STEP)),
            Arg::Time(from),
        ],
    )
    .first(|row| row.time(1).filter(|_| row.i64(0) == Some(STEP)))
    .flatten()
}

/// Webhooks that are deleted, and of which something may be left, with their streams.
pub(crate) fn removals(spi: &Spi) -> Vec<(String, String)> {
    spi.read(
        "select webhook, stream from outbox.webhook_removals order by removed_at, webhook",
        &[],
    )
    .map(|row| {
        (
            row.text(0).unwrap_or_default(),
            row.text(1).unwrap_or_default(),
        )
    })
}

/// What a step at the deliveries of a deleted webhook came to.
pub(crate) struct Removed {
    /// The last delivery looked at.
    pub(crate) last: i64,
    /// Somebody else holds some of them.
    pub(crate) held: bool,
}

/// Removes the next deliveries of a deleted webhook, behind that id; None if there are no more.
pub(crate) fn remove(spi: &Spi, webhook: &str, behind: i64) -> Option<Removed> {
    spi.write(
        "with next as materialized (
             select d.id from outbox.webhook_deliveries d where d.webhook = $1 and d.id > $2 order by d.id limit $3
         ), gone as (
             delete from outbox.webhook_deliveries where id = any (array(
                 select d.id from next n join outbox.webhook_deliveries d on d.id = n.id for update of d skip locked)) returning id
         ), attempts as (
             delete from outbox.webhook_attempts a using gone g where a.delivery = g.id
         )
         select (select max(id) from next), (select count(*) from next) > (select count(*) from gone)",
        &[
            Arg::Text(Some(webhook)),
            Arg::I64(Some(behind)),
            Arg::I64(Some(STEP)),
        ],
    )
    .first(|row| {
        row.i64(0).map(|last| Removed {
            last,
            held: row.bool(1).unwrap_or(true),
        })
    })
    .flatten()
}

/// Nothing is left of a deleted webhook.
pub(crate) fn forget_removal(spi: &Spi, webhook: &str) {
    spi.write(
        "delete from outbox.webhook_removals where webhook = $1",
        &[Arg::Text(Some(webhook))],
    );
}

/// Drops the cursor of a stream's webhooks if there are none any more: it holds events back. False if whoever is just making one holds it.
pub(crate) fn drop_idle_cursor(spi: &Spi, stream: &str) -> bool {
    const IDLE: &str = "from outbox.cursors c where c.name = 'webhooks:' || $1
        and not exists (select from outbox.webhooks w where w.stream = $1)";
    let stream = [Arg::Text(Some(stream))];
    if spi.write(&format!("select {IDLE}"), &stream).count() == 0 {
        return true;
    }
    let held = spi.write(
        "select from outbox.cursors where name = 'webhooks:' || $1 for update skip locked",
        &stream,
    );
    if held.count() == 0 {
        return false;
    }
    // By now, whoever had held it may have made one.
    spi.write(&format!("delete {IDLE}"), &stream);
    true
}
