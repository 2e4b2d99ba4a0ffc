//! Positions after a move to another cluster.
//!
//! Positions are transaction ids. A logical restore, or pg_upgrade, brings them to a cluster whose ids start low again or belong to
//! a different history: every cursor would lie in the future, and new events would be skipped for ever, silently. The sign is
//! outbox.clusters, where CREATE EXTENSION wrote this cluster's identifier and the dump adds the old one's. Clusters that are copies
//! of one another share an identifier; there the sign is a position that has not been reached yet.
//!
//! The cure: all events that are visible now become those of one transaction V of this cluster, the last one before everything that
//! is unfinished. They keep their order by seq, and every cursor is put before the first event that it had not seen. Undelivered
//! events stay undelivered; some may be delivered twice. What was parked for a sink is undelivered: its cursor goes back before the
//! first of it, and nothing is parked any more, so that the events of each key come in order. What is committed from here on has its
//! own id, above V.
//!
//! The same is done for a stream whose numbers begin again, as after TRUNCATE … RESTART IDENTITY: the floors of its cursors would lie
//! above its new events. The sign is the file of its sequence, which is another one then.
//!
//! A dump is restored table by table, and this server's dispatcher sees what is there already. A cursor without its events would run
//! ahead of them, and events without their cursors would be taken for new ones. So a session that restores is marked (a trigger on
//! the tables that only a restore writes to) and until it ends nothing is delivered.

use std::sync::Arc;

use super::streams::{self, Shape, Stream};
use super::{audit, functions, transactions};
use crate::dispatch::{Floors, Grouping, Mark, Place, Snapshot, Window};
use crate::pg::catalog;
use crate::pg::error::Complaint;
use crate::pg::lock::{self, Use};
use crate::pg::spi::{Arg, Spi};
use pgrx::PgSqlErrorCode;

/// A cursor's windows are counted on from here, so that a save by somebody who has not noticed is refused.
const LEAP: i64 = 1 << 32;

/// What is wrong with what is stored.
#[derive(Debug, Clone, Copy, Default)]
struct Signs {
    /// It comes from another cluster.
    moved: bool,
    /// The numbers of a stream have begun again.
    renumbered: bool,
    /// Functions are named whose numbers are those of another database.
    strange_functions: bool,
}

fn signs(spi: &Spi) -> Signs {
    // What a session holds there concerns the recorder of usage alone: that has its own look at it.
    let recorder = if lock::hold_ours(&[c"usage_recorder"], Use::Reading) {
        " union all select from outbox.usage_recorder where home <> $3"
    } else {
        ""
    };
    let sql = format!(
        "select exists (select from outbox.clusters where system_identifier <> $1 or since_xid >= $2),
                exists (select from outbox.streams where numbering <> pg_relation_filenode(sequence)),
                exists (select from outbox.sinks where home <> $3{recorder})"
    );
    spi.read(
        &sql,
        &[
            Arg::I64(Some(catalog::system_identifier())),
            Arg::Xid(catalog::next_xid()),
            Arg::Text(Some(&functions::home())),
        ],
    )
    .first(|row| Signs {
        moved: row.bool(0).unwrap_or(false),
        renumbered: row.bool(1).unwrap_or(false),
        strange_functions: row.bool(2).unwrap_or(false),
    })
    .unwrap_or_default()
}

/// Whether a sink stands where this cluster has not come yet. Costs more than to be asked with every pass.
fn is_ahead(spi: &Spi) -> bool {
    spi.read(
        "select exists (select from outbox.cursors where pg_snapshot_xmax(upto) > $1)",
        &[Arg::Xid(catalog::next_xid())],
    )
    .first(|row| row.bool(0).unwrap_or(false))
    .unwrap_or(false)
}

/// Whether what is stored may not be acted on yet: retention waits for the re-basing.
pub(crate) fn is_due(spi: &Spi) -> bool {
    lock::restore_goes_on() || signs(spi).moved
}

/// For whoever reads or writes positions: re-bases if this database came from another cluster. An error while another session still
/// restores it.
pub(crate) fn settle(spi: &Spi) -> Result<(), Complaint> {
    if lock::restore_goes_on() {
        let code = PgSqlErrorCode::ERRCODE_OBJECT_IN_USE;
        return Err(
            Complaint::new(code, "a dump is being restored into this database")
                .detail("The session that restores it has not ended.")
                .hint("outbox.status names it."),
        );
    }
    if_moved(spi, false);
    Ok(())
}

/// Re-bases all streams if this database came from another cluster, and those whose numbers begin again. True if there were any.
/// `thorough`: looks at the cursors, too.
pub(crate) fn if_moved(spi: &Spi, thorough: bool) -> bool {
    let signs = signs(spi);
    if signs.strange_functions {
        functions::settle(spi);
    }
    if !(signs.moved || (thorough && is_ahead(spi))) {
        return signs.renumbered && rebase_renumbered(spi);
    }
    // One at a time: whoever comes second finds it done.
    spi.write("lock table outbox.clusters in exclusive mode", &[]);
    let still = spi.write(
        "select from outbox.clusters where system_identifier <> $1 or since_xid >= $2
         union all select from outbox.cursors where pg_snapshot_xmax(upto) > $2",
        &[
            Arg::I64(Some(catalog::system_identifier())),
            Arg::Xid(catalog::next_xid()),
        ],
    );
    if still.count() == 0 {
        return false;
    }
    for stream in streams::all(spi) {
        audit::unguarded(|| rebase(spi, &stream));
    }
    audit::look_at_all_again(spi);
    spi.write(
        "update outbox.webhooks set since = null where since is not null",
        &[],
    );
    // The cursors stand before what was parked.
    spi.write("delete from outbox.parked", &[]);
    spi.write("delete from outbox.clusters", &[]);
    spi.write(
        "insert into outbox.clusters (system_identifier) values ($1)",
        &[Arg::I64(Some(catalog::system_identifier()))],
    );
    pgrx::log!("pg_outbox: positions re-based: this database came from another cluster");
    true
}

fn rebase_renumbered(spi: &Spi) -> bool {
    spi.write("lock table outbox.clusters in exclusive mode", &[]);
    let still = spi.write(
        "select name from outbox.streams where numbering <> pg_relation_filenode(sequence) order by name",
        &[],
    );
    let still = still.map(|row| row.text(0).unwrap_or_default());
    for stream in still.iter().filter_map(|name| streams::named(spi, name)) {
        audit::unguarded(|| rebase(spi, &stream));
        if stream.shape == Shape::Audit {
            audit::look_at_all_again(spi);
        }
        let name = &stream.name;
        spi.write(
            "delete from outbox.parked p using outbox.sinks s where s.id = p.sink and s.stream = $1",
            &[Arg::Text(Some(name))],
        );
        pgrx::log!("pg_outbox: positions re-based: the numbers of stream \"{name}\" begin again");
    }
    !still.is_empty()
}

/// A cursor, and what it had not seen.
struct Cursor {
    name: String,
    /// None for one that keeps nothing but a pair.
    window_no: Option<i64>,
    /// How it is read on: what it had seen of is one transaction now, which both orders take alike.
    grouping: Grouping,
    /// The seq of the first event that it had not seen.
    first: Option<i64>,
}

fn rebase(spi: &Spi, stream: &Stream) {
    let relation = &stream.relation;
    // Sampled first: what gets its id from here on draws numbers above.
    let mut floors = Floors::default();
    stream.look(spi, &mut floors);

    // One statement, so one snapshot: what that does not see keeps its id and comes in a later window. What was written here since
    // the extension was made is new to every cursor, whatever the old ids say; but what one transaction has put there with several
    // ids, it has restored. What this very transaction has written is moved, too: it is committed with its new id, or not at all.
    let sql = format!(
        "with now as materialized (
             select n.snapshot, (pg_snapshot_xmin(n.snapshot)::text::numeric - 1)::text::xid8 as v
               from (select pg_current_snapshot() as snapshot) n
         ), local as materialized (
             select min(k.since_xid) as since from outbox.clusters k where k.system_identifier = $2
         ), restored as materialized (
             select e.xmin::text as by from {relation} e group by 1 having count(distinct e.txid) > 1
         ), cursor as materialized (
             select c.name, c.window_no, s.\"grouping\",
                    (select min(e.seq) from {relation} e
                      where exists (select from outbox.parked p where p.sink = s.id and p.seq = e.seq)
                         or (e.txid between local.since and greatest(pg_snapshot_xmax(now.snapshot), $3)
                             and not exists (select from restored r where r.by = e.xmin::text))
                         or not case
                            when c.window_no is null then (e.txid, e.seq) <= (c.txid, c.seq)
                            when pg_visible_in_snapshot(e.txid, c.done) then true
                            when not pg_visible_in_snapshot(e.txid, c.upto) then false
                            when c.at_grouping = 'transaction' then ({last}, e.seq) <= (c.at_group, c.at_seq)
                            else e.seq <= c.at_seq
                        end) as first
               from now cross join local cross join outbox.cursors c left join outbox.sinks s on c.name = 'sink:' || s.id
              where c.stream = $1
         ), moved as (
             update {relation} e
                set txid = now.v, id = coalesce(e.id, outbox.event_id(e.id, $1, e.txid, e.seq, e.\"time\"))
               from now where e.txid <> now.v
         )
         select now.v, now.snapshot::text, (select max(e.seq) from {relation} e), c.name, c.window_no, c.\"grouping\", c.first
           from now left join cursor c on true",
        last = transactions::last_of(stream, "e.txid"),
    );
    let args = [
        Arg::Text(Some(&stream.name)),
        Arg::I64(Some(catalog::system_identifier())),
        Arg::Xid(catalog::next_xid()),
    ];
    let rows = spi.write(&sql, &args).map(|row| {
        let snapshot = row.text(1).and_then(|text| text.parse::<Snapshot>().ok());
        let snapshot = snapshot.unwrap_or_else(Snapshot::empty);
        let now = Now {
            v: row.xid(0).unwrap_or(0),
            // What this transaction writes after this is not committed either.
            seen: match catalog::own_xid() {
                Some(own) => snapshot.with_running(own),
                None => snapshot,
            },
            greatest: row.i64(2).unwrap_or(0),
        };
        let cursor = row.text(3).map(|name| Cursor {
            name,
            window_no: row.i64(4),
            grouping: row
                .text(5)
                .as_deref()
                .and_then(Grouping::named)
                .unwrap_or_default(),
            first: row.i64(6),
        });
        (now, cursor)
    });
    for (now, cursor) in rows {
        if let Some(cursor) = cursor {
            let next_floor = floors.below(now.seen.xmax()).unwrap_or(0);
            write_cursor(spi, &cursor, &now, next_floor);
        }
    }
    spi.write(
        "update outbox.streams set pruned_seq = 0, gone_txid = '0', gone_seq = 0, numbering = pg_relation_filenode(sequence) where name = $1",
        &[Arg::Text(Some(&stream.name))],
    );
}

/// What the stream has come to.
struct Now {
    /// The transaction whose events all are that were visible.
    v: u64,
    /// The snapshot in which they were.
    seen: Snapshot,
    /// Their greatest seq.
    greatest: i64,
}

impl Now {
    /// Before the first event that a cursor had not seen.
    fn place_of(&self, cursor: &Cursor, next_floor: i64) -> Place {
        let window = Window {
            number: cursor.window_no.unwrap_or(0) + LEAP,
            grouping: cursor.grouping,
            done: Snapshot::before(self.v),
            upto: self.seen.clone(),
            floor: 0,
            ceiling: self.greatest,
            next_floor,
        };
        let mark = match cursor.first {
            None => Mark::END,
            Some(first) => Mark {
                group: match cursor.grouping {
                    Grouping::Transaction => self.greatest,
                    Grouping::Event => first - 1,
                },
                seq: first - 1,
            },
        };
        Place {
            window: Arc::new(window),
            mark,
        }
    }
}

/// Puts a cursor where it belongs now. Not forward only: the old position belongs to another history.
fn write_cursor(spi: &Spi, cursor: &Cursor, now: &Now, next_floor: i64) {
    let seen = cursor.first.map_or(now.greatest, |first| first - 1);
    spi.write(
        "update outbox.cursors set txid = $2, seq = $3, updated_at = clock_timestamp() where name = $1",
        &[
            Arg::Text(Some(&cursor.name)),
            Arg::Xid(now.v),
            Arg::I64(Some(seen)),
        ],
    );
    if cursor.window_no.is_some() {
        let Place { window, mark } = now.place_of(cursor, next_floor);
        spi.write(
            "update outbox.cursors
                set window_no = $2, done = $3, upto = $4, at_group = $5, at_seq = $6, floor = $7, ceiling = $8, next_floor = $9,
                    at_grouping = $10, ahead = null,
                    handed_group = null, handed_seq = null, handed_last_txid = null, handed_last_seq = null, handed_events = null,
                    sample_seq = null, sample_xid = null
              where name = $1",
            &[
                Arg::Text(Some(&cursor.name)),
                Arg::I64(Some(window.number)),
                Arg::Snapshot(Some(&window.done.to_string())),
                Arg::Snapshot(Some(&window.upto.to_string())),
                Arg::I64(Some(mark.group)),
                Arg::I64(Some(mark.seq)),
                Arg::I64(Some(window.floor)),
                Arg::I64(Some(window.ceiling)),
                Arg::I64(Some(window.next_floor)),
                Arg::Text(Some(window.grouping.name())),
            ],
        );
    }
}
