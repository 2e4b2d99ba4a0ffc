//! outbox.backfills: what is to be written as events of what was there before, and how far that has come.

use pgrx::pg_sys;

use crate::pg::lock;
use crate::pg::spi::{Arg, Row, Spi};

/// A backfill that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backfill {
    pub(crate) id: i64,
    pub(crate) relation: pg_sys::Oid,
    /// The number of the sink that alone gets the events.
    pub(crate) for_sink: Option<i32>,
    pub(crate) condition: Option<String>,
    pub(crate) chunk_size: i32,
    pub(crate) owner: pg_sys::Oid,
    /// The table, qualified and quoted.
    pub(crate) table: String,
    /// The columns of the primary key, and their types as SQL names them.
    pub(crate) key: Vec<String>,
    pub(crate) types: Vec<String>,
    /// The key of the last row taken, as text.
    pub(crate) position: Option<Vec<String>>,
    pub(crate) chunks: i64,
}

/// The ids of those that run, and the sizes of their chunks.
pub(crate) fn running(spi: &Spi) -> Vec<(i64, i32)> {
    spi.read(
        "select id, chunk_size from outbox.backfills where state = 'running' order by id",
        &[],
    )
    .map(|row| (row.i64(0).unwrap_or(0), row.i32(1).unwrap_or(1)))
}

fn backfill(row: &Row) -> Backfill {
    Backfill {
        id: row.i64(0).unwrap_or(0),
        relation: row.oid(1).unwrap_or(pg_sys::InvalidOid),
        condition: row.text(2),
        chunk_size: row.i32(3).unwrap_or(1),
        owner: row.oid(4).unwrap_or(pg_sys::InvalidOid),
        table: row.text(5).unwrap_or_default(),
        key: row.texts(6).unwrap_or_default(),
        types: row.texts(7).unwrap_or_default(),
        position: row.texts(8),
        chunks: row.i64(9).unwrap_or(0),
        for_sink: row.i32(10),
    }
}

/// Takes hold of a backfill until the transaction ends. None if it does not run, or cannot any more, or somebody else is at it. Its row
/// stays free, so that whoever stops it does not wait for the chunk.
pub(crate) fn take(spi: &Spi, id: i64) -> Option<Backfill> {
    spi.write("select outbox.end_backfills()", &[]);
    if !lock::take_backfill_for_transaction(id) {
        return None;
    }
    spi.write(
        "select b.id, b.relation::oid, b.condition, b.chunk_size, b.owner::oid, format('%I.%I', n.nspname, r.relname), b.key,
                array(select outbox.base_type(a.atttypid)
                        from unnest(b.key) with ordinality k (name, place)
                        join pg_catalog.pg_attribute a on a.attrelid = r.oid and a.attname = k.name order by k.place),
                b.position, b.chunks, b.for_sink
           from outbox.backfills b
           join pg_catalog.pg_class r on r.oid = b.relation join pg_catalog.pg_namespace n on n.oid = r.relnamespace
          where b.id = $1 and b.state = 'running'",
        &[Arg::I64(Some(id))],
    )
    .first(backfill)
}

/// What is updated: the backfill, if it runs, and nobody else is about to stop it.
const FREE: &str = "id = (select id from outbox.backfills where id = $1 and state = 'running' for no key update skip locked)";

/// A chunk is taken. False if the backfill has been stopped meanwhile, or somebody is about to: then the chunk must be given up.
pub(crate) fn advance(
    spi: &Spi,
    id: i64,
    position: Option<&[String]>,
    rows: i64,
    done: bool,
) -> bool {
    let advanced = spi.write(
        &format!(
            "update outbox.backfills
                set position = coalesce($2, position), chunks = chunks + 1, rows = rows + $3, error = null,
                    state = case when $4 then 'done' else state end, updated_at = now()
              where {FREE}"
        ),
        &[
            Arg::I64(Some(id)),
            Arg::Texts(position),
            Arg::I64(Some(rows)),
            Arg::Bool(done),
        ],
    );
    advanced.count() == 1
}

/// A chunk could not be taken.
pub(crate) fn fail(spi: &Spi, id: i64, error: &str) {
    spi.write(
        &format!("update outbox.backfills set error = $2, updated_at = now() where {FREE} and error is distinct from $2"),
        &[Arg::I64(Some(id)), Arg::Text(Some(error))],
    );
}

/// It cannot go on.
pub(crate) fn stop(spi: &Spi, id: i64, error: &str) {
    spi.write(
        &format!("update outbox.backfills set state = 'stopped', error = $2, updated_at = now() where {FREE}"),
        &[Arg::I64(Some(id)), Arg::Text(Some(error))],
    );
}

/// The sink that is furthest behind, if more than `most` events are undelivered to it: among those that get the backfill's events.
pub(crate) fn slowest(spi: &Spi, backfill: &Backfill, most: i64) -> Option<String> {
    spi.read(
        "select s.sink
           from outbox.captures c
           join outbox.sink_status() s on s.stream = c.stream
           join outbox.sinks k on k.id = s.sink
          where c.relation = $1 and ($2 is null or k.number = $2) and s.lag_events > $3
          order by s.lag_events desc, s.sink limit 1",
        &[
            Arg::Oid(Some(backfill.relation)),
            Arg::I32(backfill.for_sink),
            Arg::I64(Some(most)),
        ],
    )
    .first(|row| row.text(0))
    .flatten()
}
