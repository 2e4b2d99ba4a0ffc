//! CloudEvents as they are read out of a request's body, strictly.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

/// One event. The text of its payload is kept as it came, since parsing loses what some tests look for.
#[derive(Debug, Clone)]
pub struct Event {
    pub id: String,
    pub source: String,
    /// CloudEvents' `type`.
    pub topic: String,
    pub subject: Option<String>,
    pub tenant: Option<String>,
    /// As written: RFC 3339.
    pub time: String,
    /// CloudEvents' `sequence`: `<txid>:<seq>`.
    pub position: String,
    /// The JSON text of `data`, or nothing if there is none.
    pub data_text: Option<String>,
    /// The JSON text of every attribute that is not one of the above.
    pub extensions: BTreeMap<String, String>,
}

impl Event {
    /// The payload; null if there is none.
    ///
    /// # Panics
    /// If it is no JSON that serde_json can hold, as with a lone surrogate.
    pub fn data(&self) -> Value {
        let text = self.data_text.as_deref().unwrap_or("null");
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The two numbers of its position.
    ///
    /// # Panics
    /// If it is none.
    pub fn txid_and_seq(&self) -> (u64, u64) {
        self.position
            .split_once(':')
            .and_then(|(txid, seq)| Some((txid.parse().ok()?, seq.parse().ok()?)))
            .unwrap_or_else(|| panic!("no position: {}", self.position))
    }

    /// The events of a body, which is a batch or, by its content type, a single one.
    pub(super) fn parse(content_type: &str, body: &[u8]) -> Result<Vec<Self>, String> {
        type Attributes = BTreeMap<String, Box<RawValue>>;
        let events: Vec<Attributes> = match content_type.split(';').next() {
            Some("application/cloudevents-batch+json") => serde_json::from_slice(body),
            Some("application/cloudevents+json") => {
                serde_json::from_slice(body).map(|event| vec![event])
            }
            _ => return Err(format!("content-type {content_type:?}")),
        }
        .map_err(|error| error.to_string())?;
        events.into_iter().map(Self::from_attributes).collect()
    }

    fn from_attributes(mut attributes: BTreeMap<String, Box<RawValue>>) -> Result<Self, String> {
        let mut text = |name: &str| -> Result<Option<String>, String> {
            let Some(raw) = attributes.remove(name) else {
                return Ok(None);
            };
            serde_json::from_str(raw.get())
                .map(Some)
                .map_err(|error| format!("{name} {raw}: {error}"))
        };
        let mut required =
            |name: &str| text(name)?.ok_or_else(|| format!("an event without {name}"));
        let version = required("specversion")?;
        if version != "1.0" {
            return Err(format!("specversion {version:?}"));
        }
        let id = required("id")?;
        let source = required("source")?;
        let topic = required("type")?;
        let time = required("time")?;
        let position = required("sequence")?;
        let subject = text("subject")?;
        let tenant = text("tenant")?;
        if let Some(other) = text("datacontenttype")?.filter(|t| t != "application/json") {
            return Err(format!("datacontenttype {other:?}"));
        }
        let data_text = attributes.remove("data").map(|raw| raw.get().to_owned());
        let extensions = attributes
            .into_iter()
            .map(|(name, raw)| (name, raw.get().to_owned()))
            .collect();
        Ok(Self {
            id,
            source,
            topic,
            subject,
            tenant,
            time,
            position,
            data_text,
            extensions,
        })
    }
}
