//! Sinks as SQL makes them: where they start, and what they get.

mod consumers;
mod scene;

use consumers::{TAKE, called, pull, web};
use outbox_tests::{Cluster, Receiver, Sql, until};
use postgres::Client;
use scene::{http_sink, quick, status};
use serde_json::{Value, json};

/// A cluster without a dispatcher, for what pull sinks show as well as any.
fn still() -> Cluster {
    Cluster::builder().preload(false).start()
}

#[test]
fn a_sink_starts_where_it_is_told() {
    let cluster = still();
    let (mut db, mut open) = (cluster.connect(), cluster.connect());
    for n in 1..=4 {
        db.run(&format!(
            "select outbox.emit('{n}.a'), outbox.emit('{n}.b')"
        ));
    }
    open.run("begin; select outbox.emit('open')");
    db.run("select outbox.emit('5')");
    let positions: Vec<String> =
        db.all("select outbox.format_position(txid, seq) from outbox.events order by seq");
    let dotted = |n: usize| positions[n].replace(':', ".");
    for (sink, start) in [
        ("default", String::new()),
        ("origin", ", start => 'origin'".into()),
        ("zero", ", start => '0:0'".into()),
        ("tail", ", start => 'tail'".into()),
        ("within", format!(", start => '{}'", positions[2])),
        ("dotted", format!(", start => '{}'", dotted(2))),
        ("between", format!(", start => '{}'", positions[3])),
        (
            "whole",
            format!(
                ", start => '{}', \"grouping\" => 'transaction'",
                positions[2]
            ),
        ),
        // Of a later id than the open transaction's, whose event must come all the same.
        (
            "last",
            format!(", start => '{}'", positions.last().unwrap()),
        ),
    ] {
        db.run(&format!(
            "select outbox.create_sink('{sink}', 'pull'{start})"
        ));
    }
    db.run("select outbox.emit('6')");
    let all = [
        "1.a", "1.b", "2.a", "2.b", "3.a", "3.b", "4.a", "4.b", "5", "6",
    ];
    for (sink, expected) in [
        ("default", &all[..]),
        ("origin", &all),
        ("zero", &all),
        ("tail", &all[9..]),
        ("within", &all[3..]),
        ("dotted", &all[3..]),
        ("between", &all[4..]),
        ("whole", &all[3..]),
        ("last", &all[9..]),
    ] {
        assert_eq!(pull(&mut db, sink), expected, "{sink}");
    }
    // What was open is later than each of these starts.
    open.run("commit");
    for sink in ["default", "zero", "tail", "within", "whole", "last"] {
        assert_eq!(pull(&mut db, sink), ["open"], "{sink}");
    }

    // A position that an open transaction has taken: better some of its events twice than one never.
    open.run("begin; select outbox.emit('a')");
    let position: String =
        open.one("select outbox.format_position(txid, seq) from outbox.events where topic = 'a'");
    db.run("select outbox.emit('b')");
    db.run(&format!(
        "select outbox.create_sink('early', 'pull', start => '{position}')"
    ));
    assert!(!pull(&mut db, "early").contains(&"a".to_owned()));
    open.run("select outbox.emit('c'); commit");
    let got = pull(&mut db, "early");
    assert!(got.contains(&"c".to_owned()), "{got:?}");

    // The cursor of a new sink tells where it stands.
    assert_eq!(
        db.one::<String>("select outbox.cursor('sink:origin')")
            .split(':')
            .count(),
        2
    );
    let refusal = db.refused("select outbox.create_sink('x', 'pull', start => '99999999:1')");
    assert_eq!(
        refusal.sqlstate, "22023",
        "it would skip what is written until then"
    );
    assert!(refusal.message.contains("99999999:1"));
}

#[test]
fn every_kind_starts_where_it_is_told() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(TAKE);
    db.run("select outbox.emit('1')");
    db.run("select outbox.emit('2')");
    let first: String = db.one("select min(position) from outbox.read()");
    let receiver = Receiver::start();
    let tail = Receiver::start();
    let function = r#"config => '{"function": "take"}'"#;
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        &format!("start => '{first}'"),
    );
    http_sink(&mut db, "tail", &tail, json!({}), "start => 'tail'");
    db.run(&format!(
        "select outbox.create_sink('fn', 'function', {function}, start => '{}')",
        first.replace(':', ".")
    ));
    db.run("select outbox.emit('3')");
    receiver.wait_for(2);
    tail.wait_for(1);
    until("the function to be called", || {
        (called(&mut db).len() >= 2).then_some(())
    });
    assert_eq!(web(&receiver), ["2", "3"]);
    assert_eq!(web(&tail), ["3"]);
    assert_eq!(called(&mut db), ["2", "3"]);
}

/// Events to choose from.
fn write_a_choice(db: &mut Client) {
    db.run(
        r#"insert into outbox.events (topic, tenant, subject, source, payload, headers) values
            ('order.placed', 'acme', '1', 'shop', '{"total": 10}', null),
            ('order.paid', 'acme', '1', 'till', '{"total": 200}', '{"vip": true}'),
            ('order.placed', 'zeta', '2', 'shop', '{"total": 150}', null),
            ('order.placed.late', 'zeta', null, null, null, null),
            ('order', null, null, null, '{}', null),
            ('stock.moved', null, 'it''s', 'shop', '[1, 2]', null),
            ('Order.Placed', '', null, null, '"text"', null)"#,
    );
}

const CHOICE: [&str; 7] = [
    "order.placed",
    "order.paid",
    "order.placed",
    "order.placed.late",
    "order",
    "stock.moved",
    "Order.Placed",
];

#[test]
fn a_sink_gets_what_it_asks_for() {
    let cluster = still();
    let mut db = cluster.connect();
    write_a_choice(&mut db);
    db.run(
        r#"create function public.shout(e outbox.event) returns jsonb language sql as
               $$ select case when e.topic like '%late' then null else jsonb_build_object('was', e.payload, 'topic', upper(e.topic)) end $$;
           create function public.never(e outbox.event) returns jsonb language sql as 'select null::jsonb'"#,
    );
    let cases: &[(&str, &[usize])] = &[
        ("", &[0, 1, 2, 3, 4, 5, 6]),
        ("topics => '{}'", &[0, 1, 2, 3, 4, 5, 6]),
        ("topics => '{order.placed}'", &[0, 2]),
        ("topics => '{order.*}'", &[0, 1, 2]),
        ("topics => '{order.>}'", &[0, 1, 2, 3]),
        ("topics => '{order}'", &[4]),
        ("topics => '{*}'", &[4]),
        ("topics => '{>}'", &[0, 1, 2, 3, 4, 5, 6]),
        ("topics => '{*.*.late}'", &[3]),
        ("topics => '{*.placed, stock.>}'", &[0, 2, 5]),
        ("topics => '{nothing}'", &[]),
        ("tenant => 'acme'", &[0, 1]),
        ("tenant => 'ACME'", &[]),
        ("tenant => 'zeta', topics => '{order.*}'", &[2]),
        ("filter => 'topic like ''order.%'''", &[0, 1, 2, 3]),
        (
            "filter => '(payload ->> ''total'')::numeric > 100'",
            &[1, 2],
        ),
        (
            "filter => 'tenant is null or subject = ''1'''",
            &[0, 1, 4, 5],
        ),
        ("filter => 'headers ? ''vip'''", &[1]),
        ("filter => 'null'", &[]),
        ("filter => 'payload is null -- a remark'", &[3]),
        (
            "filter => 'source = ''shop'' and time <= clock_timestamp() and seq > 0 and txid > ''0'''",
            &[0, 2, 5],
        ),
        ("filter => 'subject = ''it''''s'''", &[5]),
        (
            "filter => 'exists (select from pg_class where relname = ''pg_class'')'",
            &[0, 1, 2, 3, 4, 5, 6],
        ),
        (
            "filter => 'id like ''evt_%'' and event.topic = ''order'''",
            &[4],
        ),
        (
            "topics => '{order.>}', tenant => 'acme', filter => 'subject = ''1'''",
            &[0, 1],
        ),
        ("transform => 'shout(outbox.event)'", &[0, 1, 2, 4, 5, 6]),
        (
            "transform => 'shout(outbox.event)', filter => 'payload is not null', topics => '{order.>}'",
            &[0, 1, 2],
        ),
        ("transform => 'never(outbox.event)'", &[]),
    ];
    for (number, (arguments, expected)) in cases.iter().enumerate() {
        let comma = if arguments.is_empty() { "" } else { ", " };
        db.run(&format!(
            "select outbox.create_sink('s{number}', 'pull'{comma}{arguments})"
        ));
        let expected: Vec<_> = expected.iter().map(|&n| CHOICE[n]).collect();
        assert_eq!(
            pull(&mut db, &format!("s{number}")),
            expected,
            "{arguments}"
        );
    }

    // What a transform makes is the payload, and nothing else changes.
    db.run(
        "select outbox.create_sink('t', 'pull', transform => 'shout(outbox.event)', topics => '{order.paid}')",
    );
    let row: Value = db.one("select to_jsonb(p) from outbox.poll('t') p");
    assert_eq!(
        row["payload"],
        json!({"was": {"total": 200}, "topic": "ORDER.PAID"})
    );
    let original: Value =
        db.one("select to_jsonb(r) from outbox.read() r where topic = 'order.paid'");
    for (name, value) in original.as_object().unwrap() {
        assert!(name == "payload" || row[name] == *value, "{name}");
    }
}

#[test]
fn every_kind_gets_what_it_asks_for() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    write_a_choice(&mut db);
    db.run(TAKE);
    db.run(
        r#"create function public.shout(e outbox.event) returns jsonb language sql as
               $$ select case when e.payload ->> 'total' = '10' then null else jsonb_build_object('was', e.payload) end $$"#,
    );
    let ask = "topics => '{order.>}', filter => 'tenant is not null and payload is not null', transform => 'shout(outbox.event)'";
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), ask);
    db.run(&format!(
        r#"select outbox.create_sink('fn', 'function', config => '{{"function": "take"}}', {ask})"#
    ));
    db.run(&format!("select outbox.create_sink('pull', 'pull', {ask})"));
    let expected = [
        json!({"was": {"total": 200}}),
        json!({"was": {"total": 150}}),
    ];
    let arrived: Vec<_> = receiver
        .wait_for(2)
        .iter()
        .map(outbox_tests::Event::data)
        .collect();
    assert_eq!(arrived, expected);
    until("the function to be called", || {
        (called(&mut db).len() == 2).then_some(())
    });
    assert_eq!(
        db.all::<Value>("select payload from seen order by n"),
        expected
    );
    assert_eq!(
        db.all::<Value>("select payload from outbox.poll('pull')"),
        expected
    );
}

#[test]
fn what_is_filtered_out_moves_the_cursor() {
    let mut cluster = quick().setting("outbox.retention_min_age", "0").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    db.run(TAKE);
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        "filter => 'topic = ''wanted'''",
    );
    db.run(r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}', topics => '{wanted}')"#);
    db.run("select outbox.create_sink('pull', 'pull', tenant => 'nobody')");
    for _ in 0..3 {
        db.run("select outbox.emit('unwanted') from generate_series(1, 500)");
    }
    let events = "select count(*) from outbox.events";
    until("retention to take what nobody wants", || {
        // Pull sinks move when their consumers ask.
        assert_eq!(pull(&mut db, "pull"), Vec::<String>::new());
        db.run("select outbox.prune()");
        (db.one::<i64>(events) == 0).then_some(())
    });
    for sink in ["web", "fn", "pull"] {
        let status = status(&mut db, sink);
        assert_eq!((status.lag_events, status.delivered), (0, 0), "{sink}");
    }
    assert_eq!(receiver.requests().len(), 0);

    // Also over a restart, and what is wanted comes among what is not.
    drop(db);
    cluster.stop(outbox_tests::Mode::Fast);
    cluster.start_again();
    let mut db = cluster.connect();
    db.run("select outbox.emit(case n % 100 when 7 then 'wanted' else 'unwanted' end, subject => n::text) from generate_series(1, 500) n");
    let subjects: Vec<_> = receiver
        .wait_for(5)
        .into_iter()
        .map(|event| event.subject.unwrap())
        .collect();
    assert_eq!(subjects, ["7", "107", "207", "307", "407"]);
    until("the function to be called", || {
        (called(&mut db).len() == 5).then_some(())
    });
}

#[test]
fn batches_are_no_larger_than_asked_for() {
    let cluster = quick().setting("outbox.batch_size", "10").start();
    let mut db = cluster.connect();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    db.run("create table sizes (n int); create function take(events outbox.event[]) returns void language sql as 'insert into sizes values (cardinality(events))'");
    db.run("select outbox.emit('a') from generate_series(1, 95)");
    http_sink(&mut db, "web", &receiver, json!({}), "");
    http_sink(&mut db, "other", &other, json!({}), "batch_size => 40");
    db.run(r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}', batch_size => 30)"#);
    let sizes = |receiver: &Receiver, all: usize| {
        receiver.wait_for(all);
        let mut left = receiver.events().len();
        let mut sizes = Vec::new();
        for request in receiver.requests() {
            let events: Vec<Value> = serde_json::from_slice(&request.body).unwrap();
            sizes.push(events.len());
            left -= events.len();
        }
        assert_eq!(left, 0);
        sizes
    };
    let web = sizes(&receiver, 95);
    assert!(
        web.iter().all(|&size| size <= 10) && web.contains(&10),
        "{web:?}"
    );
    let others = sizes(&other, 95);
    assert!(
        others.iter().all(|&size| size <= 40) && others.contains(&40),
        "{others:?}"
    );
    until("the function to be called", || {
        (db.one::<Option<i64>>("select sum(n) from sizes") == Some(95)).then_some(())
    });
    assert_eq!(db.one::<i32>("select max(n) from sizes"), 30);

    // The setting is read again on a reload.
    cluster.set("outbox.batch_size", "25");
    until("the setting to be read", || {
        receiver.clear();
        db.run("select outbox.emit('a') from generate_series(1, 100)");
        sizes(&receiver, 100).contains(&25).then_some(())
    });
}

#[test]
fn a_function_gets_events_as_they_are_stored() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(TAKE);
    write_a_choice(&mut db);
    db.run(r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}')"#);
    until("the function to be called", || {
        (called(&mut db).len() == 7).then_some(())
    });
    let same = "select count(*) from seen s join outbox.events e on to_jsonb(s.event) = to_jsonb(e) - 'for_sink'";
    assert_eq!(db.one::<i64>(same), 7);
    assert_eq!(called(&mut db), CHOICE);
}
