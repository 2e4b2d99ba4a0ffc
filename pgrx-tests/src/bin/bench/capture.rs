//! What an event costs the transaction that writes it: pgbench with four clients that insert an order, and the event or not.

use std::fs;

use outbox_tests::{Receiver, Sql};

use crate::Run;
use crate::drain::listed;
use crate::machine::Meter;
use crate::processes::{dispatchers, memory};
use crate::profile::Profile;
use crate::report::Line;
use crate::stage::Stage;

const CLIENTS: &str = "4";

const ALONE: &str = "insert into orders (customer, total, state, note) values (:customer, :total, 'placed', 'leave it at the door');";
const EVENT: &str = r#"'order.placed', '{"order": 123456, "items": [{"n": 1, "sku": "A-314"}, {"n": 1, "sku": "B-15"}], "note": "leave it at the door", "state": "placed", "total": 92.65, "express": false, "currency": "EUR", "customer": "C-3589"}'"#;

/// The ways to write an event, with the first one as what they are compared to.
fn scripts() -> [(&'static str, String); 4] {
    [
        ("alone", String::new()),
        (
            "insert",
            format!(
                "insert into outbox.events (topic, payload, subject, source) values ({EVENT}, :customer::text, 'shop');"
            ),
        ),
        (
            "emit",
            format!("select outbox.emit({EVENT}, subject => :customer::text, source => 'shop');"),
        ),
        (
            "pgq",
            format!(
                "select pgq.insert_event('bench', {EVENT}, :customer::text, 'shop', null, null);"
            ),
        ),
    ]
}

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let mut lines = measure(run, false);
    if run.profile.is_none() {
        lines.extend(measure(run, true));
    }
    lines
}

fn measure(run: &Run, with_sink: bool) -> Vec<Line> {
    let mut stage = Stage::new(run.settings());
    stage.db.run(
        "create extension pgq; select pgq.create_queue('bench');
         create table orders (id bigint generated always as identity primary key, customer int, total int, state text, note text,
                              placed_at timestamptz default now())",
    );
    let receiver = Receiver::builder().counting().start();
    if with_sink {
        stage.db.run(&format!(
            r#"select outbox.create_sink('bench', 'http', '{{"url": "{}"}}')"#,
            receiver.url()
        ));
    }
    let scripts = scripts();
    for (name, event) in &scripts {
        let text = format!(
            "\\set customer random(1, 100000)\n\\set total random(100, 99999)\nbegin;\n{ALONE}\n{event}\ncommit;\n"
        );
        fs::write(
            stage.cluster.socket_folder().join(format!("{name}.sql")),
            text,
        )
        .expect("a script is written");
    }
    if let Some(time) = run.profile {
        for name in ["insert", "emit"] {
            let mut profile = Profile::start(&format!("capture-{name}"), time, &mut stage.db);
            let postmaster = stage.cluster.postmaster_pid();
            let watched = std::thread::spawn(move || {
                std::thread::sleep(time / 2);
                crate::processes::children_of(postmaster)
            });
            pgbench(&stage, name, time.as_secs() + 1);
            profile.take_part(&watched.join().expect("the watcher ends"));
            profile.print(&mut stage.db);
        }
        return Vec::new();
    }

    let (rounds, seconds) = run.of((7, 8), (3, 3));
    let meter = Meter::start(&stage.cluster);
    let mut tps = vec![Vec::new(); scripts.len()];
    for _ in 0..rounds {
        for (index, (name, _)) in scripts.iter().enumerate() {
            tps[index].push(pgbench(&stage, name, seconds));
        }
    }
    let others = meter.others();
    let used = memory(&dispatchers(&mut stage.db));
    let with = if with_sink { ", one http sink" } else { "" };
    let mut lines = vec![
        Line::new(
            format!("pgbench, order alone{with}"),
            median(&tps[0]),
            "tps",
        )
        .note(format!("median of {}", listed(&tps[0])))
        .memory(used)
        .others(others),
    ];
    for (index, what) in [
        (1, "insert into outbox.events"),
        (2, "outbox.emit"),
        (3, "pgq.insert_event"),
    ] {
        let ratios = tps[index]
            .iter()
            .zip(&tps[0])
            .map(|(with, alone)| with / alone);
        let ratios = ratios.collect::<Vec<_>>();
        let line =
            Line::new(format!("pgbench, {what}{with}, ratio"), median(&ratios), "").note(format!(
                "{} tps; median of {}",
                listed(&[median(&tps[index])]),
                listed(&ratios)
            ));
        lines.push(if index == 2 { line.at_least(0.9) } else { line });
    }
    lines
}

pub(crate) fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Transactions per second.
pub(crate) fn pgbench(stage: &Stage, script: &str, seconds: u64) -> f64 {
    let mut pgbench = stage.cluster.program("pgbench");
    pgbench.args([
        "-n",
        "-M",
        "prepared",
        "-c",
        CLIENTS,
        "-j",
        CLIENTS,
        "-T",
        &seconds.to_string(),
    ]);
    pgbench
        .arg("-f")
        .arg(stage.cluster.socket_folder().join(format!("{script}.sql")));
    let output = pgbench.output().expect("pgbench runs");
    let said = String::from_utf8_lossy(&output.stdout);
    said.lines()
        .find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("{said}\n{}", String::from_utf8_lossy(&output.stderr)))
}
