//! The extension's processes, as an administrator finds them in the server's own views.
#![allow(dead_code, reason = "each file of tests needs a part of it")]

use outbox_tests::{Cluster, Signal, Sql, until};
use postgres::Client;

/// A connection that stands in no tested database's way.
#[track_caller]
pub fn admin(cluster: &Cluster) -> Client {
    cluster.connect_to("postgres")
}

/// The launcher's process id, once there is one.
#[track_caller]
pub fn launcher(cluster: &Cluster) -> i32 {
    let mut db = admin(cluster);
    until("the launcher", || {
        db.all("select pid from pg_stat_activity where backend_type = 'pg_outbox launcher'")
            .pop()
    })
}

/// The process ids of a database's dispatchers, those of single sinks among them.
#[track_caller]
pub fn dispatchers(cluster: &Cluster, database: &str) -> Vec<i32> {
    admin(cluster).all(&format!(
        "select pid from pg_stat_activity where backend_type = 'pg_outbox dispatcher' and datname = '{database}' order by pid"
    ))
}

/// The process id of the one dispatcher of a database that serves all of its sinks, if there is one: it holds the lease with number 0.
#[track_caller]
pub fn find_dispatcher(cluster: &Cluster, database: &str) -> Option<i32> {
    admin(cluster)
        .all(&format!(
            "select l.pid from pg_locks l join pg_database d on d.oid = l.database
              where l.locktype = 'advisory' and l.objsubid = 3 and l.objid = 0 and l.granted and d.datname = '{database}'"
        ))
        .pop()
}

/// The same, waited for.
#[track_caller]
pub fn dispatcher(cluster: &Cluster, database: &str) -> i32 {
    until(&format!("a dispatcher of {database}"), || {
        find_dispatcher(cluster, database)
    })
}

/// Waits until a database has another dispatcher than this one.
#[track_caller]
pub fn another_dispatcher(cluster: &Cluster, database: &str, old: i32) -> i32 {
    until(&format!("another dispatcher of {database}"), || {
        find_dispatcher(cluster, database).filter(|&pid| pid != old)
    })
}

/// Waits until a database has no dispatcher of any kind.
#[track_caller]
pub fn until_quiet(cluster: &Cluster, database: &str) {
    until(&format!("no dispatcher in {database}"), || {
        dispatchers(cluster, database).is_empty().then_some(())
    });
}

/// Waits until a process of the server is gone.
#[track_caller]
pub fn until_gone(cluster: &Cluster, pid: i32) {
    let mut db = admin(cluster);
    until(&format!("the end of process {pid}"), || {
        db.all::<i32>(&format!(
            "select pid from pg_stat_activity where pid = {pid}"
        ))
        .is_empty()
        .then_some(())
    });
}

/// As an administrator does it.
#[track_caller]
pub fn terminate(cluster: &Cluster, pid: i32) {
    admin(cluster).run(&format!("select pg_terminate_backend({pid})"));
}

/// Waits until a process has settled: it is neither in a statement nor about to begin one.
#[track_caller]
pub fn until_resting(cluster: &Cluster, pid: i32) {
    let mut db = admin(cluster);
    until(&format!("process {pid} to rest"), || {
        db.one::<bool>(&format!(
            "select coalesce(state = 'idle' and wait_event_type = 'Extension', false) from pg_stat_activity where pid = {pid}"
        ))
        .then_some(())
    });
}

/// Kills a database's dispatcher as the kernel would, and waits until the server has started again.
#[track_caller]
pub fn kill_dispatcher(cluster: &Cluster, database: &str) {
    let pid = dispatcher(cluster, database);
    cluster.kill_backend(pid, Signal::KILL);
    // Gone from there, it is the postmaster that has seen its end, and lets nobody in until all is well.
    until("the postmaster to notice", || {
        (!std::path::Path::new(&format!("/proc/{pid}")).exists()).then_some(())
    });
    cluster.wait_until_it_answers();
}
