//! outbox.emit, and what the tables of events call.

use pgrx::prelude::*;
use pgrx::{PgSqlErrorCode, pg_sys};

use crate::pg::call::{Arguments, Text};
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::spi::{Arg, Mode, connected};
use crate::pg::{catalog, security, sequence, xact};
use crate::settings;
use crate::store::streams;

fn random_id() -> String {
    let Some(digits) = catalog::random_hex() else {
        Complaint::new(
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            "the server has no randomness for an event id",
        )
        .raise()
    };
    let mut id = String::with_capacity(36);
    id.push_str("evt_");
    id.extend(digits.map(char::from));
    id
}

#[pg_extern(sql = false)]
fn new_id() -> String {
    random_id()
}

/// What the numbers of streams come from; others of our own are for our own functions.
#[pg_extern(sql = false)]
fn next_seq(call: pg_sys::FunctionCallInfo) -> i64 {
    drawn(call, |name| name.ends_with("_seq_seq"))
}

#[pg_extern(sql = false)]
fn next_number(call: pg_sys::FunctionCallInfo) -> i64 {
    drawn(call, |_| true)
}

#[pg_extern(sql = false)]
fn is_drawn(call: pg_sys::FunctionCallInfo) -> bool {
    // A dump brings the numbers that it holds.
    security::has_no_path() || Arguments::of(call).i64(0).is_some_and(sequence::is_last)
}

fn drawn(call: pg_sys::FunctionCallInfo, is_one: impl FnOnce(&str) -> bool) -> i64 {
    let relation = Arguments::of(call).oid(0).unwrap_or(pg_sys::InvalidOid);
    if !catalog::our_sequence(relation).is_some_and(|name| is_one(&name)) {
        Complaint::bad_argument("no stream takes its numbers from there")
            .detail("The relation is no sequence of a stream.")
            .raise();
    }
    sequence::draw(relation, 1)
}

#[pg_trigger(sql = false)]
fn wake<'a>(
    _trigger: &'a pgrx::PgTrigger<'a>,
) -> Result<Option<PgHeapTuple<'a, impl WhoAllocated>>, pgrx::spi::Error> {
    xact::wake_at_commit();
    Ok(None::<PgHeapTuple<'a, AllocatedByRust>>)
}

#[pg_trigger(sql = false)]
fn change<'a>(
    _trigger: &'a pgrx::PgTrigger<'a>,
) -> Result<Option<PgHeapTuple<'a, impl WhoAllocated>>, pgrx::spi::Error> {
    xact::change_at_commit();
    Ok(None::<PgHeapTuple<'a, AllocatedByRust>>)
}

#[pg_extern(sql = false)]
fn announce() {
    xact::announce_at_commit();
}

/// Positions of the arguments in the SQL declaration.
mod argument {
    pub(super) const TOPIC: usize = 0;
    pub(super) const PAYLOAD: usize = 1;
    pub(super) const SUBJECT: usize = 2;
    pub(super) const SOURCE: usize = 3;
    pub(super) const TENANT: usize = 4;
    pub(super) const HEADERS: usize = 5;
    pub(super) const ID: usize = 6;
    pub(super) const STREAM: usize = 7;
}

#[pg_extern(sql = false)]
fn emit(call: pg_sys::FunctionCallInfo) -> Text {
    let args = Arguments::of(call);
    if args.text_size(argument::TOPIC).unwrap_or(0) == 0 {
        Complaint::bad_argument("an event needs a topic")
            .detail("The topic is null or empty.")
            .hint("For example: select outbox.emit('order.placed', '{\"total\": 12}')")
            .raise();
    }
    if args.text_size(argument::ID) == Some(0) {
        Complaint::bad_argument("the event's id is empty")
            .hint("Leave it out, or give null, and one is made up.")
            .raise();
    }
    let stream = args
        .text(argument::STREAM)
        .unwrap_or_else(|| "outbox".to_owned());
    let made_up = args.raw(argument::ID).is_none().then(random_id);
    // Texts go as they are: the database's encoding may hold what Rust cannot.
    let text = |argument| Arg::RawText(args.raw(argument));
    let mut values = vec![
        made_up
            .as_deref()
            .map_or_else(|| text(argument::ID), |id| Arg::Text(Some(id))),
        text(argument::TOPIC),
        text(argument::SOURCE),
        text(argument::SUBJECT),
        Arg::RawJson(args.raw(argument::PAYLOAD)),
    ];
    // What the session has said is the default of the column, which is left to it.
    let tenant = args.raw(argument::TENANT);
    let with_tenant = tenant.is_some() || !settings::has_tenant();
    if with_tenant {
        values.push(Arg::RawText(tenant));
    }
    let headers = args.raw(argument::HEADERS);
    let with_headers = headers.is_some() || !settings::has_headers();
    if with_headers {
        values.push(Arg::RawJson(headers));
    }
    let columns = match (with_tenant, with_headers) {
        (true, true) => ", tenant, headers) values ($1, $2, $3, $4, $5, $6, $7)",
        (true, false) => ", tenant) values ($1, $2, $3, $4, $5, $6)",
        (false, true) => ", headers) values ($1, $2, $3, $4, $5, $6)",
        (false, false) => ") values ($1, $2, $3, $4, $5)",
    };
    connected(|spi| {
        let relation = if stream == "outbox" {
            "outbox.events".to_owned()
        } else {
            relation_of(&stream).or_raise()
        };
        // The rights are the caller's own, so nothing is read back: emitting does not include reading.
        let sql = format!("insert into {relation} (id, topic, source, subject, payload{columns}");
        spi.run(Mode::Write, &sql, &values);
    });
    match made_up {
        Some(id) => Text::new(&id),
        None => Text::of_datum(args.raw(argument::ID).unwrap_or(pg_sys::Datum::from(0))),
    }
}

/// The table of a stream that is not the built-in one.
fn relation_of(stream: &str) -> Result<String, Complaint> {
    if stream == streams::AUDIT {
        return Err(Complaint::bad_argument("the stream audit takes no events")
            .detail("It holds records of who did what, which have a form of their own.")
            .hint("Write them with outbox.audit(action, resource_type, resource_id, details)."));
    }
    crate::pg::security::as_extension(|| {
        connected(|spi| streams::named(spi, stream).map(|stream| stream.relation))
    })
    .ok_or_else(|| streams::unknown(stream))
}
