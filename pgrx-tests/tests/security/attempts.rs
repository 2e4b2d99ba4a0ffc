//! What an operator's function, filter and transform try in vain, run by a dispatcher and by a superuser.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use outbox_tests::{DEADLINE, Receiver, Sql};
use postgres::Client;

use super::scene::{quick, status, until_idle, until_status};
use super::{function_sink, http_sink, tick, with_operators};

/// A name, statements, and the SQLSTATEs with which they must fail; none for what does no harm.
const ATTEMPTS: &[(&str, &str, &[&str])] = &[
    ("reads", "perform from public.secret", DENIED),
    ("reads_events", "perform from outbox.events", DENIED),
    ("reads_secrets", "perform from outbox.secrets", DENIED),
    ("writes_sinks", "update outbox.sinks set owner = 'postgres'", DENIED),
    ("sets_role", "set role postgres", DENIED),
    ("sets_role_locally", "perform set_config('role', 'postgres', true)", DENIED),
    ("resets_role", "reset role", DENIED),
    ("sets_role_none", "set role none", DENIED),
    ("sets_session", "set session authorization postgres", DENIED),
    ("resets_session", "reset session authorization", DENIED),
    ("resets_all", "reset all; perform from public.secret", DENIED),
    ("grants_itself", "alter role op superuser", DENIED),
    ("makes_role", "create role evil superuser", DENIED),
    ("joins", "grant pg_read_all_data to op", DENIED),
    ("grants_outbox", "perform outbox.grant('op', 'secrets')", DENIED),
    ("reads_file", "perform pg_read_file('PG_VERSION')", DENIED),
    ("lists_files", "perform pg_ls_dir('.')", DENIED),
    ("exports", "perform lo_export(lo_from_bytea(0, 'x'), '/tmp/pg_outbox-evil')", DENIED),
    ("copies_out", "copy (select 1) to program 'cat'", DENIED),
    ("makes_temp_table", "create temp table t (l text)", DENIED),
    ("copies_file", "create table op.lines (l text); copy op.lines from '/etc/passwd'", DENIED),
    ("makes_c", "create function op.c() returns int language c as 'pg_outbox', 'new_id_wrapper'", DENIED),
    ("makes_temp_view", "create temp view v as select 1", DENIED),
    ("alters_system", "alter system set work_mem = '1GB'", &["25001", "42501"]),
    ("replicates", "set session_replication_role = replica", DENIED),
    ("reads_passwords", "perform rolpassword from pg_authid", DENIED),
    ("listens", "listen evil", &["42501", "0A000"]),
    ("holds_cursor", "execute 'declare c cursor with hold for select 1'", DENIED),
    ("prepares", "execute 'prepare p as select 1'", DENIED),
    ("discards", "execute 'discard all'", &["42501", "25001"]),
    ("commits", "commit", &["2D000"]),
    ("rolls_back", "rollback", &["2D000"]),
    ("ends_processes", "perform pg_terminate_backend(pid) from pg_stat_activity where usename is null or usename = 'postgres'", DENIED),
    ("ends_this", "perform pg_terminate_backend(pg_backend_pid())", DENIED),
    ("cancels_this", "perform pg_cancel_backend(pg_backend_pid())", DENIED),
    ("ticks", "perform outbox.tick()", &["55000"]),
    ("starts", "perform outbox.start()", &["55000"]),
    ("stops", "perform outbox.stop()", &["55000"]),
    ("is_cancelled", "raise exception 'no' using errcode = '57014'", &["57014"]),
    ("asserts", "assert false", &["P0004"]),
    // A trigger that would run at the commit, with whose rights it happens to find.
    (
        "defers",
        "create table if not exists op.pit (n int);
         create or replace function op.pit() returns trigger language plpgsql as
             'begin alter role op superuser; return null; end';
         create or replace trigger pit before insert on op.pit for each statement execute function op.pit();
         drop trigger pit on op.pit;
         create constraint trigger pit after insert on op.pit deferrable initially deferred for each row execute function op.pit();
         insert into op.pit values (1)",
        DENIED,
    ),
    ("defers_again", "set constraints all deferred; insert into op.late values (1)", DENIED),
    ("leaves_deferred", "set constraints all deferred", HARMLESS),
    ("notifies", "notify evil; perform pg_notify('outbox', 'outbox 1:1')", HARMLESS),
    ("unlocks", "perform pg_advisory_unlock_all()", HARMLESS),
    ("locks", "perform pg_advisory_xact_lock(1), pg_try_advisory_lock_shared(2)", HARMLESS),
    (
        "sets",
        "set search_path = op; set statement_timeout = '1ms'; set lock_timeout = '1ms'; set standard_conforming_strings = off;
         set default_transaction_read_only = on; set enable_indexscan = off; set outbox.tenant = 'evil'; set evil.setting = 'evil';
         set time zone 'Asia/Kathmandu'",
        HARMLESS,
    ),
    ("shadows", "create or replace function pg_temp.lower(text) returns text language plpgsql as 'begin raise exception ''evil''; end'", HARMLESS),
    ("opens_cursor", "if not exists (select from pg_cursors where name = 'c') then execute 'declare c cursor for select 1'; end if", HARMLESS),
    ("draws", "perform setseed(0.5), lo_creat(-1)", HARMLESS),
];
const DENIED: &[&str] = &["42501"];
const HARMLESS: &[&str] = &[];

/// The ways in which code is supplied.
const WAYS: [&str; 3] = ["function", "filter", "transform"];

/// A sink of the operator's for every attempt and way, and two that are as they should be. Those that deliver to somewhere else do
/// so to `evil`, or to `good` if they do no harm.
fn supply(op: &mut Client, good: &Receiver, evil: &Receiver) {
    op.run(
        "create table op.late (n int);
         create function op.late() returns trigger language plpgsql as 'begin alter role op superuser; return null; end';
         create constraint trigger late after insert on op.late deferrable initially deferred for each row execute function op.late();
         create table op.taken (id text);
         create function op.take(outbox.event[]) returns void language sql as 'insert into op.taken select e.id from unnest($1) e'",
    );
    function_sink(op, "good_function", "op.take", "");
    http_sink(op, "good_http", good, ", filter => 'topic <> $$x$$'");
    for (name, statements, failures) in ATTEMPTS {
        op.run(&format!(
            "create function op.{name}() returns boolean language plpgsql as $try$ begin {statements}; return true; end $try$;
             create function op.{name}(outbox.event[]) returns void language plpgsql as 'begin perform op.{name}(); end';
             create function op.{name}(outbox.event) returns jsonb language plpgsql as 'begin perform op.{name}(); return $1.payload; end'"
        ));
        let to = if failures.is_empty() { good } else { evil };
        function_sink(
            op,
            &format!("{name}.function"),
            &format!("op.{name}(outbox.event[])"),
            "",
        );
        http_sink(
            op,
            &format!("{name}.filter"),
            to,
            &format!(", filter => 'op.{name}()'"),
        );
        http_sink(
            op,
            &format!("{name}.transform"),
            to,
            &format!(", transform => 'op.{name}(outbox.event)'"),
        );
    }
}

fn emit(db: &mut Client) {
    db.run("select outbox.emit('a', jsonb_build_object('n', n), id => 'n' || n) from generate_series(1, 3) n");
}

/// Nothing of what was tried has come to be.
#[track_caller]
fn nothing_happened(db: &mut Client, evil: &Receiver) {
    assert_eq!(evil.count(), 0, "events went where they should not");
    let special: Vec<String> = db.all(
        "select rolname::text from pg_roles where (rolsuper or rolcreaterole) and rolname <> 'postgres'
         union all select 'a member: ' || member::regrole from pg_auth_members where member = 'op'::regrole",
    );
    assert_eq!(special, Vec::<String>::new());
    let owners: Vec<String> = db.all("select distinct owner::text from outbox.sinks");
    assert_eq!(owners, ["op"]);
    assert_eq!(db.one::<i64>("select count(*) from op.late"), 0);
    assert!(!std::path::Path::new("/tmp/pg_outbox-evil").exists());
}

#[track_caller]
fn failed_so(sink: &str, error: &str, failures: &[&str]) {
    let so = failures
        .iter()
        .any(|state| error.ends_with(&format!("(SQLSTATE {state})")));
    assert!(so, "{sink}: {error}");
    assert!(!error.contains("hunter2"), "{sink}: {error}");
}

/// What a sink has come to.
#[derive(Debug, Default, PartialEq)]
struct State {
    delivered: i64,
    dead_letters: i64,
    error: Option<String>,
}

/// Waits until every sink has delivered everything, or has an error. They are looked at all at once: a look costs something for each.
fn until_all_have_come_to_something(db: &mut Client) -> BTreeMap<String, State> {
    let start = Instant::now();
    loop {
        let rows = db
            .query(
                "select sink, delivered, dead_letters, last_error from outbox.status",
                &[],
            )
            .expect("the status can be read");
        let states = rows.iter().map(|row| {
            let state = State {
                delivered: row.get(1),
                dead_letters: row.get(2),
                error: row.get(3),
            };
            (row.get(0), state)
        });
        let states: BTreeMap<String, State> = states.collect();
        let open = |state: &&State| state.delivered < 3 && state.error.is_none();
        if !states.values().any(|state| open(&state)) {
            return states;
        }
        assert!(start.elapsed() < DEADLINE * 3, "{states:#?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn run_by_a_dispatcher() {
    let cluster = quick().setting("max_worker_processes", "240").start();
    let mut db = with_operators(&cluster);
    let (good, evil) = (Receiver::start(), Receiver::start());
    supply(&mut cluster.connect_as("op"), &good, &evil);
    emit(&mut db);
    let states = until_all_have_come_to_something(&mut db);
    for (name, _, failures) in ATTEMPTS {
        for way in WAYS {
            let sink = format!("{name}.{way}");
            let state = &states[&sink];
            if failures.is_empty() {
                assert_eq!(
                    *state,
                    State {
                        delivered: 3,
                        ..State::default()
                    },
                    "{sink}"
                );
            } else {
                failed_so(&sink, state.error.as_deref().unwrap_or_default(), failures);
                assert_eq!((state.delivered, state.dead_letters), (0, 0), "{sink}");
            }
        }
    }
    // The others have not been kept from anything, and are not now.
    for emitted in [3, 6] {
        for sink in ["good_function", "good_http"] {
            until_status(&mut db, sink, "all delivered", |now| {
                now.delivered == emitted
            });
        }
        if emitted == 3 {
            emit(&mut db);
        }
    }
    assert_eq!(db.one::<i64>("select count(*) from op.taken"), 6);
    nothing_happened(&mut db, &evil);
    let log = cluster.log();
    assert!(!log.contains("terminated by signal") && !log.contains("PANIC"));
    assert!(!log.contains("hunter2"));
}

#[test]
fn run_by_a_superuser() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("select outbox.stop()");
    let (good, evil) = (Receiver::start(), Receiver::start());
    supply(&mut cluster.connect_as("op"), &good, &evil);
    emit(&mut db);

    // One after the other, and then all at once.
    for (name, _, failures) in ATTEMPTS {
        for way in WAYS {
            let sink = format!("{name}.{way}");
            let (outcome, error) = tick(&mut db, &sink);
            if failures.is_empty() {
                assert_eq!((outcome.as_str(), error), ("delivered", None), "{sink}");
            } else {
                assert_eq!(outcome, "failed", "{sink}");
                failed_so(&sink, &error.unwrap_or_default(), failures);
            }
        }
    }
    let delivered: Vec<String> =
        db.all("select sink from outbox.tick() where outcome = 'delivered' order by 1");
    assert_eq!(delivered, ["good_function", "good_http"]);
    assert_eq!(db.one::<i64>("select count(*) from op.taken"), 3);
    nothing_happened(&mut db, &evil);

    // And nothing of it has stayed in the session.
    let left: String = db.one(
        "select concat_ws('|', current_user, session_user, current_setting('search_path'), current_setting('statement_timeout'),
                          current_setting('standard_conforming_strings'), current_setting('outbox.tenant'),
                          nullif(current_setting('evil.setting', true), ''), current_setting('default_transaction_read_only'),
                          (select count(*) from pg_listening_channels()), (select count(*) from pg_prepared_statements where name = 'p'),
                          (select count(*) from pg_cursors where name = 'c'), (select count(*) from pg_class where relpersistence = 't'))",
    );
    assert_eq!(
        left,
        r#"postgres|postgres|"$user", public|0|on||off|0|0|0|0"#
    );
}

#[test]
fn it_sees_itself_as_its_owner() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = Receiver::start();
    let mut op = cluster.connect_as("op");
    op.run(
        "create table op.seen (role text);
         create function op.see(outbox.event[]) returns void language sql as 'insert into op.seen values (current_user)';
         create function op.see(outbox.event) returns jsonb language sql as $$ select to_jsonb(current_user || ' ' || $1.topic) $$",
    );
    function_sink(&mut op, "function", "op.see", "");
    http_sink(
        &mut op,
        "http",
        &receiver,
        ", filter => 'current_user = $$op$$', transform => 'op.see(outbox.event)'",
    );
    db.run("select outbox.emit('a')");
    assert_eq!(receiver.wait_for(1)[0].data(), "op a");
    until_idle(&mut db, "function");
    // By a superuser, and by somebody else who operates.
    db.run("select outbox.stop()");
    for role in ["postgres", "other"] {
        db.run("select outbox.emit('b')");
        let mut session = cluster.connect_as(role);
        super::delivers(&mut session, "function");
        super::delivers(&mut session, "http");
    }
    assert_eq!(receiver.wait_for(3)[2].data(), "op b");
    assert_eq!(op.all::<String>("select role from op.seen"), ["op"; 3]);
}

#[test]
fn a_statement_that_is_cancelled_is_cancelled() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    db.run("select outbox.stop()");
    let mut op = cluster.connect_as("op");
    op.run("create function op.sleep(outbox.event[]) returns void language sql as 'select pg_sleep(3600)'");
    function_sink(&mut op, "sleeps", "op.sleep", "");
    db.run("select outbox.emit('a')");
    op.run("set statement_timeout = '100ms'");
    assert_eq!(op.refused("select outbox.tick('sleeps')").sqlstate, "57014");
    // It was not the sink's fault.
    assert_eq!(status(&mut db, "sleeps").last_error, None);
}
