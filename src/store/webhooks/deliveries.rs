//! outbox.webhook_deliveries and their attempts: written, read, settled, begun anew.

use super::ACTIVE_SECRETS;
use crate::pg::spi::{Arg, Spi};

/// New deliveries, column by column.
#[derive(Default)]
pub(crate) struct New {
    pub(crate) webhooks: Vec<String>,
    pub(crate) tenants: Vec<String>,
    pub(crate) event_ids: Vec<String>,
    pub(crate) topics: Vec<String>,
    /// JSON text.
    pub(crate) events: Vec<String>,
}

/// Writes deliveries, due at once. Returns their ids and webhooks.
pub(crate) fn write(spi: &Spi, new: &New) -> Vec<(i64, String)> {
    if new.webhooks.is_empty() {
        return Vec::new();
    }
    spi.write(
        "insert into outbox.webhook_deliveries (webhook, tenant, event_id, topic, event)
         select u.webhook, u.tenant, u.event_id, u.topic, u.event::jsonb
           from unnest($1, $2, $3, $4, $5) with ordinality as u (webhook, tenant, event_id, topic, event, n) order by u.n
         returning id, webhook",
        &[
            Arg::Texts(Some(&new.webhooks)),
            Arg::Texts(Some(&new.tenants)),
            Arg::Texts(Some(&new.event_ids)),
            Arg::Texts(Some(&new.topics)),
            Arg::Texts(Some(&new.events)),
        ],
    )
    .map(|row| (row.i64(0).unwrap_or(0), row.text(1).unwrap_or_default()))
}

/// The next deliveries of one endpoint.
pub(crate) struct Pending {
    pub(crate) webhook: String,
    pub(crate) failing: bool,
    /// (due, in microseconds since the Unix epoch; id), by due time.
    pub(crate) deliveries: Vec<(i64, i64)>,
}

/// The first `limit` pending deliveries of each enabled endpoint, or of these.
pub(crate) fn pending(spi: &Spi, webhooks: Option<&[String]>, limit: usize) -> Vec<Pending> {
    // Not under the snapshot at hand: what this transaction has written is among it.
    let rows = spi
        .write(
            "select w.id, w.failing_since is not null, d.next_attempt_at, d.id
               from outbox.webhooks w, lateral (
                    select d.id, d.next_attempt_at from outbox.webhook_deliveries d
                     where d.webhook = w.id and d.state = 'pending' order by d.next_attempt_at, d.id limit $2) d
              where w.enabled and ($1 is null or w.id = any ($1)) order by w.id, d.next_attempt_at, d.id",
            &[
                Arg::Texts(webhooks),
                Arg::I64(i64::try_from(limit).ok()),
            ],
        )
        .map(|row| {
            let delivery = (row.time(2).unwrap_or(0), row.i64(3).unwrap_or(0));
            (row.text(0).unwrap_or_default(), row.bool(1), delivery)
        });
    let mut all: Vec<Pending> = Vec::new();
    for (webhook, failing, delivery) in rows {
        match all.last_mut() {
            Some(last) if last.webhook == webhook => last.deliveries.push(delivery),
            _ => all.push(Pending {
                webhook,
                failing: failing.unwrap_or(false),
                deliveries: vec![delivery],
            }),
        }
    }
    all
}

/// A delivery as it is sent.
pub(crate) struct Delivery {
    pub(crate) id: i64,
    pub(crate) webhook: String,
    pub(crate) url: String,
    pub(crate) event_id: String,
    /// JSON text.
    pub(crate) event: String,
    pub(crate) secrets: Vec<String>,
    /// Attempts so far, in this round.
    pub(crate) attempts: u32,
}

/// These deliveries, as far as they are still to be made.
pub(crate) fn load(spi: &Spi, ids: &[i64]) -> Vec<Delivery> {
    // As above.
    spi.write(
        &format!(
            "select d.id, w.id, w.url, d.event_id, d.event, {ACTIVE_SECRETS}, d.attempts - d.earlier
               from unnest($1::bigint[]) as u (id) join outbox.webhook_deliveries d on d.id = u.id
               join outbox.webhooks w on w.id = d.webhook
              where d.state = 'pending' and w.enabled"
        ),
        &[Arg::Texts(Some(&texts(ids)))],
    )
    .map(|row| Delivery {
        id: row.i64(0).unwrap_or(0),
        webhook: row.text(1).unwrap_or_default(),
        url: row.text(2).unwrap_or_default(),
        event_id: row.text(3).unwrap_or_default(),
        event: row.json(4).unwrap_or_default(),
        secrets: row.texts(5).unwrap_or_default(),
        attempts: row.i32(6).unwrap_or(0).cast_unsigned(),
    })
}

fn texts(numbers: &[i64]) -> Vec<String> {
    numbers.iter().map(i64::to_string).collect()
}

/// What an attempt came to, and what follows.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) id: i64,
    pub(crate) webhook: String,
    pub(crate) status: Option<u16>,
    pub(crate) duration_ms: i64,
    pub(crate) error: Option<String>,
    /// delivered, dead or pending.
    pub(crate) state: &'static str,
    /// Microseconds since the Unix epoch.
    pub(crate) next_attempt_at: Option<i64>,
}

/// Writes what attempts came to. Returns the deliveries that somebody else holds, by a transaction that is still open: nothing waits
/// for it, least of all the sinks; what is known of them is to be handed in again.
pub(crate) fn record(spi: &Spi, records: &[Record]) -> Vec<i64> {
    let column = |of: &dyn Fn(&Record) -> String| records.iter().map(of).collect::<Vec<_>>();
    let ids = column(&|record| record.id.to_string());
    // An empty text stands for null.
    let statuses = column(&|record| record.status.map_or(String::new(), |s| s.to_string()));
    let durations = column(&|record| record.duration_ms.to_string());
    let errors = column(&|record| record.error.clone().unwrap_or_default());
    let states = column(&|record| record.state.to_owned());
    let next = column(&|record| {
        record
            .next_attempt_at
            .map_or(String::new(), |at| at.to_string())
    });
    spi.write(
        "with said as materialized (
             select u.id::bigint, nullif(u.status, '')::int as status, u.duration::int, nullif(u.error, '') as error, u.state,
                    'epoch'::timestamptz + nullif(u.next, '')::bigint * interval '1 microsecond' as next
               from unnest($1, $2, $3, $4, $5, $6) as u (id, status, duration, error, state, next)
         ), free as materialized (
             select d.id from said s join outbox.webhook_deliveries d on d.id = s.id for no key update of d skip locked
         ), settled as (
             update outbox.webhook_deliveries d
                set attempts = d.attempts + 1, state = s.state, next_attempt_at = s.next,
                    finished_at = case when s.state <> 'pending' then clock_timestamp() end
               from said s join free f on f.id = s.id where d.id = s.id and d.state = 'pending'
             returning d.id, d.attempts, d.tenant, d.state, s.status, s.duration, s.error
         ), noted as (
             insert into outbox.webhook_attempts (delivery, attempt, tenant, status, duration_ms, error)
             select id, attempts, tenant, status, duration, error from settled
                 on conflict (delivery, attempt) do nothing
         ), counted as (
             insert into outbox.webhook_totals as t (delivered, last_delivery_at)
             select count(*), clock_timestamp() from settled where state = 'delivered' having count(*) > 0
                 on conflict (single) do update
                    set delivered = t.delivered + excluded.delivered, last_delivery_at = excluded.last_delivery_at
         )
         select d.id from said s join outbox.webhook_deliveries d on d.id = s.id
          where d.state = 'pending' and not exists (select from free f where f.id = d.id)",
        &[
            Arg::Texts(Some(&ids)),
            Arg::Texts(Some(&statuses)),
            Arg::Texts(Some(&durations)),
            Arg::Texts(Some(&errors)),
            Arg::Texts(Some(&states)),
            Arg::Texts(Some(&next)),
        ],
    )
    .map(|row| row.i64(0).unwrap_or(0))
}

/// The tenant of a delivery, unless its webhook is deleted.
pub(crate) fn tenant_of_delivery(spi: &Spi, delivery: i64) -> Option<String> {
    spi.read(
        "select w.tenant from outbox.webhook_deliveries d join outbox.webhooks w on w.id = d.webhook where d.id = $1",
        &[Arg::I64(Some(delivery))],
    )
    .first(|row| row.text(0).unwrap_or_default())
}

const AGAIN: &str = "update outbox.webhook_deliveries
    set state = 'pending', earlier = attempts, next_attempt_at = clock_timestamp(), finished_at = null";

/// One more round of attempts for one delivery.
pub(crate) fn redeliver(spi: &Spi, delivery: i64) {
    let sql = format!("{AGAIN} where id = $1");
    spi.write(&sql, &[Arg::I64(Some(delivery))]);
}

/// The same for all dead ones of an endpoint that were made since a time, in microseconds since the Unix epoch.
pub(crate) fn redeliver_dead(spi: &Spi, webhook: &str, since: i64) -> u64 {
    let args = [Arg::Text(Some(webhook)), Arg::Time(Some(since))];
    let sql = format!("{AGAIN} where webhook = $1 and state = 'dead' and created_at >= $2");
    spi.write(&sql, &args).count()
}
