//! The settings of webhooks of tenants.

use std::ffi::CString;
use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

use super::milliseconds;
use crate::dispatch::Limits;
use crate::pg::guc::{self, Form};
use crate::sinks::webhook::Rules;

static ALLOW_PRIVATE_NETWORKS: GucSetting<bool> = GucSetting::<bool>::new(false);
static HTTP: GucSetting<bool> = GucSetting::<bool>::new(false);
static PORTS: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"80, 443, 8080, 8443"));
static TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(15_000);
static CONCURRENCY: GucSetting<i32> = GucSetting::<i32>::new(256);
static ENDPOINT_CONCURRENCY: GucSetting<i32> = GucSetting::<i32>::new(4);
static WAITS: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"60, 300, 1800, 7200, 21600, 43200, 86400"));
static ATTEMPTS: GucSetting<i32> = GucSetting::<i32>::new(8);
static DISABLE_AFTER: GucSetting<i32> = GucSetting::<i32>::new(5 * 86_400);
static RETENTION: GucSetting<i32> = GucSetting::<i32>::new(90 * 86_400);

/// Ports, separated by commas, or nothing.
struct Ports;

/// Seconds, separated by commas.
struct Waits;

impl Ports {
    /// Whatever cannot be read allows nothing.
    fn read(text: &str) -> Option<Vec<u16>> {
        let ports = text.split(',').map(|port| port.trim().parse());
        match text.trim().is_empty() {
            true => Some(Vec::new()),
            false => ports.collect::<Result<_, _>>().ok(),
        }
    }
}

impl Waits {
    fn read(text: &str) -> Option<Vec<Duration>> {
        let seconds = text.split(',').map(|wait| wait.trim().parse().ok());
        seconds
            .map(|seconds| Duration::try_from_secs_f64(seconds?).ok())
            .collect()
    }
}

impl Form for Ports {
    fn fits(text: &str) -> bool {
        Self::read(text).is_some()
    }
}

impl Form for Waits {
    fn fits(text: &str) -> bool {
        Self::read(text).is_some()
    }
}

/// Defines them; called when the library is loaded.
pub(super) fn define() {
    let plain = GucFlags::default();
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
        &HTTP,
        GucContext::Sighup,
        plain,
    );
    guc::define::<Ports>(
        c"outbox.webhook_ports",
        c"Ports that webhooks of tenants may use, separated by commas.",
        c"Empty means any.",
        &PORTS,
        GucContext::Sighup,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_timeout",
        c"The time-out of one attempt at a webhook.",
        c"",
        &TIMEOUT,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_concurrency",
        c"Attempts at webhooks under way at once, in all; half of them are for endpoints that are slow or fail.",
        c"",
        &CONCURRENCY,
        2,
        10_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_endpoint_concurrency",
        c"Attempts under way at once to one endpoint.",
        c"",
        &ENDPOINT_CONCURRENCY,
        1,
        1_000,
        GucContext::Sighup,
        plain,
    );
    guc::define::<Waits>(
        c"outbox.webhook_waits",
        c"Seconds to wait after each failed attempt at a webhook, separated by commas; the last stands for all further ones.",
        c"",
        &WAITS,
        GucContext::Sighup,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_attempts",
        c"Attempts at a webhook's delivery before it is dead.",
        c"",
        &ATTEMPTS,
        1,
        1_000,
        GucContext::Sighup,
        plain,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_disable_after",
        c"A webhook of which every attempt fails for as long as this is disabled.",
        c"",
        &DISABLE_AFTER,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"outbox.webhook_retention",
        c"How long deliveries to webhooks are kept once they are delivered or dead.",
        c"",
        &RETENTION,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
}

fn read<T>(setting: &GucSetting<Option<CString>>, read: fn(&str) -> Option<T>) -> Option<T> {
    let text = setting.get()?;
    read(text.to_str().ok()?)
}

/// Where they may lead.
pub(crate) fn rules() -> Rules {
    Rules {
        private_networks: ALLOW_PRIVATE_NETWORKS.get(),
        plain_http: HTTP.get(),
        // What was let through unread allows no port.
        ports: read(&PORTS, Ports::read).unwrap_or_else(|| vec![0]),
    }
}

pub(crate) fn timeout() -> Duration {
    milliseconds(&TIMEOUT)
}

/// How many attempts may be under way.
pub(crate) fn limits() -> Limits {
    let number = |setting: &GucSetting<i32>| usize::try_from(setting.get()).unwrap_or(1);
    let all = number(&CONCURRENCY);
    Limits {
        fresh: all - all / 2,
        slow: all / 2,
        each: number(&ENDPOINT_CONCURRENCY),
        slow_after: Duration::from_millis(500),
    }
}

/// After each failed attempt.
pub(crate) fn waits() -> Vec<Duration> {
    read(&WAITS, Waits::read).unwrap_or_default()
}

pub(crate) fn attempts() -> u32 {
    ATTEMPTS.get().unsigned_abs()
}

pub(crate) fn disable_after() -> Duration {
    Duration::from_secs(DISABLE_AFTER.get().unsigned_abs().into())
}

pub(crate) fn retention() -> Duration {
    Duration::from_secs(RETENTION.get().unsigned_abs().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_a_whole_or_not_at_all() {
        assert_eq!(Ports::read("80, 443 ,8443"), Some(vec![80, 443, 8443]));
        assert_eq!(Ports::read(" "), Some(Vec::new()));
        for text in ["https", "80, https", "80,", "65536", "-1", ","] {
            assert_eq!(Ports::read(text), None, "{text}");
        }
        let waits = Waits::read("0.5, 60").unwrap();
        assert_eq!(waits, [0.5, 60.0].map(Duration::from_secs_f64));
        for text in ["", "1 min", "60,", "-1", "inf", "NaN"] {
            assert_eq!(Waits::read(text), None, "{text}");
        }
    }
}
