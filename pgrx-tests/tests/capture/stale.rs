//! A table changes its shape while sessions that have written to it before wait to write again: what they have kept in mind is not what
//! they go by.

use std::thread;

use outbox_tests::{Cluster, Sql, until};
use postgres::Client;

use super::{quiet, taken};

/// A session that has written.
fn warm(cluster: &Cluster, write: &str) -> Client {
    let mut session = cluster.connect();
    session.run(&write.replace("{n}", "1000"));
    session.run(&write.replace("{n}", "1001"));
    session
}

/// Has a session write while `db` is about to commit `ddl`; says what became of the write.
#[track_caller]
fn write_meanwhile(
    db: &mut Client,
    mut session: Client,
    ddl: &str,
    write: &str,
) -> Result<(), String> {
    let pid: i32 = session.one("select pg_backend_pid()");
    db.run(&format!("begin; {ddl}"));
    let write = write.replace("{n}", "1");
    let writing = thread::spawn(move || {
        let outcome = session.batch_execute(&write);
        assert!(!session.is_closed(), "the session ended: {outcome:?}");
        outcome.map_err(|error| {
            let said = error.as_db_error().expect("the server says why");
            format!("{} {}", said.code().code(), said.message())
        })
    });
    until("the session to wait", || {
        let waits: bool = db.one(&format!(
            "select coalesce((select wait_event_type = 'Lock' from pg_stat_activity where pid = {pid}), true)"
        ));
        (waits || writing.is_finished()).then_some(())
    });
    db.run("commit");
    writing.join().expect("the server stays up")
}

#[test]
fn a_streams_table_is_looked_at_once_it_is_locked() {
    let (cluster, mut db) = quiet();
    db.run(
        "create table t (id int primary key, v text); select outbox.capture('t');
         create table known (subject text primary key); insert into known values ('2');
         create function outbox.seen() returns trigger language plpgsql as $$ begin new.headers := '{\"seen\": true}'; return new; end $$;
         create function public.noted() returns trigger language plpgsql as $$ begin insert into public.known values ('noted ' || new.subject); return null; end $$;
         create function public.shown(text) returns text language sql immutable as $$ select 'shown ' || $1 $$",
    );
    // What is done, and undone; what becomes of the write, and a truth about its event.
    let cases = [
        ("add note text", "drop note", Ok("note is null")),
        ("add note text default 'n'", "drop note", Ok("note = 'n'")),
        (
            "add note int not null default 7",
            "drop note",
            Ok("note = 7"),
        ),
        (
            "add note uuid not null default gen_random_uuid()",
            "drop note",
            Ok("note is not null"),
        ),
        (
            "add note text generated always as (subject || '!') stored",
            "drop note",
            Ok("note = '1!'"),
        ),
        (
            "add note int generated always as identity",
            "drop note",
            Ok("note > 0"),
        ),
        (
            "add note text not null default nullif('x', 'x')",
            "drop note",
            Err("23502"),
        ),
        (
            "add note int; alter table outbox.events drop note",
            "set (fillfactor = 90)",
            Ok("true"),
        ),
        (
            "alter subject type varchar(40)",
            "alter subject type text",
            Ok("true"),
        ),
        (
            "alter source set default 'x', alter id set default 'mine'",
            "alter source drop default, alter id set default outbox.new_id()",
            Ok("id = 'mine'"),
        ),
        (
            "alter tenant set default 'acme'",
            "alter tenant set default nullif(current_setting('outbox.tenant', true), '')",
            Ok("tenant = 'acme'"),
        ),
        (
            "add constraint c check (subject <> '1')",
            "drop constraint c",
            Err("23514"),
        ),
        (
            "add constraint c foreign key (subject) references known",
            "drop constraint c",
            Err("23503"),
        ),
        (
            "add constraint c unique (subject)",
            "drop constraint c",
            Ok("true"),
        ),
        (
            "add constraint c unique (topic) deferrable initially deferred",
            "drop constraint c",
            Ok("true"),
        ),
        (
            "add constraint c exclude (subject with =)",
            "drop constraint c",
            Ok("true"),
        ),
        (
            "alter tenant set not null",
            "alter tenant drop not null",
            Err("23502"),
        ),
        (
            "enable row level security, force row level security",
            "disable row level security, no force row level security",
            Ok("true"),
        ),
        ("set unlogged", "set logged", Ok("true")),
        ("rename to happenings", "", Ok("true")),
        ("rename subject to about", "", Err("42703")),
        (
            "; create trigger a before insert on outbox.events for each row execute function outbox.seen()",
            "; drop trigger a on outbox.events",
            Ok("headers = '{\"seen\": true}'"),
        ),
        (
            "; create trigger a after insert on outbox.events for each row execute function noted()",
            "; drop trigger a on outbox.events; delete from known where subject like 'noted%'",
            Ok("(select count(*) from known where subject = 'noted 1') = 1"),
        ),
        (
            "; create rule r as on insert to outbox.events where new.subject = '1' do also insert into known values ('ruled')",
            "; drop rule r on outbox.events",
            Ok("true"),
        ),
        (
            "; create index i on outbox.events (public.shown(subject))",
            "; drop index outbox.i",
            Ok("public.shown(subject) = 'shown 1'"),
        ),
        (
            "; create index i on outbox.events (subject) where topic <> 'x'",
            "; drop index outbox.i",
            Ok("true"),
        ),
        (
            "; create statistics s on (topic || 'x') from outbox.events; lock outbox.events",
            "; drop statistics s",
            Ok("true"),
        ),
    ];
    for (ddl, undo, outcome) in cases {
        let whole = |sql: &str| match sql.strip_prefix(';') {
            Some(sql) => sql.to_owned(),
            None => format!("alter table outbox.events {sql}"),
        };
        db.run("delete from t; delete from outbox.events");
        let session = warm(&cluster, "insert into t values ({n})");
        db.run("delete from outbox.events");
        let written = write_meanwhile(&mut db, session, &whole(ddl), "insert into t values ({n})");
        match outcome {
            Ok(truth) => {
                assert_eq!(written, Ok(()), "{ddl}");
                let table = if ddl.starts_with("rename to") {
                    "happenings"
                } else {
                    "events"
                };
                let found: Vec<bool> = db.all(&format!(
                    "select topic = 'outbox.public.t.insert' and source = 'public.t' and subject = '1' and payload->>'id' = '1' and txid > '0'
                            and {truth} from outbox.{table}"
                ));
                assert_eq!(found, [true], "{ddl}");
            }
            Err(code) => {
                let refusal = written.expect_err(ddl);
                assert!(refusal.starts_with(code), "{ddl}: {refusal}");
                assert_eq!(db.one::<i64>("select count(*) from t where id = 1"), 0);
            }
        }
        match ddl {
            "rename to happenings" => db.run("alter table outbox.happenings rename to events"),
            "rename subject to about" => {
                db.run("alter table outbox.events rename about to subject")
            }
            _ => db.run(&whole(undo)),
        }
    }
}

#[test]
fn a_captured_table_is_looked_at_once_it_is_locked() {
    let (cluster, mut db) = quiet();
    db.run("create table u (id int, v text, w int) partition by list (w); create table u_1 partition of u for values in (1);
            create table u_2 (w int, id int, v text); create table u_3 partition of u for values in (3); create schema s");
    // What is done, and what the events of the write are then.
    let cases = [
        (
            "alter table t add x int default 5",
            r#"{"v":"a","w":1,"x":5,"id":1}"#,
        ),
        (
            "alter table t add x int default 5; alter table t drop v",
            r#"{"w":1,"x":5,"id":1}"#,
        ),
        (
            "alter table t alter w type text",
            r#"{"v":"a","w":"1","id":1}"#,
        ),
        (
            "alter table t alter w type numeric(20,5)",
            r#"{"v":"a","w":1.00000,"id":1}"#,
        ),
        (
            "alter table t alter w type bool using true",
            r#"{"v":"a","w":true,"id":1}"#,
        ),
        ("alter table t rename w to z", r#"{"v":"a","z":1,"id":1}"#),
        (
            "alter table t drop w; alter table t add w jsonb default '[1]'",
            r#"{"v":"a","w":[1],"id":1}"#,
        ),
        (
            "alter table t drop w; alter table t add w bytea default '\\x00ff'",
            r#"{"v":"a","w":"\\x00ff","id":1}"#,
        ),
        (
            "select outbox.alter_capture('t', columns => '{v}'); lock t",
            r#"{"v":"a","id":1}"#,
        ),
        (
            "select outbox.alter_capture('t', payload => 'keys'); lock t",
            r#"{"id":1}"#,
        ),
        ("select outbox.uncapture('t')", ""),
        ("select outbox.pause_capture('t'); lock t", ""),
    ];
    for payload in ["full", "changed", "before_after"] {
        for (ddl, expected) in cases {
            db.run(&format!(
                "drop table if exists t cascade; create table t (id int primary key, v text, w int); select outbox.capture('t', payload => '{payload}')"
            ));
            let session = warm(&cluster, "insert into t values ({n}, 'a', 1)");
            db.run("delete from outbox.events");
            let write = if ddl.contains("w type bool") || ddl.contains("drop") {
                "insert into t (id) values ({n})"
            } else {
                "insert into t values ({n}, 'a', 1)"
            };
            let written = write_meanwhile(&mut db, session, ddl, write);
            assert_eq!(written, Ok(()), "{ddl}");
            let payloads = taken(&mut db);
            let payloads = payloads.iter().map(|it| match payload {
                "before_after" if !expected.contains("keys") => it.payload["after"].clone(),
                _ => it.payload.clone(),
            });
            let payloads = payloads.map(|it| it.to_string()).collect::<Vec<_>>();
            match (expected, ddl.contains("keys")) {
                ("", _) => assert!(payloads.is_empty(), "{payload}, {ddl}: {payloads:?}"),
                (_, true) => assert_eq!(payloads.len(), 1),
                _ if write.contains("(id)") => assert_eq!(payloads.len(), 1, "{payload}, {ddl}"),
                _ => {
                    let expected: serde_json::Value = serde_json::from_str(expected).expect("json");
                    assert_eq!(payloads, [expected.to_string()], "{payload}, {ddl}");
                }
            }
        }
    }
    // Partitions come, go and change their names while somebody waits to write to the root.
    for (ddl, partition) in [
        (
            "alter table u attach partition u_2 for values in (2)",
            "public.u_2",
        ),
        ("alter table u_2 rename to u_two", "public.u_two"),
        ("alter table u_two set schema s", "s.u_two"),
        ("alter schema s rename to z; lock u", "z.u_two"),
        (
            "alter table u detach partition z.u_two; alter table z.u_two set schema public; alter table u_two rename to u_2; create table u_other partition of u for values in (2)",
            "public.u_other",
        ),
        (
            "alter table u detach partition u_other; drop table u_other; create table u_default partition of u default",
            "public.u_default",
        ),
    ] {
        db.run("do $$ begin perform outbox.capture('u'); exception when duplicate_object then null; end $$");
        let session = warm(&cluster, "insert into u values ({n}, 'a', 3)");
        db.run("delete from outbox.events");
        let write = "lock u in row exclusive mode; insert into u values ({n}, 'a', 2)";
        let written = write_meanwhile(&mut db, session, &format!("lock u; {ddl}"), write);
        assert_eq!(written, Ok(()), "{ddl}");
        let changes = taken(&mut db);
        assert_eq!(changes.len(), 1, "{ddl}");
        assert_eq!(changes[0].headers["partition"], partition, "{ddl}");
    }
}

#[test]
fn a_capture_goes_to_another_stream_while_writers_wait() {
    let (cluster, mut db) = quiet();
    db.run("create table t (id int primary key); select outbox.create_stream('one'), outbox.create_stream('two'); select outbox.capture('t', stream => 'one')");
    let session = warm(&cluster, "insert into t values ({n})");
    let written = write_meanwhile(
        &mut db,
        session,
        "select outbox.alter_capture('t', stream => 'two'), outbox.drop_stream('one')",
        "insert into t values ({n})",
    );
    assert_eq!(written, Ok(()));
    assert_eq!(db.all::<String>("select subject from outbox.two"), ["1"]);
    // One of the same name is another one.
    let session = warm(&cluster, "insert into t values ({n} + 5)");
    let written = write_meanwhile(
        &mut db,
        session,
        "select outbox.create_stream('three'), outbox.alter_capture('t', stream => 'three'), outbox.drop_stream('two');
         select outbox.create_stream('two'), outbox.alter_capture('t', stream => 'two'), outbox.drop_stream('three')",
        "insert into t values ({n} + 1)",
    );
    assert_eq!(written, Ok(()));
    assert_eq!(db.all::<String>("select subject from outbox.two"), ["2"]);
    // A session that is in the middle of a transaction learns at once what is not to be told any more.
    db.run("alter table t add secret text; delete from outbox.two");
    let mut other = cluster.connect();
    other.run("begin; insert into t values (10, 'x')");
    db.run("select outbox.alter_capture('t', redact => '{secret}')");
    other.run("insert into t values (11, 'x'); commit");
    assert_eq!(
        db.all::<String>("select payload::text from outbox.two order by seq"),
        [r#"{"id": 10, "secret": "x"}"#, r#"{"id": 11}"#]
    );
}

#[test]
fn a_backfill_looks_at_the_table_once_it_is_locked() {
    let (cluster, mut db) = quiet();
    db.run("create table t (id int primary key, w int); insert into t select n, n from generate_series(1, 3) n; select outbox.capture('t')");
    for (type_, expected) in [("text", r#""2""#), ("numeric", "2"), ("int", "2")] {
        let id: i64 = db.one("select outbox.backfill('t', chunk_size => 1)");
        let mut session = cluster.connect();
        session.run(&format!("select outbox.backfill_chunk({id})"));
        db.run("delete from outbox.events");
        let ddl = format!("alter table t alter w type {type_} using w::{type_}");
        let write = format!("select outbox.backfill_chunk({id})");
        assert_eq!(
            write_meanwhile(&mut db, session, &ddl, &write),
            Ok(()),
            "{ddl}"
        );
        let changes = taken(&mut db);
        assert_eq!(changes[0].payload["w"].to_string(), expected, "{ddl}");
        db.run(&format!(
            "select outbox.stop_backfill({id}); delete from outbox.events"
        ));
    }
}
