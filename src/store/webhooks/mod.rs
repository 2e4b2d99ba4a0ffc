//! outbox.webhooks, what signs for them, and how they are. Called with the extension's rights, for a caller whose own have been checked.

mod deliveries;
mod removal;

use pgrx::pg_sys;

pub(crate) use self::deliveries::{
    Delivery, New, Record, load, pending, record, redeliver, redeliver_dead, tenant_of_delivery,
    write,
};
pub(crate) use self::removal::{drop_idle_cursor, forget_removal, prune, removals, remove};

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

/// The enabled webhooks of these tenants. No row is locked, and none that somebody else holds is passed over, or events would be
/// lost on it: what is written for one that is just being deleted is removed with the rest of it, as the same process does both.
pub(crate) fn wishes(spi: &Spi, stream: &str, tenants: &[String]) -> Vec<Wish> {
    spi.read(
        "select id, tenant, topics, since::text from outbox.webhooks
          where stream = $1 and enabled and tenant = any ($2) order by id",
        &[Arg::Text(Some(stream)), Arg::Texts(Some(tenants))],
    )
    .map(|row| Wish {
        id: row.text(0).unwrap_or_default(),
        tenant: row.text(1).unwrap_or_default(),
        topics: row.texts(2),
        since: row.text(3),
    })
}

/// The values that sign for `w`, the latest first.
const ACTIVE_SECRETS: &str = "array(select s.value from outbox.webhook_secrets s
     where s.webhook = w.id and (s.expires_at is null or s.expires_at > clock_timestamp()) order by s.created_at desc)";

/// The latest attempts of these endpoints went through. Returns those whose rows somebody else holds, as [`record`] does.
pub(crate) fn are_well(spi: &Spi, webhooks: &[String]) -> Vec<String> {
    spi.write(
        "with free as materialized (
             select id from outbox.webhooks where id = any ($1) and failing_since is not null for no key update skip locked
         ), settled as (
             update outbox.webhooks w set failing_since = null from free f where w.id = f.id
         )
         select w.id from outbox.webhooks w
          where w.id = any ($1) and w.failing_since is not null and not exists (select from free f where f.id = w.id)",
        &[Arg::Texts(Some(webhooks))],
    )
    .map(|row| row.text(0).unwrap_or_default())
}

/// The latest attempts of these endpoints have failed. Those that have done nothing else for `patience` are disabled, and returned.
/// What somebody else holds is passed over: the next failure tells the same.
pub(crate) fn are_failing(
    spi: &Spi,
    webhooks: &[String],
    patience: std::time::Duration,
) -> Vec<String> {
    spi.write(
        "update outbox.webhooks set failing_since = clock_timestamp()
          where id = any (array(select id from outbox.webhooks where id = any ($1) and failing_since is null for no key update skip locked))",
        &[Arg::Texts(Some(webhooks))],
    );
    let given_up = spi
        .write(
            "select id from outbox.webhooks
              where id = any ($1) and enabled and failing_since < clock_timestamp() - $2 * interval '1 millisecond'
                for no key update skip locked",
            &[
                Arg::Texts(Some(webhooks)),
                Arg::I64(i64::try_from(patience.as_millis()).ok()),
            ],
        )
        .map(|row| row.text(0).unwrap_or_default());
    // An update of none would have dispatchers look at everything again all the same.
    if !given_up.is_empty() {
        spi.write(
            "update outbox.webhooks
                set enabled = false, disabled_at = clock_timestamp(),
                    disabled_reason = 'every attempt has failed since ' || to_char(failing_since, 'YYYY-MM-DD HH24:MI:SS OF')
              where id = any ($1)",
            &[Arg::Texts(Some(&given_up))],
        );
    }
    given_up
}

/// These endpoints have said that they want no more. Returns those whose rows somebody else holds.
pub(crate) fn are_gone(spi: &Spi, webhooks: &[String]) -> Vec<String> {
    spi.write(
        "with free as materialized (
             select id from outbox.webhooks where id = any ($1) and enabled for no key update skip locked
         ), settled as (
             update outbox.webhooks w
                set enabled = false, disabled_at = clock_timestamp(), disabled_reason = 'the endpoint answered 410 Gone'
               from free f where w.id = f.id
         )
         select w.id from outbox.webhooks w where w.id = any ($1) and w.enabled and not exists (select from free f where f.id = w.id)",
        &[Arg::Texts(Some(webhooks))],
    )
    .map(|row| row.text(0).unwrap_or_default())
}

/// Keeps the cursor of a stream's webhooks from being dropped until the transaction ends; false if there is none.
pub(crate) fn hold_cursor(spi: &Spi, stream: &str) -> bool {
    let name = cursor_of(stream);
    let held = spi.write(
        "select from outbox.cursors where name = $1 for key share",
        &[Arg::Text(Some(&name))],
    );
    held.count() == 1
}

/// Whoever makes the first webhook of a stream is alone in that until the transaction ends.
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

/// The tenant of a webhook.
pub(crate) fn tenant_of(spi: &Spi, id: &str) -> Option<String> {
    spi.read(
        "select tenant from outbox.webhooks where id = $1",
        &[Arg::Text(Some(id))],
    )
    .first(|row| row.text(0).unwrap_or_default())
}

/// The same; it is kept from being changed by anybody else until the transaction ends.
pub(crate) fn to_change(spi: &Spi, id: &str) -> Option<String> {
    spi.write(
        "select tenant from outbox.webhooks where id = $1 for no key update",
        &[Arg::Text(Some(id))],
    )
    .first(|row| row.text(0).unwrap_or_default())
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

/// Removes a webhook. Its deliveries, and the cursor that it may be the last to need, go later: there may be millions.
pub(crate) fn delete(spi: &Spi, id: &str) {
    let args = [Arg::Text(Some(id))];
    for sql in [
        "insert into outbox.webhook_removals (webhook, stream) select id, stream from outbox.webhooks where id = $1",
        "delete from outbox.webhooks where id = $1",
        "delete from outbox.webhook_secrets where webhook = $1",
    ] {
        spi.write(sql, &args);
    }
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
