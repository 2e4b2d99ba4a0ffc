//! What a committed call has done is known to the process that takes the sink next, whatever happens in between: it is done once.

use outbox_tests::{Cluster, Signal, Sql, until};
use postgres::Client;

use super::scene::{emit, ids, quick, status, until_idle, until_status};
use super::{seen, sink};

/// A function that notes what it takes, fails what is in `bad` and puts off what is in `later`.
fn with_function(db: &mut Client, name: &str) {
    db.run(&format!(
        "create table if not exists seen (id text);
         create table if not exists bad (id text);
         create table if not exists later (id text);
         create function {name}(events outbox.event[]) returns table (seq bigint, result text, error text) language plpgsql as $$
         declare
             e outbox.event;
         begin
             foreach e in array events loop
                 seq := e.seq;
                 result := case when exists (select from bad b where b.id = e.id) then 'failed'
                                when exists (select from later l where l.id = e.id) then 'skipped' else 'recorded' end;
                 error := case result when 'failed' then 'not yet' end;
                 if result = 'recorded' then insert into seen values (e.id); end if;
                 return next;
             end loop;
         end $$"
    ));
}

fn until_seen(db: &mut Client, count: i64) {
    until("events to be taken", || {
        (db.one::<i64>("select count(*) from seen") >= count).then_some(())
    });
}

type Interruption = (&'static str, fn(&Cluster));

/// Ends what serves the sink in each way there is; the sink is served again after that.
fn interruptions() -> Vec<Interruption> {
    fn pid(db: &mut Client) -> i32 {
        until("a holder of the lease", || status(db, "taker").lease_pid)
    }
    vec![
        ("pause and resume", |cluster| {
            let mut db = cluster.connect();
            db.run("select outbox.pause_sink('taker')");
            until("the lease to be given back", || {
                status(&mut db, "taker").lease_pid.is_none().then_some(())
            });
            db.run("select outbox.resume_sink('taker')");
        }),
        ("stop and start", |cluster| {
            let mut db = cluster.connect();
            db.run("select outbox.stop()");
            until("the lease to be given back", || {
                status(&mut db, "taker").lease_pid.is_none().then_some(())
            });
            db.run("select outbox.start()");
        }),
        ("terminate", |cluster| {
            let mut db = cluster.connect();
            let pid = pid(&mut db);
            db.run(&format!("select pg_terminate_backend({pid})"));
        }),
        ("kill", |cluster| {
            let mut db = cluster.connect();
            let pid = pid(&mut db);
            cluster.kill_backend(pid, Signal::KILL);
            until("the server to go down", || {
                db.execute("select 1", &[]).err()
            });
            cluster.wait_until_it_answers();
        }),
        ("other batches", |cluster| {
            let mut db = cluster.connect();
            db.run("select outbox.alter_sink('taker', batch_size => 3)");
        }),
        ("whole transactions", |cluster| {
            let mut db = cluster.connect();
            db.run("select outbox.alter_sink('taker', \"grouping\" => 'transaction')");
        }),
        ("another function", |cluster| {
            let mut db = cluster.connect();
            with_function(&mut db, "take_too");
            db.run(
                "drop function take(outbox.event[]);
                 select outbox.emit('test', subject => 'n9', id => 'n9')",
            );
            until_status(&mut db, "taker", "the want of its function", |status| {
                status.state == "error"
            });
            db.run("select outbox.alter_sink('taker', config => '{\"function\": \"take_too\"}')");
        }),
    ]
}

fn is_taken_once(holds_up: &str) {
    for (name, interrupt) in interruptions() {
        let cluster = quick().setting("outbox.poison_attempts", "1000").start();
        let mut db = cluster.connect();
        with_function(&mut db, "take");
        db.run(&format!("insert into {holds_up} values ('n1')"));
        sink(&mut db, r#"{"function": "take"}"#, ", batch_size => 8");
        emit(&mut db, 1..=8);
        until_seen(&mut db, 7);
        println!("{name}");
        interrupt(&cluster);
        let mut db = cluster.connect();
        if name != "another function" {
            db.run("select outbox.emit('test', subject => 'n9', id => 'n9')");
        }
        if holds_up == "bad" {
            let attempts = status(&mut db, "taker").attempts;
            until_status(&mut db, "taker", "a further attempt", |status| {
                status.state == "retrying" && status.attempts > attempts
            });
        } else {
            until_seen(&mut db, 8);
        }
        db.run("truncate bad, later");
        until_idle(&mut db, "taker");
        assert_eq!(seen(&mut db), ids(1..=9), "{name}, {holds_up}");
    }
}

#[test]
fn what_went_through_ahead_of_a_failing_event_is_done_once() {
    is_taken_once("bad");
}

#[test]
fn what_went_through_ahead_of_an_event_that_was_put_off_is_done_once() {
    is_taken_once("later");
}

#[test]
fn an_event_that_is_put_off_has_not_failed() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    with_function(&mut db, "take");
    db.run("insert into later values ('n1')");
    sink(&mut db, r#"{"function": "take"}"#, ", batch_size => 8");
    for number in 1..=12 {
        emit(&mut db, number..=number);
        until_seen(&mut db, number - 1);
    }
    let now = until_status(&mut db, "taker", "a next attempt", |status| {
        status.next_attempt_in.is_some()
    });
    assert_eq!(
        (now.attempts, now.last_error, now.dead_letters),
        (0, None, 0)
    );
    assert_eq!(now.state, "flowing");
    db.run("truncate later");
    until_idle(&mut db, "taker");
    assert_eq!(seen(&mut db), ids(1..=12));
}

#[test]
fn numbers_that_begin_again_are_of_other_events() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    with_function(&mut db, "take");
    db.run("insert into bad values ('n1')");
    sink(&mut db, r#"{"function": "take"}"#, "");
    emit(&mut db, 1..=5);
    until_seen(&mut db, 4);
    db.run("truncate outbox.events restart identity; truncate seen");
    emit(&mut db, 11..=18);
    until_seen(&mut db, 8);
    until_idle(&mut db, "taker");
    assert_eq!(seen(&mut db), ids(11..=18));
}

#[test]
fn what_is_done_of_a_transaction_that_comes_again_is_done_once() {
    for holds_up in ["bad", "later"] {
        for (name, interrupt) in interruptions() {
            let cluster = quick().setting("outbox.poison_attempts", "1000").start();
            let mut db = cluster.connect();
            with_function(&mut db, "take");
            db.run(&format!("insert into {holds_up} values ('n2')"));
            let arguments = ", batch_size => 8, \"grouping\" => 'transaction'";
            sink(&mut db, r#"{"function": "take"}"#, arguments);
            db.run("begin");
            emit(&mut db, 1..=4);
            db.run("commit");
            until_seen(&mut db, 3);
            interrupt(&cluster);
            let mut db = cluster.connect();
            if name != "another function" {
                db.run("select outbox.emit('test', subject => 'n9', id => 'n9')");
            }
            db.run("truncate bad, later");
            until_idle(&mut db, "taker");
            let mut taken = ids(1..=4);
            taken.push("n9".to_owned());
            assert_eq!(seen(&mut db), taken, "{name}, {holds_up}");
        }
    }
}

#[test]
fn what_went_through_ahead_of_an_event_that_is_gone_is_done_once_and_the_next_is_done() {
    let ways = [
        "delete from outbox.events where id = 'n1'",
        "select outbox.alter_sink('taker', filter => 'id <> ''n1''')",
    ];
    for way in ways {
        let cluster = quick().start();
        let mut db = cluster.connect();
        let pause = |db: &mut Client| {
            db.run("select outbox.pause_sink('taker')");
            until("the lease to be given back", || {
                status(db, "taker").lease_pid.is_none().then_some(())
            });
        };
        with_function(&mut db, "take");
        db.run("insert into bad values ('n1')");
        sink(&mut db, r#"{"function": "take"}"#, ", batch_size => 8");
        emit(&mut db, 1..=5);
        until_seen(&mut db, 4);
        pause(&mut db);
        db.run(way);
        db.run("insert into later values ('n6')");
        emit(&mut db, 6..=7);
        db.run("select outbox.resume_sink('taker')");
        until_seen(&mut db, 5);
        // Another process goes by what is stored.
        pause(&mut db);
        db.run("truncate later; select outbox.resume_sink('taker')");
        until_idle(&mut db, "taker");
        assert_eq!(seen(&mut db), ids(2..=7), "{way}");
    }
}
