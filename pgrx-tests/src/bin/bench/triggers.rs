//! What capture adds to the statements that write to a table, beside the same table without it: transactions of a single row by pgbench
//! with four clients, and statements that touch 100,000 rows.

use std::fs;
use std::time::Instant;

use outbox_tests::Sql;

use crate::Run;
use crate::capture::{median, pgbench};
use crate::drain::listed;
use crate::machine::Meter;
use crate::profile::Profile;
use crate::report::Line;
use crate::stage::Stage;

/// The tables: one without capture, and one for each payload.
const TABLES: [&str; 5] = ["alone", "keys", "changed", "full", "before_after"];

const ROWS: u32 = 100_000;

/// The statements that touch many rows, and what is asked of them.
const BULK: [(&str, &str, Option<f64>); 3] = [
    (
        "insert … select",
        "insert into t_{table} (customer, total, state, note)
         select n % 1000, n / 7.0, 'placed', 'leave it at the door' from generate_series(1, {rows}) n",
        Some(2.5),
    ),
    ("update", "update t_{table} set state = 'paid', total = total + 1", None),
    ("delete", "delete from t_{table}", None),
];

fn stage(run: &Run) -> Stage {
    let mut stage = Stage::new(run.settings());
    // Nobody reads the events: what is measured is the writing.
    stage.db.run("select outbox.stop()");
    for table in TABLES {
        stage.db.run(&format!(
            "create table t_{table} (id bigint generated always as identity primary key, customer int, total numeric, state text, note text,
                                   placed_at timestamptz default now())"
        ));
        if table != "alone" {
            stage.db.run(&format!(
                "select outbox.capture('t_{table}', payload => '{table}')"
            ));
        }
        let script = format!(
            "\\set customer random(1, 100000)\n\\set total random(100, 99999)\n\
             insert into t_{table} (customer, total, state, note) values (:customer, :total, 'placed', 'leave it at the door');\n"
        );
        fs::write(
            stage.cluster.socket_folder().join(format!("{table}.sql")),
            script,
        )
        .expect("a script is written");
    }
    stage
}

pub(crate) fn figure(run: &Run) -> Vec<Line> {
    let mut stage = stage(run);
    if let Some(time) = run.profile {
        profile(&mut stage, time);
        return Vec::new();
    }
    let mut lines = single_rows(run, &mut stage);
    lines.extend(many_rows(run, &mut stage));
    lines
}

fn single_rows(run: &Run, stage: &mut Stage) -> Vec<Line> {
    let (rounds, seconds) = run.of((7, 6), (3, 3));
    let meter = Meter::start(&stage.cluster);
    let mut tps = vec![Vec::new(); TABLES.len()];
    for _ in 0..rounds {
        for (index, table) in TABLES.iter().enumerate() {
            tps[index].push(pgbench(stage, table, seconds));
        }
    }
    let others = meter.others();
    let mut lines = vec![
        Line::new("single rows, not captured", median(&tps[0]), "tps")
            .note(format!("median of {}", listed(&tps[0])))
            .others(others),
    ];
    for (index, payload) in TABLES.iter().enumerate().skip(1) {
        let ratios = ratios(&tps[index], &tps[0]);
        lines.push(
            Line::new(
                format!("single rows, payload {payload}, ratio"),
                median(&ratios),
                "",
            )
            .at_least(0.9)
            .note(format!("median of {}", listed(&ratios))),
        );
    }
    lines
}

fn many_rows(run: &Run, stage: &mut Stage) -> Vec<Line> {
    let rounds = run.of(7, 3);
    let meter = Meter::start(&stage.cluster);
    let mut seconds = vec![vec![Vec::new(); TABLES.len()]; BULK.len()];
    for _ in 0..rounds {
        for table in TABLES {
            stage.db.run(&format!("truncate t_{table}, outbox.events"));
        }
        stage.settle();
        for (step, (_, sql, _)) in BULK.iter().enumerate() {
            for (index, table) in TABLES.iter().enumerate() {
                let sql = sql
                    .replace("{table}", table)
                    .replace("{rows}", &ROWS.to_string());
                let start = Instant::now();
                stage.db.run(&sql);
                seconds[step][index].push(start.elapsed().as_secs_f64());
            }
        }
    }
    let others = meter.others();
    let mut lines = Vec::new();
    for ((name, _, aim), seconds) in BULK.iter().zip(&seconds) {
        lines.push(
            Line::new(
                format!("{name} of {ROWS} rows, not captured"),
                median(&seconds[0]) * 1000.0,
                "ms",
            )
            .others(others),
        );
        for (index, payload) in TABLES.iter().enumerate().skip(1) {
            let ratios = ratios(&seconds[index], &seconds[0]);
            let line = Line::new(
                format!("{name}, payload {payload}, time ratio"),
                median(&ratios),
                "",
            )
            .note(format!("median of {}", listed(&ratios)));
            lines.push(match aim {
                Some(aim) => line.at_most(*aim),
                None => line,
            });
        }
    }
    lines
}

fn ratios(of: &[f64], to: &[f64]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of / to).collect()
}

/// Repeats the insert that the aim is set for.
fn profile(stage: &mut Stage, time: std::time::Duration) {
    let sql = BULK[0]
        .1
        .replace("{table}", "full")
        .replace("{rows}", &ROWS.to_string());
    let pid: i32 = stage.db.one("select pg_backend_pid()");
    let mut profile = Profile::start("triggers", time, &mut stage.db);
    profile.take_part(&[pid.unsigned_abs()]);
    while !profile.is_over() {
        stage.db.run(&sql);
        stage.db.run("truncate t_full, outbox.events");
    }
    profile.print(&mut stage.db);
}
