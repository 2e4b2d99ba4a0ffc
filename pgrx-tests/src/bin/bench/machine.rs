//! The machine: what it is, how loaded it is, and how much of it went to others while something was measured.

use std::fs;
use std::time::Instant;

use outbox_tests::Cluster;

use crate::processes::{children_of, ticks_of};
use crate::stage;

/// Of a second, in /proc. Linux shows this unit to programs on every machine.
pub(crate) const TICKS: f64 = 100.0;

/// CPU, cores, versions and settings, for the head of the table.
pub(crate) fn described() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|rest| rest.split_once(':'))
        .map_or("an unknown CPU", |(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let settings = stage::SETTINGS.map(|(name, value)| format!("{name} = {value}"));
    format!(
        "{model}, {cores} cores, Linux {}, PostgreSQL {}\n{}\nServer, receiver and client share these cores.",
        kernel.trim(),
        stage::server_version(),
        settings.join(", ")
    )
}

/// The load average, as a warning.
pub(crate) fn load() -> String {
    let average = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = average.split(' ').next().unwrap_or("?").to_owned();
    format!("load average {first}")
}

/// Tells how many cores were busy with what is neither ours nor the cluster's.
pub(crate) struct Meter {
    postmaster: u32,
    start: Instant,
    everything: f64,
    ours: f64,
}

impl Meter {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        let postmaster = cluster.postmaster_pid();
        Self {
            postmaster,
            start: Instant::now(),
            everything: everything(),
            ours: ours(postmaster),
        }
    }

    /// Cores that were busy with other things since the start, on average.
    pub(crate) fn others(&self) -> f64 {
        let others = (everything() - self.everything) - (ours(self.postmaster) - self.ours);
        (others / self.start.elapsed().as_secs_f64()).max(0.0)
    }
}

/// CPU seconds that the machine has been busy.
fn everything() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = stat.lines().next().unwrap_or_default().split_whitespace();
    let ticks = fields
        .skip(1)
        .map(|field| field.parse::<f64>().unwrap_or(0.0))
        .collect::<Vec<_>>();
    // user nice system idle iowait irq softirq steal
    ticks
        .iter()
        .enumerate()
        .filter(|(index, _)| !matches!(index, 3 | 4) && *index < 8)
        .map(|(_, ticks)| ticks / TICKS)
        .sum()
}

/// CPU seconds of this process, of the cluster, and of children of both that have ended.
fn ours(postmaster: u32) -> f64 {
    let with_ended = |pid| ticks_of(pid).map_or(0, |ticks| ticks.own + ticks.of_ended_children);
    let live = children_of(postmaster)
        .into_iter()
        .filter_map(ticks_of)
        .map(|ticks| ticks.own)
        .sum::<u64>();
    (with_ended(std::process::id()) + with_ended(postmaster) + live) as f64 / TICKS
}
