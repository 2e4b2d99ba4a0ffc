//! What /proc tells about processes, and which of a cluster's are the extension's.

use std::fs;

use outbox_tests::Sql;
use postgres::Client;

/// CPU time of a process, in ticks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticks {
    pub(crate) own: u64,
    pub(crate) of_ended_children: u64,
}

/// The CPU time that a process has had; none if there is no such process.
pub(crate) fn ticks_of(pid: u32) -> Option<Ticks> {
    let fields = stat(pid)?;
    let at = |index: usize| {
        fields
            .get(index)
            .and_then(|field| field.parse::<u64>().ok())
    };
    // utime, stime, cutime and cstime are fields 14 to 17 of the file; ours begin with the third.
    Some(Ticks {
        own: at(11)? + at(12)?,
        of_ended_children: at(13)? + at(14)?,
    })
}

/// The processes whose parent is `parent`.
pub(crate) fn children_of(parent: u32) -> Vec<u32> {
    let parent = parent.to_string();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| stat(pid).is_some_and(|fields| fields.get(1) == Some(&parent)))
        .collect()
}

/// The fields of /proc/<pid>/stat behind the name, which may hold spaces.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// A number in /proc/<pid>/status.
pub(crate) fn status(pid: u32, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

/// The extension's processes: launcher and dispatchers.
pub(crate) fn workers(db: &mut Client) -> Vec<u32> {
    pids(db, "backend_type like 'pg_outbox %'")
}

/// The dispatchers, also those for single sinks.
pub(crate) fn dispatchers(db: &mut Client) -> Vec<u32> {
    pids(db, "backend_type = 'pg_outbox dispatcher'")
}

fn pids(db: &mut Client, condition: &str) -> Vec<u32> {
    let sql = format!("select pid from pg_stat_activity where {condition} order by pid");
    db.all::<i32>(&sql)
        .into_iter()
        .map(i32::cast_unsigned)
        .collect()
}

/// Private memory, in kB, of those processes together.
pub(crate) fn memory(pids: &[u32]) -> u64 {
    pids.iter().filter_map(|&pid| status(pid, "RssAnon")).sum()
}
