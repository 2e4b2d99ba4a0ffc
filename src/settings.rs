//! The settings `outbox.*`. Read on the main thread only.

use std::ffi::CString;
use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

use crate::dispatch::{Limits, Policy};
use crate::pg::encoding;
use crate::sinks::Defaults;
use crate::sinks::webhook::Rules;

static ENABLED: GucSetting<bool> = GucSetting::<bool>::new(true);
static DATABASES: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static BATCH_SIZE: GucSetting<i32> = GucSetting::<i32>::new(32);
static RETRY_MIN: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static RETRY_MAX: GucSetting<i32> = GucSetting::<i32>::new(300_000);
static POISON_ATTEMPTS: GucSetting<i32> = GucSetting::<i32>::new(5);
static POLL_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(5_000);
static RETENTION_MIN_AGE: GucSetting<i32> = GucSetting::<i32>::new(3_600);
static RETENTION_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(60_000);
static HTTP_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static ALLOW_PRIVATE_NETWORKS: GucSetting<bool> = GucSetting::<bool>::new(false);
static WEBHOOK_HTTP: GucSetting<bool> = GucSetting::<bool>::new(false);
static WEBHOOK_PORTS: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"80, 443, 8080, 8443"));
static WEBHOOK_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(15_000);
static WEBHOOK_CONCURRENCY: GucSetting<i32> = GucSetting::<i32>::new(256);
static WEBHOOK_ENDPOINT_CONCURRENCY: GucSetting<i32> = GucSetting::<i32>::new(4);
static WEBHOOK_WAITS: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"60, 300, 1800, 7200, 21600, 43200, 86400"));
static WEBHOOK_ATTEMPTS: GucSetting<i32> = GucSetting::<i32>::new(8);
static WEBHOOK_DISABLE_AFTER: GucSetting<i32> = GucSetting::<i32>::new(5 * 86_400);
static WEBHOOK_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(90 * 86_400);
static TOPIC_PREFIX: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"outbox"));
static NOTIFY: GucSetting<bool> = GucSetting::<bool>::new(true);
static TENANT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static HEADERS: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// Defines them; called when the library is loaded.
pub(crate) fn define() {
    let plain = GucFlags::default();
    let ms = GucFlags::UNIT_MS;
    GucRegistry::define_bool_guc(
        c"outbox.enabled",
        c"Whether dispatchers run.",
        c"",
        &ENABLED,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_string_guc(
        c"outbox.databases",
        c"Databases that get a dispatcher, separated by commas.",
        c"Empty means every database that has the extension.",
        &DATABASES,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.batch_size",
        c"The most events handed to a sink at once, where the sink does not say otherwise.",
        c"",
        &BATCH_SIZE,
        1,
        100_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.retry_min",
        c"The wait after the first failure of an event; it doubles with each further one.",
        c"",
        &RETRY_MIN,
        1,
        i32::MAX,
        GucContext::Sighup,
        ms,
    );
    GucRegistry::define_int_guc(
        c"outbox.retry_max",
        c"The longest wait between two tries.",
        c"",
        &RETRY_MAX,
        1,
        i32::MAX,
        GucContext::Sighup,
        ms,
    );
    GucRegistry::define_int_guc(
        c"outbox.poison_attempts",
        c"How often an event must have failed alone before it may be set aside.",
        c"",
        &POISON_ATTEMPTS,
        1,
        1_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.poll_interval",
        c"How often a dispatcher looks for events that no commit has woken it for.",
        c"",
        &POLL_INTERVAL,
        10,
        i32::MAX,
        GucContext::Sighup,
        ms,
    );
    GucRegistry::define_int_guc(
        c"outbox.retention_min_age",
        c"Events younger than this are kept even when every cursor has passed them.",
        c"",
        &RETENTION_MIN_AGE,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"outbox.retention_interval",
        c"How often retention runs.",
        c"",
        &RETENTION_INTERVAL,
        10,
        i32::MAX,
        GucContext::Sighup,
        ms,
    );
    GucRegistry::define_int_guc(
        c"outbox.http_timeout",
        c"The time-out of a request to a sink of kind http, where the sink does not say otherwise.",
        c"",
        &HTTP_TIMEOUT,
        1,
        i32::MAX,
        GucContext::Sighup,
        ms,
    );
    GucRegistry::define_bool_guc(
        c"outbox.allow_private_networks",
        c"Whether webhooks of tenants may go to private addresses.",
        c"",
        &ALLOW_PRIVATE_NETWORKS,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_bool_guc(
        c"outbox.webhook_http",
        c"Whether webhooks of tenants may use http, beside https.",
        c"",
        &WEBHOOK_HTTP,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_string_guc(
        c"outbox.webhook_ports",
        c"Ports that webhooks of tenants may use, separated by commas.",
        c"Empty means any.",
        &WEBHOOK_PORTS,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_timeout",
        c"The time-out of one attempt at a webhook.",
        c"",
        &WEBHOOK_TIMEOUT,
        1,
        i32::MAX,
        GucContext::Sighup,
        ms,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_concurrency",
        c"Attempts at webhooks under way at once, in all; half of them are for endpoints that are slow or fail.",
        c"",
        &WEBHOOK_CONCURRENCY,
        2,
        10_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_endpoint_concurrency",
        c"Attempts under way at once to one endpoint.",
        c"",
        &WEBHOOK_ENDPOINT_CONCURRENCY,
        1,
        1_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_string_guc(
        c"outbox.webhook_waits",
        c"Seconds to wait after each failed attempt at a webhook, separated by commas; the last stands for all further ones.",
        c"",
        &WEBHOOK_WAITS,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_attempts",
        c"Attempts at a webhook's delivery before it is dead.",
        c"",
        &WEBHOOK_ATTEMPTS,
        1,
        1_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_disable_after",
        c"A webhook of which every attempt fails for as long as this is disabled.",
        c"",
        &WEBHOOK_DISABLE_AFTER,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_retention",
        c"How long deliveries to webhooks are kept once they are delivered or dead.",
        c"",
        &WEBHOOK_RETENTION,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_string_guc(
        c"outbox.topic_prefix",
        c"The first segment of topics that are made up from a table's name.",
        c"",
        &TOPIC_PREFIX,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_bool_guc(
        c"outbox.notify",
        c"Whether dispatchers send NOTIFY outbox when they have found events.",
        c"",
        &NOTIFY,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_string_guc(
        c"outbox.tenant",
        c"The tenant of events that do not name one.",
        c"",
        &TENANT,
        GucContext::Userset,
        plain,
    );
    GucRegistry::define_string_guc(
        c"outbox.headers",
        c"The headers, a JSON object, of events that do not name any.",
        c"",
        &HEADERS,
        GucContext::Userset,
        plain,
    );
}

fn milliseconds(setting: &GucSetting<i32>) -> Duration {
    Duration::from_millis(setting.get().unsigned_abs().into())
}

fn text(setting: &GucSetting<Option<CString>>) -> String {
    setting
        .get()
        .map(|text| encoding::from_database(text.to_bytes()).text)
        .unwrap_or_default()
}

pub(crate) fn enabled() -> bool {
    ENABLED.get()
}

/// Whether a database may have a dispatcher.
pub(crate) fn serves(database: &str) -> bool {
    let names = text(&DATABASES);
    names.trim().is_empty() || names.split(',').any(|name| name.trim() == database)
}

/// The limits of a sink's engine; the sink may have a batch size of its own.
pub(crate) fn policy(batch_size: Option<i32>) -> Policy {
    Policy {
        batch_size: usize::try_from(batch_size.unwrap_or_else(|| BATCH_SIZE.get())).unwrap_or(1),
        retry_min: milliseconds(&RETRY_MIN),
        retry_max: milliseconds(&RETRY_MAX).max(milliseconds(&RETRY_MIN)),
        poison_attempts: POISON_ATTEMPTS.get().unsigned_abs(),
    }
}

pub(crate) fn retry_min() -> Duration {
    milliseconds(&RETRY_MIN)
}

pub(crate) fn retry_max() -> Duration {
    milliseconds(&RETRY_MAX)
}

pub(crate) fn poll_interval() -> Duration {
    milliseconds(&POLL_INTERVAL)
}

pub(crate) fn retention_min_age() -> Duration {
    Duration::from_secs(RETENTION_MIN_AGE.get().unsigned_abs().into())
}

pub(crate) fn retention_interval() -> Duration {
    milliseconds(&RETENTION_INTERVAL)
}

/// What holds for sinks whose config does not say otherwise.
pub(crate) fn sink_defaults() -> Defaults {
    Defaults {
        http_timeout: milliseconds(&HTTP_TIMEOUT),
        topic_prefix: topic_prefix().into(),
    }
}

/// What the topics of captured changes begin with.
pub(crate) fn topic_prefix() -> String {
    text(&TOPIC_PREFIX)
}

/// Whether they begin with this.
pub(crate) fn is_topic_prefix(prefix: &str) -> bool {
    TOPIC_PREFIX
        .get()
        .is_some_and(|text| text.to_bytes() == prefix.as_bytes())
}

/// Where webhooks of tenants may lead.
pub(crate) fn webhook_rules() -> Rules {
    let ports = text(&WEBHOOK_PORTS);
    Rules {
        private_networks: ALLOW_PRIVATE_NETWORKS.get(),
        plain_http: WEBHOOK_HTTP.get(),
        ports: ports
            .split(',')
            .filter_map(|port| port.trim().parse().ok())
            .collect(),
    }
}

pub(crate) fn webhook_timeout() -> Duration {
    milliseconds(&WEBHOOK_TIMEOUT)
}

/// How many attempts at webhooks may be under way.
pub(crate) fn webhook_limits() -> Limits {
    let number = |setting: &GucSetting<i32>| usize::try_from(setting.get()).unwrap_or(1);
    let all = number(&WEBHOOK_CONCURRENCY);
    Limits {
        fresh: all - all / 2,
        slow: all / 2,
        each: number(&WEBHOOK_ENDPOINT_CONCURRENCY),
        slow_after: Duration::from_millis(500),
    }
}

pub(crate) fn webhook_waits() -> Vec<Duration> {
    let waits = text(&WEBHOOK_WAITS);
    let seconds = waits.split(',').filter_map(|wait| wait.trim().parse().ok());
    seconds
        .filter_map(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .collect()
}

pub(crate) fn webhook_attempts() -> u32 {
    WEBHOOK_ATTEMPTS.get().unsigned_abs()
}

pub(crate) fn webhook_disable_after() -> Duration {
    Duration::from_secs(WEBHOOK_DISABLE_AFTER.get().unsigned_abs().into())
}

pub(crate) fn webhook_retention() -> Duration {
    Duration::from_secs(WEBHOOK_RETENTION.get().unsigned_abs().into())
}

pub(crate) fn notify() -> bool {
    NOTIFY.get()
}

/// Whether the session has said a tenant: the default of that column.
pub(crate) fn has_tenant() -> bool {
    !is_empty(&TENANT)
}

/// Whether the session has said headers: the default of that column.
pub(crate) fn has_headers() -> bool {
    !is_empty(&HEADERS)
}

fn is_empty(setting: &GucSetting<Option<CString>>) -> bool {
    setting.get().is_none_or(|text| text.is_empty())
}
