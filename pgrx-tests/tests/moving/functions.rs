//! Functions that sinks and the recorder of usage name: renamed, moved, dropped, and in a database where their numbers are other ones.

use outbox_tests::{Cluster, Sql, until};
use postgres::Client;

use crate::scene::{emit, quick, until_idle, until_status};

/// What the database says of them.
const NAMES: &str = "select concat_ws(' ', (select function from outbox.sinks where id = 'fn'),
    (select transform from outbox.sinks where id = 'shaped'), (select function from outbox.usage_recorder))";

fn filled(db: &mut Client) {
    db.run(
        "create schema \"Code of mine\";
         create table heard (id text);
         create table billed (key text);
         create function \"Code of mine\".hear(e outbox.event[]) returns void language sql as 'insert into public.heard select id from unnest(e)';
         create function \"Code of mine\".shape(e outbox.event) returns jsonb language sql as 'select jsonb_build_object(''shaped'', e.id)';
         create function \"Code of mine\".bill(w outbox.usage_window[]) returns void language sql as
             'insert into public.billed select idempotency_key from unnest(w)';
         select outbox.create_sink('fn', 'function', config => '{\"function\": \"\\\"Code of mine\\\".hear\"}');
         select outbox.create_sink('shaped', 'pull', transform => '\"Code of mine\".shape(outbox.event)');
         select outbox.set_usage_recorder('\"Code of mine\".bill(outbox.usage_window[])')",
    );
}

/// Each of them still does its work.
#[track_caller]
fn all_work(db: &mut Client, n: i64) {
    emit(db, n..=n);
    until("the function", || {
        (db.one::<i64>(&format!("select count(*) from heard where id = 'n{n}'")) == 1).then_some(())
    });
    let shaped: Vec<String> = db.all("select payload ->> 'shaped' from outbox.poll('shaped')");
    assert_eq!(shaped.last(), Some(&format!("n{n}")));
    db.run("select outbox.ack('shaped')");
    let key: String = db.one(&format!(
        "select outbox.record_usage('vm{n}', '2020-01-01', 'm', 1)"
    ));
    until("the recorder", || {
        db.run("select outbox.tick_usage()");
        (db.one::<i64>(&format!("select count(*) from billed where key = '{key}'")) == 1)
            .then_some(())
    });
}

#[test]
fn a_renamed_function_is_followed() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    filled(&mut db);
    assert_eq!(
        db.one::<String>(NAMES),
        "\"Code of mine\".hear(outbox.event[]) \"Code of mine\".shape(outbox.event) \"Code of mine\".bill(outbox.usage_window[])"
    );
    all_work(&mut db, 1);
    db.run(
        "alter function \"Code of mine\".hear rename to listen;
         alter routine \"Code of mine\".shape set schema public;
         alter schema \"Code of mine\" rename to code",
    );
    assert_eq!(
        db.one::<String>(NAMES),
        "code.listen(outbox.event[]) public.shape(outbox.event) code.bill(outbox.usage_window[])"
    );
    all_work(&mut db, 2);
    // What takes an old name is somebody else's.
    db.run(
        "create function public.hear(e outbox.event[]) returns void language sql as 'select 1 / 0'",
    );
    all_work(&mut db, 3);
    db.run("select outbox.alter_sink('fn', batch_size => 3), outbox.alter_sink('shaped', batch_size => 3)");
    all_work(&mut db, 4);
    assert_eq!(
        db.one::<String>(NAMES),
        "code.listen(outbox.event[]) public.shape(outbox.event) code.bill(outbox.usage_window[])"
    );
}

#[test]
fn a_restored_function_is_found_by_its_name() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    filled(&mut db);
    db.run("alter function \"Code of mine\".hear rename to listen");
    all_work(&mut db, 1);
    until_idle(&mut db, "fn");
    let dump = cluster.dump("app");
    // In another database of the cluster, where numbers of functions are other ones.
    cluster.restore("restored", &dump);
    let mut restored = cluster.connect_to("restored");
    all_work(&mut restored, 2);
    let strange = "select count(*) from outbox.sinks where home <> outbox.home()
        or function_oid is distinct from to_regprocedure(function) or transform_oid is distinct from to_regprocedure(transform)";
    assert_eq!(restored.one::<i64>(strange), 0);
    restored.run("alter function \"Code of mine\".listen rename to hear");
    all_work(&mut restored, 3);
    assert!(
        restored
            .one::<String>(NAMES)
            .starts_with("\"Code of mine\".hear(")
    );
    // The same for a copy.
    drop(db);
    drop(restored);
    cluster
        .connect_to("postgres")
        .run("create database copied template restored");
    all_work(&mut cluster.connect_to("copied"), 4);
}

/// `mallory` may make functions where the dropped one was.
fn takes_the_name(db: &mut Client, cluster: &Cluster, database: &str) {
    db.run("drop function \"Code of mine\".hear; grant usage, create on schema \"Code of mine\" to mallory; grant usage on schema outbox to mallory; grant usage on type outbox.event to mallory");
    let mut mallory = cluster.try_connect("mallory", database).expect("it may");
    mallory.run(
        "create function \"Code of mine\".hear(e outbox.event[]) returns void language sql as 'insert into public.heard values (''taken'')'",
    );
    emit(db, 7..=7);
    until_status(db, "fn", "an error", |now| {
        now.state == "error" && now.last_error.is_some()
    });
    db.run("select outbox.resume_sink('fn')");
    until_status(db, "fn", "an error again", |now| now.state == "error");
    assert_eq!(
        db.one::<i64>("select count(*) from heard where id = 'taken'"),
        0
    );
}

#[test]
fn nobody_takes_the_name_of_a_dropped_function() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    filled(&mut db);
    db.run("create role mallory login");
    all_work(&mut db, 1);
    let dump = cluster.dump("app");
    takes_the_name(&mut db, &cluster, "app");
    cluster.restore("restored", &dump);
    let mut restored = cluster.connect_to("restored");
    all_work(&mut restored, 2);
    takes_the_name(&mut restored, &cluster, "restored");
}
