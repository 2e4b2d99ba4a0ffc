//! How fast rows that are there already become events and reach one sink: while nobody writes, and while four clients change rows of the
//! same table, each change an event of its own.

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use outbox_tests::{Receiver, Sql, until};

use crate::Run;
use crate::capture::median;
use crate::drain::listed;
use crate::machine::Meter;
use crate::processes::{dispatchers, memory};
use crate::profile::Profile;
use crate::report::Line;
use crate::stage::Stage;

const CLIENTS: &str = "4";

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let (rows, rounds) = run.of((200_000, 5), (20_000, 2));
    let mut stage = stage(run, rows);
    let receiver = Receiver::builder().counting().start();
    stage.db.run(&format!(
        r#"select outbox.create_sink('bench', 'http', '{{"url": "{}"}}', batch_size => 1000, start => 'tail')"#,
        receiver.url()
    ));
    if let Some(time) = run.profile {
        let mut profile = Profile::start("backfill", time, &mut stage.db);
        profile.take_part(&dispatchers(&mut stage.db));
        while !profile.is_over() {
            backfill(&mut stage, rows);
        }
        profile.print(&mut stage.db);
        return Vec::new();
    }
    [false, true]
        .map(|with_writers| measure(&mut stage, rows, rounds, with_writers))
        .into()
}

fn stage(run: &Run, rows: u32) -> Stage {
    let mut stage = Stage::new(run.settings());
    stage.db.run(&format!(
        "create table orders (id bigint primary key, customer int, total numeric, state text, note text, placed_at timestamptz default now());
         insert into orders select n, n % 1000, n / 7.0, 'placed', 'leave it at the door' from generate_series(1, {rows}) n;
         select outbox.capture('orders')"
    ));
    stage.settle();
    fs::write(
        stage.cluster.socket_folder().join("change.sql"),
        format!(
            "\\set id random(1, {rows})\nupdate orders set total = total + 1 where id = :id;\n"
        ),
    )
    .expect("a script is written");
    stage
}

/// Clients that go on until they are dropped.
struct Writers(Child);

impl Writers {
    fn start(stage: &Stage) -> Self {
        let mut pgbench = stage.cluster.program("pgbench");
        pgbench.args(["-n", "-M", "prepared", "-c", CLIENTS, "-j", CLIENTS]);
        pgbench.args(["-T", "3600", "-f"]);
        pgbench.arg(stage.cluster.socket_folder().join("change.sql"));
        pgbench.stdout(Stdio::null()).stderr(Stdio::null());
        Self(pgbench.spawn().expect("pgbench runs"))
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(stage: &mut Stage, rows: u32, rounds: usize, with_writers: bool) -> Line {
    let meter = Meter::start(&stage.cluster);
    let (mut rates, mut changes) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        stage.db.run("truncate outbox.events");
        let writers = with_writers.then(|| Writers::start(stage));
        if with_writers {
            until("the clients write", || {
                stage
                    .db
                    .one::<bool>("select exists (select from outbox.events)")
                    .then_some(())
            });
        }
        let before = changed(stage);
        let seconds = backfill(stage, rows);
        changes.push((changed(stage) - before) / seconds);
        rates.push(f64::from(rows) / seconds);
        drop(writers);
    }
    let others = meter.others();
    let used = memory(&dispatchers(&mut stage.db));
    let what = if with_writers {
        format!("backfill to one sink while {CLIENTS} clients write")
    } else {
        "backfill to one sink".to_owned()
    };
    let meanwhile = match with_writers {
        true => format!("; {} changes/s meanwhile", listed(&changes)),
        false => String::new(),
    };
    Line::new(what, median(&rates), "rows/s")
        .note(format!("median of {}{meanwhile}", listed(&rates)))
        .memory(used)
        .others(others)
}

/// How many changes have become events: each is numbered, and so are the rows of backfills.
fn changed(stage: &mut Stage) -> f64 {
    let sql = "select count(*) from outbox.events where for_sink is null";
    stage.db.one::<i64>(sql) as f64
}

/// Backfills all rows, and says how many seconds that took. What the sink has not had by then is less than a hundredth.
fn backfill(stage: &mut Stage, rows: u32) -> f64 {
    let start = Instant::now();
    let id: i64 = stage.db.one("select outbox.backfill('orders', 'bench')");
    let is_done = format!(
        "select state = 'done' and rows = {rows} from outbox.backfill_status where id = {id}"
    );
    while !stage.db.one::<bool>(&is_done) {
        std::thread::sleep(Duration::from_millis(5));
    }
    start.elapsed().as_secs_f64()
}
