//! What a role can do with each privilege, and what not.

use std::collections::BTreeSet;

use outbox_tests::Sql;

use super::{abilities, denied, functions, with_roles};

#[test]
fn who_may_emit_writes_events_and_no_more() {
    let (cluster, mut db) = with_roles(&["app"]);
    db.run("select outbox.grant('app', 'emit')");
    db.run("select outbox.create_stream('billing')");
    let able = abilities(&mut db, "app");
    assert_eq!(
        functions(&able),
        BTreeSet::from([
            "audit",
            "emit",
            "is_drawn",
            "new_id",
            "next_seq",
            "record_usage"
        ])
    );
    let columns = [
        "id", "topic", "source", "subject", "tenant", "time", "payload", "headers",
    ];
    let mut expected: BTreeSet<String> = ["outbox.events", "outbox.billing"]
        .iter()
        .flat_map(|table| columns.map(|column| format!("insert on column {table}.{column}")))
        .collect();
    let audited = [
        "id",
        "tenant",
        "action",
        "resource_type",
        "resource_id",
        "admission",
        "details",
    ];
    expected.extend(audited.map(|column| format!("insert on column outbox.audit_events.{column}")));
    expected.insert("usage on the schema".to_owned());
    expected.extend(
        able.iter()
            .filter(|one| one.starts_with("execute"))
            .cloned(),
    );
    assert_eq!(able, expected);

    let mut app = cluster.connect_as("app");
    app.run("set outbox.tenant = 'acme'");
    let id: String = app.one("select outbox.emit('a.emitted', '{\"n\": 1}', subject => '7')");
    app.run("select outbox.emit('b.emitted', stream => 'billing')");
    app.run("insert into outbox.events (topic, payload) values ('c.inserted', '{}')");
    app.run("insert into outbox.billing (topic) values ('d.inserted')");
    app.run("select outbox.audit('a.done', 'thing', '7'), outbox.record_usage('a', now(), 'm', 1)");
    app.run("insert into outbox.audit_events (action, resource_type) values ('b.done', 'thing')");
    let copied = "copy outbox.events (topic, subject) from stdin";
    let mut copy = app.copy_in(copied).expect("copying is inserting");
    std::io::Write::write_all(&mut copy, b"e.copied\t8\n").expect("the server takes it");
    copy.finish().expect("the server takes it");
    let written: Vec<String> = db.all(
        "select concat_ws(' ', topic, tenant, subject) from outbox.events union all
         select concat_ws(' ', topic, tenant, subject) from outbox.billing order by 1",
    );
    let wanted = [
        "a.emitted acme 7",
        "b.emitted acme",
        "c.inserted acme",
        "d.inserted acme",
        "e.copied acme 8",
    ];
    assert_eq!(written, wanted);
    assert_eq!(
        db.one::<String>("select id from outbox.events where topic = 'a.emitted'"),
        id
    );

    denied(
        &mut app,
        &[
            "select from outbox.events",
            "table outbox.billing",
            "select from outbox.status",
            "select from outbox.streams",
            "insert into outbox.events (topic) values ('x') returning topic",
            // Positions are not its to choose: such an event would come too early, never, or in the way of another.
            "insert into outbox.events (topic, txid) values ('x', '3')",
            "insert into outbox.events (topic, txid) values ('x', '18446744073709551615')",
            "insert into outbox.events (topic, seq) overriding system value values ('x', 99)",
            "insert into outbox.billing (topic, seq) overriding system value values ('x', 99)",
            "insert into outbox.events overriding system value table outbox.events",
            "update outbox.events set topic = 'x'",
            "delete from outbox.events",
            "truncate outbox.events",
            "do $$ begin lock table outbox.events in share mode; end $$",
            "create trigger t before insert on outbox.events execute function outbox.wake()",
            "create table outbox.mine ()",
            "select nextval('outbox.events_seq_seq')",
            "select outbox.read()",
            "select outbox.tail()",
            "select outbox.poll('p')",
            "select outbox.save_cursor('c', '1:1')",
            "select outbox.tick()",
            "select outbox.create_stream('mine')",
            "select outbox.make_stream_table('mine', 'mine')",
            "select outbox.create_sink('s', 'pull')",
            "select outbox.set_secret('s', array['v'])",
            "select outbox.grant('app', 'read')",
            "select outbox.revoke('app', 'emit')",
            "select outbox.rebase_if_moved()",
            "table outbox.audit_events",
            "insert into outbox.audit_events (action, resource_type, time) values ('x', 'x', now())",
            "insert into outbox.audit_events (action, resource_type, txid) values ('x', 'x', '3')",
            "delete from outbox.audit_events",
            "select outbox.verify_audit()",
            "select outbox.seal_audit()",
            "table outbox.usage_windows",
            "select outbox.tick_usage()",
            "select outbox.create_webhook('acme', 'https://example.com')",
            "select from outbox.webhooks",
        ],
    );
}

#[test]
fn who_may_read_reads_and_keeps_cursors() {
    let (cluster, mut db) = with_roles(&["consumer"]);
    db.run("select outbox.grant('consumer', 'read')");
    db.run("select outbox.create_sink('pulled', 'pull')");
    db.run("select outbox.emit('a'), outbox.emit('b')");
    let able = abilities(&mut db, "consumer");
    let expected = [
        "ack",
        "cursor",
        "drop_cursor",
        "format_position",
        "parse_position",
        "poll",
        "read",
        "save_cursor",
        "tail",
    ];
    assert_eq!(functions(&able), BTreeSet::from(expected));
    assert!(
        !able
            .iter()
            .any(|one| one.contains(" on table ") || one.contains(" on column "))
    );

    let mut consumer = cluster.connect_as("consumer");
    assert_eq!(
        consumer.all::<String>("select topic from outbox.read()"),
        ["a", "b"]
    );
    let last: String = consumer.one("select outbox.tail()");
    assert!(consumer.one::<bool>(&format!("select outbox.save_cursor('mine', '{last}')")));
    assert_eq!(consumer.one::<String>("select outbox.cursor('mine')"), last);
    assert!(consumer.one::<bool>("select outbox.drop_cursor('mine')"));
    assert_eq!(
        consumer.all::<String>("select topic from outbox.poll('pulled')"),
        ["a", "b"]
    );
    assert!(consumer.one::<bool>("select outbox.ack('pulled')"));

    denied(
        &mut consumer,
        &[
            "select outbox.emit('x')",
            "insert into outbox.events (topic) values ('x')",
            "select from outbox.events",
            "select from outbox.cursors",
            "select from outbox.sinks",
            "select from outbox.status",
            "select outbox.tick()",
            "select outbox.create_sink('s', 'pull')",
            "select outbox.drop_sink('pulled')",
            "select outbox.grant('consumer', 'emit')",
        ],
    );
    // Of a sink's cursor it is the sink that says where it stands.
    assert_eq!(
        consumer
            .refused("select outbox.save_cursor('sink:pulled', '1:1')")
            .sqlstate,
        "22023"
    );
    assert_eq!(
        consumer
            .refused("select outbox.drop_cursor('sink:pulled')")
            .sqlstate,
        "22023"
    );
}

#[test]
fn reading_can_be_limited_to_sinks() {
    let (cluster, mut db) = with_roles(&["consumer"]);
    for sink in ["one", "two", "three"] {
        db.run(&format!("select outbox.create_sink('{sink}', 'pull')"));
    }
    db.run("select outbox.grant('consumer', 'read', array['one', 'two'])");
    db.run("select outbox.emit('a')");
    let able = abilities(&mut db, "consumer");
    assert_eq!(functions(&able), BTreeSet::from(["ack", "poll"]));

    let mut consumer = cluster.connect_as("consumer");
    assert_eq!(
        consumer.all::<String>("select topic from outbox.poll('one')"),
        ["a"]
    );
    assert!(consumer.one::<bool>("select outbox.ack('one')"));
    denied(
        &mut consumer,
        &[
            "select outbox.poll('three')",
            "select outbox.ack('three')",
            "select outbox.read()",
            "select outbox.tail()",
        ],
    );

    db.run("select outbox.revoke('consumer', 'read', array['one'])");
    denied(
        &mut consumer,
        &["select outbox.poll('one')", "select outbox.ack('one')"],
    );
    assert_eq!(
        consumer.all::<String>("select topic from outbox.poll('two')"),
        ["a"]
    );

    // A sink that is made anew under the name is another one.
    db.run("select outbox.drop_sink('two'), outbox.create_sink('two', 'pull')");
    denied(&mut consumer, &["select outbox.poll('two')"]);

    // To a member of the role it is given as well.
    db.run("create role member login in role consumer");
    db.run("select outbox.grant('consumer', 'read', array['two'])");
    let mut member = cluster.connect_as("member");
    assert_eq!(
        member.all::<String>("select topic from outbox.poll('two')"),
        ["a"]
    );
}

#[test]
fn who_operates_runs_everything_but_reads_no_secret() {
    let (cluster, mut db) = with_roles(&["operator"]);
    db.run("create schema operator authorization operator");
    db.run("select outbox.grant('operator', 'operate'), outbox.set_secret('signing', array['hunter2'])");
    let mut operator = cluster.connect_as("operator");
    operator.run(
        "create function operator.take(outbox.event[]) returns void language plpgsql as $$
         begin if $1[1].topic = 'bad' then raise exception 'bad'; end if; end $$",
    );
    operator.run("select outbox.create_stream('billing')");
    operator.run(
        "select outbox.create_sink('f', 'function', config => '{\"function\": \"operator.take\"}', stream => 'billing'),
                outbox.create_sink('p', 'pull'),
                outbox.create_sink('h', 'http', config => '{\"url\": \"http://127.0.0.1:1/\", \"secret\": \"signing\"}')",
    );
    db.run("select outbox.emit('good', stream => 'billing')");
    let ticked: String = operator.one("select outcome || ' ' || delivered from outbox.tick('f')");
    assert_eq!(ticked, "delivered 1");
    operator.run("select outbox.pause_sink('h'), outbox.resume_sink('h'), outbox.alter_sink('h', batch_size => 5)");
    let states: Vec<String> = operator.all("select sink from outbox.status order by 1");
    assert_eq!(states, ["f", "h", "p"]);
    for table in ["sinks", "cursors", "dead_letters", "streams", "sink_health"] {
        operator.run(&format!("table outbox.{table}"));
    }
    operator.run("select outbox.redeliver('f')");
    assert_eq!(
        operator
            .refused("select outbox.discard('f', '1:1')")
            .sqlstate,
        "42704"
    );
    operator.run("select outbox.prune()");
    operator.run("select outbox.start()");
    operator.run("select outbox.stop()");
    operator.run("select outbox.drop_sink('f'), outbox.drop_sink('p'), outbox.drop_sink('h')");
    operator.run("select outbox.drop_stream('billing')");

    denied(
        &mut operator,
        &[
            "select from outbox.secrets",
            "select outbox.set_secret('signing', null)",
            "select from outbox.events",
            "select outbox.read()",
            "select outbox.emit('x')",
            "insert into outbox.events (topic) values ('x')",
            "select outbox.poll('p')",
            "insert into outbox.sinks default values",
            "update outbox.sinks set owner = 'postgres'",
            "update outbox.cursors set seq = 0",
            "delete from outbox.dead_letters",
            "select outbox.grant('operator', 'secrets')",
            "select outbox.revoke('operator', 'operate')",
            "select outbox.make_stream_table('x', 'x')",
            "select outbox.set_sink_enabled('h', false)",
            "create function outbox.mine() returns int language sql return 1",
            "create table outbox.mine ()",
            "create type outbox.mine as enum ('a')",
            "create operator outbox.= (leftarg = text, rightarg = text, function = texteq)",
            "alter table outbox.events disable trigger all",
            "create trigger t after insert on outbox.events execute function outbox.wake()",
            "create trigger t after update on outbox.sinks execute function suppress_redundant_updates_trigger()",
            "create rule r as on insert to outbox.events do nothing",
            "create policy p on outbox.events",
            "comment on extension pg_outbox is 'mine'",
            "alter extension pg_outbox update",
            // A file of the server's is not an operator's to have read.
            "select outbox.create_sink('s', 'http', config => '{\"url\": \"https://localhost/\", \"ca_file\": \"/etc/shadow\"}')",
        ],
    );
    db.run("grant pg_read_server_files to operator");
    operator.run("select outbox.create_sink('s', 'http', config => '{\"url\": \"https://localhost/\", \"ca_file\": \"/etc/shadow\"}')");
    db.run("revoke pg_read_server_files from operator");
    operator.run("select outbox.alter_sink('s', batch_size => 3)");
    denied(
        &mut operator,
        &[
            "select outbox.alter_sink('s', config => '{\"url\": \"https://localhost/\", \"ca_file\": \"/etc/gshadow\"}')",
        ],
    );
}

#[test]
fn who_keeps_secrets_sets_them_and_reads_none() {
    let (cluster, mut db) = with_roles(&["keeper"]);
    db.run("select outbox.grant('keeper', 'secrets')");
    let able = abilities(&mut db, "keeper");
    assert_eq!(
        functions(&able),
        BTreeSet::from(["set_secret", "set_secret_source"])
    );
    let mut keeper = cluster.connect_as("keeper");
    keeper.run("select outbox.set_secret('signing', array['one', 'two'])");
    let kept: String = db
        .one("select array_to_string(\"values\", '+') from outbox.secrets where name = 'signing'");
    assert_eq!(kept, "one+two");
    denied(
        &mut keeper,
        &[
            "table outbox.secrets",
            "select from outbox.sinks",
            "select outbox.emit('x')",
            "select outbox.read()",
            "select outbox.create_sink('s', 'pull')",
            "select outbox.grant('keeper', 'read')",
        ],
    );
    keeper.run("select outbox.set_secret('signing', null)");
    assert_eq!(db.one::<i64>("select count(*) from outbox.secrets"), 0);
}

/// Postgres says what is missing, and cannot know how it is given.
#[test]
fn who_may_nothing_is_told_how_that_is_changed() {
    let (cluster, mut db) = with_roles(&["nobody"]);
    let mut nobody = cluster.connect_as("nobody");
    for statement in [
        "select outbox.emit('order.placed')",
        "insert into outbox.events (topic) values ('order.placed')",
        "select outbox.read()",
        "select * from outbox.status",
    ] {
        let refused = nobody.refused(statement);
        assert_eq!(refused.sqlstate, "42501", "{statement}");
        let hint = refused.hint.expect("what to do");
        assert!(hint.contains("outbox.grant("), "{statement}: {hint}");
    }
    // What is not ours is none of our business.
    db.run("create schema other; create table other.t (x int)");
    assert_eq!(nobody.refused("select from other.t").hint, None);
}

/// A destination is told what it is logged in with, so who may name both could read any secret.
#[test]
fn a_secret_to_log_in_with_takes_the_privilege_to_set_it() {
    let (cluster, mut db) = with_roles(&["ops", "keeper"]);
    db.run(
        "select outbox.grant('ops', 'operate'); select outbox.grant('keeper', 'operate'); select outbox.grant('keeper', 'secrets');
         select outbox.set_secret('s', array['postgresql://u:p@127.0.0.1:1/x'])",
    );
    let nats = r#"'{"url": "nats://127.0.0.1:1", "auth": "token", "secret": "s"}'"#;
    let kafka = r#"'{"brokers": "127.0.0.1:1", "secret": "s", "properties": {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "u"}}'"#;
    let postgres = r#"'{"secret": "s", "statement": "select $1"}'"#;
    let mut ops = cluster.connect_as("ops");
    let mut keeper = cluster.connect_as("keeper");
    for (kind, config) in [("nats", nats), ("kafka", kafka), ("postgres", postgres)] {
        let made = format!(
            "select outbox.create_sink('{kind}', '{kind}', config => {config}, enabled => false)"
        );
        denied(&mut ops, &[&made]);
        keeper.run(&made);
        denied(
            &mut ops,
            &[&format!(
                "select outbox.alter_sink('{kind}', config => {config})"
            )],
        );
    }
    // What only signs with it goes nowhere with it.
    ops.run(r#"select outbox.create_sink('http', 'http', config => '{"url": "http://127.0.0.1:1/", "secret": "s"}', enabled => false)"#);
    ops.run("select outbox.alter_sink('nats', batch_size => 10)");
}

#[test]
fn what_a_session_has_kept_gives_its_next_role_nothing() {
    let (_cluster, mut db) = with_roles(&["app", "half", "nobody"]);
    db.run("select outbox.grant('app', 'emit'), outbox.grant('nobody', 'emit'), outbox.revoke('nobody', 'emit')");
    // May call the function, and that alone.
    db.run("grant usage on schema outbox to half; grant execute on function outbox.emit to half");
    db.run("prepare emitting as select outbox.emit('a'); prepare inserting as insert into outbox.events (topic) values ('b')");
    for _ in 0..8 {
        db.run("execute emitting; execute inserting");
    }
    for role in ["half", "nobody"] {
        db.run(&format!("set role {role}"));
        denied(
            &mut db,
            &[
                "execute emitting",
                "execute inserting",
                "select outbox.emit('a')",
            ],
        );
        db.run("reset role");
    }
    db.run("set role app; execute emitting; execute inserting; reset role");
    assert_eq!(db.one::<i64>("select count(*) from outbox.events"), 18);
}
