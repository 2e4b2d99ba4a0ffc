//! outbox.sinks: what is to be delivered where.

use pgrx::pg_sys;

use super::functions;
use crate::dispatch::Grouping;
use crate::pg::spi::{Arg, Row, Spi};
use crate::pg::{catalog, lock};

/// Whether a text may be the id of a sink or the name of a secret.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=100).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._@-".contains(&byte))
}

/// The state of a sink that cannot run as it is.
pub(crate) const SET_ASIDE: &str = "error";

/// A sink as its row says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SinkRow {
    pub(crate) id: String,
    pub(crate) kind: String,
    /// JSON text.
    pub(crate) config: String,
    pub(crate) stream: String,
    pub(crate) topics: Option<Vec<String>>,
    pub(crate) tenant: Option<String>,
    pub(crate) filter: Option<String>,
    pub(crate) transform: Option<pg_sys::Oid>,
    pub(crate) function: Option<pg_sys::Oid>,
    pub(crate) batch_size: Option<i32>,
    /// Of windows to come; an open one is read as it was begun ([`crate::dispatch::Window::grouping`]).
    pub(crate) grouping: Grouping,
    pub(crate) isolation: String,
    pub(crate) enabled: bool,
    pub(crate) owner: pg_sys::Oid,
    /// The key of its lease.
    pub(crate) number: i32,
    /// A UUID, new when the sink is made anew.
    pub(crate) life: String,
    pub(crate) version: i64,
}

/// A sink and the versions of what it is made of, to see whether anything changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) id: String,
    pub(crate) number: i32,
    pub(crate) version: i64,
    /// Of the secret that its config names; 0 for none.
    pub(crate) secret: i64,
}

const COLUMNS: &str = r#"id, kind, config, stream, topics, tenant, filter, outbox.function_of(transform, transform_oid, home),
       outbox.function_of(function, function_oid, home), batch_size, "grouping", isolation, enabled, owner::oid, number, version, life::text"#;

fn sink(row: &Row) -> SinkRow {
    let text = |column| row.text(column).unwrap_or_default();
    SinkRow {
        id: text(0),
        kind: text(1),
        config: row.json(2).unwrap_or_default(),
        stream: text(3),
        topics: row.texts(4),
        tenant: row.text(5),
        filter: row.text(6),
        transform: row.oid(7),
        function: row.oid(8),
        batch_size: row.i32(9),
        grouping: Grouping::named(&text(10)).unwrap_or_default(),
        isolation: text(11),
        enabled: row.bool(12).unwrap_or(false),
        owner: row.oid(13).unwrap_or(pg_sys::InvalidOid),
        number: row.i32(14).unwrap_or(0),
        version: row.i64(15).unwrap_or(0),
        life: text(16),
    }
}

/// The versions of all sinks. Cheap: this is asked with every pass.
pub(crate) fn versions(spi: &Spi) -> Vec<Version> {
    spi.read(
        "select s.id, s.number, s.version, coalesce((select k.version from outbox.secrets k where k.name = s.config ->> 'secret'), 0)
           from outbox.sinks s order by s.id",
        &[],
    )
    .map(|row| Version {
        id: row.text(0).unwrap_or_default(),
        number: row.i32(1).unwrap_or(0),
        version: row.i64(2).unwrap_or(0),
        secret: row.i64(3).unwrap_or(0),
    })
}

pub(crate) fn named(spi: &Spi, id: &str) -> Option<SinkRow> {
    // Not under the snapshot at hand, which may be older than the change that is looked for.
    spi.write(
        &format!("select {COLUMNS} from outbox.sinks where id = $1"),
        &[Arg::Text(Some(id))],
    )
    .first(sink)
}

/// The same, kept from being changed by anybody else until the transaction ends.
pub(crate) fn named_to_change(spi: &Spi, id: &str) -> Option<SinkRow> {
    spi.write(
        &format!("select {COLUMNS} from outbox.sinks where id = $1 for update"),
        &[Arg::Text(Some(id))],
    )
    .first(sink)
}

/// Whether a sink may be written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It is there, and stays so until the transaction ends.
    Held,
    /// A transaction that is still open changes or drops it, or its cursor.
    Taken,
    /// It is gone, or is another one of its id.
    Gone,
}

/// Keeps a sink from being dropped, and its cursor from being moved by others, until the transaction ends. Never waits: whoever drops it
/// may take his time to commit.
pub(crate) fn hold(spi: &Spi, sink: &SinkRow) -> Hold {
    let args = [Arg::I32(Some(sink.number)), Arg::Text(Some(&sink.id))];
    let is_there = "select from outbox.sinks where number = $1 and id = $2";
    let held = "select from outbox.sinks s join outbox.cursors c on c.name = 'sink:' || s.id where s.number = $1 and s.id = $2
                   for key share of s skip locked for no key update of c skip locked";
    if spi.write(held, &args).count() == 1 {
        Hold::Held
    } else if spi.write(is_there, &args).count() == 1 {
        Hold::Taken
    } else {
        Hold::Gone
    }
}

/// Whether a sink could be held now, as far as can be seen without an id of the open transaction: while that does something that takes
/// long, readers wait for whoever has an id, and whoever drops or alters the sink waits for whoever holds it.
pub(crate) fn may_be_held(spi: &Spi, sink: &SinkRow) -> bool {
    let touched = spi
        .write(
            "select case when xmax <> '0' then xmax::text::bigint end from outbox.sinks where number = $1 and id = $2",
            &[Arg::I32(Some(sink.number)), Arg::Text(Some(&sink.id))],
        )
        .first(|row| row.i64(0))
        .flatten();
    let by_another = touched
        .and_then(|xid| u32::try_from(xid).ok())
        .is_some_and(catalog::is_running);
    !by_another || hold(spi, sink) != Hold::Taken
}

/// Whether a sink is there, as the open transaction sees it.
pub(crate) fn is_there(spi: &Spi, number: i32) -> bool {
    let there = "select from outbox.sinks where number = $1";
    spi.write(there, &[Arg::I32(Some(number))]).count() == 1
}

/// Asks the process to end that holds the sink's lease, if it is one of ours: whoever has started it has not lived to do so.
pub(crate) fn end_orphan(spi: &Spi, number: i32) {
    spi.write(
        "select pg_terminate_backend(l.pid)
           from pg_locks l join pg_stat_activity a on a.pid = l.pid
          where l.locktype = 'advisory' and l.objsubid = 3 and l.classid = $2::oid and l.objid = $1::oid and l.granted
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and a.backend_type = 'pg_outbox dispatcher' and l.pid <> pg_backend_pid()",
        &[
            Arg::I64(Some(i64::from(number))),
            Arg::I64(Some(i64::from(lock::LEASE_CLASS))),
        ],
    );
}

/// What `create` writes beside what `SinkRow` holds.
pub(crate) struct NewSink<'a> {
    pub(crate) sink: &'a SinkRow,
    pub(crate) start: &'a str,
}

/// Writes a new sink; false if the id is taken.
pub(crate) fn create(spi: &Spi, new: &NewSink) -> bool {
    let NewSink { sink, start } = new;
    let rows = spi.write(
        r#"insert into outbox.sinks (id, kind, config, stream, start, topics, tenant, filter, transform, function, batch_size,
                                     "grouping", isolation, enabled, owner, transform_oid, function_oid, home)
           values ($1, $2, $3, $4, $5, $6, $7, $8, outbox.function_name($9), outbox.function_name($10), $11, $12, $13, $14, $15::regrole,
                   $9, $10, $16)
           on conflict (id) do nothing"#,
        &[
            Arg::Text(Some(&sink.id)),
            Arg::Text(Some(&sink.kind)),
            Arg::Json(Some(&sink.config)),
            Arg::Text(Some(&sink.stream)),
            Arg::Text(Some(start)),
            Arg::Texts(sink.topics.as_deref()),
            Arg::Text(sink.tenant.as_deref()),
            Arg::Text(sink.filter.as_deref()),
            Arg::Oid(sink.transform),
            Arg::Oid(sink.function),
            Arg::I32(sink.batch_size),
            Arg::Text(Some(sink.grouping.name())),
            Arg::Text(Some(&sink.isolation)),
            Arg::Bool(sink.enabled),
            Arg::Oid(Some(sink.owner)),
            Arg::Text(Some(&functions::home())),
        ],
    );
    rows.count() == 1
}

/// Writes a changed sink.
pub(crate) fn update(spi: &Spi, sink: &SinkRow) {
    spi.write(
        r#"update outbox.sinks
              set config = $2, topics = $3, tenant = $4, filter = $5,
                  transform = case when $6 is not null then coalesce(outbox.function_name($6), transform) end, transform_oid = $6,
                  function = case when $7 is not null then coalesce(outbox.function_name($7), function) end, function_oid = $7, home = $13,
                  batch_size = $8, "grouping" = $9, isolation = $10, enabled = $11, owner = $12::regrole,
                  version = version + 1, updated_at = now()
            where id = $1"#,
        &[
            Arg::Text(Some(&sink.id)),
            Arg::Json(Some(&sink.config)),
            Arg::Texts(sink.topics.as_deref()),
            Arg::Text(sink.tenant.as_deref()),
            Arg::Text(sink.filter.as_deref()),
            Arg::Oid(sink.transform),
            Arg::Oid(sink.function),
            Arg::I32(sink.batch_size),
            Arg::Text(Some(sink.grouping.name())),
            Arg::Text(Some(&sink.isolation)),
            Arg::Bool(sink.enabled),
            Arg::Oid(Some(sink.owner)),
            Arg::Text(Some(&functions::home())),
        ],
    );
}
