//! An event as the dispatcher read it, before any sink has shaped it.

use super::Position;

/// One committed event, with the values of its row.
///
/// JSON stays text: parsing a payload to print it again would cost time and lose digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) position: Position,
    /// The same over redeliveries, and unique over streams.
    pub(crate) id: String,
    /// The event type, such as `reservation.placed`.
    pub(crate) topic: String,
    /// What the event is about: the qualified table, or what the application said.
    pub(crate) source: Option<String>,
    /// The row or entity within the source.
    pub(crate) subject: Option<String>,
    pub(crate) tenant: Option<String>,
    /// Microseconds since the Unix epoch. The extremes stand for -infinity and infinity.
    pub(crate) time: i64,
    /// JSON text exactly as Postgres prints `jsonb`; `None` for an SQL null.
    pub(crate) payload: Option<String>,
    /// Text of a JSON object; its members become extension attributes.
    pub(crate) headers: Option<String>,
    /// Set when events are delivered by whole transactions.
    pub(crate) part: Option<Part>,
    /// A record of the audit trail: it has a form of its own, and its payload is the whole of it.
    pub(crate) is_record: bool,
}

/// Where an event stands among those of its transaction (`position.txid`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// From 1 to `count`.
    pub(crate) index: u32,
    /// How many events the transaction has in the stream, whether the sink wants them or not.
    pub(crate) count: u32,
}

impl Event {
    /// What order is kept for: two tables that share a key value are two keys.
    pub(crate) fn key(&self) -> (Option<&str>, Option<&str>) {
        (self.source.as_deref(), self.subject.as_deref())
    }
}
