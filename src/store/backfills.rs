//! outbox.backfills: what is to be written as events of what was there before, and how far that has come.

use pgrx::pg_sys;

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

pub(crate) fn running(spi: &Spi) -> Vec<i64> {
    spi.read(
        "select id from outbox.backfills where state = 'running' order by id",
        &[],
    )
    .map(|row| row.i64(0).unwrap_or(0))
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

/// Takes hold of a backfill until the transaction ends. None if it does not run, or cannot any more, or somebody else is at it.
pub(crate) fn take(spi: &Spi, id: i64) -> Option<Backfill> {
    spi.write("select outbox.end_backfills()", &[]);
    spi.write(
        "select b.id, b.relation::oid, b.condition, b.chunk_size, b.owner::oid, format('%I.%I', n.nspname, r.relname), b.key,
                array(select outbox.base_type(a.atttypid)
                        from unnest(b.key) with ordinality k (name, place)
                        join pg_catalog.pg_attribute a on a.attrelid = r.oid and a.attname = k.name order by k.place),
                b.position, b.chunks, b.for_sink
           from outbox.backfills b
           join pg_catalog.pg_class r on r.oid = b.relation join pg_catalog.pg_namespace n on n.oid = r.relnamespace
          where b.id = $1 and b.state = 'running' for update of b skip locked",
        &[Arg::I64(Some(id))],
    )
    .first(backfill)
}

/// A chunk is taken.
pub(crate) fn advance(spi: &Spi, id: i64, position: Option<&[String]>, rows: i64, done: bool) {
    spi.write(
        "update outbox.backfills
            set position = coalesce($2, position), chunks = chunks + 1, rows = rows + $3, error = null,
                state = case when $4 then 'done' else state end, updated_at = now()
          where id = $1",
        &[
            Arg::I64(Some(id)),
            Arg::Texts(position),
            Arg::I64(Some(rows)),
            Arg::Bool(done),
        ],
    );
}

/// A chunk could not be taken.
pub(crate) fn fail(spi: &Spi, id: i64, error: &str) {
    spi.write(
        "update outbox.backfills set error = $2, updated_at = now() where id = $1",
        &[Arg::I64(Some(id)), Arg::Text(Some(error))],
    );
}

/// Events of a capture's stream that the sink which is furthest behind has not had yet.
pub(crate) fn lag(spi: &Spi, relation: pg_sys::Oid) -> i64 {
    spi.read(
        "select coalesce(max(s.lag_events), 0) from outbox.captures c join outbox.sink_status() s on s.stream = c.stream where c.relation = $1",
        &[Arg::Oid(Some(relation))],
    )
    .first(|row| row.i64(0))
    .flatten()
    .unwrap_or(0)
}
