//! Functions: what is parked is delivered in the transaction that says so, and so has its effect once.

use outbox_tests::Sql;
use postgres::Client;

use super::scene::{dead_letters, quick, until_idle, until_status};
use super::{emit, of_subject, until_parked};

/// A function that notes each event, and fails on those in `refused`; a sink that calls it.
fn taker(db: &mut Client, arguments: &str) {
    db.run(&format!(
        "create table seen (n bigint generated always as identity, id text);
         create table refused (id text);
         create function take(events outbox.event[]) returns void language plpgsql as $$
         declare
             e outbox.event;
         begin
             foreach e in array events loop
                 insert into seen (id) values (e.id);
                 if exists (select from refused r where r.id = e.id) then
                     raise exception 'not this one';
                 end if;
             end loop;
         end $$;
         select outbox.create_sink('taker', 'function', config => '{{\"function\": \"take\"}}', isolation => 'key'{arguments})"
    ));
}

fn seen(db: &mut Client) -> Vec<String> {
    db.all("select id from seen order by n")
}

#[track_caller]
fn until_seen(db: &mut Client, ids: &str) {
    outbox_tests::until(&format!("{ids} to be seen"), || {
        let there = seen(db);
        ids.split(' ')
            .all(|id| there.iter().any(|one| one == id))
            .then_some(())
    });
}

#[test]
fn a_function_that_raises_holds_one_key() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    taker(&mut db, ", batch_size => 8");
    db.run("insert into refused values ('a2'), ('d1')");
    emit(&mut db, "a1 b1 a2 b2 a3 c1 a4 d1 d2 b3 c2");
    until_seen(&mut db, "a1 b1 b2 c1 b3 c2");
    until_parked(&mut db, "taker", "a2 a3 a4 d1 d2");
    let status = until_status(&mut db, "taker", "attempts", |status| status.attempts >= 2);
    assert_eq!(
        (&*status.state, status.lag_events, status.delivered),
        ("retrying", 5, 6)
    );
    assert_eq!(
        status.last_error.as_deref(),
        Some("not this one (SQLSTATE P0001)")
    );
    db.run("delete from refused");
    until_seen(&mut db, "a2 a3 a4 d1 d2");
    let idle = until_idle(&mut db, "taker");
    assert_eq!((idle.delivered, idle.dead_letters), (11, 0));
    let seen = seen(&mut db);
    assert_eq!(seen.len(), 11, "each once");
    assert_eq!(of_subject(&seen, "a"), "a1 a2 a3 a4");
    assert_eq!(of_subject(&seen, "d"), "d1 d2");
}

#[test]
fn a_function_that_reports_holds_one_key() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (n bigint generated always as identity, id text);
         create table refused (id text);
         create function take(events outbox.event[]) returns table (seq bigint, result text, error text) language plpgsql as $$
         declare
             e outbox.event;
             held text[] := '{}';
         begin
             foreach e in array events loop
                 seq := e.seq;
                 error := null;
                 if e.subject = any (held) then
                     result := 'skipped';
                 elsif exists (select from refused r where r.id = e.id) then
                     result := 'failed';
                     error := 'not now';
                     held := held || e.subject;
                 elsif e.id = 'c1' then
                     result := 'rejected';
                     error := 'never';
                 else
                     result := 'recorded';
                     insert into seen (id) values (e.id);
                 end if;
                 return next;
             end loop;
         end $$;
         insert into refused values ('a1');
         select outbox.create_sink('taker', 'function', config => '{\"function\": \"take\"}', isolation => 'key')",
    );
    emit(&mut db, "a1 b1 a2 c1 c2 a3");
    until_seen(&mut db, "b1 c2");
    until_parked(&mut db, "taker", "a1 a2 a3");
    let dead = dead_letters(&mut db, "taker");
    assert_eq!((dead.len(), dead[0].id(), dead[0].attempts), (1, "c1", 1));
    db.run("delete from refused");
    until_seen(&mut db, "a1 a2 a3");
    until_idle(&mut db, "taker");
    assert_eq!(of_subject(&seen(&mut db), "a"), "a1 a2 a3");
    assert_eq!(seen(&mut db).len(), 5);
}

#[test]
fn effects_happen_once_also_when_the_process_is_killed() {
    // However often the first of a key fails before it may go through.
    let cluster = quick().setting("outbox.poison_attempts", "1000").start();
    let mut db = cluster.connect();
    taker(&mut db, "");
    db.run("insert into refused values ('a1')");
    emit(&mut db, "a1 b1 a2 a3");
    until_parked(&mut db, "taker", "a1 a2 a3");
    for round in 1..=5 {
        emit(&mut db, &format!("b{} c{round} a{}", round + 1, round + 3));
        let pid = until_status(&mut db, "taker", "a holder", |status| {
            status.lease_pid.is_some()
        })
        .lease_pid;
        db.run(&format!("select pg_terminate_backend({})", pid.unwrap()));
        if round == 3 {
            db.run("delete from refused");
        }
    }
    until_seen(&mut db, "a8 b6 c5");
    until_idle(&mut db, "taker");
    let seen = seen(&mut db);
    assert_eq!(of_subject(&seen, "a"), "a1 a2 a3 a4 a5 a6 a7 a8");
    assert_eq!(of_subject(&seen, "b"), "b1 b2 b3 b4 b5 b6");
    assert_eq!(of_subject(&seen, "c"), "c1 c2 c3 c4 c5");
}

#[test]
fn a_pass_by_hand_tries_what_is_parked() {
    let cluster = quick()
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .start();
    let mut db = cluster.connect();
    taker(&mut db, "");
    db.run("insert into refused values ('a1')");
    emit(&mut db, "a1 b1 a2");
    until_parked(&mut db, "taker", "a1 a2");
    db.run("select outbox.stop()");
    outbox_tests::until("the lease", || {
        let outcome: String = db.one("select outcome from outbox.tick('taker')");
        (outcome != "leased").then(|| assert_eq!(outcome, "failed"))
    });
    db.run("delete from refused");
    assert_eq!(
        db.one::<i64>("select delivered from outbox.tick('taker')"),
        2
    );
    assert_eq!(seen(&mut db), ["b1", "a1", "a2"]);
    let outcome: String = db.one("select outcome from outbox.tick('taker')");
    assert_eq!(outcome, "idle");
}
