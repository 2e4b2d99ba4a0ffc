//! outbox.create_sink and outbox.alter_sink: everything about a sink is checked when it is set.

mod checks;
mod start;

use pgrx::pg_sys;
use pgrx::prelude::*;

pub(super) use self::checks::checked_topics;
use self::checks::{Code, check, checked_grouping, may_hand_secret, may_use_files};
use self::start::starting_place;
pub(super) use self::start::tail;
use crate::dispatch::Grouping;
use crate::pg::call::Arguments;
use crate::pg::catalog;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::connected;
use crate::pg::statement::{self, Holder};
use crate::sinks::ConfigError;
use crate::store::sinks::{self, NewSink, SinkRow};
use crate::store::{cursors, parked, rebase, streams};

impl From<ConfigError> for Complaint {
    fn from(error: ConfigError) -> Self {
        Complaint {
            detail: error.detail,
            hint: error.hint,
            ..Complaint::bad_argument(error.message)
        }
    }
}

/// What both functions take, in this order, at the end of their arguments.
struct Choices {
    topics: Option<Vec<Option<String>>>,
    tenant: Option<String>,
    filter: Option<String>,
    transform: Option<pg_sys::Oid>,
    batch_size: Option<i32>,
    grouping: Option<String>,
    isolation: Option<String>,
    enabled: Option<bool>,
}

impl Choices {
    /// From that argument on.
    fn of(args: Arguments, first: usize) -> Self {
        Self {
            topics: args.texts(first),
            tenant: args.text(first + 1),
            filter: args.text(first + 2),
            transform: args.oid(first + 3),
            batch_size: args.i32(first + 4),
            grouping: args.text(first + 5),
            isolation: args.text(first + 6),
            enabled: args.bool(first + 7),
        }
    }
}

#[pg_extern(sql = false)]
fn create_sink(call: pg_sys::FunctionCallInfo) {
    // The config may hold credentials, and what fails is logged with its statement.
    statement::hide(Holder::CreateSink);
    let args = Arguments::of(call);
    let chosen = Choices::of(args, 5);
    let mut sink = SinkRow {
        id: checked_id(args.text(0).as_deref()).or_raise().to_owned(),
        kind: args
            .text(1)
            .ok_or_else(|| Complaint::bad_argument("a sink needs a kind"))
            .or_raise(),
        config: args.json(2).unwrap_or_else(|| "{}".to_owned()),
        stream: args.text(3).unwrap_or_else(|| "outbox".to_owned()),
        topics: checked_topics(chosen.topics).or_raise(),
        tenant: given(chosen.tenant),
        filter: given(chosen.filter),
        transform: chosen.transform,
        function: None,
        batch_size: chosen.batch_size,
        grouping: checked_grouping(chosen.grouping.as_deref().unwrap_or("event")).or_raise(),
        isolation: chosen.isolation.unwrap_or_else(|| "batch".to_owned()),
        enabled: chosen.enabled.unwrap_or(true),
        owner: security::current_role(),
        number: 0,
        life: String::new(),
        version: 1,
    };
    let start = args.text(4).unwrap_or_else(|| "origin".to_owned());
    let code = Code {
        function: true,
        filter: true,
        transform: true,
    };
    let config = check(&mut sink, code).or_raise();
    may_use_files(&config, sink.owner).or_raise();
    may_hand_secret(&config, sink.owner).or_raise();
    as_extension(|| {
        connected(|spi| {
            rebase::settle(spi).or_raise();
            let stream = streams::named(spi, &sink.stream)
                .ok_or_else(|| streams::unknown(&sink.stream))
                .or_raise();
            if !streams::hold(spi, &sink.stream) {
                streams::unknown(&sink.stream).raise();
            }
            let (place, pair) = starting_place(spi, &stream, sink.grouping, &start).or_raise();
            let new = NewSink {
                sink: &sink,
                start: &start,
            };
            if !sinks::create(spi, &new) {
                taken(&sink.id).raise();
            }
            cursors::create(spi, &sink.id, &sink.stream, &place, pair);
        });
    });
}

#[pg_extern(sql = false)]
fn alter_sink(call: pg_sys::FunctionCallInfo) {
    statement::hide(Holder::AlterSink);
    let caller = security::current_role();
    let args = Arguments::of(call);
    let id = args.text(0).unwrap_or_default();
    let config = args.json(1);
    let chosen = Choices::of(args, 2);
    let before = as_extension(|| connected(|spi| sinks::named_to_change(spi, &id)));
    let mut sink = before.ok_or_else(|| unknown(&id)).or_raise();
    let code = Code {
        function: config.is_some() && sink.kind == "function",
        filter: chosen.filter.is_some(),
        transform: chosen.transform.is_some(),
    };
    // What code makes of events with its owner's rights goes where the config says.
    let leads_elsewhere = config.is_some() && (sink.filter.is_some() || sink.transform.is_some());
    // So is what another server is told to run, and as whom.
    let leads_elsewhere = leads_elsewhere || (config.is_some() && sink.kind == "postgres");
    if code.any() && code.is_all_of(&sink) && !catalog::role_exists(sink.owner) {
        // Nothing is left of what a role supplied that is gone.
        sink.owner = caller;
    } else if (code.any() || leads_elsewhere) && !security::has_rights_of(caller, sink.owner) {
        Complaint::denied(format!("the code of sink \"{id}\" belongs to another role"))
            .detail(
                "Its function, filter and transform run with the rights of the role that made it, and go where its config says.",
            )
            .hint("Make a sink of your own, or have its owner change it.")
            .raise();
    }
    let new_config = config.is_some();
    if let Some(config) = config {
        sink.config = config;
    }
    if chosen.topics.is_some() {
        sink.topics = checked_topics(chosen.topics).or_raise();
    }
    if chosen.tenant.is_some() {
        sink.tenant = given(chosen.tenant);
    }
    if chosen.filter.is_some() {
        sink.filter = given(chosen.filter);
    }
    if let Some(transform) = chosen.transform {
        sink.transform = (transform != pg_sys::InvalidOid).then_some(transform);
    }
    if chosen.batch_size.is_some() {
        sink.batch_size = chosen.batch_size;
    }
    if let Some(grouping) = &chosen.grouping {
        sink.grouping = checked_grouping(grouping).or_raise();
    }
    if let Some(isolation) = chosen.isolation {
        sink.isolation = isolation;
    }
    sink.enabled = chosen.enabled.unwrap_or(sink.enabled);
    let checked = check(&mut sink, code).or_raise();
    if new_config {
        may_use_files(&checked, caller).or_raise();
        may_hand_secret(&checked, caller).or_raise();
    }
    as_extension(|| {
        connected(|spi| {
            // The row is ours, so nothing more can be parked meanwhile.
            if chosen.grouping.is_some()
                && sink.grouping == Grouping::Transaction
                && parked::any(spi, &id)
            {
                still_parked(&id).raise();
            }
            sinks::update(spi, &sink);
        });
    });
}

/// Parked events are delivered one by one, and whole transactions must not overtake them.
fn still_parked(id: &str) -> Complaint {
    Complaint::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("sink \"{id}\" has parked events"),
    )
    .detail("They are delivered one by one, before other events of their keys.")
    .hint("Change its grouping when outbox.parked has none of it any more.")
}

/// Text that was given and is not empty.
fn given(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

fn taken(id: &str) -> Complaint {
    Complaint::new(
        PgSqlErrorCode::ERRCODE_DUPLICATE_OBJECT,
        format!("sink \"{id}\" exists already"),
    )
    .hint("Change it with outbox.alter_sink, or give it up with outbox.drop_sink.")
}

pub(super) fn unknown(id: &str) -> Complaint {
    Complaint::unknown(format!("sink \"{id}\" does not exist"))
        .hint("Sinks are made by outbox.create_sink and listed in outbox.status.")
}

fn checked_id(id: Option<&str>) -> Result<&str, Complaint> {
    id.filter(|id| sinks::is_name(id)).ok_or_else(|| {
        let shown = id.map_or_else(
            || "null".to_owned(),
            |id| format!("{:?}", id.chars().take(60).collect::<String>()),
        );
        Complaint::bad_argument(format!("sink id {shown} is not allowed"))
            .detail("A sink id is 1 to 100 of letters, digits and . _ @ -")
            .hint("Keep it for good: the sink's cursor is stored under it.")
    })
}
