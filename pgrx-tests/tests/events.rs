//! Writing events, the streams that hold them, and positions.

use std::collections::HashSet;

use outbox_tests::{Cluster, Receiver, Reply, Sql, until};
use serde_json::{Value, json};

fn cluster() -> Cluster {
    Cluster::builder()
        .setting("outbox.retry_min", "20ms")
        .setting("outbox.retry_max", "200ms")
        .start()
}

/// The rows of a query, as JSON.
fn rows(db: &mut impl Sql, query: &str) -> Vec<Value> {
    db.all(&format!("select to_jsonb(r) from ({query}) r"))
}

fn is_made_up(id: &str) -> bool {
    id.strip_prefix("evt_")
        .is_some_and(|digits| digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[test]
fn an_insert_may_name_only_the_topic() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run("begin; insert into outbox.events (topic) values ('a')");
    let row = &rows(
        &mut db,
        "select e.*, txid = pg_current_xact_id() as ours, time between now() and clock_timestamp() as timely from outbox.events e",
    )[0];
    db.run("commit");
    assert_eq!(
        (&row["ours"], &row["timely"], &row["topic"]),
        (&json!(true), &json!(true), &json!("a"))
    );
    assert!(is_made_up(row["id"].as_str().unwrap()), "{row}");
    for empty in ["source", "subject", "tenant", "payload", "headers"] {
        assert_eq!(row[empty], Value::Null, "{empty}");
    }
    assert_eq!(db.one::<i64>("select count(*) from outbox.read()"), 1);

    let refusal = db.refused("insert into outbox.events (subject) values ('1')");
    assert_eq!(refusal.sqlstate, "23502", "an event without a topic");
    let refusal = db.refused("insert into outbox.events (seq, topic) values (7, 'a')");
    assert_eq!(refusal.sqlstate, "428C9", "an application draws no seq");
}

#[test]
fn emit_writes_each_of_its_arguments() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    let id: String = db.one(
        r#"select outbox.emit('order.placed', payload => '{"total": "12"}', subject => '7', source => 'shop', tenant => 'acme',
                              headers => '{"trace": "x"}', id => 'mine', stream => 'outbox')"#,
    );
    assert_eq!(id, "mine");
    let by_position: String =
        db.one(r#"select outbox.emit('order.paid', '{"n": 1}', '8', 'till', 'zeta', '{"a": 1}')"#);
    let bare: String = db.one("select outbox.emit('tick')");
    assert!(is_made_up(&by_position) && is_made_up(&bare));
    assert_eq!(
        rows(
            &mut db,
            "select id, topic, source, subject, tenant, payload, headers from outbox.events order by seq"
        ),
        [
            json!({"id": "mine", "topic": "order.placed", "source": "shop", "subject": "7", "tenant": "acme",
                   "payload": {"total": "12"}, "headers": {"trace": "x"}}),
            json!({"id": by_position, "topic": "order.paid", "source": "till", "subject": "8", "tenant": "zeta",
                   "payload": {"n": 1}, "headers": {"a": 1}}),
            json!({"id": bare, "topic": "tick", "source": null, "subject": null, "tenant": null, "payload": null, "headers": null}),
        ]
    );
    // A function call that is rolled back has written nothing.
    db.run("begin; select outbox.emit('gone'); rollback");
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.events where topic = 'gone'"),
        0
    );
}

#[test]
fn emit_says_what_is_wrong() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    for statement in ["select outbox.emit(null)", "select outbox.emit('')"] {
        let refusal = db.refused(statement);
        assert_eq!(refusal.sqlstate, "22023", "{statement}");
        assert!(
            refusal.detail.is_some() && refusal.hint.unwrap().contains("outbox.emit("),
            "{statement}"
        );
    }
    let refusal = db.refused("select outbox.emit('a', stream => 'nowhere')");
    assert_eq!(refusal.sqlstate, "42704");
    assert!(refusal.message.contains("\"nowhere\"") && refusal.hint.is_some());
    let refusal = db.refused(r#"select outbox.emit('a', stream => 'events"; drop table x; --')"#);
    assert_eq!(refusal.sqlstate, "42704");
    assert_eq!(db.one::<i64>("select count(*) from outbox.events"), 0);
}

#[test]
fn a_session_states_tenant_and_headers_once() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run(
        r#"begin;
           set local outbox.tenant = 'acme';
           set local outbox.headers = '{"trace": "t1", "n": 3}';
           select outbox.emit('emitted');
           insert into outbox.events (topic) values ('inserted');
           select outbox.emit('own', tenant => 'other', headers => '{"own": true}');
           insert into outbox.events (topic, tenant, headers) values ('inserted own', 'other', '{"own": true}');
           commit;
           select outbox.emit('after');
           insert into outbox.events (topic) values ('inserted after')"#,
    );
    let session = json!({"trace": "t1", "n": 3});
    let own = json!({"own": true});
    assert_eq!(
        rows(
            &mut db,
            "select topic, tenant, headers from outbox.events order by seq"
        ),
        [
            json!({"topic": "emitted", "tenant": "acme", "headers": session}),
            json!({"topic": "inserted", "tenant": "acme", "headers": session}),
            json!({"topic": "own", "tenant": "other", "headers": own}),
            json!({"topic": "inserted own", "tenant": "other", "headers": own}),
            json!({"topic": "after", "tenant": null, "headers": null}),
            json!({"topic": "inserted after", "tenant": null, "headers": null}),
        ]
    );

    // For a whole session, in a stream of one's own, and unset again.
    db.run("select outbox.create_stream('billing'); set outbox.tenant = 'Ünïcode ☃'");
    db.run("select outbox.emit('a', stream => 'billing'); insert into outbox.billing (topic) values ('b')");
    db.run("reset outbox.tenant; select outbox.emit('c', stream => 'billing')");
    assert_eq!(
        rows(&mut db, "select tenant from outbox.billing order by seq"),
        [
            json!({"tenant": "Ünïcode ☃"}),
            json!({"tenant": "Ünïcode ☃"}),
            json!({"tenant": null})
        ]
    );

    // What could not be written is refused at once.
    for headers in ["garbage", "[1]", "1", r#"{"a": "\u0000"}"#] {
        let refused = db.refused(&format!("set outbox.headers = '{headers}'"));
        assert_eq!(refused.sqlstate, "22023", "{headers}");
    }
}

#[test]
fn made_up_ids_are_unique() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run("select outbox.create_stream('other')");
    db.run("select outbox.emit('a') from generate_series(1, 2000)");
    db.run("select outbox.emit('a', stream => 'other') from generate_series(1, 2000)");
    db.run("insert into outbox.events (topic) select 'a' from generate_series(1, 2000)");
    db.run("insert into outbox.other (id, topic) select null, 'a' from generate_series(1, 2000)");
    db.run("insert into outbox.events (id, topic) select null, 'a' from generate_series(1, 2000)");
    let ids: Vec<String> =
        db.all("select id from outbox.read(null, 100000) union all select id from outbox.read(null, 100000, 'other')");
    assert_eq!(ids.len(), 10_000);
    assert!(ids.iter().all(|id| is_made_up(id)));
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 10_000);
}

#[test]
fn an_event_without_an_id_has_the_same_one_wherever_it_arrives() {
    let cluster = cluster();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    db.run(
        "create table seen (id text);
         create function take(events outbox.event[]) returns void language sql as 'insert into seen select id from unnest(events)';
         select outbox.create_sink('fn', 'function', config => '{\"function\": \"take\"}');
         select outbox.create_sink('pull', 'pull')",
    );
    let config = json!({"url": receiver.url()});
    db.run(&format!(
        "select outbox.create_sink('web', 'http', config => '{config}')"
    ));
    receiver.reply_next([Reply::status(503), Reply::reset()]);
    db.run("insert into outbox.events (id, topic) values (null, 'a')");

    let id: String = db.one("select id from outbox.read()");
    assert!(is_made_up(&id));
    assert_eq!(receiver.wait_for(1)[0].id, id);
    for request in receiver.wait_for_requests(3) {
        assert!(
            String::from_utf8_lossy(&request.body).contains(&id),
            "also in what failed"
        );
    }
    until("the function to be called", || {
        db.all::<String>("select id from seen").pop()
    });
    assert_eq!(db.all::<String>("select id from seen"), [id.as_str()]);
    for _ in 0..2 {
        assert_eq!(
            db.all::<String>("select id from outbox.poll('pull')"),
            [id.as_str()]
        );
    }
}

#[test]
fn streams_keep_apart() {
    let cluster = cluster();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    db.run("select outbox.create_stream('billing')");
    let config = json!({"url": receiver.url()});
    db.run(&format!(
        "select outbox.create_sink('web', 'http', config => '{config}', stream => 'billing')"
    ));
    db.run("select outbox.emit('in.outbox')");
    let emitted: String = db.one("select outbox.emit('in.billing', stream => 'billing')");
    db.run("insert into outbox.billing (topic) values ('inserted')");
    let topics = |events: &[outbox_tests::Event]| {
        events
            .iter()
            .map(|event| event.topic.clone())
            .collect::<Vec<_>>()
    };
    let events = receiver.wait_for(2);
    assert_eq!(topics(&events), ["in.billing", "inserted"]);
    assert_eq!(events[0].id, emitted);

    assert_eq!(
        db.all::<String>("select topic from outbox.read(stream => 'billing')"),
        ["in.billing", "inserted"]
    );
    assert_eq!(
        db.all::<String>("select topic from outbox.read()"),
        ["in.outbox"]
    );
    assert_ne!(
        db.one::<String>("select outbox.tail('billing')"),
        db.one::<String>("select outbox.tail()")
    );

    // It goes with everything that belongs to it, and its name is free again.
    db.run("select outbox.save_cursor('reader', '9:9', 'billing')");
    assert_eq!(
        db.refused("select outbox.drop_stream('billing')").sqlstate,
        "2BP01"
    );
    db.run("select outbox.drop_sink('web'); select outbox.drop_stream('billing')");
    assert_eq!(
        db.one::<Option<String>>("select outbox.cursor('reader')"),
        None
    );
    assert_eq!(
        db.one::<Option<String>>("select to_regclass('outbox.billing')::text"),
        None
    );
    assert_eq!(
        db.refused("select outbox.read(stream => 'billing')")
            .sqlstate,
        "42704"
    );
    assert_eq!(
        db.refused("select outbox.emit('a', stream => 'billing')")
            .sqlstate,
        "42704"
    );
}

#[test]
fn a_stream_that_is_made_again_begins_anew() {
    let cluster = cluster();
    let receiver = Receiver::start();
    let config = json!({"url": receiver.url()});
    let make = format!(
        "select outbox.create_stream('billing');
         select outbox.create_sink('web', 'http', config => '{config}', stream => 'billing')"
    );
    let (mut db, mut open) = (cluster.connect(), cluster.connect());
    db.run(&make);
    db.run("select outbox.emit('first', stream => 'billing') from generate_series(1, 20)");
    receiver.wait_for(20);

    // A dispatcher that looks now finds the newest transaction id in use, so that what it knows about the numbering must be
    // older than that; and what it knew about the stream of that name is about another table.
    db.run("begin; select outbox.drop_sink('web'); select outbox.drop_stream('billing')");
    db.run(&make);
    open.run("begin; select pg_current_xact_id()");
    db.run("commit");
    until("the dispatcher to take the sink", || {
        let taken = "select lease_pid is not null from outbox.status where sink = 'web'";
        db.one::<bool>(taken).then_some(())
    });
    db.run("select outbox.emit('again', stream => 'billing')");
    assert_eq!(receiver.wait_for(21)[20].topic, "again");
    open.run("commit");
}

#[test]
fn streams_that_cannot_be_made_or_dropped() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run("select outbox.create_stream('billing')");
    let long = format!("'{}'", "a".repeat(41));
    for (name, sqlstate) in [
        ("null", "22023"),
        ("''", "22023"),
        ("'Billing'", "22023"),
        ("'1st'", "22023"),
        ("'a-b'", "22023"),
        ("'a b'", "22023"),
        ("'a.b'", "22023"),
        ("'ünï'", "22023"),
        ("E'a\\n'", "22023"),
        (r#"'x" (a int); drop table outbox.events; --'"#, "22023"),
        (&long, "22023"),
        ("'audit'", "22023"),
        ("'events'", "22023"),
        ("'sinks'", "22023"),
        ("'status'", "22023"),
        ("'billing'", "42710"),
        ("'outbox'", "42710"),
    ] {
        let refusal = db.refused(&format!("select outbox.create_stream({name})"));
        assert_eq!(refusal.sqlstate, sqlstate, "{name}: {refusal:?}");
        assert!(
            sqlstate != "22023" || refusal.detail.is_some() && refusal.hint.is_some(),
            "{name}"
        );
    }
    for (name, sqlstate) in [
        ("null", "42704"),
        ("'nowhere'", "42704"),
        ("'outbox'", "22023"),
    ] {
        let refusal = db.refused(&format!("select outbox.drop_stream({name})"));
        assert_eq!(refusal.sqlstate, sqlstate, "{name}: {refusal:?}");
    }
    let names: Vec<String> = db.all("select name from outbox.streams order by name");
    assert_eq!(names, ["audit", "billing", "outbox"]);
    let long = "a".repeat(40);
    db.run(&format!(
        "select outbox.create_stream('{long}'); select outbox.emit('a', stream => '{long}')"
    ));
    assert_eq!(
        db.one::<i64>(&format!("select count(*) from outbox.{long}")),
        1
    );
}

#[test]
fn an_event_costs_two_index_entries() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run("select outbox.create_stream('billing')");
    for table in ["outbox.events", "outbox.billing"] {
        let query = format!("select count(*) from pg_index where indrelid = '{table}'::regclass");
        assert_eq!(db.one::<i64>(&query), 2, "{table}");
    }
}

#[test]
fn positions_are_written_and_read_in_both_spellings() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    assert_eq!(
        db.one::<String>("select outbox.format_position('731', 12)"),
        "731:12"
    );
    assert_eq!(
        db.one::<String>("select outbox.format_position('731', 12, '.')"),
        "731.12"
    );
    assert_eq!(
        db.one::<String>(
            "select outbox.format_position(seq => 12, txid => '731', separator => '.')"
        ),
        "731.12"
    );
    for text in [
        "731:12",
        "731.12",
        "731.120",
        "0:0",
        "18446744073709551615:9223372036854775807",
        "18446744073709551615.9223372036854775807",
    ] {
        let (txid, seq) = text.split_once([':', '.']).unwrap();
        let parsed =
            format!("select txid::text || ' ' || seq from outbox.parse_position('{text}')");
        assert_eq!(db.one::<String>(&parsed), format!("{txid} {seq}"));
        let round = format!(
            "select outbox.format_position(p.txid, p.seq) from outbox.parse_position('{text}') p"
        );
        assert_eq!(db.one::<String>(&round), format!("{txid}:{seq}"));
    }
    assert_eq!(
        db.one::<Option<i64>>("select seq from outbox.parse_position(null)"),
        None
    );

    for text in [
        "",
        " ",
        ":",
        ".",
        "7",
        "7:",
        ":7",
        "7:1:1",
        "7.1.1",
        "7:.1",
        "7:+1",
        "-7:1",
        "7:-1",
        " 7:1",
        "7:1 ",
        "7,1",
        "0x7:1",
        "7:1e3",
        "1e3:1",
        "٧:١",
        "7:1\n",
        "\n7:1",
        "garbage",
        "NaN:1",
        "18446744073709551616:1",
        "1:9223372036854775808",
        "99999999999999999999:1",
        "1:'; drop table outbox.events; --",
    ] {
        let quoted = text.replace('\'', "''");
        let refusal = db.refused(&format!("select outbox.parse_position('{quoted}')"));
        assert_eq!(refusal.sqlstate, "22023", "{text:?}: {refusal:?}");
        assert!(
            refusal.detail.is_some() && refusal.hint.is_some(),
            "{text:?}"
        );
    }
    let long = "9".repeat(1_000_000);
    let refusal = db.refused(&format!("select outbox.parse_position('{long}:1')"));
    assert_eq!(refusal.sqlstate, "22023");
    assert!(refusal.message.len() < 200);
}
