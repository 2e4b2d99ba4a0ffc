//! What JetStream answers to an event.

use std::borrow::Cow;

use serde::Deserialize;

use crate::sinks::plain_text::{LONGEST, one_line};

/// Nobody is subscribed where the event was published: no stream, or no JetStream.
const NO_RESPONDERS: u16 = 503;
/// The message is larger than its stream lets any be: the one refusal that is the event's own fault.
const TOO_LARGE: u32 = 10_054;

/// What became of an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is in the stream, now or already.
    Stored,
    NobodyThere,
    Refused {
        error: String,
        /// No retry of this event can help.
        permanent: bool,
    },
}

#[derive(Deserialize)]
struct Ack<'a> {
    #[serde(default, borrow)]
    stream: Option<Cow<'a, str>>,
    #[serde(default)]
    seq: Option<u64>,
    #[serde(default, borrow)]
    error: Option<Refusal<'a>>,
}

#[derive(Deserialize)]
struct Refusal<'a> {
    #[serde(default)]
    err_code: u32,
    #[serde(default, borrow)]
    description: Cow<'a, str>,
}

/// Reads an answer. Whatever is not the acknowledgement of a stream is none.
pub(super) fn read(status: Option<u16>, payload: &[u8]) -> Answer {
    let refused = |error: String| Answer::Refused {
        error,
        permanent: false,
    };
    match status {
        Some(NO_RESPONDERS) => return Answer::NobodyThere,
        Some(status) => return refused(format!("the server answered with status {status}")),
        None => {}
    }
    match serde_json::from_slice(payload) {
        Ok(Ack {
            error: Some(refusal),
            ..
        }) => Answer::Refused {
            error: one_line(
                &format!("JetStream: {} ({})", refusal.description, refusal.err_code),
                LONGEST,
            ),
            permanent: refusal.err_code == TOO_LARGE,
        },
        Ok(Ack {
            stream: Some(stream),
            seq: Some(1..),
            ..
        }) if !stream.is_empty() => Answer::Stored,
        _ => refused("it was answered by something that is no stream of JetStream".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_stream() {
        for ack in [
            r#"{"stream":"EVENTS","seq":1}"#,
            r#"{"stream":"EVENTS", "domain":"hub", "seq":22, "duplicate": true}"#,
        ] {
            assert_eq!(read(None, ack.as_bytes()), Answer::Stored);
        }
    }

    #[test]
    fn what_nobody_takes() {
        assert_eq!(read(Some(503), b""), Answer::NobodyThere);
        assert!(matches!(
            read(Some(408), b""),
            Answer::Refused {
                permanent: false,
                ..
            }
        ));
    }

    #[test]
    fn what_is_refused() {
        let refusal = |code: u32| {
            let json = format!(
                r#"{{"error":{{"code":400,"err_code":{code},"description":"because\n"}},"stream":"EVENTS","seq":0}}"#
            );
            read(None, json.as_bytes())
        };
        for (code, permanent) in [(10_054, true), (10_060, false), (10_077, false), (0, false)] {
            let error = format!("JetStream: because ({code})");
            assert_eq!(refusal(code), Answer::Refused { error, permanent });
        }
    }

    #[test]
    fn what_some_service_answers_is_no_acknowledgement() {
        for payload in [
            "",
            "ok",
            "{}",
            "[]",
            r#"{"stream":"","seq":1}"#,
            r#"{"stream":"X"}"#,
            r#"{"seq":1}"#,
            r#"{"stream":"X","seq":0}"#,
        ] {
            assert!(
                matches!(
                    read(None, payload.as_bytes()),
                    Answer::Refused {
                        permanent: false,
                        ..
                    }
                ),
                "{payload}"
            );
        }
    }
}
