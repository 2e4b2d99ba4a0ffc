//! Where the time goes: samples of the whole machine by `perf`, shown for the processes that took part.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use outbox_tests::Sql;
use postgres::Client;

/// What a cluster needs for it.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    ("shared_preload_libraries", "pg_outbox,pg_stat_statements"),
    ("pg_stat_statements.track", "all"),
];

/// Functions shown for each thread.
const SHOWN: usize = 25;
/// Threads with less than this share, in per cent, are not shown.
const LEAST_SHARE: f64 = 2.0;

/// A profile being taken.
pub(crate) struct Profile {
    end: Instant,
    file: PathBuf,
    perf: Option<Child>,
    parts: BTreeSet<u32>,
}

impl Profile {
    /// Starts sampling. Without `perf` only the process ids are told, for other tools.
    pub(crate) fn start(name: &str, time: Duration, db: &mut Client) -> Self {
        db.run("create extension if not exists pg_stat_statements");
        db.run("select pg_stat_statements_reset()");
        let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bench"));
        let _ = std::fs::create_dir_all(&folder);
        let file = folder.join(format!("{name}.perf"));
        let mut perf = Command::new("perf");
        perf.args(["record", "-a", "-q", "-F", "997", "-g", "-o"])
            .arg(&file);
        perf.args(["--", "sleep", &time.as_secs_f64().to_string()]);
        perf.stdout(Stdio::null()).stderr(Stdio::null());
        let perf = perf.spawn().ok();
        if perf.is_none() {
            eprintln!(
                "    there is no perf (Debian: linux-perf); what is measured goes on for {time:?}"
            );
        }
        Self {
            end: Instant::now() + time,
            file,
            perf,
            parts: BTreeSet::from([std::process::id()]),
        }
    }

    /// Whether the time is up.
    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    /// These processes take part in what is measured.
    pub(crate) fn take_part(&mut self, pids: &[u32]) {
        for &pid in pids {
            if self.parts.insert(pid) {
                eprintln!("    takes part: pid {pid}");
            }
        }
    }

    /// Prints which functions the time of each thread was spent in.
    pub(crate) fn print(mut self, db: &mut Client) {
        print_statements(db);
        let Some(mut perf) = self.perf.take() else {
            return;
        };
        let _ = perf.wait();
        let pids = self.parts.iter().map(u32::to_string).collect::<Vec<_>>();
        let mut report = Command::new("perf");
        report.args([
            "report",
            "--stdio",
            "--no-children",
            "-g",
            "none",
            "-t",
            ";",
        ]);
        report.args(["--percentage", "relative", "--sort", "pid,dso,sym"]);
        report.args(["--pid", &pids.join(","), "-i"]);
        report.arg(&self.file).stderr(Stdio::null());
        let report = report
            .output()
            .map(|output| output.stdout)
            .unwrap_or_default();
        println!("\nfrom {}:", self.file.display());
        print!("{}", by_thread(&String::from_utf8_lossy(&report)));
    }
}

/// Prints the statements that took longest, also those that functions and background workers ran.
fn print_statements(db: &mut Client) {
    println!("\n      share   calls   µs each    rows  statement");
    let statements = db.all::<String>(
        "select format('    %s %s %s %s  %s',
                    to_char(100 * total_exec_time / sum(total_exec_time) over (), '990.0%'), lpad(calls::text, 7),
                    lpad(round(1000 * mean_exec_time)::text, 9), lpad(rows::text, 7), left(regexp_replace(query, '\\s+', ' ', 'g'), 110))
           from pg_stat_statements order by total_exec_time desc limit 20",
    );
    for statement in statements {
        println!("{statement}");
    }
}

/// The lines of a report, `percent;thread;object;symbol`, as one list for each thread, in per cent of its time.
fn by_thread(report: &str) -> String {
    let mut threads: BTreeMap<&str, Vec<(f64, String)>> = BTreeMap::new();
    for line in report.lines().filter(|line| !line.starts_with('#')) {
        let mut fields = line.split(';').map(str::trim);
        let percent = fields
            .next()
            .and_then(|text| text.trim_end_matches('%').parse().ok());
        if let (Some(percent), Some(thread), Some(object), Some(symbol)) =
            (percent, fields.next(), fields.next(), fields.next())
        {
            let symbol = symbol.trim_start_matches("[.] ").trim_start_matches("[k] ");
            threads
                .entry(thread)
                .or_default()
                .push((percent, format!("{symbol} ({object})")));
        }
    }
    let mut threads = threads
        .into_iter()
        .map(|(thread, symbols)| {
            (
                symbols.iter().map(|(percent, _)| percent).sum::<f64>(),
                thread,
                symbols,
            )
        })
        .filter(|(share, ..)| *share >= LEAST_SHARE)
        .collect::<Vec<_>>();
    threads.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
    let mut text = String::new();
    for (share, thread, symbols) in threads {
        text.push_str(&format!("  {thread}: {share:.0}% of all\n"));
        for (percent, symbol) in symbols.iter().take(SHOWN) {
            text.push_str(&format!("    {:5.1}%  {symbol}\n", percent * 100.0 / share));
        }
    }
    text
}
