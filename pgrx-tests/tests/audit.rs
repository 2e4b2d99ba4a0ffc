//! The audit trail: append-only, delivered without holes, and a chain of hashes that tells what was tampered with.

mod scene;

use std::collections::BTreeSet;

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{http_sink, quick, until_idle, until_status};
use serde_json::{Value, json};

/// Without a dispatcher; what is passed may go at once.
fn still() -> Cluster {
    Cluster::builder()
        .preload(false)
        .setting("outbox.retention_min_age", "0")
        .start()
}

/// Writes records with the ids r1, r2 and so on, in one transaction.
#[track_caller]
fn write(db: &mut Client, first: i64, last: i64) {
    db.run(&format!(
        "select outbox.audit('thing.done', 'thing', n::text, jsonb_build_object('n', n), id => 'r' || n)
           from generate_series({first}, {last}) n"
    ));
}

/// The records of a request's body.
fn records(body: &[u8]) -> Vec<Value> {
    serde_json::from_slice(body).expect("an array of records")
}

#[track_caller]
fn seal(db: &mut Client) -> i64 {
    db.one("select outbox.seal_audit()")
}

/// What `verify_audit` says: the problem and the id of the record that it is about.
#[track_caller]
fn verify(db: &mut Client) -> (bool, i64, Option<String>, Option<String>) {
    let row = db
        .query_one(
            "select intact, records, problem, id from outbox.verify_audit()",
            &[],
        )
        .expect("it can be verified");
    (row.get(0), row.get(1), row.get(2), row.get(3))
}

/// Does what only a superuser can: with the guards switched off.
#[track_caller]
fn tamper(db: &mut Client, sql: &str) {
    db.run(&format!(
        "begin; alter table outbox.audit_events disable trigger all; alter table outbox.audit_chain disable trigger all; {sql};
         alter table outbox.audit_events enable always trigger outbox_append_only;
         alter table outbox.audit_chain enable always trigger outbox_append_only; commit"
    ));
}

#[test]
fn a_record_is_delivered_in_its_own_form() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "siem", &receiver, json!({}), "stream => 'audit'");
    let id: String = db.one(
        r#"select outbox.audit('member.removed', 'team', '42', '{"by": "ada", "n": 1.50}', '{"policy": "owner"}', tenant => 'acme')"#,
    );
    assert!(id.starts_with("aud_"), "{id}");
    db.run("set outbox.tenant = 'globex'; select outbox.audit('login', 'session')");
    let requests = until("two records", || {
        let requests = receiver.requests();
        let delivered: usize = requests.iter().map(|one| records(&one.body).len()).sum();
        (delivered >= 2).then_some(requests)
    });
    assert_eq!(requests[0].header("content-type"), Some("application/json"));
    let delivered: Vec<Value> = requests.iter().flat_map(|one| records(&one.body)).collect();
    let time: i64 = db.one(&format!(
        "select floor(extract(epoch from time) * 1000)::bigint from outbox.audit_events where id = '{id}'"
    ));
    let expected = format!(
        r#"{{"id": "{id}", "tenantId": "acme", "time": {time}, "action": "member.removed", "resource": {{"type": "team", "id": "42"}},
            "admission": {{"policy": "owner"}}, "details": {{"by": "ada", "n": 1.50}}}}"#
    );
    assert_eq!(
        delivered[0],
        serde_json::from_str::<Value>(&expected).expect("JSON")
    );
    assert_eq!(delivered[1]["tenantId"], "globex");
    assert_eq!(
        delivered[1]["resource"],
        json!({"type": "session", "id": null})
    );
    assert!(delivered[1].get("admission").is_none() && delivered[1].get("details").is_none());
    // A reader sees the same as payload.
    let read: Vec<String> =
        db.all("select topic || ' ' || (payload ->> 'id') from outbox.read(stream => 'audit')");
    assert_eq!(read[0], format!("member.removed {id}"));
}

#[test]
fn a_function_sink_gets_records_as_payloads_once() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table taken (id text, record jsonb);
         create function take(events outbox.event[]) returns void language sql as
             $$ insert into public.taken select id, payload from unnest(events) $$;
         select outbox.create_sink('kept', 'function', config => '{\"function\": \"take\"}', stream => 'audit')",
    );
    write(&mut db, 1, 1200);
    until_status(&mut db, "kept", "all of them", |status| {
        status.delivered == 1200
    });
    assert_eq!(
        db.one::<i64>("select count(*) from taken where record ->> 'id' = id and record -> 'details' ->> 'n' = substr(id, 2)"),
        1200
    );
}

#[test]
fn five_hundred_at_a_time_and_never_taken_apart() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    // A receiver that can never take r7, and says so for good: an audit trail has no holes, so it waits.
    receiver.reply_with(|request| {
        let bad = records(&request.body)
            .iter()
            .any(|record| record["id"] == "r7");
        if bad {
            Reply::failures(&[("r7", "no", true)])
        } else {
            Reply::ok()
        }
    });
    write(&mut db, 1, 1100);
    http_sink(&mut db, "siem", &receiver, json!({}), "stream => 'audit'");
    let stuck = until_status(&mut db, "siem", "several tries", |status| {
        status.attempts >= 8
    });
    assert_eq!((stuck.delivered, stuck.dead_letters), (0, 0));
    let sizes: BTreeSet<usize> = receiver
        .requests()
        .iter()
        .map(|request| records(&request.body).len())
        .collect();
    assert_eq!(
        sizes,
        BTreeSet::from([500]),
        "the same batch again and again"
    );
    receiver.clear();
    receiver.reply_always(Reply::ok());
    until_idle(&mut db, "siem");
    let sizes: Vec<usize> = receiver
        .requests()
        .iter()
        .map(|request| records(&request.body).len())
        .collect();
    assert_eq!(sizes, [500, 500, 100]);
    assert_eq!(db.one::<i64>("select count(*) from outbox.dead_letters"), 0);
}

/// Not the receiver, but what shapes the records cannot take one of them: that makes no hole either.
#[test]
fn a_record_that_a_transform_cannot_take_is_waited_for() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    db.run(
        "create table refused as select 'r3' as id;
         create function shaped(e outbox.event) returns jsonb language plpgsql as $$ begin
             if exists (select from public.refused r where r.id = e.id) then raise exception 'cannot take %', e.id using errcode = '22023'; end if;
             return e.payload; end $$",
    );
    write(&mut db, 1, 5);
    http_sink(
        &mut db,
        "siem",
        &receiver,
        json!({}),
        "stream => 'audit', transform => 'shaped(outbox.event)'",
    );
    let stuck = until_status(&mut db, "siem", "several tries", |status| {
        status.attempts >= 8
    });
    assert_eq!((stuck.delivered, stuck.dead_letters), (0, 0));
    assert!(
        stuck
            .last_error
            .expect("an error")
            .contains("cannot take r3")
    );
    assert_eq!(receiver.requests().len(), 0);
    db.run("delete from refused");
    until_idle(&mut db, "siem");
    let delivered: Vec<Value> = receiver
        .requests()
        .iter()
        .flat_map(|request| records(&request.body))
        .map(|record| record["id"].clone())
        .collect();
    assert_eq!(delivered, ["r1", "r2", "r3", "r4", "r5"]);
}

#[test]
fn nobody_changes_what_is_written() {
    let cluster = still();
    let mut db = cluster.connect();
    write(&mut db, 1, 3);
    seal(&mut db);
    for sql in [
        "update outbox.audit_events set action = 'x'",
        "update outbox.audit_events set action = 'x' where false",
        "delete from outbox.audit_events",
        "truncate outbox.audit_events",
        "truncate outbox.audit_events restart identity cascade",
        "set session_replication_role = replica; delete from outbox.audit_events",
        "update outbox.audit_chain set hash = ''",
        "delete from outbox.audit_chain",
        "truncate outbox.audit_chain",
        "insert into outbox.audit_events (seq, action, resource_type) overriding system value values (1, 'x', 'x') on conflict (seq) do update set action = 'x'",
        "merge into outbox.audit_events e using (values (1)) v (n) on e.seq = v.n when matched then delete",
    ] {
        assert_eq!(db.refused(sql).sqlstate, "42501", "{sql}");
        db.run("reset session_replication_role");
    }
    assert_eq!(verify(&mut db), (true, 3, None, None));
}

#[test]
fn bad_records_and_wrong_doors_are_refused() {
    let cluster = still();
    let mut db = cluster.connect();
    for (sql, sqlstate) in [
        ("select outbox.audit(null, 'team')", "22023"),
        ("select outbox.audit('', 'team')", "22023"),
        ("select outbox.audit('a', '')", "22023"),
        ("select outbox.emit('a', stream => 'audit')", "22023"),
        ("select outbox.create_stream('audit')", "22023"),
        ("select outbox.drop_stream('audit')", "22023"),
        (
            "select outbox.create_sink('s', 'pull', stream => 'audit', \"grouping\" => 'transaction')",
            "22023",
        ),
        (
            "select outbox.create_sink('s', 'pull', stream => 'audit', isolation => 'key')",
            "22023",
        ),
    ] {
        let refusal = db.refused(sql);
        assert_eq!(refusal.sqlstate, sqlstate, "{sql}: {}", refusal.message);
    }
    let hint = db
        .refused("select outbox.emit('a', stream => 'audit')")
        .hint;
    assert!(hint.is_some_and(|hint| hint.contains("outbox.audit(")));
}

#[test]
fn the_chain_finds_what_was_done_to_it() {
    let cluster = still();
    let mut db = cluster.connect();
    write(&mut db, 1, 10);
    assert_eq!(seal(&mut db), 10);
    assert_eq!(seal(&mut db), 0);
    let head: String = db.one("select head from outbox.verify_audit()");
    assert_eq!(verify(&mut db), (true, 10, None, None));
    for no_head in ["", "10", "10:", "10:9c56…", "x:ab", "10:abc"] {
        let refused = db.refused(&format!("select * from outbox.verify_audit('{no_head}')"));
        assert_eq!(refused.sqlstate, "22023", "{no_head}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("head")));
    }

    for (what, undo, problem, id) in [
        (
            "update outbox.audit_events set details = '{}' where id = 'r4'",
            "update outbox.audit_events set details = '{\"n\": 4}' where id = 'r4'",
            "the record was altered",
            Some("r4"),
        ),
        (
            "update outbox.audit_events set time = time + interval '1 microsecond' where id = 'r9'",
            "update outbox.audit_events set time = time - interval '1 microsecond' where id = 'r9'",
            "the record was altered",
            Some("r9"),
        ),
        (
            "create table hidden as select * from outbox.audit_events where id = 'r6'; delete from outbox.audit_events where id = 'r6'",
            "insert into outbox.audit_events overriding system value table hidden; drop table hidden",
            "the record is missing",
            None,
        ),
        (
            "insert into outbox.audit_events (txid, id, action, resource_type) values ('5', 'forged', 'x', 'x')",
            "delete from outbox.audit_events where id = 'forged'",
            "the record was put in later",
            Some("forged"),
        ),
    ] {
        tamper(&mut db, what);
        let (intact, _, found, found_id) = verify(&mut db);
        assert!(!intact, "{what}");
        assert_eq!(found.as_deref(), Some(problem), "{what}");
        assert_eq!(found_id.as_deref(), id, "{what}");
        tamper(&mut db, undo);
        assert!(verify(&mut db).0, "{undo}");
    }

    // Of several, the first.
    tamper(
        &mut db,
        "update outbox.audit_events set action = action || '!' where id in ('r3', 'r8'); create table hidden as
            select * from outbox.audit_events where id = 'r5'; delete from outbox.audit_events where id = 'r5'",
    );
    assert_eq!(verify(&mut db).3.as_deref(), Some("r3"));
    tamper(
        &mut db,
        "update outbox.audit_events set action = 'thing.done' where id = 'r3'",
    );
    let (records, problem, seq): (i64, String, i64) = {
        let row = db
            .query_one(
                "select records, problem, seq from outbox.verify_audit()",
                &[],
            )
            .expect("it can be verified");
        (row.get(0), row.get(1), row.get(2))
    };
    assert_eq!(
        (records, problem.as_str(), seq),
        (4, "the record is missing", 5)
    );
    tamper(
        &mut db,
        "update outbox.audit_events set action = 'thing.done' where id = 'r8';
         insert into outbox.audit_events overriding system value table hidden; drop table hidden",
    );
    assert!(verify(&mut db).0);

    // Whoever rewrites the chain as well is found out by a head that was noted elsewhere.
    tamper(
        &mut db,
        "update outbox.audit_events set details = '{}' where id = 'r4';
         do $$ declare hash bytea := ''; link record; begin
            for link in select c.n, e from outbox.audit_chain c join outbox.audit_events e using (seq) order by c.n loop
                hash := outbox.audit_hash(hash, link.e);
                update outbox.audit_chain c set hash = rewritten.hash from (select hash) rewritten where c.n = link.n;
            end loop; end $$",
    );
    assert!(verify(&mut db).0, "the chain alone cannot tell");
    let problem: String = db.one(&format!(
        "select problem from outbox.verify_audit('{head}')"
    ));
    assert_eq!(problem, "the chain was rewritten since its head was noted");
    tamper(
        &mut db,
        "delete from outbox.audit_chain where n > 8; delete from outbox.audit_events where seq > 8",
    );
    let problem: String = db.one(&format!(
        "select problem from outbox.verify_audit('{head}')"
    ));
    assert_eq!(
        problem,
        "records at the end are missing since the head was noted"
    );
}

#[test]
fn sealing_waits_for_nobody_and_holds_nobody_up() {
    let cluster = still();
    let mut db = cluster.connect();
    let mut slow = cluster.connect();
    let mut sealer = cluster.connect();
    slow.run("begin");
    write(&mut slow, 1, 1);
    // A sealer in the middle of its work, and an open writer.
    write(&mut db, 2, 3);
    sealer.run("begin");
    assert_eq!(seal(&mut sealer), 2);
    write(&mut db, 4, 4);
    assert_eq!(seal(&mut db), 0, "one at a time");
    sealer.run("commit");
    assert_eq!(seal(&mut db), 1);
    slow.run("commit");
    assert_eq!(seal(&mut db), 1);
    assert_eq!(verify(&mut db), (true, 4, None, None));
    let order: Vec<String> = db.all(
        "select e.id from outbox.audit_chain c join outbox.audit_events e using (seq) order by c.n",
    );
    assert_eq!(order, ["r2", "r3", "r4", "r1"]);
    // What is rolled back leaves a number out, and no hole.
    db.run("begin; select outbox.audit('x', 'x'); rollback");
    write(&mut db, 5, 5);
    db.run("begin; select outbox.audit('x', 'x')");
    assert_eq!(seal(&mut db), 0, "not in the transaction of a writer");
    db.run("commit");
    assert_eq!(seal(&mut db), 2);
    assert!(verify(&mut db).0);
}

#[test]
fn a_backlog_is_sealed_in_steps_that_cost_what_they_seal() {
    let cluster = still();
    let mut db = cluster.connect();
    let mut slow = cluster.connect();
    slow.run("begin");
    write(&mut slow, 1, 300);
    for first in (301..=3_000).step_by(100) {
        write(&mut db, first, first + 99);
    }
    let mut looked_at = Vec::new();
    let mut step = |db: &mut Client| -> i64 {
        db.run("begin");
        let fetched = |db: &mut Client| -> i64 {
            db.one(
                "select pg_stat_get_xact_tuples_fetched('outbox.audit_events'::regclass)
                      + pg_stat_get_xact_tuples_returned('outbox.audit_events'::regclass)",
            )
        };
        let before = fetched(db);
        let sealed = db.one("select outbox.seal_audit(100)");
        looked_at.push(fetched(db) - before);
        db.run("commit");
        sealed
    };
    // What is written, and committed, meanwhile has its turn in the next window.
    assert_eq!(step(&mut db), 100);
    write(&mut db, 3_001, 3_050);
    slow.run("commit");
    let mut sealed = 100;
    while sealed < 2_700 {
        assert_eq!(step(&mut db), 100);
        sealed += 100;
    }
    assert!(!verify(&mut db).0 || verify(&mut db).1 == 2_700);
    for _ in 0..10 {
        sealed += step(&mut db);
    }
    assert_eq!(sealed, 3_050);
    assert!(looked_at.iter().all(|&rows| rows <= 500), "{looked_at:?}");
    assert_eq!(verify(&mut db), (true, 3_050, None, None));
    let most: i64 = db.one(
        "select max(n) from (select count(*) as n from outbox.audit_chain where seq is not null group by seq) x",
    );
    assert_eq!(most, 1, "each once");
}

#[test]
fn retention_takes_from_the_beginning_and_the_rest_still_holds() {
    let cluster = still();
    let mut db = cluster.connect();
    write(&mut db, 1, 20);
    db.run("select outbox.create_sink('a', 'pull', stream => 'audit'), outbox.create_sink('b', 'pull', stream => 'audit')");
    db.run("select outbox.poll('a', 100); select outbox.ack('a')");
    db.run("select outbox.poll('b', 12); select outbox.ack('b')");
    assert_eq!(
        db.one::<i64>("select outbox.prune('audit')"),
        0,
        "not sealed yet"
    );
    seal(&mut db);
    assert_eq!(db.one::<i64>("select outbox.prune('audit')"), 12);
    assert_eq!(verify(&mut db), (true, 8, None, None));
    db.run("select outbox.poll('b', 100); select outbox.ack('b')");
    // What was cut out is not passed over.
    tamper(&mut db, "delete from outbox.audit_events where id = 'r15'");
    assert_eq!(db.one::<i64>("select outbox.prune()"), 2);
    let (intact, _, problem, _) = verify(&mut db);
    assert_eq!(
        (intact, problem.as_deref()),
        (false, Some("the record is missing"))
    );
}

#[test]
fn a_restored_trail_is_intact_and_goes_on() {
    let cluster = Cluster::builder()
        .setting("outbox.retention_min_age", "0")
        .start();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('a', 'pull', stream => 'audit')");
    write(&mut db, 1, 9);
    db.run("select outbox.poll('a', 4); select outbox.ack('a')");
    until("the dispatcher to seal", || {
        (verify(&mut db).1 == 9).then_some(())
    });
    db.run("select outbox.prune('audit')");
    cluster.restore("restored", &cluster.dump("app"));
    let mut restored = cluster.connect_to("restored");
    let verified = until("the trail", || {
        let verified = verify(&mut restored);
        (verified.1 == 5).then_some(verified)
    });
    assert_eq!(verified, (true, 5, None, None));
    write(&mut restored, 10, 12);
    until("the dispatcher to seal on", || {
        (verify(&mut restored).1 == 8).then_some(())
    });
    let mut left: Vec<String> = restored.all("select id from outbox.poll('a', 100)");
    restored.run("select outbox.ack('a')");
    left.extend(restored.all::<String>("select id from outbox.poll('a', 100)"));
    assert_eq!(left, ["r5", "r6", "r7", "r8", "r9", "r10", "r11", "r12"]);
    assert!(verify(&mut restored).0);
}
