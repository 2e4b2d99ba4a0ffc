//! What an answer says: the status, how long to wait, and which events failed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::StatusCode;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use serde::Deserialize;
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

/// The body of a successful answer, as far as it was read.
#[derive(Clone, Copy)]
pub(super) struct Answer<'a> {
    pub(super) headers: &'a HeaderMap,
    pub(super) body: &'a [u8],
    /// How much was to be read, if the body is longer than that.
    pub(super) cut_at: Option<usize>,
}

/// The member that counts. The others may hold whatever they like.
#[derive(Deserialize)]
struct Report {
    #[serde(default)]
    failures: Value,
}

impl<'a> Answer<'a> {
    /// The events that it reports as failed: `{"failures":[{"id":…,"error":…,"permanent":…}]}`. Ids that are not among `events` are
    /// ignored, and so is any other body, such as `OK` or a page of HTML.
    ///
    /// # Errors
    /// Why it cannot be told whether it reports any: then to take it for plain success could lose the events that it names.
    pub(super) fn failures(self, events: &[Arc<Event>]) -> Result<Vec<Failure>, String> {
        let Some(object) = self.object()? else {
            return Ok(Vec::new());
        };
        let report: Report =
            serde_json::from_slice(object).map_err(|_| "it is no JSON as a whole".to_owned())?;
        let Value::Array(reported) = report.failures else {
            return Ok(Vec::new());
        };
        if reported.is_empty() {
            return Ok(Vec::new());
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
        Ok(failures)
    }

    fn object(self) -> Result<Option<&'a [u8]>, String> {
        let body = text_of(self.headers, self.body)?;
        let begins = begins_an_object(body);
        let is_json = || self.says_json() && !body.is_empty();
        match self.cut_at {
            Some(largest) if begins || is_json() => {
                Err(format!("it is longer than {largest} bytes"))
            }
            None if begins => Ok(Some(body)),
            // Words are no report, whatever they are called; what is not even text may hide one.
            None if is_json() && !is_text(body) => Err("it is no JSON".to_owned()),
            _ => Ok(None),
        }
    }

    fn says_json(self) -> bool {
        let content_type = self.headers.get(CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok());
        content_type.is_some_and(|text| {
            let kind = text.split(';').next().unwrap_or_default().trim();
            let kind = kind.to_ascii_lowercase();
            kind.ends_with("/json") || kind.ends_with("+json")
        })
    }
}

/// The bytes of a body that nobody has compressed: that was asked for, and there is nothing here to read them otherwise.
///
/// # Errors
/// How they are encoded instead.
pub(super) fn text_of<'b>(headers: &HeaderMap, body: &'b [u8]) -> Result<&'b [u8], String> {
    const GZIP: &[u8] = &[0x1f, 0x8b];
    if body.is_empty() {
        return Ok(body);
    }
    for value in headers.get_all(CONTENT_ENCODING) {
        let value = String::from_utf8_lossy(value.as_bytes());
        let mut codings = value.split(',').map(str::trim);
        let other =
            codings.find(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"));
        if let Some(coding) = other {
            let coding = one_line(coding, LONGEST_CODING);
            return Err(format!(
                "it is encoded as {coding}, which was not asked for"
            ));
        }
    }
    if body.starts_with(GZIP) {
        return Err("it is encoded as gzip, which was not asked for".to_owned());
    }
    Ok(body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body))
}

/// As some write it before UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const LONGEST_CODING: usize = 40;

/// Whether a body that begins like this can be a JSON object: a brace, and then a name or the end.
fn begins_an_object(body: &[u8]) -> bool {
    let mut bytes = body.iter().filter(|byte| !byte.is_ascii_whitespace());
    bytes.next() == Some(&b'{') && matches!(bytes.next(), None | Some(b'"' | b'}'))
}

fn is_text(body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok_and(|text| !text.contains('\0'))
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

    fn of(body: &[u8], events: &[Arc<Event>]) -> Result<Vec<Failure>, String> {
        answer("", body).failures(events)
    }

    /// Whole, and of that type, if it has one.
    fn answer<'a>(content_type: &'static str, body: &'a [u8]) -> Answer<'a> {
        let mut headers = HeaderMap::new();
        if !content_type.is_empty() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        Answer {
            headers: Box::leak(Box::new(headers)),
            body,
            cut_at: None,
        }
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
            of(body, &events(4)).unwrap(),
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
            let failures = of(body.as_bytes(), &numbered).unwrap();
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
        let failures = of(br#"{"failures": [{"id": "evt_1"}]}"#, &twice).unwrap();
        let indexes: Vec<_> = failures.iter().map(|failure| failure.index).collect();
        assert_eq!(indexes, [0, 2]);
    }

    #[test]
    fn any_other_body_is_plain_success() {
        for (content_type, body) in [
            ("", ""),
            ("application/json", ""),
            ("text/plain", "ok"),
            ("application/json", "OK"),
            ("application/json; charset=utf-8", "null"),
            ("text/html", "<html>{"),
            ("text/plain", "{done}"),
            ("text/plain; charset=latin-1", "\u{e9}"),
            ("", "[]"),
            ("", "{}"),
            ("", "\u{feff}{}"),
            ("", r#"{"failures": null}"#),
            ("", r#"{"failures": []}"#),
            ("", r#"{"failures": {}}"#),
            ("", r#"{"failures": "evt_1"}"#),
            ("", r#"{"failures": ["evt_1", {"id": "evt_9"}]}"#),
            ("", r#"[{"failures": [{"id": "evt_1"}]}]"#),
            ("", r#"{"result": {"failures": [{"id": "evt_1"}]}}"#),
            ("", r#"{"echo": [1e999, "\ud800"], "failures": []}"#),
        ] {
            let answer = answer(content_type, body.as_bytes());
            assert_eq!(answer.failures(&events(1)), Ok(vec![]), "{body:.40}");
        }
        // What is not JSON may be as long as it likes.
        let endless = |content_type, body| {
            let answer = answer(content_type, body);
            let cut_at = Some(10);
            Answer { cut_at, ..answer }.failures(&events(1))
        };
        assert_eq!(endless("text/html", b"<html>    "), Ok(vec![]));
        for (content_type, body) in [
            ("", b"{\"failures"),
            ("application/problem+json", b"[1, 2, 3, "),
        ] {
            let why = endless(content_type, body).unwrap_err();
            assert_eq!(why, "it is longer than 10 bytes");
        }
    }

    #[test]
    fn what_cannot_be_read_is_no_success() {
        let deep = format!("{{\"failures\":{}", "[".repeat(100_000));
        let whole = "it is no JSON as a whole";
        for (body, why) in [
            ("{", whole),
            (" {\n \"failures\": [{\"id\": \"ev", whole),
            ("\u{feff}{\"a", whole),
            (r#"{"failures": [{"id": "evt_1"}]} trailing"#, whole),
            (r#"{"failures": [], "failures": []}"#, whole),
            (&deep, whole),
        ] {
            assert_eq!(
                of(body.as_bytes(), &events(1)).unwrap_err(),
                why,
                "{body:.40}"
            );
        }
        let utf16: Vec<u8> = "{\"failures\": []}"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        for body in [&utf16[..], b"\xff\xfe", b"\x78\x9c\x03"] {
            let answer = answer("application/json", body);
            assert_eq!(answer.failures(&events(1)).unwrap_err(), "it is no JSON");
        }
    }

    #[test]
    fn what_is_encoded_is_no_success() {
        for (coding, why) in [
            (
                "gzip",
                Some("it is encoded as gzip, which was not asked for"),
            ),
            (
                "identity, BR",
                Some("it is encoded as BR, which was not asked for"),
            ),
            ("Identity", None),
            ("", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.append(CONTENT_ENCODING, HeaderValue::from_static("identity"));
            headers.append(CONTENT_ENCODING, HeaderValue::from_static(coding));
            let answer = |body| Answer {
                headers: &headers,
                body,
                cut_at: None,
            };
            let failures = answer(b"ok").failures(&events(1));
            assert_eq!(failures.err().as_deref(), why, "{coding}");
            assert_eq!(answer(b"").failures(&events(1)), Ok(vec![]));
        }
        // It does not say so.
        let why = of(b"\x1f\x8b\x08\x00", &events(1)).unwrap_err();
        assert_eq!(why, "it is encoded as gzip, which was not asked for");
    }

    #[test]
    fn long_reasons_are_cut() {
        let body = format!(
            r#"{{"failures": [{{"id": "evt_1", "error": "{}"}}]}}"#,
            "x".repeat(9_000)
        );
        assert!(of(body.as_bytes(), &events(1)).unwrap()[0].error.len() <= LONGEST);
    }
}
