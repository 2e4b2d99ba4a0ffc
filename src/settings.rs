//! The settings `outbox.*`. Read on the main thread only.

pub(crate) mod webhooks;

use std::ffi::CString;
use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

use crate::dispatch::Policy;
use crate::pg::encoding;
use crate::pg::guc::{self, Form};
use crate::sinks::Defaults;

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
static TOPIC_PREFIX: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"outbox"));
static NOTIFY: GucSetting<bool> = GucSetting::<bool>::new(true);
static TENANT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static HEADERS: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// What topics may begin with: a pattern must be able to match it.
struct TopicPrefix;

impl Form for TopicPrefix {
    fn fits(text: &str) -> bool {
        let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '*' | '>');
        text.split('.')
            .all(|segment| !segment.is_empty() && segment.chars().all(is_plain))
    }
}

/// Nothing, or a JSON object: an event must not fail for it later.
struct Headers;

impl Form for Headers {
    fn fits(text: &str) -> bool {
        let object = || serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text);
        text.is_empty() || (!text.contains("\\u0000") && object().is_ok())
    }
}

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
    webhooks::define();
    guc::define::<TopicPrefix>(
        c"outbox.topic_prefix",
        c"The first segment of topics that are made up from a table's name.",
        c"Segments of letters, digits and other visible characters but * and >, separated by dots.",
        &TOPIC_PREFIX,
        GucContext::Sighup,
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
    guc::define::<Headers>(
        c"outbox.headers",
        c"The headers, a JSON object, of events that do not name any.",
        c"",
        &HEADERS,
        GucContext::Userset,
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

/// What the session has said.
pub(crate) fn tenant() -> Option<String> {
    said(&TENANT)
}

/// JSON text, if it is any.
pub(crate) fn headers() -> Option<String> {
    said(&HEADERS)
}

fn said(setting: &GucSetting<Option<CString>>) -> Option<String> {
    let text = setting.get().filter(|text| !text.is_empty())?;
    Some(encoding::from_database(text.as_bytes()).text)
}

fn is_empty(setting: &GucSetting<Option<CString>>) -> bool {
    setting.get().is_none_or(|text| text.is_empty())
}
