//! The events of a statement on their way into the table.

use std::collections::HashMap;
use std::ffi::CString;
use std::ops::Range;

use pgrx::{PgSqlErrorCode, pg_sys};

use super::jsonb::Writer;
use super::routing::Router;
use super::row::{payload, texts};
use super::table::Table;
use super::{HEADER, OfSession, Recipe, datum_of, set_size, stored_text};
use crate::pg::error::Complaint;
use crate::pg::{catalog, encoding, exact, sequence};

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

/// As `outbox.new_id` makes them.
const ID_PREFIX: &[u8] = b"evt_";

const NUMBERS_AT_ONCE: i64 = 100;

/// The events of one statement.
pub(super) struct Events<'a> {
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
    /// Drawn and not used yet.
    numbers: Range<i64>,
    /// How many rows are still to come.
    left: i64,
    /// Where what is made for several rows lies.
    memory: pg_sys::MemoryContext,
    /// What is made for one row, emptied with each.
    scratch: pg_sys::MemoryContext,
}

impl<'a> Events<'a> {
    /// For so many rows.
    pub(super) fn new(recipe: &'a Recipe, session: &OfSession, count: i64) -> Self {
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
        let partitions = recipe.plan.partitions.as_ref();
        let mut events = Self {
            recipe,
            table: Table::open(recipe.plan.table, column::COUNT),
            values: [pg_sys::Datum::from(0); column::COUNT],
            nulls: [true; column::COUNT],
            id: stored_text(&[0; ID_PREFIX.len() + 32]),
            subject: Vec::new(),
            tenant: Vec::new(),
            json: Writer::default(),
            router: partitions.map(|partitions| Router::new(&partitions.levels)),
            headers: headers(recipe.plan.headers.as_deref(), session.headers.as_deref()),
            by_partition: HashMap::new(),
            numbers: 0..0,
            left: count,
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
    pub(super) unsafe fn add(&mut self, row: *mut pg_sys::TupleTableSlot) {
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
            let number = self.number();
            self.set(column::SEQ, number);
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

    /// The next row's. Nobody else's code runs between one row and the next, so several can be drawn at once.
    fn number(&mut self) -> pg_sys::Datum {
        let number = self.numbers.next().unwrap_or_else(|| {
            let count = self.left.clamp(1, NUMBERS_AT_ONCE);
            let first = sequence::draw(self.recipe.plan.sequence, count);
            self.numbers = first + 1..first + count;
            first
        });
        self.left -= 1;
        pg_sys::Datum::from(number)
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

    pub(super) fn close(self) {
        self.table.close();
        if let Some(router) = self.router {
            router.close();
        }
        // SAFETY: made in `new`; nothing refers to it any more.
        unsafe { pg_sys::MemoryContextDelete(self.scratch) };
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
