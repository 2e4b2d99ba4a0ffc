//! The tables of events: reading a window of a stream in commit order, at the cost of what is read (see dispatch/window.rs).

use std::ops::ControlFlow;

use pgrx::pg_sys;

use super::streams::{Shape, Stream};
use crate::dispatch::{Mark, Pattern, Place, Window};
use crate::envelope::{Event, Position};
use crate::pg::spi::{Arg, Record, RecordType, Row, Spi};
use crate::pg::transaction;

/// What a reader wants to see, and in what form.
#[derive(Clone, Default)]
pub(crate) struct Want {
    pub(crate) topics: Option<Vec<Pattern>>,
    pub(crate) tenant: Option<String>,
    /// Payload and headers as text, for sinks that print them.
    pub(crate) text: bool,
    /// The whole event as a value of type outbox.event, for SQL that takes one.
    pub(crate) record: bool,
    /// The stream is the audit trail, whose records are delivered as they are.
    pub(crate) records: bool,
    /// Events of a window that is read by transactions are to say which part of theirs they are.
    pub(crate) parts: bool,
    /// The number of the sink that reads. It gets what is for everybody, and what is for it alone.
    pub(crate) sink: Option<i32>,
}

impl Want {
    pub(crate) fn takes_all(&self) -> bool {
        self.tenant.is_none() && self.topics.is_none()
    }

    fn takes(&self, topic: &str, tenant: Option<&str>) -> bool {
        self.tenant
            .as_deref()
            .is_none_or(|wanted| tenant == Some(wanted))
            && self
                .topics
                .as_ref()
                .is_none_or(|patterns| patterns.iter().any(|pattern| pattern.matches(topic)))
    }
}

/// An event that was read.
pub(crate) struct Found {
    pub(crate) event: Event,
    pub(crate) record: Option<Record>,
    pub(crate) mark: Mark,
    /// Why it cannot be printed, if that is so and it is to be.
    pub(crate) problem: Option<&'static str>,
}

/// An event of a database in SQL_ASCII, which takes any bytes, may not be fit for JSON.
const UNSAYABLE: &str = "it holds text that is not valid UTF-8";
const UNPRINTABLE: &str = "its payload or headers are too large to be printed";
/// Bytes of jsonb. A text of Postgres has a gigabyte at the most, and a number that takes 16 bytes may have a text of 147,456.
const MAY_NOT_BE_PRINTABLE: usize = 64 << 10;

/// A stretch of a window.
pub(crate) struct Page {
    pub(crate) found: Vec<Found>,
    /// Everything up to here was looked at.
    pub(crate) end: Mark,
    /// How many rows that were.
    pub(crate) looked_at: usize,
    /// How many rows were walked over to find out which come next.
    pub(crate) walked: usize,
    /// The greatest position among them.
    pub(crate) greatest: Position,
}

impl Page {
    /// Nothing was looked at behind a mark.
    pub(super) fn empty(end: Mark) -> Self {
        Self {
            found: Vec::new(),
            end,
            looked_at: 0,
            walked: 0,
            greatest: Position::default(),
        }
    }

    /// A row was looked at.
    pub(super) fn pass(&mut self, row: &Row, mark: Mark) {
        self.looked_at += 1;
        self.end = mark;
        self.greatest = self.greatest.max(position_of(row));
    }
}

/// The position of a row of [`columns`].
fn position_of(row: &Row) -> Position {
    Position {
        txid: row.xid(0).unwrap_or(0),
        seq: row.i64(1).unwrap_or(0),
    }
}

/// The columns of an event, in the order of type outbox.event. The function is called only where no id is stored: Postgres cannot
/// inline it, and starts an executor for each call.
const COLUMNS: &str = r#"e.txid, e.seq, coalesce(e.id, outbox.event_id(e.id, $1, e.txid, e.seq, e."time")) as id, e.topic, e.source, e.subject,
       e.tenant, e."time", e.payload, e.headers"#;
/// The same of a record of the audit trail.
const AUDIT_COLUMNS: &str = r#"e.txid, e.seq, e.id, e.action as topic, e.resource_type as source, e.resource_id as subject, e.tenant, e."time",
       outbox.audit_record(e.id, e.tenant, e."time", e.action, e.resource_type, e.resource_id, e.admission, e.details) as payload,
       null::jsonb as headers"#;
pub(crate) const WIDTH: usize = 10;

/// The columns of an event, as they are read from the table `e` of a stream.
pub(crate) fn columns(stream: &Stream) -> &'static str {
    match stream.shape {
        Shape::Events => COLUMNS,
        Shape::Audit => AUDIT_COLUMNS,
    }
}

/// The same, and behind them the number of the sink that alone is to get the event.
pub(super) fn columns_and_sink(stream: &Stream) -> String {
    let for_sink = match stream.shape {
        Shape::Events => "e.for_sink",
        Shape::Audit => "null::int",
    };
    format!("{}, {for_sink}", columns(stream))
}

/// Whether an event of the table `e` of a stream is for a sink, or for nobody else but it.
pub(crate) fn is_for(stream: &Stream, sink: Option<i32>) -> String {
    match (stream.shape, sink) {
        (Shape::Audit, _) => "true".to_owned(),
        (Shape::Events, None) => "e.for_sink is null".to_owned(),
        (Shape::Events, Some(sink)) => format!("(e.for_sink is null or e.for_sink = {sink})"),
    }
}

/// Bytes of payload and headers, uncompressed and as texts, after which a page ends: one huge event among many must not fill the memory.
const PAGE_BYTES: usize = 16 << 20;

/// The statement that reads a window of a stream, in order of seq. Parameters: $1 the stream's name, $2 the seq behind which part (a) begins,
/// $3 its upper bound, $4 xmax of `done`, $5 `upto`, $6 limit; and with `late` $7 the exact transactions of part (b), $8 the seq
/// behind which those are wanted. Rows that the condition leaves out do not count.
pub(crate) fn window_sql(stream: &Stream, late: bool, columns: &str, condition: &str) -> String {
    let relation = &stream.relation;
    let fresh = format!(
        "select {columns} from {relation} e
          where e.seq > $2 and e.seq <= $3 and e.txid >= $4 and pg_visible_in_snapshot(e.txid, $5) and {condition} order by e.seq limit $6"
    );
    if !late {
        return fresh;
    }
    // Each late transaction is looked up by itself and read no further than needed.
    format!(
        "({fresh}) union all
         (select x.* from unnest($7) as l (late), lateral
            (select {columns} from {relation} e where e.txid = l.late and e.seq > $8 and {condition} order by e.txid, e.seq limit $6) x)
         order by 2 limit $6"
    )
}

/// The parameters of `window_sql`, from a place on.
pub(crate) fn with_window_args<R>(
    stream: &Stream,
    place: &Place,
    limit: usize,
    run: impl FnOnce(bool, &[Arg]) -> R,
) -> R {
    let window = &place.window;
    let late = window.late();
    let upto = window.upto.to_string();
    let behind = window.floor.max(place.mark.seq).max(stream.pruned_seq);
    let mut args = vec![
        Arg::Text(Some(&stream.name)),
        Arg::I64(Some(behind)),
        Arg::I64(Some(window.ceiling)),
        Arg::Xid(window.done.xmax()),
        Arg::Snapshot(Some(&upto)),
        Arg::I64(Some(i64::try_from(limit).unwrap_or(i64::MAX))),
    ];
    if !late.is_empty() {
        args.push(Arg::Xids(&late));
        args.push(Arg::I64(Some(place.mark.seq)));
    }
    run(!late.is_empty(), &args)
}

/// The last event of a window in commit order; none if it holds none.
pub(crate) fn last_of_window(spi: &Spi, stream: &Stream, window: &Window) -> Option<Position> {
    let relation = &stream.relation;
    let sql = format!(
        "(select e.txid, e.seq from {relation} e
           where e.seq > $1 and e.seq <= $2 and e.txid >= $3 and pg_visible_in_snapshot(e.txid, $4) order by e.seq desc limit 1)
         union all
         (select x.* from unnest($5) as l (late), lateral
            (select e.txid, e.seq from {relation} e where e.txid = l.late order by e.txid desc, e.seq desc limit 1) x)
         order by 2 desc limit 1"
    );
    let upto = window.upto.to_string();
    let args = [
        Arg::I64(Some(window.floor.max(stream.pruned_seq))),
        Arg::I64(Some(window.ceiling)),
        Arg::Xid(window.done.xmax()),
        Arg::Snapshot(Some(&upto)),
        Arg::Xids(&window.late()),
    ];
    spi.read(&sql, &args).first(position_of)
}

/// The last event that outbox.read could return now.
pub(crate) fn last_readable(spi: &Spi, stream: &Stream) -> Option<Position> {
    let sql = format!(
        "select e.txid, e.seq from {} e
          where e.txid < pg_snapshot_xmin(pg_current_snapshot()) order by e.txid desc, e.seq desc limit 1",
        stream.relation
    );
    spi.read(&sql, &[]).first(position_of)
}

/// Reads up to `limit` rows of a window behind a place, and keeps those that are wanted.
pub(crate) fn read(spi: &Spi, stream: &Stream, place: &Place, limit: usize, want: &Want) -> Page {
    if place.mark == Mark::END {
        return Page::empty(Mark::END);
    }
    with_window_args(stream, place, limit, |late, args| {
        let sql = window_sql(stream, late, &columns_and_sink(stream), "true");
        let rows = spi.read(&sql, args);
        let through = rows.count() < limit as u64;
        let mut page = Page::empty(place.mark);
        let record = want.record.then(RecordType::event);
        let mut bytes = 0;
        let mut cut = false;
        rows.each(|row| {
            if bytes > PAGE_BYTES {
                cut = true;
                return ControlFlow::Break(());
            }
            let seq = row.i64(1).unwrap_or(0);
            page.pass(row, Mark { group: seq, seq });
            if let Some(found) = take(row, page.end, want, record.as_ref()) {
                bytes += row.raw_json_size(8) + row.raw_json_size(9);
                let texts = [&found.event.payload, &found.event.headers];
                bytes += texts
                    .map(|text| text.as_ref().map_or(0, String::len))
                    .iter()
                    .sum::<usize>();
                page.found.push(found);
            }
            ControlFlow::Continue(())
        });
        if through && !cut {
            page.end = Mark::END;
        }
        page
    })
}

/// Reads these events, given by their seqs, in this order. Those that are gone or not wanted are left out.
pub(crate) fn these(spi: &Spi, stream: &Stream, seqs: &[i64], want: &Want) -> Vec<Found> {
    let sql = format!(
        "select {} from unnest($2::bigint[]) with ordinality as p (seq, place) join {} e on e.seq = p.seq order by p.place",
        columns_and_sink(stream),
        stream.relation
    );
    let list = seqs.iter().map(i64::to_string).collect::<Vec<_>>();
    let list = format!("{{{}}}", list.join(","));
    let record = want.record.then(RecordType::event);
    let mut found = Vec::with_capacity(seqs.len());
    let args = [Arg::Text(Some(&stream.name)), Arg::Text(Some(&list))];
    // Not under the snapshot at hand, which may be older than they are.
    spi.write(&sql, &args).each(|row| {
        let seq = row.i64(1).unwrap_or(0);
        found.extend(take(row, Mark { group: seq, seq }, want, record.as_ref()));
        ControlFlow::Continue(())
    });
    found
}

/// One row of [`columns_and_sink`] as an event, if it is wanted.
pub(crate) fn take(
    row: &Row,
    mark: Mark,
    want: &Want,
    record: Option<&RecordType>,
) -> Option<Found> {
    if row.i32(WIDTH).is_some_and(|only| want.sink != Some(only)) {
        return None;
    }
    // What is only carried along as a record is not spelled out.
    let mut exact = true;
    let mut spelled = |wanted: bool, column| {
        (want.text || wanted)
            .then(|| row.text_as_said(column, &mut exact))
            .flatten()
    };
    let topic = spelled(want.topics.is_some(), 3).unwrap_or_default();
    let tenant = spelled(want.tenant.is_some(), 6);
    if !want.takes(&topic, tenant.as_deref()) {
        return None;
    }
    let id = spelled(false, 2).unwrap_or_default();
    let source = spelled(true, 4);
    let subject = spelled(true, 5);
    let mut printable = true;
    let mut printed = |column| {
        if !want.text {
            return None;
        }
        if row.raw_json_size(column) < MAY_NOT_BE_PRINTABLE {
            return row.json_as_said(column, &mut exact);
        }
        // Its text may be longer than Postgres can hold. That is its own trouble, and nobody else's.
        let printed = transaction::nested(|| row.json_as_said(column, &mut exact));
        printable &= printed.is_ok();
        printed.ok().flatten()
    };
    let event = Event {
        position: position_of(row),
        id,
        topic,
        source,
        subject,
        tenant,
        time: row.time(7).unwrap_or(0),
        payload: printed(8),
        headers: printed(9),
        part: None,
        is_record: want.records,
    };
    let record = record.map(|of| row.record_of(of, WIDTH));
    Some(Found {
        event,
        record,
        mark,
        // As a record, it is what it is in the table.
        problem: match want.text {
            true if !printable => Some(UNPRINTABLE),
            true if !exact => Some(UNSAYABLE),
            _ => None,
        },
    })
}

/// An event from its value of type outbox.event.
pub(crate) fn from_record(spi: &Spi, record: &Record, stream: &Stream) -> Option<Event> {
    let sql = format!("select {COLUMNS}, null::int from unnest($2) as e");
    let records = std::slice::from_ref(record);
    let want = Want {
        text: true,
        ..Want::default()
    };
    spi.read(
        &sql,
        &[
            Arg::Text(Some(&stream.name)),
            Arg::Records(records, event_type()),
        ],
    )
    .first(|row| take(row, Mark::default(), &want, None))
    .flatten()
    .map(|found| found.event)
}

/// A value of type outbox.event for an event that was set aside: its row with this payload, or, where the row is gone, what is left
/// of it.
pub(crate) fn to_record(spi: &Spi, stream: &Stream, event: &Event) -> Record {
    let sql = format!(
        r#"(select row(e.txid, e.seq, outbox.event_id(e.id, $11, e.txid, e.seq, e."time"), e.topic, e.source, e.subject, e.tenant,
                       e."time", $9, e.headers)::outbox.event
              from {} e where e.seq = $2 and e.txid = $1)
           union all
           (select row($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)::outbox.event) limit 1"#,
        stream.relation
    );
    spi.read(
        &sql,
        &[
            Arg::Xid(event.position.txid),
            Arg::I64(Some(event.position.seq)),
            Arg::Text(Some(&event.id)),
            Arg::Text(Some(&event.topic)),
            Arg::Text(event.source.as_deref()),
            Arg::Text(event.subject.as_deref()),
            Arg::Text(event.tenant.as_deref()),
            Arg::Time(Some(event.time)),
            Arg::Json(event.payload.as_deref()),
            Arg::Json(event.headers.as_deref()),
            Arg::Text(Some(&stream.name)),
        ],
    )
    .first(|row| row.record(0))
    .flatten()
    .unwrap_or_default()
}

/// The type outbox.event.
pub(crate) fn event_type() -> pg_sys::Oid {
    RecordType::event_oid()
}
