//! Captures in dumps.

use outbox_tests::Sql;

use super::{quiet, short, taken};

#[test]
fn a_dump_brings_captures_that_work() {
    let (cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key, k text, old int); alter table t drop old;
         create table p (id int primary key, n int) partition by range (id); create table p_1 partition of p for values from (0) to (100);
         select outbox.create_stream('billing');
         select outbox.capture('t', payload => 'changed', columns => '{k}', condition => 'new.id > 0'), outbox.capture('p', replicated => true, stream => 'billing');
         insert into t values (1, 'x'); insert into p values (1, 1)",
    );
    taken(&mut db);
    let file = cluster.socket_folder().join("captures.dump");
    for jobs in ["1", "3"] {
        let mut dump = cluster.program("pg_dump");
        assert!(
            dump.args(["-Fc", "-f"])
                .arg(&file)
                .arg("app")
                .status()
                .expect("pg_dump runs")
                .success()
        );
        let name = format!("copy{jobs}");
        cluster
            .connect_to("postgres")
            .run(&format!("create database {name} template template0"));
        let mut restore = cluster.program("pg_restore");
        restore
            .args(["--exit-on-error", "-j", jobs, "-d", &name])
            .arg(&file);
        assert!(restore.status().expect("pg_restore runs").success());
        let mut copy = cluster.connect_to(&name);
        copy.run("select outbox.stop()");
        assert_eq!(
            copy.one::<i64>("select count(*) from outbox.check_captures()"),
            0
        );
        assert_eq!(copy.one::<i64>("select count(*) from outbox.events"), 0);
        assert_eq!(
            short(
                &mut copy,
                "insert into t values (2, 'y'), (-2, 'z'); update t set k = 'q' where id = 1"
            ),
            ["insert 2", "update 1"]
        );
        copy.run("delete from outbox.billing; insert into p_1 values (2, 2)");
        assert_eq!(
            copy.all::<String>("select topic || subject from outbox.billing"),
            ["outbox.public.p.insert2"]
        );
        copy.run("alter table t rename k to kk; create table p_2 partition of p for values from (100) to (200); insert into p values (150, 1)");
        assert_eq!(copy.one::<i64>("select count(*) from outbox.billing"), 2);
    }
}
