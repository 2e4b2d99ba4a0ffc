//! Databases in other encodings than UTF-8: text arrives as it was written, as far as it can be said.

mod everywhere;
mod scene;

use everywhere::{Scene, create_sinks, same_everywhere};
use outbox_tests::{Reply, Sql, until};
use postgres::Client;
use scene::until_dead;
use serde_json::{Value, json};

/// A database of another encoding, with the extension.
fn database(scene: &Scene, name: &str, encoding: &str) -> Client {
    scene.cluster.connect_to("postgres").run(&format!(
        "create database {name} template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
    ));
    let mut db = scene.cluster.connect_to(name);
    db.run("create extension pg_outbox");
    db
}

#[test]
fn a_database_in_latin1() {
    let scene = Scene::start();
    let mut db = database(&scene, "latin1", "LATIN1");
    create_sinks(&mut db, &scene.receiver);
    db.run(r#"create schema "größe"; create function "größe"."ändern"(e outbox.event) returns jsonb language sql as $$ select jsonb_build_object('é', e.payload) $$"#);
    db.run(
        r#"select outbox.create_sink('chosen', 'pull', topics => '{größe.*}', tenant => 'Ärger', filter => 'subject = ''é''',
                                     transform => '"größe"."ändern"(outbox.event)')"#,
    );
    let write = r#"select outbox.emit('größe.geändert', '{"ü": "ß\u00e9"}', 'é', 'straße', 'Ärger', '{"kopf": "ñ"}', 'ïd')"#;
    assert_eq!(db.one::<String>(write), "ïd");
    db.run("set outbox.tenant = 'Ärger'; set outbox.headers = '{\"kopf\": \"ñ\"}'");
    db.run(
        r#"select outbox.emit('größe.geändert', '{"ü": "ß\u00e9"}', 'é', 'straße', id => 'ïd2')"#,
    );
    db.run(r#"insert into outbox.events (id, topic, subject, source, payload) values ('ïd3', 'größe.geändert', 'é', 'straße', '{"ü": "ß\u00e9"}')"#);
    let events = scene.receiver.wait_for(3);
    for (event, id) in events.iter().zip(["ïd", "ïd2", "ïd3"]) {
        assert_eq!(event.id, id);
        assert_eq!(event.topic, "größe.geändert");
        assert_eq!(event.subject.as_deref(), Some("é"));
        assert_eq!(event.tenant.as_deref(), Some("Ärger"));
        assert_eq!(event.source, "stra%C3%9Fe");
        assert_eq!(event.data(), json!({"ü": "ßé"}));
        assert_eq!(event.extensions["kopf"], "\"ñ\"");
    }
    same_everywhere(&mut db, 3);
    let chosen: Vec<Value> = db.all("select payload from outbox.poll('chosen')");
    assert_eq!(chosen, vec![json!({"é": {"ü": "ßé"}}); 3]);
    assert!(db.one::<bool>("select outbox.ack('chosen')"));

    // What this encoding does not have is refused at the write, as Postgres does.
    assert_eq!(
        db.refused(r#"select outbox.emit('a', '"\u4e2d"')"#)
            .sqlstate,
        "22P05"
    );
    assert_eq!(db.refused("select outbox.emit('中')").sqlstate, "22P05");

    // An error that cannot be said in it is kept as well as it can be, and stops nothing.
    let error = "no ünïcode: 中文";
    scene
        .receiver
        .reply_next([Reply::failures(&[("poison é", error, true)])]);
    db.run("select outbox.emit('größe', '\"é\"', id => 'poison é')");
    let letter = &until_dead(&mut db, "web", 1)[0];
    assert!(
        letter.error.contains("no ") && letter.error.contains("code: "),
        "{}",
        letter.error
    );
    assert_eq!(letter.event["data"], json!("é"));
    assert_eq!(letter.event["id"], json!("poison é"));
    db.run("select outbox.redeliver('web')");
    assert_eq!(scene.receiver.wait_for(4)[3].data(), json!("é"));
    scene
        .receiver
        .reply_next([Reply::status(503).body("ошибка ü")]);
    db.run("select outbox.emit('größe')");
    scene.receiver.wait_for(5);
    scene::until_idle(&mut db, "web");

    // Errors name what they are about.
    let refusal = db.refused("select outbox.create_sink('x', 'pull', filter => 'größe > 1')");
    assert_eq!(refusal.sqlstate, "22023");
    let refusal = db.refused("select outbox.poll('wär')");
    assert_eq!(refusal.sqlstate, "42704");
    let refusal = db.refused("select outbox.create_sink('x', 'pull', topics => '{größe..x}')");
    assert_eq!(refusal.sqlstate, "22023");
    let refusal = db.refused("select outbox.create_sink('wär', 'pull')");
    assert_eq!(refusal.sqlstate, "22023");
    assert_eq!(
        db.refused("select outbox.ack('chosen', 'é')").sqlstate,
        "22023"
    );
    assert_eq!(
        db.refused("select outbox.set_secret('é', '{}')").sqlstate,
        "22023"
    );
    assert_eq!(db.refused("select outbox.prune('é')").sqlstate, "42704");
    db.run("select outbox.set_secret('s', array['schlüssel'])");
}

#[test]
fn a_database_without_an_encoding() {
    let scene = Scene::start();
    let mut db = database(&scene, "ascii", "SQL_ASCII");
    create_sinks(&mut db, &scene.receiver);
    db.run("set client_encoding = 'SQL_ASCII'");
    // Whose clients speak UTF-8.
    db.run(r#"select outbox.emit('größe', '{"ü": "中"}', 'é', tenant => 'Ärger', headers => '{"kopf": "ñ"}', id => 'ïd')"#);
    let event = &scene.receiver.wait_for(1)[0];
    assert_eq!(
        (&*event.topic, event.subject.as_deref(), &*event.id),
        ("größe", Some("é"), "ïd")
    );
    assert_eq!(event.data(), json!({"ü": "中"}));
    same_everywhere(&mut db, 1);

    // And some speak something else: what is not UTF-8 cannot go to an endpoint, and stops nothing that can.
    let gr = "convert_from('\\x6772f6df65', 'SQL_ASCII')";
    db.run(&format!(
        "insert into outbox.events (id, topic, subject) values ('latin', 'a', {gr})"
    ));
    db.run(&format!("insert into outbox.events (id, topic, payload) values ('latin payload', 'a', to_jsonb({gr}))"));
    db.run(&format!(
        "insert into outbox.events (id, topic) values ('latin topic', {gr})"
    ));
    for n in 1..=3 {
        db.run(&format!("select outbox.emit('good', id => 'good {n}')"));
    }
    let letters = until_dead(&mut db, "web", 3);
    assert!(
        letters.iter().all(|letter| letter.error.contains("UTF-8")),
        "{letters:?}"
    );
    let ids: Vec<_> = scene
        .receiver
        .wait_for(4)
        .into_iter()
        .map(|event| event.id)
        .collect();
    assert_eq!(ids, ["ïd", "good 1", "good 2", "good 3"]);
    // A function gets it as it is stored, and so does whoever reads.
    until("the function to be called", || {
        (db.one::<i64>("select count(*) from seen") == 7).then_some(())
    });
    let bytes = "select encode(convert_to((event).subject, 'SQL_ASCII'), 'hex') from seen where (event).id = 'latin'";
    assert_eq!(db.one::<String>(bytes), "6772f6df65");
    let polled =
        "select count(*) from outbox.poll('pull') where id like 'latin%' or id like 'good%'";
    assert_eq!(db.one::<i64>(polled), 6);
    db.run("select outbox.create_sink('filtered', 'pull', filter => 'subject is not null', topics => '{a}')");
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.poll('filtered')"),
        1
    );
    assert_eq!(
        db.one::<i64>(
            "select count(*) from outbox.status where last_error is not null and state = 'error'"
        ),
        0
    );
}
