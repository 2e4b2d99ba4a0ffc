//! How fast a client pulls a backlog, beside PgQ: the same client reads as many columns of the same events from both.
//!
//! PgQ's consumer reads what its tables hold of an event, ours what `outbox.poll` returns of it. In both, each batch is read
//! and finished in one transaction, as a consumer does that writes to the same database.

use std::time::{Duration, Instant};

use outbox_tests::Sql;
use postgres::types::{FromSql, Type};
use postgres::{Client, Row};

use crate::Run;
use crate::drain::listed;
use crate::machine::{Meter, TICKS};
use crate::processes::{memory, ticks_of};
use crate::profile::Profile;
use crate::report::Line;
use crate::stage::Stage;

const BATCH: u64 = 1000;

const POLL: &str = r#"select seq, "time", position, topic, payload, id, source, subject, tenant, headers from outbox.poll('bench', 1000)"#;
const GET: &str = "select ev_id, ev_time, ev_txid, ev_type, ev_data, ev_retry, ev_extra1, ev_extra2, ev_extra3, ev_extra4
     from pgq.get_batch_events($1)";

/// A value of any type, as it comes over the wire.
struct Raw<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

/// Looks at every column of every row.
fn consume(rows: &[Row]) -> (u64, usize) {
    let bytes = rows
        .iter()
        .flat_map(|row| (0..row.len()).filter_map(|column| row.get::<_, Option<Raw>>(column)))
        .map(|raw| raw.0.len())
        .sum();
    (rows.len() as u64, bytes)
}

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let events = run.of(500_000, 100_000);
    let rounds = run.of(5, 2);
    let mut stage = Stage::new(run.settings());
    fill(&mut stage, events, rounds);
    let mut client = stage.cluster.connect();
    if let Some(time) = run.profile {
        let mut profile = Profile::start("pull", time, &mut stage.db);
        profile.take_part(&[backend(&mut client)]);
        while !profile.is_over() {
            pull(&mut stage, &mut client, events);
        }
        profile.print(&mut stage.db);
        return Vec::new();
    }
    let meter = Meter::start(&stage.cluster);
    let rate = |time: Duration| events as f64 / time.as_secs_f64();
    let server = backend(&mut client);
    let (mut ours, mut pgq) = (Vec::new(), Vec::new());
    let mut ticks = [0; 2];
    let busy = || ticks_of(server).map_or(0, |ticks| ticks.own);
    for round in 0..rounds {
        let start = busy();
        ours.push(rate(pull(&mut stage, &mut client, events)));
        let middle = busy();
        pgq.push(rate(pull_pgq(&mut client, events, round)));
        ticks[0] += middle - start;
        ticks[1] += busy() - middle;
    }
    let others = meter.others();
    let used = memory(&[server]);
    let cpu = ticks.map(|ticks| ticks as f64 / TICKS * 1e6 / (events * rounds as u64) as f64);
    let best = |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max);
    vec![
        Line::new("pull, batches of 1,000", best(&ours), "events/s")
            .note(format!(
                "best of {}; {:.2} µs of the backend's CPU an event; memory of that backend",
                listed(&ours),
                cpu[0]
            ))
            .memory(used)
            .others(others),
        Line::new("PgQ, the same", best(&pgq), "events/s")
            .note(format!(
                "best of {}; {:.2} µs of the backend's CPU an event",
                listed(&pgq),
                cpu[1]
            ))
            .others(others),
        Line::new("pull, ratio to PgQ", best(&ours) / best(&pgq), "").at_least(1.0),
    ]
}

pub(crate) fn backend(client: &mut Client) -> u32 {
    client.one::<i32>("select pg_backend_pid()").cast_unsigned()
}

/// The same events into both; PgQ gets a tick for each thousand, so that its batches are as large as ours.
fn fill(stage: &mut Stage, events: u64, consumers: usize) {
    stage
        .db
        .run("create extension pgq; select pgq.create_queue('bench')");
    for consumer in 0..consumers {
        stage.db.run(&format!(
            "select pgq.register_consumer('bench', 'c{consumer}')"
        ));
    }
    stage.fill_and(
        events,
        &format!(
            "perform pgq.insert_event('bench', 'order.placed', payload(n)::text, 'shop', (n % 10000)::text, null, null)
                from generate_series(low, high) n;
             commit;
             if high % {BATCH} = 0 then perform pgq.ticker('bench'); end if;"
        ),
    );
    stage
        .db
        .run("select pgq.force_tick('bench'); select pgq.ticker('bench')");
}

/// A new pull sink's consumer takes everything.
pub(crate) fn pull(stage: &mut Stage, client: &mut Client, events: u64) -> Duration {
    stage.db.run("select outbox.create_sink('bench', 'pull')");
    let poll = client.prepare(POLL).expect("poll is prepared");
    let ack = client
        .prepare("select outbox.ack('bench')")
        .expect("ack is prepared");
    let start = Instant::now();
    let mut taken = 0;
    while taken < events {
        let mut batch = client.transaction().expect("a transaction begins");
        let rows = batch.query(&poll, &[]).expect("poll answers");
        let (count, bytes) = consume(&rows);
        assert!(count > 0 && bytes > 0, "a batch of {count} after {taken}");
        taken += count;
        batch.execute(&ack, &[]).expect("ack answers");
        batch.commit().expect("the transaction commits");
    }
    let time = start.elapsed();
    stage.db.run("select outbox.drop_sink('bench')");
    time
}

fn pull_pgq(client: &mut Client, events: u64, consumer: usize) -> Duration {
    let next = format!("select pgq.next_batch('bench', 'c{consumer}')");
    let next = client.prepare(&next).expect("next_batch is prepared");
    let get = client.prepare(GET).expect("get_batch_events is prepared");
    let finish = client
        .prepare("select pgq.finish_batch($1)")
        .expect("finish_batch is prepared");
    let start = Instant::now();
    let mut taken = 0;
    while taken < events {
        let mut batch = client.transaction().expect("a transaction begins");
        let row = batch.query_one(&next, &[]).expect("next_batch answers");
        let id: Option<i64> = row.get(0);
        let id = id.unwrap_or_else(|| panic!("no batch after {taken}"));
        let rows = batch.query(&get, &[&id]).expect("get_batch_events answers");
        taken += consume(&rows).0;
        batch
            .execute(&finish, &[&id])
            .expect("finish_batch answers");
        batch.commit().expect("the transaction commits");
    }
    start.elapsed()
}
