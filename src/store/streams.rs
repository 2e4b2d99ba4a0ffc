//! outbox.streams: the tables that hold events, and where their sequences stand.

use crate::dispatch::{Floors, Grouping, Snapshot, Window};
use crate::pg::catalog;
use crate::pg::error::Complaint;
use crate::pg::spi::{Row, Spi};

/// A stream of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) name: String,
    /// Of the table. A stream that is dropped and made again has another one, and numbers its events anew.
    pub(crate) oid: u32,
    /// The table, qualified and quoted.
    pub(crate) relation: String,
    /// The sequence behind `seq`, qualified and quoted.
    pub(crate) sequence: String,
    /// Retention has removed everything up to here.
    pub(crate) pruned_seq: i64,
    /// The sequence's file. It gets another one when its numbers begin again.
    pub(crate) numbering: u32,
    pub(crate) shape: Shape,
}

/// The name of the audit trail.
pub(crate) const AUDIT: &str = "audit";

/// What the columns of a stream's table are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Those of outbox.events.
    Events,
    /// Those of outbox.audit_events.
    Audit,
}

const COLUMNS: &str = "s.name,
       format('%I.%I', n.nspname, c.relname), format('%I.%I', qn.nspname, q.relname), s.pruned_seq, c.oid, s.shape, s.numbering
  from outbox.streams s
  join pg_catalog.pg_class c on c.oid = s.relation join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  join pg_catalog.pg_class q on q.oid = s.sequence join pg_catalog.pg_namespace qn on qn.oid = q.relnamespace";

fn stream(row: &Row) -> Stream {
    Stream {
        name: row.text(0).unwrap_or_default(),
        relation: row.text(1).unwrap_or_default(),
        sequence: row.text(2).unwrap_or_default(),
        pruned_seq: row.i64(3).unwrap_or(0),
        oid: row.oid(4).map_or(0, |oid| oid.to_u32()),
        shape: match row.text(5).as_deref() {
            Some("audit") => Shape::Audit,
            _ => Shape::Events,
        },
        numbering: row.oid(6).map_or(0, |oid| oid.to_u32()),
    }
}

pub(crate) fn all(spi: &Spi) -> Vec<Stream> {
    spi.read(&format!("select {COLUMNS} order by s.name"), &[])
        .map(stream)
}

pub(crate) fn named(spi: &Spi, name: &str) -> Option<Stream> {
    use crate::pg::spi::Arg;
    spi.read(
        &format!("select {COLUMNS} where s.name = $1"),
        &[Arg::Text(Some(name))],
    )
    .first(stream)
}

/// Keeps a stream from being dropped until the transaction ends. False if it is gone.
pub(crate) fn hold(spi: &Spi, name: &str) -> bool {
    use crate::pg::spi::Arg;
    let held = spi.write(
        "select from outbox.streams where name = $1 for key share",
        &[Arg::Text(Some(name))],
    );
    held.count() == 1
}

/// The error for a stream that does not exist.
pub(crate) fn unknown(name: &str) -> Complaint {
    Complaint::unknown(format!("stream \"{name}\" does not exist"))
        .hint("Streams are made by outbox.create_stream and listed in outbox.streams.")
}

/// What is visible now in a stream, and how far its numbering has come.
#[derive(Debug, Clone)]
pub(crate) struct Horizon {
    pub(crate) snapshot: Snapshot,
    /// The sequence's value, read after the snapshot was taken.
    pub(crate) last_seq: i64,
    /// The stream's numbers have begun again since it was read what stream that is: nothing may be made of it before the cursors
    /// are re-based.
    pub(crate) is_renumbered: bool,
}

impl Stream {
    /// Takes the snapshot in force and a sample of the sequence, which is remembered in `floors`.
    pub(crate) fn look(&self, spi: &Spi, floors: &mut Floors) -> Horizon {
        let sql = format!(
            "select pg_current_snapshot()::text, case when is_called then last_value else 0 end, pg_relation_filenode(tableoid) from {}",
            self.sequence
        );
        let (text, last_seq, numbering) = spi
            .read(&sql, &[])
            .first(|row| {
                let numbering = row.oid(2).map(|oid| oid.to_u32());
                (
                    row.text(0).unwrap_or_default(),
                    row.i64(1).unwrap_or(0),
                    numbering,
                )
            })
            .unwrap_or_default();
        // Read after the sequence: transactions from this id on draw greater numbers.
        floors.sample(last_seq, catalog::next_xid());
        let snapshot = text
            .parse::<Snapshot>()
            .unwrap_or_else(|_| Snapshot::empty());
        // A session's snapshots show it its own changes; for everybody else they are not there yet.
        let snapshot = match catalog::own_xid() {
            Some(own) => snapshot.with_running(own),
            None => snapshot,
        };
        Horizon {
            snapshot,
            last_seq,
            is_renumbered: numbering.is_some_and(|numbering| numbering != self.numbering),
        }
    }
}

impl Horizon {
    /// The window that follows `window` and ends here, to be read in this order; none if nothing can have been committed in between, or if this is the older
    /// one: then somebody else has opened the window since.
    pub(crate) fn window_after(
        &self,
        window: &Window,
        grouping: Grouping,
        floors: &mut Floors,
    ) -> Option<Window> {
        let is_older = self.snapshot.xmax() < window.upto.xmax()
            || !window.upto.sees_none_of(self.snapshot.running());
        (self.snapshot != window.upto && !is_older).then(|| {
            window.next(
                grouping,
                self.snapshot.clone(),
                self.last_seq,
                floors.below(self.snapshot.xmax()),
            )
        })
    }
}
