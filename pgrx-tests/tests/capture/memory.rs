//! A captured statement of many rows takes no more memory than one of few.

use std::fs;

use outbox_tests::{Cluster, Sql};

/// How far the memory of a new session's process has grown at most, in kB, while it ran the statements; without what all processes share.
fn growth(cluster: &Cluster, sql: &str) -> i64 {
    let mut session = cluster.connect();
    session.run("create temp table warm (x int); select outbox.emit('warm')");
    let pid: i32 = session.one("select pg_backend_pid()");
    let peak = || -> i64 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let words = line.expect("it has a peak").split_whitespace();
        words
            .filter_map(|word| word.parse().ok())
            .next()
            .expect("a number")
    };
    let before = peak();
    session.run(sql);
    peak() - before
}

#[test]
fn memory_does_not_grow_with_the_rows_of_a_statement() {
    let cluster = Cluster::builder()
        .preload(false)
        .setting("shared_buffers", "2MB")
        .setting("work_mem", "1MB")
        .setting("max_wal_size", "4GB")
        .start();
    let mut db = cluster.connect();
    db.run(
        "create function half(n int) returns text language sql as $$ select string_agg(md5(n::text || m) || repeat('x', 32), '') from generate_series(1, 48) m $$;
         select outbox.create_stream('others'); alter table outbox.others add more int",
    );
    let captures = [
        "payload => 'full'",
        "payload => 'changed'",
        "condition => 'new.id > 0 or old.id > 0'",
        "stream => 'others'",
    ];
    for capture in captures {
        let sizes = [2_000, 12_000].map(|count| {
            db.run(&format!(
                "drop table if exists t; create table t (id int primary key, v text, n int); select outbox.capture('t', {capture})"
            ));
            ["insert into t select n, half(n), 1 from generate_series(1, {count}) n", "update t set n = 2", "delete from t"]
                .map(|sql| growth(&cluster, &sql.replace("{count}", &count.to_string())))
        });
        for (few, many) in sizes[0].into_iter().zip(sizes[1]) {
            assert!(many < few + 2_500, "{capture}: {sizes:?} kB");
        }
        println!("{capture}: {sizes:?}");
    }
}
