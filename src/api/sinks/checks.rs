//! What is checked of a sink before it is written.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::dispatch::{Grouping, Pattern};
use crate::pg::error::Complaint;
use crate::pg::security::{self, Path, as_extension};
use crate::pg::spi::{Arg, connected};
use crate::pg::{catalog, expression, transaction};
use crate::sinks::{self as kinds, Config};
use crate::store::events;
use crate::store::sinks::SinkRow;
use crate::store::streams;
use crate::worker::function::{self, Returns};
use crate::worker::shaping;

/// Which code of a sink is new and has to be looked at.
#[derive(Clone, Copy)]
pub(super) struct Code {
    pub(super) function: bool,
    pub(super) filter: bool,
    pub(super) transform: bool,
}

impl Code {
    pub(super) fn any(self) -> bool {
        self.function || self.filter || self.transform
    }

    /// Whether a sink has no other.
    pub(super) fn is_all_of(self, sink: &SinkRow) -> bool {
        (self.function || sink.kind != "function")
            && (self.filter || sink.filter.is_none())
            && (self.transform || sink.transform.is_none())
    }
}

pub(in crate::api) fn checked_topics(
    topics: Option<Vec<Option<String>>>,
) -> Result<Option<Vec<String>>, Complaint> {
    let Some(topics) = topics.filter(|topics| !topics.is_empty()) else {
        return Ok(None);
    };
    let checked = topics.into_iter().map(|topic| {
        let topic = topic.ok_or_else(|| Complaint::bad_argument("a topic pattern is null"))?;
        match Pattern::parse(&topic) {
            Ok(_) => Ok(topic),
            Err(error) => Err(Complaint::bad_argument(format!("topic pattern {topic:?} is not allowed"))
                .detail(error.to_string())
                .hint("\"*\" stands for one segment and \">\" for the rest, as in order.* and outbox.public.>")),
        }
    });
    checked.collect::<Result<Vec<_>, _>>().map(Some)
}

pub(super) fn checked_grouping(grouping: &str) -> Result<Grouping, Complaint> {
    Grouping::named(grouping).ok_or_else(|| {
        Complaint::bad_argument(format!("grouping {grouping:?} is not known"))
            .detail("It is event or transaction.")
    })
}

/// Checks what a sink is made of; fills in what `function` refers to.
pub(super) fn check(sink: &mut SinkRow, code: Code) -> Result<Config, Complaint> {
    let value = serde_json::from_str(&sink.config)
        .map_err(|_| Complaint::bad_argument("config is not readable as JSON"))?;
    let config = kinds::parse(&sink.kind, &value)?;
    if !(1..=100_000).contains(&sink.batch_size.unwrap_or(1)) {
        return Err(Complaint::bad_argument(
            "batch_size must be between 1 and 100000",
        ));
    }
    if sink.stream == streams::AUDIT
        && (sink.grouping != Grouping::Event || sink.isolation != "batch")
    {
        return Err(Complaint::bad_argument(
            "a sink of the stream audit takes records in batches, as they come",
        )
        .detail("Its grouping is event and its isolation batch: an audit trail has no holes."));
    }
    match sink.isolation.as_str() {
        "batch" => {}
        "key" => {
            config.may_isolate_keys()?;
            if sink.grouping == Grouping::Transaction {
                return Err(Complaint::bad_argument(
                    "isolation \"key\" does not go with grouping \"transaction\"",
                )
                .detail("A transaction is handed over as a whole, and may be about many keys.")
                .hint("Choose one of them."));
            }
        }
        other => {
            return Err(
                Complaint::bad_argument(format!("isolation {other:?} is not known"))
                    .detail("It is batch or key."),
            );
        }
    }
    if let (Config::Function(config), true) = (&config, code.function) {
        sink.function = Some(resolve(&config.function, sink.owner)?);
    }
    if let (Some(transform), true) = (sink.transform, code.transform) {
        check_function(transform, "transform", Shape::Transform, sink.owner)?;
    }
    if let (Some(filter), true) = (&sink.filter, code.filter) {
        check_filter(filter, sink.owner)?;
    }
    Ok(config)
}

/// A file that a new config names is read by the server, and what comes of it is told: that is not for everybody to ask for.
pub(super) fn may_use_files(config: &Config, caller: pg_sys::Oid) -> Result<(), Complaint> {
    match config.file() {
        Some(key) if !security::may_read_files(caller) => Err(Complaint::denied(format!(
            "permission denied for \"{key}\" in the config of a sink"
        ))
        .detail("It has the server read a file.")
        .hint("Membership of pg_read_server_files allows it.")),
        _ => Ok(()),
    }
}

/// Who may name a secret may have a server of his own be told it.
pub(super) fn may_hand_secret(config: &Config, caller: pg_sys::Oid) -> Result<(), Complaint> {
    // The privilege is what outbox.grant gives; a superuser has it.
    let is_granted = || {
        let sql = "select pg_catalog.has_function_privilege($1, 'outbox.set_secret(text, text[])', 'execute')";
        as_extension(|| {
            connected(|spi| {
                spi.read(sql, &[Arg::Oid(Some(caller))])
                    .first(|row| row.bool(0))
            })
        })
    };
    match config.handed_secret() {
        Some(name) if is_granted().flatten() != Some(true) => Err(Complaint::denied(format!(
            "permission denied for secret \"{name}\" in the config of a sink"
        ))
        .detail("The sink logs in with its values, where the config says.")
        .hint("The privilege secrets allows it: outbox.grant(role, 'secrets').")),
        _ => Ok(()),
    }
}

/// What a function must look like.
#[derive(Clone, Copy)]
enum Shape {
    /// takes outbox.event[]
    Sink,
    /// takes outbox.event, returns jsonb
    Transform,
}

impl Shape {
    fn says(self) -> &'static str {
        match self {
            Shape::Sink => "It must take one argument of type outbox.event[].",
            Shape::Transform => "It must take one argument of type outbox.event and return jsonb.",
        }
    }
}

/// The function that a config names, looked up as a statement of the session would.
fn resolve(name: &str, owner: pg_sys::Oid) -> Result<pg_sys::Oid, Complaint> {
    // Either with its argument types, or by its name alone.
    let signature = if name.contains('(') {
        name.to_owned()
    } else {
        format!("{name}(outbox.event[])")
    };
    let found = transaction::nested(|| {
        connected(|spi| {
            spi.read(
                "select pg_catalog.to_regprocedure($1)::pg_catalog.oid",
                &[Arg::Text(Some(&signature))],
            )
            .first(|row| row.oid(0))
            .flatten()
        })
    });
    let missing = || {
        Complaint::unknown(format!("function {name:?} does not exist"))
            .detail(Shape::Sink.says())
            .hint("Name it with its schema, as in billing.take(outbox.event[]).")
    };
    let oid = found.map_err(|_| missing())?.ok_or_else(missing)?;
    check_function(oid, "function", Shape::Sink, owner)?;
    if as_extension(|| connected(|spi| function::returns(spi, oid))) == Some(Returns::Other) {
        let name = catalog::function_name(oid).unwrap_or_default();
        return Err(
            Complaint::bad_argument(format!("function {name} does not fit as function"))
                .detail("It returns neither nothing nor reports on single events.")
                .hint("Let it return void, or rows: returns table (seq bigint, result text, error text)."),
        );
    }
    Ok(oid)
}

fn check_function(
    oid: pg_sys::Oid,
    what: &str,
    shape: Shape,
    owner: pg_sys::Oid,
) -> Result<(), Complaint> {
    let wanted = match shape {
        Shape::Sink => "true",
        Shape::Transform => "p.prorettype = 'jsonb'::regtype and not p.proretset",
    };
    let sql = format!(
        "select p.oid::regprocedure::text,
                p.prokind = 'f' and p.pronargs = 1 and p.proargtypes[0] = $2 and p.provariadic = 0 and {wanted},
                has_function_privilege($3, p.oid, 'execute') from pg_catalog.pg_proc p where p.oid = $1"
    );
    let found = as_extension(|| {
        connected(|spi| {
            let element = events::event_type();
            let argument = match shape {
                Shape::Sink => Arg::Records(&[], element).type_oid(),
                Shape::Transform => element,
            };
            spi.read(
                &sql,
                &[
                    Arg::Oid(Some(oid)),
                    Arg::Oid(Some(argument)),
                    Arg::Oid(Some(owner)),
                ],
            )
            .first(|row| {
                (
                    row.text(0).unwrap_or_default(),
                    row.bool(1).unwrap_or(false),
                    row.bool(2).unwrap_or(false),
                )
            })
        })
    });
    match found {
        None => Err(Complaint::unknown(format!("the {what} does not exist")).detail(shape.says())),
        Some((name, false, _)) => Err(Complaint::bad_argument(format!(
            "function {name} does not fit as {what}"
        ))
        .detail(shape.says())),
        Some((name, true, false)) => Err(Complaint::denied(format!(
            "permission denied for function {name}"
        ))),
        Some((_, true, true)) => Ok(()),
    }
}

/// Plans the filter as it will be run: with the owner's rights, and names looked up in pg_catalog and outbox.
fn check_filter(filter: &str, owner: pg_sys::Oid) -> Result<(), Complaint> {
    let sql = shaping::filter_sql(filter);
    let refused = |problem: String| {
        Complaint::bad_argument("the filter is not an SQL boolean expression over the columns of an event")
            .detail(problem.replace(char::is_control, " "))
            .hint("For example: topic like 'order.%' and (payload ->> 'total')::numeric > 100. Names outside pg_catalog need their schema.")
    };
    let planned = transaction::nested(|| {
        security::as_role(owner, Path::Ours, || {
            expression::check(filter)?;
            let element = events::event_type();
            connected(|spi| spi.check(&sql, &[Arg::Records(&[], element)]));
            Ok::<(), Complaint>(())
        })
    });
    match planned {
        Ok(Ok(())) => Ok(()),
        Ok(Err(complaint)) => Err(refused(complaint.message)),
        Err(error) if error.code == PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE => {
            Err(Complaint::denied(error.message))
        }
        Err(error) => Err(refused(error.message)),
    }
}
