//! What is sent: the body, and the headers that belong to it.

use std::fmt::Write;
use std::sync::Arc;

use bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest, Sha256};

use super::signing::Keys;
use crate::envelope::{Event, write_cloudevent};
use crate::sinks::plain_text::visible;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const BATCH: HeaderValue = HeaderValue::from_static("application/cloudevents-batch+json");
const SINGLE: HeaderValue = HeaderValue::from_static("application/cloudevents+json");
/// Records of the audit trail, one or many.
const RECORDS: HeaderValue = HeaderValue::from_static("application/json");

/// How much is serialised before others get their turn on the thread.
const AT_ONCE: usize = 256 * 1024;

/// One request, but for what is the same in all of them. Cheap to clone.
#[derive(Clone)]
pub(super) struct Message {
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Message {
    /// All of `events` as one array.
    pub(super) async fn batch(events: &[Arc<Event>], keys: &Keys) -> Self {
        let mut body = vec![b'['];
        let mut turn = AT_ONCE;
        for (index, event) in events.iter().enumerate() {
            if index > 0 {
                body.push(b',');
            }
            write_cloudevent(event, &mut body);
            if body.len() > turn {
                turn = body.len() + AT_ONCE;
                tokio::task::yield_now().await;
            }
        }
        body.push(b']');
        let content_type = if are_records(events) { RECORDS } else { BATCH };
        Self::new(content_type, delivery_id(events), body, keys).await
    }

    /// `event` by itself.
    pub(super) async fn single(event: &Arc<Event>, keys: &Keys) -> Self {
        let mut body = Vec::new();
        write_cloudevent(event, &mut body);
        let events = std::slice::from_ref(event);
        let content_type = if are_records(events) { RECORDS } else { SINGLE };
        Self::new(content_type, delivery_id(events), body, keys).await
    }

    async fn new(content_type: HeaderValue, id: HeaderValue, body: Vec<u8>, keys: &Keys) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, content_type);
        keys.sign(&id, &body, &mut headers).await;
        headers.insert(IDEMPOTENCY_KEY, id);
        Self {
            headers,
            body: body.into(),
        }
    }
}

/// A stream holds either events or records.
fn are_records(events: &[Arc<Event>]) -> bool {
    events.first().is_some_and(|event| event.is_record)
}

/// What a request is known by: the `Idempotency-Key` and the `webhook-id`.
///
/// A request with one event goes by the event's id. One with several goes by the first id and a digest of all of them: the
/// engine may send the first event again in other company, and a receiver that took the key for one it knows would skip the
/// others. Ids that no header can hold are percent-encoded, very long ones are replaced by their digest.
fn delivery_id(events: &[Arc<Event>]) -> HeaderValue {
    let mut id = sayable(events.first().map_or("", |event| event.id.as_str()));
    if events.len() > 1 {
        id.push('~');
        id.push_str(&digest(events.iter().map(|event| event.id.as_str()), 16));
    }
    in_header(&id)
}

/// What a request with the event of that id is known by.
pub(super) fn id_of_one(id: &str) -> HeaderValue {
    in_header(&sayable(id))
}

fn sayable(id: &str) -> String {
    const LONGEST: usize = 200;
    if id.len() <= LONGEST {
        visible(id)
    } else {
        digest([id], 64)
    }
}

fn in_header(id: &str) -> HeaderValue {
    HeaderValue::from_str(id).expect("percent-encoding leaves visible ASCII")
}

/// So many hex digits of a digest over `ids`, each with its length so that no two lists run together.
fn digest<'i>(ids: impl IntoIterator<Item = &'i str>, digits: usize) -> String {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update((id.len() as u64).to_be_bytes());
        hash.update(id);
    }
    let mut text = String::with_capacity(64);
    for byte in hash.finalize() {
        let _ = write!(text, "{byte:02x}");
    }
    text.truncate(digits);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sinks::http::tests::event;

    fn id(ids: &[&str]) -> String {
        let events: Vec<_> = ids
            .iter()
            .map(|id| {
                Arc::new(Event {
                    id: id.to_string(),
                    ..event(1)
                })
            })
            .collect();
        delivery_id(&events).to_str().unwrap().to_owned()
    }

    #[test]
    fn one_event_goes_by_its_own_id() {
        assert_eq!(id(&["evt_1"]), "evt_1");
        assert_eq!(id(&["a b%\r\nü"]), "a%20b%25%0D%0A%C3%BC");
        assert_eq!(id(&[""]), "");
        assert_eq!(id(&[&"x".repeat(201)]).len(), 64);
    }

    #[test]
    fn other_company_is_another_request() {
        let known = id(&["a", "b", "c"]);
        assert!(known.starts_with("a~"));
        assert_eq!(known, id(&["a", "b", "c"]));
        for other in [
            &["a"][..],
            &["a", "b"],
            &["a", "bc"],
            &["a", "c", "b"],
            &["a", "b", "d"],
        ] {
            assert_ne!(known, id(other));
        }
    }
}
