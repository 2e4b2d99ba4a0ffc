//! Writes the events of a statement's rows into a stream's table directly: for a row that is an event by itself, planning and running an
//! INSERT … SELECT, and `to_jsonb` in it, cost several times what the row costs.
//!
//! What comes out is what the statement would have written. Which captures can have it is decided elsewhere (`capture/recipe.rs`).

mod events;
mod jsonb;
mod routing;
mod row;
mod table;
mod value;

use pgrx::pg_sys;

use self::events::Events;
pub(crate) use self::routing::{Level, Strategy};
use self::row::{Shape, parts};
use self::value::Type;
use super::exact::Printed;
use super::firing::{ChangedRows, Reader};
use super::{encoding, xact};

/// A column of the rows that are turned into events: its place among them, counted from 0, and its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) index: usize,
    pub(crate) type_oid: pg_sys::Oid,
}

/// A member of a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) source: Source,
    /// Left out where [`Plan::same`] names it.
    pub(crate) if_changed: bool,
}

/// The payload of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Payload {
    Row(Vec<Field>),
    /// An object of `before` and `after`; none is null.
    Versions(Option<Vec<Field>>, Option<Vec<Field>>),
}

/// What is written, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) table: pg_sys::Oid,
    pub(crate) sequence: pg_sys::Oid,
    pub(crate) topic: String,
    pub(crate) source: String,
    /// Joined with colons. One alone may be null.
    pub(crate) subject: Vec<Source>,
    pub(crate) tenant: Option<Source>,
    pub(crate) payload: Payload,
    /// Where the rows say which columns an update has left as they were: an array of names.
    pub(crate) same: Option<usize>,
    /// JSON text of members that all headers get.
    pub(crate) headers: Option<String>,
    pub(crate) for_sink: Option<i32>,
    pub(crate) partitions: Option<Partitions>,
}

/// What is written to is partitioned: the headers name the partition that a row is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Partitions {
    /// What is written to, first, and what of it is partitioned further.
    pub(crate) levels: Vec<Level>,
    pub(crate) names: Vec<(pg_sys::Oid, String)>,
}

/// What a session has said of its events.
#[derive(Debug, Default)]
pub(crate) struct OfSession {
    pub(crate) tenant: Option<String>,
    /// JSON text.
    pub(crate) headers: Option<String>,
}

/// A plan with all that is worked out once.
pub(crate) struct Recipe {
    plan: Plan,
    topic: Vec<u8>,
    source: Vec<u8>,
    subject: Vec<(usize, Type)>,
    tenant: Option<(usize, Type)>,
    payload: Shape,
}

const HEADER: usize = size_of::<u32>();

impl Recipe {
    pub(crate) fn new(plan: Plan) -> Self {
        let typed = |source: &Source| (source.index, Type::of(source.type_oid));
        Self {
            topic: stored_text(&encoding::to_database(&plan.topic)),
            source: stored_text(&encoding::to_database(&plan.source)),
            subject: plan.subject.iter().map(typed).collect(),
            tenant: plan.tenant.as_ref().map(typed),
            payload: match &plan.payload {
                Payload::Row(fields) => Shape::Row(parts(fields)),
                Payload::Versions(before, after) => {
                    Shape::Versions(before.as_deref().map(parts), after.as_deref().map(parts))
                }
            },
            plan,
        }
    }

    /// What of a session's settings shows in what is written.
    pub(crate) fn depends_on(&self) -> Printed {
        let texts = self.subject.iter().chain(&self.tenant);
        let texts = texts.map(|(_, type_)| type_.text_depends_on());
        let (first, second) = match &self.payload {
            Shape::Row(parts) => (Some(parts), None),
            Shape::Versions(before, after) => (before.as_ref(), after.as_ref()),
        };
        let parts = first.into_iter().chain(second).flatten();
        let json = parts.map(|part| part.type_.json_depends_on());
        texts.chain(json).max().unwrap_or(Printed::Always)
    }

    /// Writes an event for each row, with the rights of the extension.
    pub(crate) fn write(&self, rows: &ChangedRows, session: &OfSession) {
        let mut events = Events::new(self, session, rows.count());
        let mut reader = Reader::new(rows.store, rows.descriptor);
        while let Some(slot) = reader.next() {
            // SAFETY: the rows have the columns that the plan names.
            unsafe { events.add(slot) };
        }
        events.close();
        xact::wake_at_commit();
    }
}

/// A text as it is stored: the bytes behind a header.
fn stored_text(text: &[u8]) -> Vec<u8> {
    let mut stored = vec![0; HEADER];
    stored.extend_from_slice(text);
    set_size(&mut stored);
    stored
}

fn set_size(stored: &mut [u8]) {
    let size = i32::try_from(stored.len()).unwrap_or(i32::MAX);
    // SAFETY: room for the header is there.
    unsafe { pgrx::set_varsize_4b(stored.as_mut_ptr().cast(), size) };
}

fn datum_of(stored: &[u8]) -> pg_sys::Datum {
    pg_sys::Datum::from(stored.as_ptr())
}
