//! The cluster harness itself, without the extension.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use outbox_tests::{Cluster, Mode, Signal, Sql, major, until};

fn plain() -> Cluster {
    Cluster::builder().preload(false).extension(false).start()
}

#[test]
fn it_is_of_the_version_asked_for_with_the_settings_asked_for() {
    let cluster = Cluster::builder()
        .preload(false)
        .extension(false)
        .setting("work_mem", "7MB")
        .setting("application_name", "it's")
        .start();
    let mut db = cluster.connect();
    let version: String = db.one("show server_version_num");
    assert_eq!(version.parse::<u32>().unwrap() / 10_000, major());
    let tell =
        "select concat_ws('|', current_setting('work_mem'), current_database(), current_user)";
    assert_eq!(db.one::<String>(tell), "7MB|app|postgres");
    assert_eq!(cluster.psql("app", "select 1, 'two'"), "1|two");
}

#[test]
fn what_is_committed_survives_every_way_to_stop() {
    let mut cluster = plain();
    cluster.connect().run("create table t (n int)");
    cluster.connect().run("insert into t values (1)");
    cluster.stop(Mode::Fast);
    cluster.start_again();
    cluster.connect().run("insert into t values (2)");
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    cluster.connect().run("insert into t values (3)");
    cluster.kill_postmaster();
    cluster.start_again();
    assert_eq!(
        cluster.connect().all::<i32>("select n from t order by n"),
        [1, 2, 3]
    );

    let mut victim = cluster.connect();
    cluster.kill_backend(victim.one("select pg_backend_pid()"), Signal::KILL);
    until("the session to be lost", || {
        victim.simple_query("").is_err().then_some(())
    });
    cluster.wait_until_it_answers();
    assert!(cluster.log().contains("was terminated by signal 9"));
}

#[test]
fn a_standby_follows_and_is_promoted() {
    let primary = plain();
    let standby = primary.standby();
    primary.connect().run("create table t (n int)");
    until("the table to arrive", || {
        let table: Option<String> = standby.connect().one("select to_regclass('t')::text");
        table
    });
    let refusal = standby.connect().refused("insert into t values (1)");
    assert_eq!(refusal.sqlstate, "25006");
    standby.promote();
    standby.connect().run("insert into t values (1)");
}

#[test]
fn a_dump_is_restored_into_another_database() {
    let cluster = plain();
    cluster
        .connect()
        .run("create table t as select 'väl\\u'::text as v");
    let dump = cluster.dump("app");
    cluster.restore("copy", &dump);
    assert_eq!(
        cluster.connect_to("copy").one::<String>("select v from t"),
        "väl\\u"
    );
}

#[test]
fn a_cluster_does_not_outlive_a_process_that_is_killed() {
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "hold_a_cluster", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let postmaster: u32 = lines
        .map_while(Result::ok)
        .find_map(|line| line.split("postmaster ").nth(1)?.parse().ok())
        .expect("the holder tells the process id of its postmaster");
    // A dead process keeps its entry, without a command line, until somebody asks how it ended.
    let command_line = format!("/proc/{postmaster}/cmdline");
    let runs = || std::fs::read(&command_line).is_ok_and(|line| !line.is_empty());
    assert!(runs());
    holder.kill().unwrap();
    holder.wait().unwrap();
    until("the postmaster to end", || (!runs()).then_some(()));
}

#[test]
#[ignore = "for a_cluster_does_not_outlive_a_process_that_is_killed, in a process of its own"]
fn hold_a_cluster() {
    let cluster = plain();
    println!("\npostmaster {}", cluster.postmaster_pid());
    loop {
        std::thread::park();
    }
}
