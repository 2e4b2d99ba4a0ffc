//! What an answer says: the status, how long to wait, and which events failed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde_json::Value;

use crate::dispatch::Failure;
use crate::envelope::Event;
use crate::sinks::plain_text::{LONGEST, one_line};

/// A sink that asks for more asks for a pause, and the engine has its own greatest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// The failure that a status other than 2xx is, as in `HTTP 410 Gone`.
pub(super) fn refusal(status: StatusCode) -> String {
    let mut text = format!("HTTP {}", status.as_u16());
    if let Some(reason) = status.canonical_reason() {
        text.push(' ');
        text.push_str(reason);
    }
    if status.is_redirection() {
        text.push_str(": redirects are not followed");
    }
    text
}

/// `Retry-After`, which is a number of seconds or a date.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        Duration::from_secs(text.parse().unwrap_or(u64::MAX))
    } else {
        let now = now.duration_since(UNIX_EPOCH).ok()?;
        let then = u64::try_from(http_date(text)?).unwrap_or(0);
        Duration::from_secs(then).saturating_sub(now)
    };
    Some(wait.min(LONGEST_WAIT))
}

/// The Unix time of an HTTP date: the one form that may be sent, and the two old ones that have to be read (RFC 9110,
/// section 5.6.7).
fn http_date(text: &str) -> Option<i64> {
    let form = match text {
        _ if text.as_bytes().get(3) == Some(&b',') => "%a, %d %b %Y %H:%M:%S GMT",
        _ if text.contains(',') => "%A, %d-%b-%y %H:%M:%S GMT",
        _ => "%a %b %e %H:%M:%S %Y",
    };
    let time = jiff::civil::DateTime::strptime(form, text).ok()?;
    let epoch = jiff::civil::date(1970, 1, 1).to_datetime(jiff::civil::Time::midnight());
    Some(time.duration_since(epoch).as_secs())
}

/// The events that the body of a successful answer reports as failed: `{"failures":[{"id":…,"error":…,"permanent":…}]}`.
/// Ids that are not among `events` are ignored, and so is any other body.
pub(super) fn failures(body: &[u8], events: &[Arc<Event>]) -> Vec<Failure> {
    if !looks_like_an_object(body) {
        return Vec::new();
    }
    let Ok(Value::Object(mut body)) = serde_json::from_slice(body) else {
        return Vec::new();
    };
    let Some(Value::Array(reported)) = body.remove("failures") else {
        return Vec::new();
    };
    if reported.is_empty() {
        return Vec::new();
    }
    // An application may give two events one id, and then they fail together.
    let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, event) in events.iter().enumerate() {
        places.entry(&event.id).or_default().push(index);
    }
    let mut failures = Vec::new();
    for report in reported {
        let id = report.get("id").map(text).unwrap_or_default();
        for index in places.remove(id.as_str()).unwrap_or_default() {
            failures.push(Failure {
                index,
                error: reason(report.get("error")),
                permanent: report.get("permanent") == Some(&Value::Bool(true)),
            });
        }
    }
    failures.sort_by_key(|failure| failure.index);
    failures
}

/// Whether the beginning of a body that is too large to read begins such a report. To take it for plain success would lose
/// the events that it names.
pub(super) fn begins_a_report(body: &[u8]) -> bool {
    let mut begin = body
        .iter()
        .copied()
        .filter(|byte| !byte.is_ascii_whitespace());
    b"{\"failures\":[{"
        .iter()
        .all(|&byte| begin.next() == Some(byte))
}

fn looks_like_an_object(body: &[u8]) -> bool {
    body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

fn reason(error: Option<&Value>) -> String {
    let given = error.filter(|error| !error.is_null()).map(text);
    let line = one_line(&given.unwrap_or_default(), LONGEST);
    if line.is_empty() {
        "reported as failed, without a reason".to_owned()
    } else {
        line
    }
}

/// A string as it is, anything else as JSON: receivers give ids as numbers, and errors as objects.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;
    use crate::sinks::http::tests::{event, events};

    #[test]
    fn statuses_have_their_names() {
        for (status, text) in [
            (410, "HTTP 410 Gone"),
            (503, "HTTP 503 Service Unavailable"),
            (599, "HTTP 599"),
            (302, "HTTP 302 Found: redirects are not followed"),
        ] {
            assert_eq!(refusal(StatusCode::from_u16(status).unwrap()), text);
        }
    }

    #[test]
    fn waits_are_seconds_or_dates() {
        // 1994-11-06T08:49:07Z, half a minute before the dates of RFC 9110.
        let now = UNIX_EPOCH + Duration::from_millis(784_111_747_250);
        let wait = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, HeaderValue::from_str(text).unwrap());
            retry_after(&headers, now)
        };
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(wait("120"), seconds(120));
        assert_eq!(wait(" 0 "), seconds(0));
        assert_eq!(wait("99999999999999999999999"), Some(LONGEST_WAIT));
        let half_a_minute = Some(Duration::from_millis(29_750));
        assert_eq!(wait("Sun, 06 Nov 1994 08:49:37 GMT"), half_a_minute);
        assert_eq!(wait("Sunday, 06-Nov-94 08:49:37 GMT"), half_a_minute);
        assert_eq!(wait("Sun Nov  6 08:49:37 1994"), half_a_minute);
        assert_eq!(wait("Sun, 06 Nov 1994 08:48:37 GMT"), seconds(0));
        assert_eq!(wait("Fri, 31 Dec 9999 20:00:00 GMT"), Some(LONGEST_WAIT));
        for text in [
            "",
            "-1",
            "1.5",
            "soon",
            "Sun, 06 Nov 1994",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 99 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(wait(text), None, "{text}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }

    #[test]
    fn reported_failures_find_their_events() {
        let body = br#" {"failures": [
            {"id": "evt_3", "error": "no stock", "permanent": true},
            {"id": "evt_1", "error": "busy\r\n\u001b[1m", "permanent": false, "more": 1},
            {"id": "evt_9", "error": "unknown"},
            {"id": "evt_1", "error": "again"}
        ]}"#;
        let failure = |index, error: &str, permanent| Failure {
            index,
            error: error.to_owned(),
            permanent,
        };
        assert_eq!(
            failures(body, &events(4)),
            [failure(0, "busy [1m", false), failure(2, "no stock", true)]
        );
    }

    #[test]
    fn reports_are_read_leniently() {
        let numbered = vec![Arc::new(Event {
            id: "5".into(),
            ..event(1)
        })];
        for (report, error, permanent) in [
            (
                r#"{"id": 5}"#,
                "reported as failed, without a reason",
                false,
            ),
            (
                r#"{"id": "5", "error": null}"#,
                "reported as failed, without a reason",
                false,
            ),
            (
                r#"{"id": "5", "error": "\u0000"}"#,
                "reported as failed, without a reason",
                false,
            ),
            (
                r#"{"id": "5", "error": {"code": 7}, "permanent": "true"}"#,
                r#"{"code":7}"#,
                false,
            ),
            (r#"{"id": "5", "error": 7, "permanent": true}"#, "7", true),
        ] {
            let body = format!(r#"{{"failures": [null, 1, {{}}, {report}]}}"#);
            let failures = failures(body.as_bytes(), &numbered);
            assert_eq!(failures.len(), 1, "{report}");
            assert_eq!(
                (failures[0].error.as_str(), failures[0].permanent),
                (error, permanent)
            );
        }
    }

    #[test]
    fn equal_ids_fail_together() {
        let twice = vec![Arc::new(event(1)), Arc::new(event(2)), Arc::new(event(1))];
        let failures = failures(br#"{"failures": [{"id": "evt_1"}]}"#, &twice);
        let indexes: Vec<_> = failures.iter().map(|failure| failure.index).collect();
        assert_eq!(indexes, [0, 2]);
    }

    #[test]
    fn any_other_body_is_plain_success() {
        let deep = format!("{{\"failures\":{}", "[".repeat(100_000));
        for body in [
            "",
            "ok",
            "{",
            "[]",
            "{}",
            "\u{feff}{}",
            r#"{"failures": {}}"#,
            r#"{"failures": []}"#,
            r#"{"failures": "evt_1"}"#,
            r#"[{"failures": [{"id": "evt_1"}]}]"#,
            r#"{"result": {"failures": [{"id": "evt_1"}]}}"#,
            r#"{"failures": [{"id": "evt_1"}]} trailing"#,
            &deep,
        ] {
            assert_eq!(failures(body.as_bytes(), &events(1)), [], "{body:.40}");
        }
    }

    #[test]
    fn long_reasons_are_cut() {
        let body = format!(
            r#"{{"failures": [{{"id": "evt_1", "error": "{}"}}]}}"#,
            "x".repeat(9_000)
        );
        assert!(failures(body.as_bytes(), &events(1))[0].error.len() <= LONGEST);
    }

    #[test]
    fn the_beginning_of_a_report_is_known() {
        assert!(begins_a_report(b" {\n \"failures\" : [ {\"id\""));
        assert!(!begins_a_report(b"{\"failures\":[]}"));
        assert!(!begins_a_report(b"<html>"));
        assert!(!begins_a_report(b""));
    }
}
