//! outbox.captures: which tables are captured, and how; read together with what the tables look like now.

use pgrx::pg_sys;

use crate::pg::append::Strategy;
use crate::pg::spi::{Arg, Row, Spi};

/// What an event of a capture carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Payload {
    Keys,
    Changed,
    Full,
    BeforeAfter,
}

/// A column of the table whose rows change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) name: String,
    /// As pg_attribute counts: that of the partition, where it is a partition that is written to.
    pub(crate) number: i16,
    pub(crate) type_oid: pg_sys::Oid,
}

/// A capture, as it concerns one table: the captured one, or a partition or child of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capture {
    /// The table that was captured.
    pub(crate) root: pg_sys::Oid,
    pub(crate) schema: String,
    pub(crate) table: String,
    /// Schema and table, quoted where SQL needs it.
    pub(crate) source: String,
    /// The partition or child that is written to, in the same form; none if it is the captured table itself.
    pub(crate) partition: Option<String>,
    /// What the written table is a partition or child of, up to the captured one.
    pub(crate) ancestors: Vec<u32>,
    pub(crate) operations: Vec<String>,
    pub(crate) payload: Payload,
    pub(crate) columns: Option<Vec<String>>,
    pub(crate) redact: Vec<String>,
    /// Empty where there is neither a primary key nor a chosen one.
    pub(crate) key: Vec<String>,
    pub(crate) tenant_column: Option<String>,
    pub(crate) condition: Option<String>,
    pub(crate) topic: Option<String>,
    pub(crate) owner: pg_sys::Oid,
    pub(crate) enabled: bool,
    /// For a table adopted as a stream: columns of an event, and the table's column for each.
    pub(crate) mapping: Vec<(String, String)>,
    /// The stream's table, qualified and quoted, and the sequence behind its seq.
    pub(crate) stream: String,
    pub(crate) sequence: String,
    pub(crate) stream_oid: pg_sys::Oid,
    pub(crate) sequence_oid: pg_sys::Oid,
    /// The stream's table is as it was made, but perhaps for indexes that run nobody's code.
    pub(crate) stream_is_plain: bool,
    pub(crate) stream_owner: pg_sys::Oid,
    /// Something on the stream's table can be put off to the end of a transaction.
    pub(crate) stream_defers: bool,
    /// In the order of the captured table.
    pub(crate) table_columns: Vec<Column>,
    /// Where the written table is partitioned itself: the partitions in which a row can end up.
    pub(crate) partitions: Vec<Partition>,
    /// And by what they are told apart: of the written table, first, and of those of its partitions that are partitioned themselves.
    pub(crate) divisions: Vec<Division>,
}

impl Capture {
    /// Whether one of these is among the relations that all this was read from, besides the one that is written to.
    pub(crate) fn hangs_on_any(&self, relations: &[pg_sys::Oid]) -> bool {
        let alone = [self.root, self.stream_oid, self.sequence_oid];
        let ancestors = self.ancestors.iter().map(|&oid| pg_sys::Oid::from(oid));
        let partitions = self.partitions.iter().map(|partition| partition.oid);
        let divisions = self.divisions.iter().map(|division| division.table);
        let all = alone.into_iter().chain(ancestors);
        all.chain(partitions)
            .chain(divisions)
            .any(|oid| relations.contains(&oid))
    }
}

/// By what a partitioned table is divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Division {
    pub(crate) table: pg_sys::Oid,
    pub(crate) strategy: Strategy,
    pub(crate) key: Vec<String>,
    /// What compares, or hashes, the values of each column of the key, and under which collation.
    pub(crate) functions: Vec<pg_sys::Oid>,
    pub(crate) collations: Vec<pg_sys::Oid>,
}

/// A partition that holds rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Partition {
    pub(crate) oid: pg_sys::Oid,
    /// Schema and table, quoted where SQL needs it.
    pub(crate) name: String,
    /// What is true of all of its rows, as an SQL expression over the columns; its names are qualified unless they are in pg_catalog.
    pub(crate) constraint: String,
}

const SQL: &str = "
    with recursive lineage (oid, depth) as (
        select $1, 0
        union all
        select i.inhparent, l.depth + 1 from lineage l join pg_catalog.pg_inherits i on i.inhrelid = l.oid
    ), found as (
        select c.*, l.depth from lineage l join outbox.captures c on c.relation = l.oid order by l.depth limit 1
    )
    select f.relation::oid, n.nspname::text, r.relname::text, format('%I.%I', n.nspname, r.relname),
           case when f.depth > 0 then (select format('%I.%I', wn.nspname, w.relname)
              from pg_catalog.pg_class w join pg_catalog.pg_namespace wn on wn.oid = w.relnamespace where w.oid = $1) end,
           array(select l.oid::text from lineage l where l.depth between 1 and f.depth),
           f.operations, f.payload, f.columns, coalesce(f.redact, '{}'),
           coalesce(f.key, outbox.primary_key(f.relation)), f.tenant_column, f.condition, f.topic, f.owner::oid, f.enabled,
           format('%I.%I', sn.nspname, s.relname), format('%I.%I', qn.nspname, q.relname),
           array(select m.key from jsonb_each_text(f.mapping) m order by m.key),
           array(select m.value from jsonb_each_text(f.mapping) m order by m.key),
           t.relation::oid, t.sequence::oid, outbox.is_plain_stream(t.relation), s.relowner,
           exists (select from pg_catalog.pg_trigger g where g.tgrelid = s.oid and g.tgdeferrable)
      from found f
      join pg_catalog.pg_class r on r.oid = f.relation join pg_catalog.pg_namespace n on n.oid = r.relnamespace
      join outbox.streams t on t.name = f.stream
      join pg_catalog.pg_class s on s.oid = t.relation join pg_catalog.pg_namespace sn on sn.oid = s.relnamespace
      join pg_catalog.pg_class q on q.oid = t.sequence join pg_catalog.pg_namespace qn on qn.oid = q.relnamespace";

/// The columns of a table that the captured one has, too. What is generated when it is read is in no row that a trigger sees.
const COLUMNS: &str = "
    select a.attname::text, a.attnum::int, a.atttypid
      from pg_catalog.pg_attribute c join pg_catalog.pg_attribute a on a.attname = c.attname
     where c.attrelid = $2 and c.attnum > 0 and not c.attisdropped
       and a.attrelid = $1 and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
     order by c.attnum";

/// The youngest come first: they get most of the rows. None where a partition is chosen by an expression, which may hold a user's code, or by
/// a column of a domain, whose checks its constant would run.
const PARTITIONS: &str = "
    select format('%I.%I', n.nspname, r.relname), pg_catalog.pg_get_partition_constraintdef(r.oid), r.oid
      from pg_catalog.pg_partition_tree($1) t
      join pg_catalog.pg_class r on r.oid = t.relid join pg_catalog.pg_namespace n on n.oid = r.relnamespace
     where t.isleaf and r.relispartition and t.relid::oid <> $1
       and not exists (select from pg_catalog.pg_partition_tree($1) x join pg_catalog.pg_partitioned_table p on p.partrelid = x.relid
                        where p.partexprs is not null or exists (
                              select from pg_catalog.pg_attribute a join pg_catalog.pg_type y on y.oid = a.atttypid
                               where a.attrelid = p.partrelid and a.attnum = any (p.partattrs)
                                 and y.oid >= 16384 and not (y.typtype = 'e' or (y.typtype = 'b' and y.typelem = 0))))
     order by r.oid desc";

const DIVISIONS: &str = "
    select p.partrelid, p.partstrat::text, array_agg(a.attname::text order by k.place), array_agg(m.amproc::oid::text order by k.place),
           array_agg(k.coll::text order by k.place)
      from pg_catalog.pg_partition_tree($1) t
      join pg_catalog.pg_partitioned_table p on p.partrelid = t.relid
     cross join unnest(p.partattrs::int2[], p.partclass::oid[], p.partcollation::oid[]) with ordinality k (number, class, coll, place)
      join pg_catalog.pg_attribute a on a.attrelid = p.partrelid and a.attnum = k.number
      join pg_catalog.pg_opclass o on o.oid = k.class
      join pg_catalog.pg_amproc m on m.amprocfamily = o.opcfamily and m.amproclefttype = o.opcintype and m.amprocrighttype = o.opcintype
                                 and m.amprocnum = case p.partstrat when 'h' then 2 else 1 end
     group by p.partrelid, p.partstrat, t.level order by t.level";

fn division(row: &Row) -> Division {
    let oids = |column| {
        let texts = row.texts(column).unwrap_or_default();
        let oids = texts.iter().filter_map(|oid| oid.parse::<u32>().ok());
        oids.map(pg_sys::Oid::from).collect()
    };
    Division {
        table: row.oid(0).unwrap_or(pg_sys::InvalidOid),
        strategy: match row.text(1).as_deref() {
            Some("h") => Strategy::Hash,
            Some("l") => Strategy::List,
            _ => Strategy::Range,
        },
        key: row.texts(2).unwrap_or_default(),
        functions: oids(3),
        collations: oids(4),
    }
}

fn capture(row: &Row) -> Capture {
    let text = |column| row.text(column).unwrap_or_default();
    let texts = |column| row.texts(column).unwrap_or_default();
    Capture {
        root: row.oid(0).unwrap_or(pg_sys::InvalidOid),
        schema: text(1),
        table: text(2),
        source: text(3),
        partition: row.text(4),
        ancestors: texts(5).iter().filter_map(|oid| oid.parse().ok()).collect(),
        operations: texts(6),
        payload: match text(7).as_str() {
            "keys" => Payload::Keys,
            "changed" => Payload::Changed,
            "before_after" => Payload::BeforeAfter,
            _ => Payload::Full,
        },
        columns: row.texts(8),
        redact: texts(9),
        key: texts(10),
        tenant_column: row.text(11),
        condition: row.text(12),
        topic: row.text(13),
        owner: row.oid(14).unwrap_or(pg_sys::InvalidOid),
        enabled: row.bool(15).unwrap_or(false),
        mapping: texts(18).into_iter().zip(texts(19)).collect(),
        stream: text(16),
        sequence: text(17),
        stream_oid: row.oid(20).unwrap_or(pg_sys::InvalidOid),
        sequence_oid: row.oid(21).unwrap_or(pg_sys::InvalidOid),
        stream_is_plain: row.bool(22).unwrap_or(false),
        stream_owner: row.oid(23).unwrap_or(pg_sys::InvalidOid),
        stream_defers: row.bool(24).unwrap_or(true),
        table_columns: Vec::new(),
        partitions: Vec::new(),
        divisions: Vec::new(),
    }
}

/// The capture that a table's changes belong to: its own, or the nearest of those it is a partition or child of.
pub(crate) fn of(spi: &Spi, relation: pg_sys::Oid) -> Option<Capture> {
    let mut found = spi.read(SQL, &[Arg::Oid(Some(relation))]).first(capture)?;
    let columns = [Arg::Oid(Some(relation)), Arg::Oid(Some(found.root))];
    found.table_columns = spi.read(COLUMNS, &columns).map(|row| Column {
        name: row.text(0).unwrap_or_default(),
        number: row.i32(1).and_then(|it| it.try_into().ok()).unwrap_or(0),
        type_oid: row.oid(2).unwrap_or(pg_sys::InvalidOid),
    });
    let partitions = spi.read(PARTITIONS, &columns[..1]);
    found.partitions = partitions.map(|row| Partition {
        name: row.text(0).unwrap_or_default(),
        constraint: row.text(1).unwrap_or_else(|| "true".to_owned()),
        oid: row.oid(2).unwrap_or(pg_sys::InvalidOid),
    });
    if !found.partitions.is_empty() {
        found.divisions = spi.read(DIVISIONS, &columns[..1]).map(division);
    }
    Some(found)
}

/// Raises an error if code of another role belongs to the stream's table, which would run with more rights than that role has.
pub(crate) fn check_code_of_stream(spi: &Spi, capture: &Capture) {
    let args = [Arg::Oid(Some(capture.stream_oid))];
    spi.write("select outbox.check_code_of_stream($1)", &args);
}

/// The last number that a stream's sequence has given to anybody; 0 if none.
pub(crate) fn last_seq(spi: &Spi, sequence: &str) -> i64 {
    let sql = format!("select case when is_called then last_value else 0 end from {sequence}");
    spi.read(&sql, &[])
        .first(|row| row.i64(0))
        .flatten()
        .unwrap_or(0)
}

/// Gives events of this transaction that lie between two numbers, the first excluded, new numbers behind all others.
pub(crate) fn move_behind(spi: &Spi, stream: &str, after: i64, upto: i64) {
    let columns = r#"id, topic, source, subject, tenant, "time", payload, headers, for_sink"#;
    let sql = format!(
        "with moved as (
             delete from {stream} e where e.txid = pg_catalog.pg_current_xact_id() and e.seq > $1 and e.seq <= $2
             returning e.seq, {columns}
         )
         insert into {stream} ({columns}) select {columns} from moved order by seq"
    );
    spi.write(&sql, &[Arg::I64(Some(after)), Arg::I64(Some(upto))]);
}
