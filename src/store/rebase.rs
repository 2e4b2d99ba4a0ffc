//! Positions after a move to another cluster.
//!
//! Positions are transaction ids. A logical restore, or pg_upgrade, brings them to a cluster whose ids start low again or belong to
//! a different history: every cursor would lie in the future, and new events would be skipped for ever, silently. The sign is
//! outbox.clusters, where CREATE EXTENSION wrote this cluster's identifier and the dump adds the old one's.
//!
//! The cure: all events become those of one transaction X of this cluster, which keeps their order by seq, and every cursor is put
//! before the first event that it had not seen. Undelivered events stay undelivered; some may be delivered twice.

use std::sync::Arc;

use super::streams::{self, Stream};
use crate::dispatch::{Mark, Place, Snapshot, Window};
use crate::pg::catalog;
use crate::pg::spi::{Arg, Spi};

fn has_moved(spi: &Spi) -> bool {
    spi.read(
        "select exists (select from outbox.clusters where system_identifier <> $1)",
        &[Arg::I64(Some(catalog::system_identifier()))],
    )
    .first(|row| row.bool(0).unwrap_or(false))
    .unwrap_or(false)
}

/// Re-bases all streams if this database came from another cluster. True if it did.
pub(crate) fn if_moved(spi: &Spi) -> bool {
    if !has_moved(spi) {
        return false;
    }
    // One at a time: whoever comes second finds it done.
    spi.write("lock table outbox.clusters in exclusive mode", &[]);
    let still = spi.write(
        "select from outbox.clusters where system_identifier <> $1",
        &[Arg::I64(Some(catalog::system_identifier()))],
    );
    if still.count() == 0 {
        return false;
    }
    for stream in streams::all(spi) {
        rebase(spi, &stream);
    }
    spi.write("delete from outbox.clusters", &[]);
    spi.write(
        "insert into outbox.clusters (system_identifier) values ($1)",
        &[Arg::I64(Some(catalog::system_identifier()))],
    );
    pgrx::log!("pg_outbox: positions re-based: this database came from another cluster");
    true
}

fn rebase(spi: &Spi, stream: &Stream) {
    let relation = &stream.relation;
    // Everything that gets a transaction id after this draws numbers above.
    let last_seq = spi
        .read(
            &format!(
                "select case when is_called then last_value else 0 end from {}",
                stream.sequence
            ),
            &[],
        )
        .first(|row| row.i64(0).unwrap_or(0))
        .unwrap_or(0);
    let (x, now) = spi
        .write(
            "select pg_current_xact_id(), pg_current_snapshot()::text",
            &[],
        )
        .first(|row| (row.xid(0).unwrap_or(0), row.text(1).unwrap_or_default()))
        .unwrap_or_default();
    let done = now
        .parse::<Snapshot>()
        .unwrap_or_else(|_| Snapshot::empty())
        .with_running(x);
    let upto = done.clone().with_finished(x);

    // What each cursor has not seen, in terms of the old ids. What was written here since the extension was made is new to all.
    let sql = format!(
        "select c.name, c.window_no, s.\"grouping\",
                (select min(e.seq) from {relation} e
                  where e.txid between local.since and $3 or not case
                      when c.window_no is null then (e.txid, e.seq) <= (c.txid, c.seq)
                      when pg_visible_in_snapshot(e.txid, c.done) then true
                      when not pg_visible_in_snapshot(e.txid, c.upto) then false
                      else c.at_seq = $2 or (e.seq <= c.at_seq and s.\"grouping\" = 'event')
                  end)
           from outbox.cursors c left join outbox.sinks s on c.name = 'sink:' || s.id
                cross join (select min(k.since_xid) as since from outbox.clusters k where k.system_identifier = $4) local
          where c.stream = $1"
    );
    let args = [
        Arg::Text(Some(&stream.name)),
        Arg::I64(Some(Mark::END.seq)),
        Arg::Xid(x),
        Arg::I64(Some(catalog::system_identifier())),
    ];
    let cursors = spi.write(&sql, &args).map(|row| {
        (
            row.text(0).unwrap_or_default(),
            row.i64(1),
            row.text(2),
            row.i64(3),
        )
    });
    spi.write(
        &format!("update {relation} e set txid = $1 where e.txid <> $1"),
        &[Arg::Xid(x)],
    );
    let greatest = spi
        .write(&format!("select max(e.seq) from {relation} e"), &[])
        .first(|row| row.i64(0))
        .flatten()
        .unwrap_or(0);

    for (name, window_no, grouping, first) in cursors {
        let seen = first.map_or(greatest, |first| first - 1);
        let mark = match (first, grouping.as_deref()) {
            (None, _) => Mark::END,
            (Some(_), Some("transaction")) => Mark {
                group: greatest,
                seq: seen,
            },
            (Some(_), _) => Mark {
                group: seen,
                seq: seen,
            },
        };
        let window = Window {
            number: window_no.unwrap_or(0) + 1,
            done: done.clone(),
            upto: upto.clone(),
            floor: 0,
            ceiling: greatest,
            next_floor: last_seq,
        };
        write_cursor(
            spi,
            &name,
            window_no.is_some(),
            &Place {
                window: Arc::new(window),
                mark,
            },
            x,
            seen,
        );
    }
    spi.write(
        "update outbox.streams set pruned_seq = 0 where name = $1",
        &[Arg::Text(Some(&stream.name))],
    );
}

/// Puts a cursor where it belongs now. Not forward only: the old position belongs to another history.
fn write_cursor(spi: &Spi, name: &str, of_sink: bool, place: &Place, x: u64, seen: i64) {
    let window = &place.window;
    spi.write(
        "update outbox.cursors set txid = $2, seq = $3, updated_at = clock_timestamp() where name = $1",
        &[Arg::Text(Some(name)), Arg::Xid(x), Arg::I64(Some(seen))],
    );
    if of_sink {
        spi.write(
            "update outbox.cursors
                set window_no = $2, done = $3, upto = $4, at_group = $5, at_seq = $6, floor = $7, ceiling = $8, next_floor = $9,
                    handed_group = null, handed_seq = null, handed_last_txid = null, handed_last_seq = null, handed_events = null,
                    sample_seq = null, sample_xid = null
              where name = $1",
            &[
                Arg::Text(Some(name)),
                Arg::I64(Some(window.number)),
                Arg::Snapshot(Some(&window.done.to_string())),
                Arg::Snapshot(Some(&window.upto.to_string())),
                Arg::I64(Some(place.mark.group)),
                Arg::I64(Some(place.mark.seq)),
                Arg::I64(Some(window.floor)),
                Arg::I64(Some(window.ceiling)),
                Arg::I64(Some(window.next_floor)),
            ],
        );
    }
}
