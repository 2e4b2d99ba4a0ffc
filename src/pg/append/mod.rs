//! Writes the events of a statement's rows into a stream's table directly: for a row that is an event by itself, planning and running an
//! INSERT … SELECT, and `to_jsonb` in it, cost several times what the row costs.
//!
//! What comes out is what the statement would have written. Which captures can have it is decided elsewhere (`capture/recipe.rs`).

mod jsonb;
mod routing;
mod table;
mod value;

use std::collections::HashMap;
use std::ffi::CString;

use pgrx::{PgSqlErrorCode, pg_sys};

use self::jsonb::{Object, Writer};
pub(crate) use self::routing::{Level, Strategy};
use self::routing::{Levels, Router};
use self::table::Table;
use self::value::{Type, bytes_of};
use super::error::Complaint;
use super::exact::{self, Printed};
use super::firing::{ChangedRows, Reader};
use super::{catalog, encoding, xact};

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
    levels: Option<Levels>,
}

enum Shape {
    Row(Vec<Part>),
    Versions(Option<Vec<Part>>, Option<Vec<Part>>),
}

struct Part {
    /// In the database's encoding.
    name: Vec<u8>,
    index: usize,
    type_: Type,
    if_changed: bool,
}

/// The columns of a stream's table, in its order.
mod column {
    pub(super) const TXID: usize = 0;
    pub(super) const SEQ: usize = 1;
    pub(super) const ID: usize = 2;
    pub(super) const TOPIC: usize = 3;
    pub(super) const SOURCE: usize = 4;
    pub(super) const SUBJECT: usize = 5;
    pub(super) const TENANT: usize = 6;
    pub(super) const TIME: usize = 7;
    pub(super) const PAYLOAD: usize = 8;
    pub(super) const HEADERS: usize = 9;
    pub(super) const FOR_SINK: usize = 10;
    pub(super) const COUNT: usize = 11;
}

const HEADER: usize = size_of::<u32>();

/// As `outbox.new_id` makes them.
const ID_PREFIX: &[u8] = b"evt_";

fn parts(fields: &[Field]) -> Vec<Part> {
    let part = |field: &Field| Part {
        name: encoding::to_database(&field.name).into_owned(),
        index: field.source.index,
        type_: Type::of(field.source.type_oid),
        if_changed: field.if_changed,
    };
    let mut parts = fields.iter().map(part).collect::<Vec<_>>();
    parts.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
    parts
}

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
            levels: plan
                .partitions
                .as_ref()
                .map(|partitions| Levels::new(partitions.levels.clone())),
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
        let mut events = Events::new(self, session);
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

/// The events of one statement.
struct Events<'a> {
    recipe: &'a Recipe,
    table: Table,
    values: [pg_sys::Datum; column::COUNT],
    nulls: [bool; column::COUNT],
    id: Vec<u8>,
    subject: Vec<u8>,
    tenant: Vec<u8>,
    json: Writer,
    router: Option<Router<'a>>,
    /// The headers of all, to which those of each partition are added.
    headers: Option<pg_sys::Datum>,
    by_partition: HashMap<Option<pg_sys::Oid>, pg_sys::Datum>,
    /// Where what is made for several rows lies.
    memory: pg_sys::MemoryContext,
    /// What is made for one row, emptied with each.
    scratch: pg_sys::MemoryContext,
}

impl<'a> Events<'a> {
    fn new(recipe: &'a Recipe, session: &OfSession) -> Self {
        // SAFETY: a child of the call's memory.
        let scratch = unsafe {
            pg_sys::AllocSetContextCreateInternal(
                pg_sys::CurrentMemoryContext,
                c"outbox events".as_ptr(),
                pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            )
        };
        let mut events = Self {
            recipe,
            table: Table::open(recipe.plan.table),
            values: [pg_sys::Datum::from(0); column::COUNT],
            nulls: [true; column::COUNT],
            id: stored_text(&[0; ID_PREFIX.len() + 32]),
            subject: Vec::new(),
            tenant: Vec::new(),
            json: Writer::default(),
            router: recipe.levels.as_ref().map(Router::new),
            headers: headers(recipe.plan.headers.as_deref(), session.headers.as_deref()),
            by_partition: HashMap::new(),
            // SAFETY: reads a global.
            memory: unsafe { pg_sys::CurrentMemoryContext },
            scratch,
        };
        // SAFETY: the transaction has an id before it draws its first number.
        let txid = unsafe { pg_sys::GetTopFullTransactionId() }.value;
        events.set(column::TXID, pg_sys::Datum::from(txid));
        events.set(column::TOPIC, datum_of(&recipe.topic));
        events.set(column::SOURCE, datum_of(&recipe.source));
        if let Some(number) = recipe.plan.for_sink {
            events.set(column::FOR_SINK, pg_sys::Datum::from(number));
        }
        if let (None, Some(tenant)) = (&recipe.tenant, &session.tenant) {
            events.tenant = stored_text(&encoding::to_database(tenant));
            let tenant = datum_of(&events.tenant);
            events.set(column::TENANT, tenant);
        }
        if let Some(headers) = events.headers {
            events.set(column::HEADERS, headers);
        }
        events
    }

    fn set(&mut self, column: usize, value: pg_sys::Datum) {
        self.values[column] = value;
        self.nulls[column] = false;
    }

    /// # Safety
    /// The row has the columns that the plan names.
    unsafe fn add(&mut self, row: *mut pg_sys::TupleTableSlot) {
        let recipe = self.recipe;
        // SAFETY: as the caller promises. What is made for the row lies in memory that is emptied with each; the table copies it.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(self.scratch);
            pg_sys::slot_getallattrs(row);

            self.id();
            self.nulls[column::SUBJECT] = !texts(&recipe.subject, row, &mut self.subject);
            self.values[column::SUBJECT] = datum_of(&self.subject);
            if let Some(tenant) = &recipe.tenant {
                let tenant = std::slice::from_ref(tenant);
                self.nulls[column::TENANT] = !texts(tenant, row, &mut self.tenant);
                self.values[column::TENANT] = datum_of(&self.tenant);
            }
            if let Some(router) = &mut self.router {
                let partition = router.find(row);
                let headers = self.headers_in(partition);
                self.set(column::HEADERS, headers);
            }
            let fits = payload(&recipe.payload, recipe.plan.same, row, &mut self.json);
            let payload = self.json.bytes();
            if !fits {
                Complaint::new(
                    PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
                    format!("a row of {} is too large for an event", recipe.plan.source),
                )
                .detail("The values that its payload shows are more than jsonb can hold.")
                .hint("Leave columns out of the capture: columns => '{…}'.")
                .raise();
            }
            set_size(payload);
            let size = payload.len();
            let payload = datum_of(payload);
            self.set(column::PAYLOAD, payload);
            self.set(column::SEQ, next_number(recipe.plan.sequence));
            self.set(
                column::TIME,
                pg_sys::Datum::from(pg_sys::GetCurrentTimestamp()),
            );
            pg_sys::MemoryContextSwitchTo(before);
            self.table.put(&self.values, &self.nulls, size);
            pg_sys::MemoryContextReset(self.scratch);
        }
    }

    /// The headers of events of rows in a partition.
    fn headers_in(&mut self, partition: Option<pg_sys::Oid>) -> pg_sys::Datum {
        if let Some(headers) = self.by_partition.get(&partition) {
            return *headers;
        }
        let partitions = self.recipe.plan.partitions.as_ref();
        let mut names = partitions.into_iter().flat_map(|it| &it.names);
        let name = names.find(|(oid, _)| Some(*oid) == partition);
        let member = serde_json::json!({ "partition": name.map(|(_, name)| name) });
        // SAFETY: it is kept until the statement is through.
        let before = unsafe { pg_sys::MemoryContextSwitchTo(self.memory) };
        let member = read_json(&member.to_string());
        let headers = match self.headers {
            Some(headers) => concatenated(headers, member),
            None => member,
        };
        // SAFETY: as it was.
        unsafe { pg_sys::MemoryContextSwitchTo(before) };
        self.by_partition.insert(partition, headers);
        headers
    }

    fn id(&mut self) {
        let Some(digits) = catalog::random_hex() else {
            Complaint::new(
                PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
                "the server has no randomness for an event id",
            )
            .raise()
        };
        let (prefix, rest) = self.id[HEADER..].split_at_mut(ID_PREFIX.len());
        prefix.copy_from_slice(ID_PREFIX);
        rest.copy_from_slice(&digits);
        let id = datum_of(&self.id);
        self.set(column::ID, id);
    }

    fn close(self) {
        self.table.close();
        if let Some(router) = self.router {
            router.close();
        }
        // SAFETY: made in `new`; nothing refers to it any more.
        unsafe { pg_sys::MemoryContextDelete(self.scratch) };
    }
}

/// `nextval(regclass)`.
const NEXT_NUMBER: pg_sys::Oid = pg_sys::Oid::from_u32(1574);

/// # Safety
/// It is a sequence.
unsafe fn next_number(sequence: pg_sys::Oid) -> pg_sys::Datum {
    // SAFETY: as the caller promises.
    unsafe {
        let sequence = pg_sys::Datum::from(sequence);
        pg_sys::OidFunctionCall1Coll(NEXT_NUMBER, pg_sys::InvalidOid, sequence)
    }
}

/// `jsonb || jsonb`.
const CONCATENATE: pg_sys::Oid = pg_sys::Oid::from_u32(3301);

/// The headers of all events of a statement: what the session says, with the members of the capture on top.
fn headers(members: Option<&str>, session: Option<&str>) -> Option<pg_sys::Datum> {
    match (session.map(read_json), members.map(read_json)) {
        (Some(session), Some(members)) => Some(concatenated(session, members)),
        (session, members) => session.or(members),
    }
}

fn read_json(text: &str) -> pg_sys::Datum {
    let text = CString::new(encoding::to_database(text)).unwrap_or_default();
    exact::read(text.as_bytes_with_nul())
}

/// Of two jsonb.
fn concatenated(first: pg_sys::Datum, second: pg_sys::Datum) -> pg_sys::Datum {
    // SAFETY: both are jsonb.
    unsafe { pg_sys::OidFunctionCall2Coll(CONCATENATE, pg_sys::InvalidOid, first, second) }
}

/// # Safety
/// The row is deformed, and has the column.
unsafe fn value(row: *mut pg_sys::TupleTableSlot, index: usize) -> Option<pg_sys::Datum> {
    // SAFETY: as the caller promises.
    unsafe { (!*(*row).tts_isnull.add(index)).then(|| *(*row).tts_values.add(index)) }
}

/// Joins values with colons, as a stored text. False if it is the null of a single one.
///
/// # Safety
/// The row has these columns, of these types.
unsafe fn texts(
    columns: &[(usize, Type)],
    row: *mut pg_sys::TupleTableSlot,
    out: &mut Vec<u8>,
) -> bool {
    out.clear();
    out.resize(HEADER, 0);
    for (place, (index, type_)) in columns.iter().enumerate() {
        if place > 0 {
            out.push(b':');
        }
        // SAFETY: as the caller promises.
        unsafe {
            match value(row, *index) {
                Some(value) => type_.text(value, out),
                None if columns.len() == 1 => return false,
                None => {}
            }
        }
    }
    set_size(out);
    true
}

/// Writes the payload of a row. False if it is beyond what jsonb can hold.
///
/// # Safety
/// The row has the columns that the shape names.
unsafe fn payload(
    shape: &Shape,
    same: Option<usize>,
    row: *mut pg_sys::TupleTableSlot,
    json: &mut Writer,
) -> bool {
    json.clear();
    // SAFETY: as the caller promises.
    unsafe {
        match shape {
            Shape::Row(parts) => {
                let same = same.map(|index| names(value(row, index)));
                let same = same.unwrap_or_default();
                let is_shown = |part: &&Part| !(part.if_changed && same.contains(&&*part.name));
                let shown = parts.iter().filter(is_shown).collect::<Vec<_>>();
                let object = object(&shown, row, json);
                json.close(&object)
            }
            Shape::Versions(before, after) => {
                let mut whole = json.object(2);
                json.key(&mut whole, b"after");
                json.key(&mut whole, b"before");
                for version in [after, before] {
                    match version {
                        Some(parts) => {
                            let inner = object(&parts.iter().collect::<Vec<_>>(), row, json);
                            json.close_within(&inner, &mut whole);
                        }
                        None => json.value(&mut whole, jsonb::Member::Null),
                    }
                }
                json.close(&whole)
            }
        }
    }
}

/// # Safety
/// The row has the columns of the parts.
unsafe fn object(parts: &[&Part], row: *mut pg_sys::TupleTableSlot, json: &mut Writer) -> Object {
    let mut object = json.object(parts.len());
    for part in parts {
        json.key(&mut object, &part.name);
    }
    for part in parts {
        // SAFETY: as the caller promises.
        unsafe {
            match value(row, part.index) {
                Some(value) => part
                    .type_
                    .json(value, |member| json.value(&mut object, member)),
                None => json.value(&mut object, jsonb::Member::Null),
            }
        }
    }
    object
}

/// The texts of an array without nulls.
///
/// # Safety
/// The value is an array of texts.
unsafe fn names<'a>(array: Option<pg_sys::Datum>) -> Vec<&'a [u8]> {
    let Some(array) = array else {
        return Vec::new();
    };
    let mut values = std::ptr::null_mut();
    let mut count = 0;
    // SAFETY: as the caller promises; the list is as long as is said, and lies in the memory in force, as do the texts.
    unsafe {
        let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        pg_sys::deconstruct_array(
            array,
            pg_sys::TEXTOID,
            -1,
            false,
            b'i' as std::ffi::c_char,
            &raw mut values,
            std::ptr::null_mut(),
            &raw mut count,
        );
        let count = usize::try_from(count).unwrap_or(0);
        (0..count)
            .map(|place| bytes_of(*values.add(place)))
            .collect()
    }
}
