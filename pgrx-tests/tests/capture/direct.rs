//! Events that are written without a statement are those that a statement would have written, and the table of the stream stays a table
//! like any other.

use outbox_tests::{Cluster, Mode, Sql};
use postgres::Client;

use super::types::{values, with_types};
use super::{quiet, taken};

/// Two tables of all types, captured into streams of which one has a column more: that one needs statements.
fn twins(db: &mut Client) -> Vec<(String, &'static str)> {
    with_types(db);
    db.run("create table t (x int)");
    let columns = values(db).into_iter().enumerate();
    let columns = columns
        .map(|(place, (type_, value, _))| {
            (
                format!("\"c {place} {type_}\"").replace("\"char\"", "char"),
                *type_,
                *value,
            )
        })
        .collect::<Vec<_>>();
    let declared = columns
        .iter()
        .map(|(name, type_, _)| format!("{name} {type_}"));
    let declared = declared.collect::<Vec<_>>().join(", ");
    for twin in ["fast", "slow"] {
        db.run(&format!("select outbox.create_stream('{twin}s')"));
        db.run(&format!(
            "create table {twin} (gone int, \"K ey\" text, id int, at timestamptz default '2024-02-29 12:00+02', tenant text, {declared},
                                  primary key (\"K ey\", id));
             alter table {twin} drop gone; select outbox.capture('{twin}', stream => '{twin}s')"
        ));
    }
    db.run("alter table outbox.slows add more int");
    let plain = |db: &mut Client, stream| -> bool {
        db.one(&format!(
            "select outbox.is_plain_stream('outbox.{stream}'::regclass)"
        ))
    };
    assert!(plain(db, "fasts") && plain(db, "events"));
    assert!(!plain(db, "slows"));
    columns
        .into_iter()
        .map(|(name, _, value)| (name, value))
        .collect()
}

/// What was written for one and not for the other.
fn differences(db: &mut Client) -> Vec<String> {
    let of = |stream: &str| {
        format!(
            "(select row_number() over (order by seq) as n, replace(topic, 'slow', 'fast') as topic, replace(source, 'slow', 'fast') as source,
                     subject, tenant, payload, payload::text as text, headers, id ~ '^evt_[0-9a-f]{{32}}$' as id,
                     txid = pg_current_xact_id() or pg_visible_in_snapshot(txid, pg_current_snapshot()) as txid, for_sink
                from outbox.{stream})"
        )
    };
    let rows = db
        .query(
            &format!(
                "select coalesce(f::text, 'none') || ' <> ' || coalesce(s::text, 'none') from {} f full join {} s on f = s where f is null or s is null
                 union all
                 select 'not as it is read: ' || payload::text from outbox.fasts where payload <> payload::text::jsonb
                 union all
                 select 'not found: ' || k from outbox.fasts f, jsonb_each(f.payload) e (k, v) where f.payload -> k is distinct from v",
                of("fasts"),
                of("slows")
            ),
            &[],
        )
        .expect("both can be read");
    rows.iter().map(|row| row.get(0)).collect()
}

#[test]
fn what_is_written_is_what_a_statement_would_write() {
    let (_cluster, mut db) = quiet();
    let columns = twins(&mut db);
    let names = columns.iter().map(|(name, _)| name.as_str());
    let names = names.collect::<Vec<_>>().join(", ");
    let sets = columns.iter().map(|(name, _)| format!("{name} = null"));
    let sets = sets.collect::<Vec<_>>().join(", ");
    let values = columns.iter().map(|(_, value)| *value);
    let values = values.collect::<Vec<_>>().join(", ");
    let changes = [
        format!(
            "insert into {{table}} (\"K ey\", id, tenant, {names}) values ('ä:\"', 1, 'acme', {values}), ('', -2, null, {values})"
        ),
        "insert into {table} (\"K ey\", id) values ('null', 3)".to_owned(),
        "update {table} set id = id + 10".to_owned(),
        "update {table} set tenant = 'umbrella' where id > 10".to_owned(),
        format!("update {{table}} set {sets}"),
        "alter table {table} add late text default 'here before'".to_owned(),
        "update {table} set at = null".to_owned(),
        "delete from {table}".to_owned(),
        "alter table {table} drop late".to_owned(),
    ];
    let captures = [
        "payload => 'keys'",
        "payload => 'changed'",
        "payload => 'full'",
        "payload => 'before_after'",
        "tenant_column => 'tenant', redact => '{at}'",
        "key => '{tenant}'",
        "key => '{at,id}', columns => '{id}'",
        "topic => 'changes', condition => 'coalesce(new.id, old.id) <> 3'",
    ];
    let sessions = [
        "reset all",
        "set outbox.tenant = 'of the session'; set timezone = 'Asia/Tokyo'; set datestyle = 'SQL, DMY'",
        r#"set outbox.headers = '{"trace": [1.50, "ü"], "operation": "overruled"}'"#,
    ];
    for capture in captures {
        for twin in ["fast", "slow"] {
            db.run(&format!(
                "select outbox.uncapture('{twin}'); select outbox.capture('{twin}', stream => '{twin}s', {capture})"
            ));
        }
        for session in sessions {
            for change in &changes {
                for twin in ["fast", "slow"] {
                    db.run(session);
                    db.run(&change.replace("{table}", twin));
                    db.run("reset all");
                }
            }
            assert_eq!(
                differences(&mut db),
                Vec::<String>::new(),
                "{capture}, {session}"
            );
            let written: i64 = db.one("select count(*) from outbox.fasts");
            assert!(written >= 8, "{written}");
            db.run("truncate outbox.fasts, outbox.slows");
        }
    }
}

#[test]
fn a_column_that_was_added_has_its_default_in_rows_of_before() {
    let (_cluster, mut db) = quiet();
    for condition in ["null", "'true'"] {
        db.run(&format!(
            "create table t (id int primary key, gone int); insert into t values (1), (2), (3);
             alter table t drop gone; alter table t add late text default 'here before';
             select outbox.capture('t', condition => {condition})"
        ));
        db.run("delete from t where id = 1; update t set id = 4 where id = 2; alter table outbox.events add more int; delete from t");
        for change in taken(&mut db) {
            assert_eq!(change.payload["late"], "here before", "{change:?}");
        }
        db.run("drop table t; alter table outbox.events drop more");
    }
}

#[test]
fn what_users_add_to_a_streams_table_works() {
    let (_cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key, v text); select outbox.capture('t');
         create index by_v on outbox.events ((payload ->> 'v')) where subject <> '1'; insert into t values (1, 'a'), (2, 'b'), (3, 'b')",
    );
    db.run("set enable_seqscan = off; set enable_bitmapscan = off");
    let found = "select count(*) from outbox.events where payload ->> 'v' = 'b' and subject <> '1'";
    let plan = db.query(&format!("explain {found}"), &[]);
    let plan = plan
        .expect("it is planned")
        .iter()
        .map(|row| row.get(0))
        .collect::<Vec<String>>();
    assert!(plan.concat().contains("by_v"), "{plan:?}");
    assert_eq!(db.one::<i64>(found), 2);

    db.run("create unique index once on outbox.events (subject)");
    let refusal = db.refused("insert into t values (4, 'c'), (5, 'd'); update t set v = 'x'");
    assert_eq!(refusal.sqlstate, "23505");
    assert_eq!(db.one::<i64>("select count(*) from t"), 3);
    db.run("drop index outbox.once");

    // From now on it takes a statement, in sessions that have written before, too.
    db.run(
        "create function seen() returns trigger language plpgsql as $$ begin new.headers := '{\"seen\": true}'; return new; end $$;
         create trigger seen before insert on outbox.events for each row execute function seen();
         delete from outbox.events; insert into t values (6)",
    );
    assert_eq!(taken(&mut db)[0].headers["seen"], true);
    db.run("drop trigger seen on outbox.events; alter table outbox.events alter source set default 'x', alter id set default 'mine' || clock_timestamp()");
    db.run("insert into t values (7)");
    assert!(db.one::<bool>("select id like 'mine%' from outbox.events"));
    db.run("alter table outbox.events alter source drop default, alter id set default outbox.new_id(); delete from outbox.events");
    db.run("alter table outbox.events add constraint short check (length(subject) < 3)");
    let refusal = db.refused("insert into t values (100)");
    assert_eq!(refusal.sqlstate, "23514");
    db.run("alter table outbox.events drop constraint short; insert into t values (100)");
    assert_eq!(taken(&mut db).len(), 1);
}

#[test]
fn what_is_undone_or_not_committed_is_no_event() {
    let (cluster, mut db) = quiet();
    db.run("create table t (id int primary key); select outbox.capture('t')");
    db.run("begin; insert into t values (1); savepoint s; insert into t select generate_series(2, 500); rollback to s; insert into t values (2)");
    assert_eq!(
        db.one::<String>("select string_agg(subject, ',' order by seq) from outbox.events"),
        "1,2"
    );
    assert_eq!(
        cluster
            .connect()
            .one::<i64>("select count(*) from outbox.events"),
        0
    );
    db.run("commit");
    let refusal = db.refused("insert into t select 1000 - n from generate_series(1, 999) n");
    assert_eq!(refusal.sqlstate, "23505");
    assert_eq!(taken(&mut db).len(), 2);
}

#[test]
fn large_events_and_many() {
    let (mut cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key, v text); select outbox.capture('t', payload => 'before_after');
         insert into t select n, case when n % 50 = 0 then repeat(md5(n::text), 20000) end from generate_series(1, 1000) n;
         update t set v = v || 'x'",
    );
    drop(db);
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    let mut db = cluster.connect();
    assert!(db.one::<bool>(
        "select count(*) = 1020 and bool_and(payload -> 'after' ->> 'v' is not distinct from
                    case when subject::int % 50 = 0 then repeat(md5(subject), 20000) || case when topic like '%update' then 'x' else '' end end)
           from outbox.events"
    ));
    // The indexes have them, too.
    db.run("set enable_seqscan = off; set enable_bitmapscan = off");
    for order in ["seq", "txid, seq"] {
        assert_eq!(
            db.one::<i64>(&format!(
                "select count(*) from (select row_number() over (order by {order}) as n, row_number() over (order by seq) as m
                                         from outbox.events where seq > 0 and txid > '0') x where n = m"
            )),
            1020
        );
    }
}

#[test]
fn a_subscriber_of_the_stream_gets_them() {
    let cluster = Cluster::builder().setting("wal_level", "logical").start();
    let mut db = cluster.connect();
    db.run(
        "create table t (id int primary key); select outbox.capture('t'); create publication p for table outbox.events",
    );
    db.run("select pg_create_logical_replication_slot('s', 'pgoutput')");
    db.run("insert into t select generate_series(1, 250)");
    assert_eq!(
        db.one::<i64>(
            "select count(*) from pg_logical_slot_peek_binary_changes('s', null, null, 'proto_version', '1', 'publication_names', 'p')
              where get_byte(data, 0) = ascii('I')"
        ),
        250
    );
}
