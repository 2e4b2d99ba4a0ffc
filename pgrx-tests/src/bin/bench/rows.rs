//! From commit to the row: destinations that are tables, whose rows say themselves when they were inserted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, UNIX_EPOCH};

use outbox_tests::Sql;
use postgres::Client;

use crate::Run;
use crate::brokers::{followed, latencies};
use crate::latency::{Arrivals, Latency, lines};
use crate::report::Line;
use crate::stage::{self, Stage};

const RATE: u64 = 1000;
const LOOK: Duration = Duration::from_millis(20);

/// The columns of a row that say which ones are new, and when it was inserted.
const NUMBER: &str = "number bigint generated always as identity";
const AT: &str = "at timestamptz default clock_timestamp()";

/// To a function that inserts.
pub(crate) fn by_function(run: &Run) -> Vec<Line> {
    let rounds = latencies(run, |stage, seconds| {
        stage.db.run(&format!(
            "drop table if exists received;
             create table received (payload jsonb, {NUMBER}, {AT});
             create or replace function receive(events outbox.event[]) returns void language sql as $$
                 insert into received (payload) select e.payload from unnest(events) e $$"
        ));
        let rows = stage.cluster.connect();
        let sink = r#"'function', '{"function": "receive(outbox.event[])"}'"#;
        to_rows(stage, sink, seconds, rows, "received")
    });
    lines("by a function ", RATE, &rounds)
}

/// To a table of another PostgreSQL.
pub(crate) fn elsewhere(run: &Run) -> Vec<Line> {
    let rounds = latencies(run, |stage, seconds| {
        let there = stage::elsewhere();
        let mut rows = there.connect();
        rows.run(&format!("alter table arrived add {NUMBER}, add {AT}"));
        let dsn = there.url("app");
        let sink = format!(r#"'postgres', '{{"dsn": "{dsn}", "table": "arrived"}}'"#);
        to_rows(stage, &sink, seconds, rows, "arrived")
    });
    lines("by another PostgreSQL ", RATE, &rounds)
}

fn to_rows(
    stage: &mut Stage,
    sink: &str,
    seconds: u64,
    rows: Client,
    table: &'static str,
) -> Latency {
    followed(stage, sink, seconds, move |arrivals, over, ready| {
        ready();
        follow(rows, table, arrivals, over);
    })
}

/// Notes new rows, with the time that they say themselves, until it is over.
fn follow(mut rows: Client, table: &str, arrivals: &Arrivals, over: &AtomicBool) {
    let sql = format!(
        "select number, payload::text, (extract(epoch from at) * 1000000)::bigint from {table} where number > $1 order by number"
    );
    let mut last = 0_i64;
    while !over.load(Ordering::SeqCst) {
        for row in rows.query(&sql, &[&last]).expect("rows can be read") {
            let payload: Option<&str> = row.get(1);
            let at = UNIX_EPOCH + Duration::from_micros(row.get::<_, i64>(2).cast_unsigned());
            arrivals.note(payload.unwrap_or_default().as_bytes(), at);
            last = row.get(0);
        }
        sleep(LOOK);
    }
}
