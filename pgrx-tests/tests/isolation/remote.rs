//! Another PostgreSQL as the destination: what it refuses holds one key, and each event takes effect once, parked or not.

use outbox_tests::{Cluster, Mode, Signal, Sql, until};
use postgres::Client;
use serde_json::json;

use super::scene::{dead_letters, quick, quoted, status, until_dead, until_idle, until_status};
use super::{emit, of_subject, parked, until_parked};

/// A cluster that knows nothing of the extension, with a table for what is applied, and another that says what it refuses.
fn destination() -> (Cluster, Client) {
    let cluster = Cluster::builder().preload(false).extension(false).start();
    let mut remote = cluster.connect();
    remote.run(
        "create table applied (at bigint generated always as identity, id text, topic text, payload jsonb);
         create table refused (id text, code text default '55000');
         create function check_it() returns trigger language plpgsql as $$
         declare
             wrong text;
         begin
             select r.code into wrong from refused r where r.id = new.id;
             if found then
                 raise exception 'not this one' using errcode = wrong;
             end if;
             return new;
         end $$;
         create trigger check_it before insert on applied for each row execute function check_it()",
    );
    (cluster, remote)
}

fn sink(db: &mut Client, to: &Cluster) {
    let config = quoted(&json!({"dsn": to.url("app"), "table": "applied"}).to_string());
    db.run(&format!(
        "select outbox.create_sink('keys', 'postgres', config => {config}, isolation => 'key')"
    ));
}

/// Retries so seldom that only what is asked for is tried.
fn patient() -> Cluster {
    quick()
        .setting("outbox.retry_min", "1h")
        .setting("outbox.retry_max", "1h")
        .start()
}

fn applied(remote: &mut Client) -> Vec<String> {
    remote.all("select id from applied order by at")
}

#[track_caller]
fn until_applied(remote: &mut Client, ids: &str) {
    until(&format!("{ids} to be applied"), || {
        let there = applied(remote);
        ids.split(' ')
            .all(|id| there.iter().any(|one| one == id))
            .then_some(())
    });
}

/// Kills the process that delivers, and with it all of the cluster's.
#[track_caller]
fn crash(cluster: &Cluster, db: &mut Client) -> Client {
    let holder = until_status(db, "keys", "a holder of its lease", |status| {
        status.lease_pid.is_some()
    });
    cluster.kill_backend(holder.lease_pid.expect("it has one"), Signal::KILL);
    until("the session to be lost", || {
        db.simple_query("").is_err().then_some(())
    });
    cluster.wait_until_it_answers();
    cluster.connect()
}

#[test]
fn what_is_refused_holds_its_key_through_restarts() {
    let (there, mut remote) = destination();
    remote.run("insert into refused values ('a2')");
    let mut cluster = patient();
    let mut db = cluster.connect();
    sink(&mut db, &there);
    emit(&mut db, "a1 b1 a2 b2 a3 c1");
    until_applied(&mut remote, "a1 b1 b2 c1");
    until_parked(&mut db, "keys", "a2 a3");
    let seen = until_status(&mut db, "keys", "attempts", |status| status.attempts >= 1);
    assert_eq!(
        (seen.lag_events, seen.delivered, seen.dead_letters),
        (2, 4, 0)
    );
    let error = seen.last_error.expect("it says why");
    assert!(error.contains("55000"), "{error}");

    let mut db = crash(&cluster, &mut db);
    emit(&mut db, "a4 b3");
    until_applied(&mut remote, "b3");
    until_parked(&mut db, "keys", "a2 a3 a4");
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    let mut db = cluster.connect();
    emit(&mut db, "c2");
    until_applied(&mut remote, "c2");
    until_parked(&mut db, "keys", "a2 a3 a4");

    remote.run("delete from refused");
    db.run("select outbox.resume_sink('keys')");
    until_applied(&mut remote, "a4");
    let idle = until_idle(&mut db, "keys");
    assert_eq!((idle.lag_events, idle.dead_letters), (0, 0));
    let applied = applied(&mut remote);
    for (key, ids) in [("a", "a1 a2 a3 a4"), ("b", "b1 b2 b3"), ("c", "c1 c2")] {
        assert_eq!(of_subject(&applied, key), ids);
    }
}

#[test]
fn each_event_that_is_refused_for_good_is_a_dead_letter_of_its_own() {
    let (there, mut remote) = destination();
    // One by what it holds, two for reasons that may pass, and do not.
    remote.run("insert into refused values ('a1', '55000'), ('a3', '55000'), ('b1', '23514')");
    let cluster = quick().start();
    let mut db = cluster.connect();
    sink(&mut db, &there);
    emit(&mut db, "a1 b1 c1 a2 b2 c2 a3 a4");
    // What goes through tells that the others are not refused with everything.
    let mut more = 3;
    until("each to be tried often enough", || {
        emit(&mut db, &format!("c{more}"));
        until_applied(&mut remote, &format!("c{more}"));
        more += 1;
        (status(&mut db, "keys").dead_letters == 3).then_some(())
    });
    let dead = dead_letters(&mut db, "keys");
    let mut ids: Vec<_> = dead.iter().map(|letter| letter.id()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["a1", "a3", "b1"]);
    for letter in &dead {
        let code = if letter.id() == "b1" {
            "23514"
        } else {
            "55000"
        };
        assert!(letter.error.contains(code), "{}", letter.error);
    }
    until_idle(&mut db, "keys");
    let before = applied(&mut remote);
    assert_eq!(of_subject(&before, "a"), "a2 a4");
    assert_eq!(of_subject(&before, "b"), "b2");
    remote.run("delete from refused");
    db.run("select outbox.redeliver('keys')");
    until_dead(&mut db, "keys", 0);
    let after = applied(&mut remote);
    assert_eq!(after.len(), 6 + more - 1, "each once: {after:?}");
    assert_eq!(parked(&mut db, "keys"), "");
}

#[test]
fn what_was_parked_and_is_applied_is_not_applied_again_after_a_crash() {
    let (there, mut remote) = destination();
    remote.run("insert into refused values ('a1')");
    let cluster = patient();
    let mut db = cluster.connect();
    sink(&mut db, &there);
    emit(&mut db, "a1 b1 a2 a3");
    until_applied(&mut remote, "b1");
    until_parked(&mut db, "keys", "a1 a2 a3");
    remote.run("delete from refused");
    // While somebody holds the cursor's row, nothing can be saved.
    let mut holder = cluster.connect();
    let mut held = holder.transaction().expect("a transaction begins");
    held.run("select from outbox.cursors where name = 'sink:keys' for update");
    db.run("select outbox.resume_sink('keys')");
    until_applied(&mut remote, "a1");
    let mut db = crash(&cluster, &mut db);
    // Nobody but the destination knows.
    let known = parked(&mut db, "keys");
    assert!(known.is_empty() || known.starts_with("a1 a2 a3"), "{known}");
    db.run("select outbox.resume_sink('keys')");
    emit(&mut db, "a4 b2");
    until_applied(&mut remote, "a4 b2");
    until_idle(&mut db, "keys");
    let applied = applied(&mut remote);
    assert_eq!(of_subject(&applied, "a"), "a1 a2 a3 a4");
    assert_eq!(of_subject(&applied, "b"), "b1 b2");
    assert_eq!(status(&mut db, "keys").dead_letters, 0);
}

#[test]
fn a_cursor_that_is_put_back_applies_nothing_again_and_parks_nothing_twice() {
    let (there, mut remote) = destination();
    remote.run("insert into refused values ('a2')");
    let cluster = patient();
    let mut db = cluster.connect();
    sink(&mut db, &there);
    emit(&mut db, "a1 b1");
    until_applied(&mut remote, "a1 b1");
    until_idle(&mut db, "keys");
    db.run("create table remembered as select * from outbox.cursors where name = 'sink:keys'");
    emit(&mut db, "a2 b2 a3 c1");
    until_applied(&mut remote, "b2 c1");
    until_parked(&mut db, "keys", "a2 a3");
    db.run("select outbox.pause_sink('keys')");
    until_status(&mut db, "keys", "no holder of its lease", |status| {
        status.lease_pid.is_none()
    });
    db.run(
        "delete from outbox.cursors where name = 'sink:keys';
         insert into outbox.cursors select * from remembered;
         select outbox.resume_sink('keys')",
    );
    emit(&mut db, "a4 b3");
    until_applied(&mut remote, "b3");
    until_parked(&mut db, "keys", "a2 a3 a4");
    remote.run("delete from refused");
    db.run("select outbox.resume_sink('keys')");
    until_applied(&mut remote, "a4");
    until_idle(&mut db, "keys");
    let applied = applied(&mut remote);
    assert_eq!(of_subject(&applied, "a"), "a1 a2 a3 a4");
    assert_eq!(of_subject(&applied, "b"), "b1 b2 b3");
    assert_eq!(of_subject(&applied, "c"), "c1");
    assert_eq!(status(&mut db, "keys").dead_letters, 0);
}
