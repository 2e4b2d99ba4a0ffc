//! outbox.webhooks and what is delivered to them. Called with the extension's rights, for a caller whose own have been checked.

use pgrx::pg_sys;

use crate::pg::spi::{Arg, Spi};

/// A cursor's name for the webhooks of a stream.
pub(crate) fn cursor_of(stream: &str) -> String {
    format!("webhooks:{stream}")
}

/// The streams that have webhooks, by their cursors.
pub(crate) fn streams(spi: &Spi) -> Vec<String> {
    spi.read(
        "select stream from outbox.cursors where name = 'webhooks:' || stream order by stream",
        &[],
    )
    .map(|row| row.text(0).unwrap_or_default())
}

/// What a webhook wants, as the fan-out asks.
pub(crate) struct Wish {
    pub(crate) id: String,
    pub(crate) tenant: String,
    pub(crate) topics: Option<Vec<String>>,
    /// Events visible in this snapshot are older than the webhook.
    pub(crate) since: Option<String>,
}

/// The enabled webhooks of these tenants. They are not deleted before the transaction ends.
pub(crate) fn wishes(spi: &Spi, stream: &str, tenants: &[String]) -> Vec<Wish> {
    spi.write(
        "select id, tenant, topics, since::text from outbox.webhooks
          where stream = $1 and enabled and tenant = any ($2) order by id for key share skip locked",
        &[Arg::Text(Some(stream)), Arg::Texts(Some(tenants))],
    )
    .map(|row| Wish {
        id: row.text(0).unwrap_or_default(),
        tenant: row.text(1).unwrap_or_default(),
        topics: row.texts(2),
        since: row.text(3),
    })
}

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

/// The values that sign for `w`, the latest first.
const ACTIVE_SECRETS: &str = "array(select s.value from outbox.webhook_secrets s
     where s.webhook = w.id and (s.expires_at is null or s.expires_at > clock_timestamp()) order by s.created_at desc)";

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

/// Writes what attempts came to.
pub(crate) fn record(spi: &Spi, records: &[Record]) {
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
        "with said as (
             select u.id::bigint, nullif(u.status, '')::int as status, u.duration::int, nullif(u.error, '') as error, u.state,
                    'epoch'::timestamptz + nullif(u.next, '')::bigint * interval '1 microsecond' as next
               from unnest($1, $2, $3, $4, $5, $6) as u (id, status, duration, error, state, next)
         ), settled as (
             update outbox.webhook_deliveries d
                set attempts = d.attempts + 1, state = s.state, next_attempt_at = s.next,
                    finished_at = case when s.state <> 'pending' then clock_timestamp() end
               from said s where d.id = s.id and d.state = 'pending'
             returning d.id, d.attempts, d.tenant, s.status, s.duration, s.error
         )
         insert into outbox.webhook_attempts (delivery, attempt, tenant, status, duration_ms, error)
         select id, attempts, tenant, status, duration, error from settled
             on conflict (delivery, attempt) do nothing",
        &[
            Arg::Texts(Some(&ids)),
            Arg::Texts(Some(&statuses)),
            Arg::Texts(Some(&durations)),
            Arg::Texts(Some(&errors)),
            Arg::Texts(Some(&states)),
            Arg::Texts(Some(&next)),
        ],
    );
}

/// The latest attempts of these endpoints went through.
pub(crate) fn are_well(spi: &Spi, webhooks: &[String]) {
    spi.write(
        "update outbox.webhooks set failing_since = null where id = any ($1) and failing_since is not null",
        &[Arg::Texts(Some(webhooks))],
    );
}

/// The latest attempts of these endpoints have failed. Those that have done nothing else for `patience` are disabled, and returned.
pub(crate) fn are_failing(
    spi: &Spi,
    webhooks: &[String],
    patience: std::time::Duration,
) -> Vec<String> {
    spi.write(
        "update outbox.webhooks set failing_since = clock_timestamp() where id = any ($1) and failing_since is null",
        &[Arg::Texts(Some(webhooks))],
    );
    spi.write(
        "update outbox.webhooks
            set enabled = false, disabled_at = clock_timestamp(),
                disabled_reason = 'every attempt has failed since ' || to_char(failing_since, 'YYYY-MM-DD HH24:MI:SS OF')
          where id = any ($1) and enabled and failing_since < clock_timestamp() - $2 * interval '1 millisecond'
         returning id",
        &[
            Arg::Texts(Some(webhooks)),
            Arg::I64(i64::try_from(patience.as_millis()).ok()),
        ],
    )
    .map(|row| row.text(0).unwrap_or_default())
}

/// These endpoints have said that they want no more.
pub(crate) fn are_gone(spi: &Spi, webhooks: &[String]) {
    spi.write(
        "update outbox.webhooks set enabled = false, disabled_at = clock_timestamp(), disabled_reason = 'the endpoint answered 410 Gone'
          where id = any ($1) and enabled",
        &[Arg::Texts(Some(webhooks))],
    );
}

/// Removes deliveries that were finished that long ago, a few thousand at a time. True if there may be more.
pub(crate) fn prune(spi: &Spi, age: std::time::Duration) -> bool {
    const STEP: i64 = 2_000;
    let gone = spi.write(
        "with gone as (
             delete from outbox.webhook_deliveries where id = any (array(
                 select d.id from outbox.webhook_deliveries d
                  where d.state <> 'pending' and d.finished_at < clock_timestamp() - $1 * interval '1 second'
                  order by d.finished_at limit $2)) returning id
         ), attempts as (
             delete from outbox.webhook_attempts a using gone g where a.delivery = g.id
         )
         select count(*) from gone",
        &[
            Arg::I64(i64::try_from(age.as_secs()).ok()),
            Arg::I64(Some(STEP)),
        ],
    );
    gone.first(|row| row.i64(0)).flatten() == Some(STEP)
}

/// Whoever makes the first webhook of a stream, or deletes the last, is alone with its cursor until the transaction ends.
pub(crate) fn lock_stream(spi: &Spi, stream: &str) {
    spi.write(
        "select from outbox.streams where name = $1 for no key update",
        &[Arg::Text(Some(stream))],
    );
}

/// A webhook that is about to be written.
pub(crate) struct NewWebhook<'a> {
    pub(crate) id: &'a str,
    pub(crate) tenant: &'a str,
    pub(crate) url: &'a str,
    pub(crate) topics: Option<&'a [String]>,
    pub(crate) description: Option<&'a str>,
    pub(crate) stream: &'a str,
}

pub(crate) fn create(spi: &Spi, new: &NewWebhook) {
    spi.write(
        "insert into outbox.webhooks (id, tenant, url, topics, description, stream) values ($1, $2, $3, $4, $5, $6)",
        &[
            Arg::Text(Some(new.id)),
            Arg::Text(Some(new.tenant)),
            Arg::Text(Some(new.url)),
            Arg::Texts(new.topics),
            Arg::Text(new.description),
            Arg::Text(Some(new.stream)),
        ],
    );
}

/// The tenant and the stream of a webhook, which is kept from being changed by anybody else until the transaction ends.
pub(crate) fn to_change(spi: &Spi, id: &str) -> Option<(String, String)> {
    spi.write(
        "select tenant, stream from outbox.webhooks where id = $1 for update",
        &[Arg::Text(Some(id))],
    )
    .first(|row| {
        (
            row.text(0).unwrap_or_default(),
            row.text(1).unwrap_or_default(),
        )
    })
}

/// Whether a role may read and manage what is a tenant's.
pub(crate) fn may_manage(spi: &Spi, role: pg_sys::Oid, tenant: &str) -> bool {
    spi.read(
        "select outbox.is_role_of($1::regrole::text::name, $2)",
        &[Arg::Oid(Some(role)), Arg::Text(Some(tenant))],
    )
    .first(|row| row.bool(0).unwrap_or(false))
    .unwrap_or(false)
}

/// What is null stays; an empty array of topics takes them away.
pub(crate) fn alter(
    spi: &Spi,
    id: &str,
    url: Option<&str>,
    topics: Option<&[String]>,
    description: Option<&str>,
) {
    spi.write(
        "update outbox.webhooks
            set url = coalesce($2, url), topics = case when $3 is null then topics else nullif($3, '{}') end,
                description = coalesce($4, description), updated_at = now()
          where id = $1",
        &[
            Arg::Text(Some(id)),
            Arg::Text(url),
            Arg::Texts(topics),
            Arg::Text(description),
        ],
    );
}

/// By hand. One that is enabled again has a clean slate.
pub(crate) fn set_enabled(spi: &Spi, id: &str, enabled: bool) {
    spi.write(
        "update outbox.webhooks
            set enabled = $2, failing_since = null, updated_at = now(),
                disabled_at = case when $2 then null else coalesce(disabled_at, now()) end,
                disabled_reason = case when $2 then null else coalesce(disabled_reason, 'by hand') end
          where id = $1",
        &[Arg::Text(Some(id)), Arg::Bool(enabled)],
    );
}

/// Removes a webhook and all of its; with the last one of a stream goes the cursor that holds its events back.
pub(crate) fn delete(spi: &Spi, id: &str, stream: &str) {
    let args = [Arg::Text(Some(id))];
    for sql in [
        "delete from outbox.webhooks where id = $1",
        "delete from outbox.webhook_secrets where webhook = $1",
        "delete from outbox.webhook_attempts a using outbox.webhook_deliveries d where d.webhook = $1 and a.delivery = d.id",
        "delete from outbox.webhook_deliveries where webhook = $1",
    ] {
        spi.write(sql, &args);
    }
    lock_stream(spi, stream);
    spi.write(
        "delete from outbox.cursors where name = 'webhooks:' || $1 and not exists (select from outbox.webhooks w where w.stream = $1)",
        &[Arg::Text(Some(stream))],
    );
}

/// Adds a value that signs. The others sign on for as long as `overlap`, an interval as text, says.
pub(crate) fn add_secret(spi: &Spi, id: &str, value: &str, overlap: &str) {
    spi.write(
        "delete from outbox.webhook_secrets where webhook = $1 and expires_at <= clock_timestamp()",
        &[Arg::Text(Some(id))],
    );
    spi.write(
        "update outbox.webhook_secrets set expires_at = least(expires_at, clock_timestamp() + $2::interval) where webhook = $1",
        &[Arg::Text(Some(id)), Arg::Text(Some(overlap))],
    );
    spi.write(
        "insert into outbox.webhook_secrets (webhook, value) values ($1, $2)
         on conflict (webhook, value) do update set expires_at = null, created_at = clock_timestamp()",
        &[Arg::Text(Some(id)), Arg::Text(Some(value))],
    );
}

/// The tenant of a delivery, and its webhook.
pub(crate) fn delivery_of(spi: &Spi, delivery: i64) -> Option<(String, String)> {
    spi.read(
        "select tenant, webhook from outbox.webhook_deliveries where id = $1",
        &[Arg::I64(Some(delivery))],
    )
    .first(|row| {
        (
            row.text(0).unwrap_or_default(),
            row.text(1).unwrap_or_default(),
        )
    })
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

/// The URL of a webhook and the values that sign for it.
pub(crate) fn address(spi: &Spi, id: &str) -> Option<(String, Vec<String>)> {
    spi.read(
        &format!("select w.url, {ACTIVE_SECRETS} from outbox.webhooks w where w.id = $1"),
        &[Arg::Text(Some(id))],
    )
    .first(|row| {
        (
            row.text(0).unwrap_or_default(),
            row.texts(1).unwrap_or_default(),
        )
    })
}
