//! outbox.create_sink and outbox.alter_sink: everything about a sink is checked when it is set.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::dispatch::{Floors, Pattern, Place, Snapshot, Window};
use crate::envelope::Position;
use crate::pg::call::Arguments;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, Path, as_extension};
use crate::pg::spi::{Arg, Spi, connected};
use crate::pg::statement::{self, Holder};
use crate::pg::{catalog, expression, transaction};
use crate::sinks::{self as kinds, Config, ConfigError};
use crate::store::events;
use crate::store::sinks::{self, Grouping, NewSink, SinkRow};
use crate::store::streams::{self, Stream};
use crate::store::{cursors, parked, rebase, transactions};
use crate::worker::function::{self, Returns};
use crate::worker::shaping;

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

/// Which code of a sink is new and has to be looked at.
#[derive(Clone, Copy)]
struct Code {
    function: bool,
    filter: bool,
    transform: bool,
}

impl Code {
    fn any(self) -> bool {
        self.function || self.filter || self.transform
    }

    /// Whether a sink has no other.
    fn is_all_of(self, sink: &SinkRow) -> bool {
        (self.function || sink.kind != "function")
            && (self.filter || sink.filter.is_none())
            && (self.transform || sink.transform.is_none())
    }
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

pub(super) fn checked_topics(
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

fn checked_grouping(grouping: &str) -> Result<Grouping, Complaint> {
    match grouping {
        "event" => Ok(Grouping::Event),
        "transaction" => Ok(Grouping::Transaction),
        other => Err(
            Complaint::bad_argument(format!("grouping {other:?} is not known"))
                .detail("It is event or transaction."),
        ),
    }
}

/// Checks what a sink is made of; fills in what `function` refers to.
fn check(sink: &mut SinkRow, code: Code) -> Result<Config, Complaint> {
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
fn may_use_files(config: &Config, caller: pg_sys::Oid) -> Result<(), Complaint> {
    match config.file() {
        Some(key) if !security::may_read_files(caller) => Err(Complaint::denied(format!(
            "permission denied for \"{key}\" in the config of a sink"
        ))
        .detail("It has the server read a file.")
        .hint("Membership of pg_read_server_files allows it.")),
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

/// Where a new sink begins.
fn starting_place(
    spi: &Spi,
    stream: &Stream,
    grouping: Grouping,
    start: &str,
) -> Result<(Place, Position), Complaint> {
    match start {
        "origin" => {
            let window = Window::empty(Snapshot::empty(), stream.pruned_seq);
            Ok((
                Place::at_start_of(window).at_end(),
                Position { txid: 0, seq: 0 },
            ))
        }
        "tail" => Ok(tail(spi, stream)),
        position => {
            let position = position.parse::<Position>().map_err(|error| {
                Complaint::bad_argument(format!(
                    "start {:?} is not known",
                    start.chars().take(60).collect::<String>()
                ))
                .detail(error.to_string())
                .hint("It is origin, tail, or a position such as outbox.read gives.")
            })?;
            let place = behind(spi, stream, grouping, position)?;
            let oldest = place.window.done.oldest_unseen();
            let pair = if oldest < position.txid {
                Position {
                    txid: oldest,
                    seq: 0,
                }
            } else {
                position
            };
            Ok((place, pair))
        }
    }
}

/// Behind all that is committed now.
pub(super) fn tail(spi: &Spi, stream: &Stream) -> (Place, Position) {
    let mut floors = Floors::default();
    let horizon = stream.look(spi, &mut floors);
    let floor = floors
        .below(horizon.snapshot.xmax())
        .unwrap_or(stream.pruned_seq);
    let pair = Position {
        txid: horizon.snapshot.oldest_unseen(),
        seq: 0,
    };
    // Nothing is in the window; that it ends here tells how far behind the reader will be.
    let window = Window {
        ceiling: horizon.last_seq,
        ..Window::empty(horizon.snapshot, floor)
    };
    (Place::at_start_of(window).at_end(), pair)
}

/// Behind a position: all that is committed of earlier transactions is done, and of the position's own everything up to its seq. What
/// is still open will come, whatever its id.
fn behind(
    spi: &Spi,
    stream: &Stream,
    grouping: Grouping,
    position: Position,
) -> Result<Place, Complaint> {
    let horizon = stream.look(spi, &mut Floors::default());
    let snapshot = horizon.snapshot;
    if position.txid >= catalog::next_xid() {
        return Err(
            Complaint::bad_argument(format!("start {position} lies in the future"))
                .detail("No transaction of this server has reached it.")
                .hint("A position means nothing outside of the server that it was read from."),
        );
    }
    let done = snapshot.below(position.txid.max(Snapshot::empty().xmax()));
    let window = Window::empty(done, stream.pruned_seq);
    if !snapshot.sees(position.txid) {
        // It is not finished yet: better some of its events again than one never.
        return Ok(Place::at_start_of(window).at_end());
    }
    Ok(Place {
        mark: transactions::mark_of(spi, stream, grouping, position),
        ..Place::at_start_of(window.next(snapshot.below(position.txid + 1), horizon.last_seq, None))
    })
}
