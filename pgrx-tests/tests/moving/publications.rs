//! A publication that hands secrets out is told of where it is made, in the log and in outbox.status.

use std::sync::{Arc, Mutex};

use outbox_tests::{Cluster, Sql, until};
use postgres::{Client, NoTls};

/// A connection, and the warnings that it was given.
fn listening(cluster: &Cluster) -> (Client, Arc<Mutex<Vec<String>>>) {
    let told = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&told);
    let mut config = cluster.config("postgres", "app");
    config.notice_callback(move |notice| {
        let detail = notice.detail().unwrap_or_default();
        let words = format!("{} {}", notice.message(), detail);
        kept.lock().expect("no panic").push(words);
    });
    (config.connect(NoTls).expect("it connects"), told)
}

#[test]
fn a_publication_of_secrets_is_told_of() {
    let cluster = Cluster::builder()
        .setting("outbox.retention_interval", "1s")
        .setting("wal_level", "logical")
        .start();
    let (mut db, told) = listening(&cluster);
    let warnings = |db: &mut Client, sql: &str| {
        told.lock().expect("no panic").clear();
        db.run(sql);
        let told = told.lock().expect("no panic").clone();
        told.into_iter()
            .filter(|one| one.contains("hands secrets"))
            .collect::<Vec<_>>()
    };
    let status =
        "select concat_ws(' ', sink, kind, state, last_error) from outbox.status order by 1";
    let all = "outbox.secrets.\"values\", outbox.sinks.config, outbox.webhook_secrets.value";

    // What hands nothing out is nothing to speak of.
    db.run("create table plain (id int primary key)");
    assert_eq!(
        warnings(
            &mut db,
            "create publication fine for table plain, outbox.events, outbox.sinks (id, kind)"
        ),
        Vec::<String>::new()
    );
    assert_eq!(db.all::<String>(status), Vec::<String>::new());

    for (name, how) in [
        ("everything", "for all tables"),
        ("schema", "for tables in schema outbox"),
        (
            "named",
            "for table outbox.secrets, outbox.sinks, outbox.webhook_secrets",
        ),
    ] {
        let said = warnings(&mut db, &format!("create publication {name} {how}"));
        assert_eq!(said.len(), 1, "{name}");
        assert!(said[0].contains(name) && said[0].contains(all), "{said:?}");
        assert_eq!(
            db.all::<String>(status),
            [format!(
                "publication:{name} publication error it hands secrets to its subscribers in clear: {all}"
            )]
        );
        until("the log to tell", || {
            let line = format!("publication \"{name}\" hands secrets to its subscribers in clear");
            cluster.log().contains(&line).then_some(())
        });
        db.run(&format!("drop publication {name}"));
        assert_eq!(db.all::<String>(status), Vec::<String>::new());
    }
    for change in [
        "alter publication fine add table outbox.webhook_secrets",
        "alter publication fine set table outbox.secrets",
        "alter publication fine set tables in schema outbox",
    ] {
        assert_eq!(warnings(&mut db, change).len(), 1, "{change}");
        assert_eq!(
            db.one::<i64>("select count(distinct publication) from outbox.published_secrets"),
            1
        );
    }
}
