//! outbox.emit, and what the tables of events call.

use pgrx::prelude::*;
use pgrx::{PgSqlErrorCode, pg_sys};

use crate::pg::call::Arguments;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::spi::{Arg, Mode, connected};
use crate::pg::{catalog, xact};
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
fn emit(call: pg_sys::FunctionCallInfo) -> String {
    let args = Arguments::of(call);
    let topic = args
        .text(argument::TOPIC)
        .filter(|topic| !topic.is_empty())
        .ok_or_else(|| {
            Complaint::bad_argument("an event needs a topic")
                .detail("The topic is null or empty.")
                .hint("For example: select outbox.emit('order.placed', '{\"total\": 12}')")
        });
    let topic = topic.or_raise();
    let stream = args
        .text(argument::STREAM)
        .unwrap_or_else(|| "outbox".to_owned());
    let id = args.text(argument::ID).unwrap_or_else(random_id);
    let tenant = args.text(argument::TENANT).or_else(settings::tenant);
    connected(|spi| {
        let relation = if stream == "outbox" {
            "outbox.events".to_owned()
        } else {
            relation_of(&stream).or_raise()
        };
        // The rights are the caller's own, so nothing is read back: emitting does not include reading.
        let headers = args.raw(argument::HEADERS);
        let session_headers = if headers.is_none() {
            settings::headers()
        } else {
            None
        };
        let sql = format!(
            "insert into {relation} (id, topic, source, subject, tenant, payload, headers) values ($1, $2, $3, $4, $5, $6, $7)"
        );
        spi.run(
            Mode::Write,
            &sql,
            &[
                Arg::Text(Some(&id)),
                Arg::Text(Some(&topic)),
                Arg::Text(args.text(argument::SOURCE).as_deref()),
                Arg::Text(args.text(argument::SUBJECT).as_deref()),
                Arg::Text(tenant.as_deref()),
                Arg::RawJson(args.raw(argument::PAYLOAD)),
                match &session_headers {
                    Some(text) => Arg::Json(Some(text)),
                    None => Arg::RawJson(headers),
                },
            ],
        );
    });
    id
}

/// The table of a stream that is not the built-in one.
fn relation_of(stream: &str) -> Result<String, Complaint> {
    crate::pg::security::as_extension(|| {
        connected(|spi| streams::named(spi, stream).map(|stream| stream.relation))
    })
    .ok_or_else(|| streams::unknown(stream))
}
