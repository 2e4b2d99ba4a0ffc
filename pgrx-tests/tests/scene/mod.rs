//! A cluster whose dispatcher loses no time, and what tests of deliveries ask of it again and again.
#![allow(dead_code, reason = "each file of tests needs a part of it")]

pub mod picky;
pub mod unseen;

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use outbox_tests::{Cluster, DEADLINE, Receiver, Sql, cluster};
use postgres::Client;
use serde_json::{Value, json};

/// A cluster that retries quickly.
pub fn quick() -> cluster::Builder {
    Cluster::builder()
        .setting("outbox.retry_min", "20ms")
        .setting("outbox.retry_max", "200ms")
        .setting("outbox.poll_interval", "1s")
}

/// A text as an SQL literal.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// Creates a sink of kind http. `config` is added to the URL; `arguments` are further ones of `create_sink`.
#[track_caller]
pub fn http_sink(db: &mut Client, id: &str, to: &Receiver, config: Value, arguments: &str) {
    let mut whole = json!({"url": to.url()});
    let (Value::Object(whole_members), Value::Object(more)) = (&mut whole, config) else {
        panic!("a config is an object");
    };
    whole_members.extend(more);
    let config = quoted(&whole.to_string());
    let rest = if arguments.is_empty() {
        String::new()
    } else {
        format!(", {arguments}")
    };
    db.run(&format!(
        "select outbox.create_sink('{id}', 'http', config => {config}{rest})"
    ));
}

/// Emits events in one transaction: event `n` has the id `n<n>`, the subject `<n>` and the payload `{"n": <n>}`.
#[track_caller]
pub fn emit(db: &mut Client, numbers: RangeInclusive<i64>) {
    let (first, last) = numbers.into_inner();
    db.run(&format!(
        "select outbox.emit('test.numbered', jsonb_build_object('n', n), subject => n::text, source => 'test', id => 'n' || n)
           from generate_series({first}, {last}) n"
    ));
}

/// The ids of the events that [`emit`] wrote.
pub fn ids(numbers: impl IntoIterator<Item = i64>) -> Vec<String> {
    numbers.into_iter().map(|n| format!("n{n}")).collect()
}

/// The ids of 1 to `last` but for these.
pub fn ids_without(last: i64, these: &[i64]) -> Vec<String> {
    ids((1..=last).filter(|n| !these.contains(n)))
}

/// A row of `outbox.status`.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    pub state: String,
    pub lag_events: i64,
    pub delivered: i64,
    pub dead_letters: i64,
    pub attempts: i32,
    pub last_error: Option<String>,
    /// In seconds from now; negative if it is over.
    pub next_attempt_in: Option<f64>,
    pub lease_pid: Option<i32>,
    pub waiting_for: Option<String>,
}

#[track_caller]
pub fn status(db: &mut Client, sink: &str) -> Status {
    let row = db
        .query_one(
            "select state, lag_events, delivered, dead_letters, attempts, last_error,
                    extract(epoch from next_attempt_at - clock_timestamp())::float8, lease_pid, waiting_for
               from outbox.status where sink = $1",
            &[&sink],
        )
        .unwrap_or_else(|error| panic!("the status of {sink}: {error}"));
    Status {
        state: row.get(0),
        lag_events: row.get(1),
        delivered: row.get(2),
        dead_letters: row.get(3),
        attempts: row.get(4),
        last_error: row.get(5),
        next_attempt_in: row.get(6),
        lease_pid: row.get(7),
        waiting_for: row.get(8),
    }
}

/// Waits until a sink's status is as asked for.
#[track_caller]
pub fn until_status(
    db: &mut Client,
    sink: &str,
    what: &str,
    mut is_it: impl FnMut(&Status) -> bool,
) -> Status {
    let start = Instant::now();
    loop {
        let now = status(db, sink);
        if is_it(&now) {
            return now;
        }
        assert!(
            start.elapsed() < DEADLINE * 2,
            "sink {sink} never came to {what}: {now:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a sink has nothing left to do and no trouble.
#[track_caller]
pub fn until_idle(db: &mut Client, sink: &str) -> Status {
    until_status(db, sink, "idle, with no trouble", |status| {
        status.state == "idle" && status.last_error.is_none()
    })
}

/// A row of `outbox.dead_letters`.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    pub position: String,
    pub event: Value,
    pub error: String,
    pub attempts: i32,
    pub queued: bool,
}

impl DeadLetter {
    pub fn id(&self) -> &str {
        self.event["id"].as_str().expect("an event has an id")
    }
}

/// The dead letters of a sink, in order of position.
#[track_caller]
pub fn dead_letters(db: &mut Client, sink: &str) -> Vec<DeadLetter> {
    let rows = db
        .query(
            "select outbox.format_position(txid, seq), event, error, attempts, redeliver_at is not null
               from outbox.dead_letters where sink = $1 order by txid, seq",
            &[&sink],
        )
        .expect("dead letters can be read");
    rows.iter()
        .map(|row| DeadLetter {
            position: row.get(0),
            event: row.get(1),
            error: row.get(2),
            attempts: row.get(3),
            queued: row.get(4),
        })
        .collect()
}

/// Waits until a sink has that many dead letters, and returns them.
#[track_caller]
pub fn until_dead(db: &mut Client, sink: &str, count: usize) -> Vec<DeadLetter> {
    let what = format!("{count} dead letters");
    until_status(db, sink, &what, |status| {
        status.dead_letters == count as i64
    });
    dead_letters(db, sink)
}

/// Ends the process that delivers to a sink, as `pg_terminate_backend` does, and waits until another one does.
#[track_caller]
pub fn replace_dispatcher(db: &mut Client, sink: &str) {
    let old = until_status(db, sink, "a holder of its lease", |status| {
        status.lease_pid.is_some()
    })
    .lease_pid;
    let pid = old.expect("it has one");
    db.run(&format!("select pg_terminate_backend({pid})"));
    until_status(db, sink, "another holder of its lease", |status| {
        status.lease_pid.is_some() && status.lease_pid != old
    });
}

/// Whether an error is one line that people can read.
#[track_caller]
pub fn assert_clear(error: &str) {
    let clear = !error.is_empty()
        && error.len() <= 500
        && !error.chars().any(char::is_control)
        && error.trim() == error;
    assert!(clear, "not one clear line: {error:?}");
}
