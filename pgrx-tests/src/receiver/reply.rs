//! How a receiver answers, well or badly.

use std::time::Duration;

/// What happens to one request once it has been read.
#[derive(Debug, Clone)]
pub struct Reply {
    pub(super) way: Way,
}

#[derive(Debug, Clone)]
pub(super) enum Way {
    Answer(Answer),
    Trickle(Answer, Duration),
    HugeBody(u64),
    Raw(Vec<u8>),
    Hang,
    Reset,
    Close,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

impl Reply {
    /// 200 with an empty body.
    pub fn ok() -> Self {
        Self::status(200)
    }

    /// A status with an empty body.
    pub fn status(status: u16) -> Self {
        let answer = Answer {
            status,
            ..Answer::default()
        };
        Self {
            way: Way::Answer(answer),
        }
    }

    /// 302 to another address.
    pub fn redirect(url: &str) -> Self {
        Self::status(302).header("location", url)
    }

    /// 200 that names events, by id, that failed: `(id, error, permanent)`. The receiver counts the others as accepted.
    pub fn failures(failures: &[(&str, &str, bool)]) -> Self {
        let failures: Vec<_> = failures
            .iter()
            .map(|(id, error, permanent)| {
                serde_json::json!({"id": id, "error": error, "permanent": permanent})
            })
            .collect();
        let body = serde_json::json!({ "failures": failures });
        Self::ok()
            .header("content-type", "application/json")
            .body(body.to_string())
    }

    /// Takes the request and never answers, until the client gives up or the receiver stops.
    pub fn hang() -> Self {
        Self { way: Way::Hang }
    }

    /// Takes the request and resets the connection.
    pub fn reset() -> Self {
        Self { way: Way::Reset }
    }

    /// Takes the request and closes the connection in good order, without an answer.
    pub fn close() -> Self {
        Self { way: Way::Close }
    }

    /// 200 with a body of that many bytes.
    pub fn huge_body(bytes: u64) -> Self {
        Self {
            way: Way::HugeBody(bytes),
        }
    }

    /// Bytes that need not be HTTP at all; then the connection is closed.
    pub fn raw(bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            way: Way::Raw(bytes.into()),
        }
    }

    /// The same answer, one byte at a time with that pause before each.
    pub fn trickle(mut self, pause: Duration) -> Self {
        if let Way::Answer(answer) = self.way {
            self.way = Way::Trickle(answer, pause);
        }
        self
    }

    /// The same answer with one more header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        if let Some(answer) = self.answer_mut() {
            answer.headers.push((name.into(), value.into()));
        }
        self
    }

    /// The same answer with that body.
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        if let Some(answer) = self.answer_mut() {
            answer.body = body.into();
        }
        self
    }

    fn answer_mut(&mut self) -> Option<&mut Answer> {
        match &mut self.way {
            Way::Answer(answer) | Way::Trickle(answer, _) => Some(answer),
            _ => None,
        }
    }

    /// Whether the receiver has taken responsibility for the request's events.
    pub(super) fn accepts(&self) -> bool {
        match &self.way {
            Way::Answer(answer) | Way::Trickle(answer, _) => (200..300).contains(&answer.status),
            Way::HugeBody(_) => true,
            Way::Raw(_) | Way::Hang | Way::Reset | Way::Close => false,
        }
    }

    /// The ids of the events that the answer says have failed.
    pub(super) fn failed_ids(&self) -> Vec<String> {
        let (Way::Answer(answer) | Way::Trickle(answer, _)) = &self.way else {
            return Vec::new();
        };
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let failures = body["failures"].as_array().cloned().unwrap_or_default();
        failures
            .iter()
            .filter_map(|failure| failure["id"].as_str().map(str::to_owned))
            .collect()
    }
}
