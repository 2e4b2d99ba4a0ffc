//! Dead letters that are queued again: through at last, refused once more, or waiting for their sink.

mod scene;

use outbox_tests::{Receiver, Reply, Sql, until};
use scene::picky::{Picky, events_in, with_dead_letters};
use scene::{
    dead_letters, emit, http_sink, ids, quick, replace_dispatcher, until_dead, until_idle,
    until_status,
};
use serde_json::json;

#[test]
fn one_is_redelivered_and_the_others_stay() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(10, &[2, 5, 7]);
    picky.refuses([]);
    picky.receiver.clear();
    let position = letters[1].position.replace(':', ".");
    let queued: i64 = db.one(&format!("select outbox.redeliver('picky', '{position}')"));
    assert_eq!(queued, 1);
    let left = until_dead(&mut db, "picky", 2);
    let left: Vec<_> = left
        .iter()
        .map(|letter| (letter.id(), letter.queued))
        .collect();
    assert_eq!(left, [("n2", false), ("n7", false)]);
    assert_eq!(picky.receiver.ids(), ["n5"]);
    let request = &picky.receiver.requests()[0];
    assert_eq!(events_in(request), [letters[1].event.clone()]);
    assert_eq!(request.header("idempotency-key"), Some("n5"));
}

#[test]
fn all_are_redelivered_while_others_flow() {
    let dead: Vec<i64> = (1..=60).filter(|n| n % 2 == 0).collect();
    let (_cluster, mut db, picky, _) = with_dead_letters(60, &dead);
    picky.refuses([]);
    picky.receiver.clear();
    let queued: i64 = db.one("select outbox.redeliver('picky')");
    assert_eq!(queued, 30);
    for n in 61..=90 {
        emit(&mut db, n..=n);
    }
    until_dead(&mut db, "picky", 0);
    picky.receiver.wait_for(60);
    until_idle(&mut db, "picky");
    let arrived = picky.receiver.ids();
    let (old, new): (Vec<_>, Vec<_>) = arrived
        .into_iter()
        .partition(|id| dead.contains(&id[1..].parse().unwrap()));
    assert_eq!(old, ids(dead));
    assert_eq!(new, ids(61..=90));
    assert_eq!(db.one::<i64>("select outbox.redeliver('picky')"), 0);
}

#[test]
fn one_that_is_refused_for_good_again_stays() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(5, &[2, 4]);
    picky.refuses([2]);
    db.run("select outbox.redeliver('picky')");
    let left = until_dead(&mut db, "picky", 1);
    assert_eq!(left[0].id(), "n2");
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "picky")[0].queued).then_some(())
    });
    let left = dead_letters(&mut db, "picky").remove(0);
    assert_eq!((left.attempts, left.error.as_str()), (2, "not wanted here"));
    assert_eq!(left.event, letters[0].event);
    assert_eq!(
        picky.receiver.ids().iter().filter(|id| *id == "n4").count(),
        1
    );
}

/// Answers 500 to every request that holds the event.
fn fail_on(receiver: &Receiver, id: &'static str) {
    receiver.reply_with(move |request| {
        if events_in(request).iter().any(|event| event["id"] == id) {
            Reply::status(500)
        } else {
            Reply::ok()
        }
    });
}

#[test]
fn one_that_fails_again_stays_once_another_has_gone_through() {
    let (_cluster, mut db, picky, _) = with_dead_letters(5, &[2, 4]);
    // Another dead letter shows that the sink is up.
    fail_on(&picky.receiver, "n2");
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 1);
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "picky")[0].queued).then_some(())
    });
    let left = dead_letters(&mut db, "picky").remove(0);
    assert_eq!(
        (left.id(), left.error.as_str()),
        ("n2", "HTTP 500 Internal Server Error")
    );
    assert!(left.attempts > 5, "{left:?}");

    // An event of the stream does so, too.
    let before = left.attempts;
    db.run("select outbox.redeliver('picky')");
    until("more than five attempts", || {
        let letter = dead_letters(&mut db, "picky").remove(0);
        assert!(letter.queued, "nothing shows that the sink is up");
        (letter.attempts > before + 6).then_some(())
    });
    emit(&mut db, 6..=6);
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "picky")[0].queued).then_some(())
    });
    until_idle(&mut db, "picky");
    assert_eq!(picky.receiver.ids().last().unwrap(), "n6");

    // In the end it is taken after all.
    picky.receiver.reply_always(Reply::ok());
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 0);
    assert_eq!(picky.receiver.ids().last().unwrap(), "n2");
}

#[test]
fn an_outage_keeps_them_queued() {
    let (_cluster, mut db, picky, _) = with_dead_letters(40, &(1..=30).collect::<Vec<_>>());
    picky.refuses([]);
    picky.receiver.clear();
    picky.receiver.stop();
    db.run("select outbox.redeliver('picky')");
    until("many attempts", || {
        let letters = dead_letters(&mut db, "picky");
        assert!(letters.iter().all(|letter| letter.queued));
        let attempts: i32 = letters.iter().map(|letter| letter.attempts - 1).sum();
        (attempts >= 40).then_some(())
    });
    replace_dispatcher(&mut db, "picky");
    let letters = dead_letters(&mut db, "picky");
    assert_eq!(letters.len(), 30);
    assert!(
        letters[0].error.contains("Connection refused"),
        "{}",
        letters[0].error
    );
    picky.receiver.start_again();
    until_dead(&mut db, "picky", 0);
    let mut arrived = picky.receiver.ids();
    arrived.sort_by_key(|id| id[1..].parse::<i64>().unwrap());
    assert_eq!(arrived, ids(1..=30), "each once");
}

#[test]
fn they_wait_until_the_stream_flows() {
    let (_cluster, mut db, picky, _) = with_dead_letters(5, &[2, 4]);
    picky.refuses([]);
    picky.receiver.clear();
    picky.receiver.reply_always(Reply::status(503));
    emit(&mut db, 6..=20);
    until_status(&mut db, "picky", "down", |status| status.state == "down");
    db.run("select outbox.redeliver('picky')");
    until_status(&mut db, "picky", "some more attempts", |status| {
        status.attempts >= 15
    });
    let letters = dead_letters(&mut db, "picky");
    assert!(
        letters
            .iter()
            .all(|letter| letter.queued && letter.attempts == 1),
        "{letters:?}"
    );
    picky.receiver.reply_always(Reply::ok());
    until_dead(&mut db, "picky", 0);
    picky.receiver.wait_for_distinct(17);
    until_idle(&mut db, "picky");
}

#[test]
fn a_paused_sink_gets_them_when_it_is_resumed() {
    let (_cluster, mut db, picky, letters) = with_dead_letters(9, &[2, 4, 6]);
    picky.refuses([]);
    picky.receiver.clear();
    db.run("select outbox.pause_sink('picky')");
    until_status(&mut db, "picky", "paused", |status| {
        status.state == "paused" && status.lease_pid.is_none()
    });
    db.run("select outbox.redeliver('picky')");
    // One that is discarded meanwhile is not delivered.
    db.run(&format!(
        "select outbox.discard('picky', '{}')",
        letters[1].position
    ));
    assert!(
        dead_letters(&mut db, "picky")
            .iter()
            .all(|letter| letter.queued)
    );
    db.run("select outbox.resume_sink('picky')");
    until_dead(&mut db, "picky", 0);
    until_idle(&mut db, "picky");
    assert_eq!(picky.receiver.ids(), ["n2", "n6"]);
}

#[test]
fn a_redelivery_is_signed_with_what_is_active_then() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let picky = Picky::start();
    picky.refuses([2]);
    db.run("select outbox.set_secret('hook', array['before'])");
    http_sink(
        &mut db,
        "picky",
        &picky.receiver,
        json!({"secret": "hook"}),
        "",
    );
    emit(&mut db, 1..=3);
    until_dead(&mut db, "picky", 1);
    db.run("select outbox.set_secret('hook', array['after'])");
    picky.refuses([]);
    db.run("select outbox.redeliver('picky')");
    until_dead(&mut db, "picky", 0);
    let last = picky.receiver.requests().last().cloned().unwrap();
    assert!(last.is_signed_with("after") && !last.is_signed_with("before"));
}

#[test]
fn a_function_gets_the_event_it_failed_on_once_more() {
    for pruned in [false, true] {
        let cluster = quick().setting("outbox.retention_min_age", "0").start();
        let mut db = cluster.connect();
        db.run(
            "create table broken (id text primary key);
             create table taken (event outbox.event);
             insert into broken values ('evt_2'), ('evt_4');
             create function take(events outbox.event[]) returns void language plpgsql as $$
             declare e outbox.event;
             begin
                 foreach e in array events loop
                     insert into taken values (e);
                     if exists (select from broken b where b.id = e.id) then
                         raise exception 'broken';
                     end if;
                 end loop;
             end $$;
             select outbox.create_sink('taker', 'function', config => '{\"function\": \"take\"}')",
        );
        // Some of them are as an application writes them, and not as the envelope would have them.
        db.run(
            r#"insert into outbox.events (id, topic, source, subject, tenant, payload, headers)
               select 'evt_' || n, 'order.placed', 'shop floor', n::text, 'acme', '{"price": 0.10}', '{"Trace-Id": 7}'
                 from generate_series(1, 6) n"#,
        );
        until_dead(&mut db, "taker", 2);
        until_idle(&mut db, "taker");
        // As text: the rows themselves may be gone by then.
        let wanted: String = db.one(
            "select string_agg(row(e.txid, e.seq, e.id, e.topic, e.source, e.subject, e.tenant, e.time, e.payload, e.headers)::text, '; ' order by e.seq)
               from outbox.events e where e.id in ('evt_2', 'evt_4')",
        );
        if pruned {
            until("the events to be pruned", || {
                db.run("select outbox.prune()");
                (db.one::<i64>("select count(*) from outbox.events") == 0).then_some(())
            });
        }
        db.run("delete from taken; delete from broken; select outbox.redeliver('taker')");
        until_dead(&mut db, "taker", 0);
        until_idle(&mut db, "taker");
        let got: String =
            db.one("select string_agg((t.event)::text, '; ' order by (t.event).seq) from taken t");
        if pruned {
            // What the envelope does not tell is lost with the row: the spelling of headers and of the source.
            let wanted = wanted
                .replace("shop floor", "shop%20floor")
                .replace("Trace-Id", "traceid");
            assert_eq!(got.replace('"', ""), wanted.replace('"', ""));
        } else {
            assert_eq!(got, wanted);
        }
    }
}

#[test]
fn a_function_that_fails_again_leaves_nothing_behind() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create table taken (id text);
         create sequence calls;
         create function take(events outbox.event[]) returns void language plpgsql as $$
         declare e outbox.event;
         begin
             perform nextval('calls');
             foreach e in array events loop
                 insert into taken values (e.id);
                 if e.id = 'n2' then raise exception 'still broken'; end if;
             end loop;
         end $$;
         select outbox.create_sink('taker', 'function', config => '{\"function\": \"take\"}')",
    );
    emit(&mut db, 1..=5);
    until_dead(&mut db, "taker", 1);
    until_idle(&mut db, "taker");
    let calls: i64 = db.one("select last_value from calls");
    db.run("select outbox.redeliver('taker')");
    until("more calls", || {
        (db.one::<i64>("select last_value from calls") > calls + 6).then_some(())
    });
    emit(&mut db, 6..=6);
    until("it is no longer queued", || {
        (!dead_letters(&mut db, "taker")[0].queued).then_some(())
    });
    until_idle(&mut db, "taker");
    let taken: Vec<String> = db.all("select id from taken order by id");
    assert_eq!(taken, ["n1", "n3", "n4", "n5", "n6"]);
    let letter = dead_letters(&mut db, "taker").remove(0);
    assert_eq!(letter.error, "still broken (SQLSTATE P0001)");
    assert!(letter.attempts > 5 + 5, "{letter:?}");
}

#[test]
fn a_letter_that_somebody_holds_is_applied_once_and_holds_up_nothing() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        r#"create table got (id text); create table refused (id text); insert into refused values ('n2');
           create function take(e outbox.event[]) returns void language plpgsql as $$
           begin
               if exists (select from unnest(e) x join refused r on r.id = x.id) then raise 'no'; end if;
               insert into got select x.id from unnest(e) x;
           end $$;
           select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#,
    );
    emit(&mut db, 1..=3);
    until_dead(&mut db, "f", 1);
    let mut open = cluster.connect();
    for call in [
        "select outbox.redeliver('f')",
        "select outbox.discard('f', outbox.format_position(txid, seq)) from outbox.dead_letters",
    ] {
        // It is being tried when it is held.
        db.run("select outbox.redeliver('f')");
        open.run(&format!("begin; {call}"));
        db.run("delete from refused");
        let first: i64 = db.one("select count(*) + 2 from got");
        for n in first..first + 5 {
            emit(&mut db, n..=n);
            until(&format!("event {n}"), || {
                db.one::<bool>(&format!(
                    "select exists (select from got where id = 'n{n}')"
                ))
                .then_some(())
            });
        }
        assert!(!db.one::<bool>("select exists (select from got where id = 'n2')"));
        db.run("insert into refused values ('n2')");
        open.run("rollback");
    }
    db.run("delete from refused; select outbox.redeliver('f')");
    until_dead(&mut db, "f", 0);
    assert_eq!(db.one::<i64>("select count(*) from got where id = 'n2'"), 1);
}

#[test]
fn a_sink_that_is_just_being_changed_says_whom_it_waits_for() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        r#"create function take(outbox.event[]) returns void language sql as 'select';
           select outbox.create_sink('f', 'function', config => '{"function": "take"}')"#,
    );
    let mut open = cluster.connect();
    let pid: i32 = open.one("select pg_backend_pid()");
    open.run("begin; select outbox.alter_sink('f', batch_size => 3)");
    emit(&mut db, 1..=1);
    until_status(&mut db, "f", "its holder", |status| {
        let why = status.waiting_for.as_deref().unwrap_or_default();
        why.contains(&format!("of pid {pid}, ")) && why.ends_with("which holds the sink")
    });
    open.run("rollback");
    until_idle(&mut db, "f");
}
