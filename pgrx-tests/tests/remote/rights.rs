//! Who gets in over there, and as whom.

use outbox_tests::{Certificate, Cluster, Sql, Tls};
use postgres::Client;
use serde_json::json;

use super::scene::{emit, ids, quick, quoted, status, until_idle, until_status};
use super::{destination, postgres_sink, until_applied};

/// Who may log in over TCP from now on.
fn let_in(remote: &mut Client, lines: &str) {
    remote.run(&format!(
        "do $$ begin
             execute format('copy (select unnest(string_to_array(%L, chr(10)))) to %L', E'local all all trust\n{lines}', current_setting('hba_file'));
         end $$;
         select pg_reload_conf()"
    ));
}

/// A destination with a role `writer` that has to say its password.
fn guarded() -> Cluster {
    let there = destination();
    let mut remote = there.connect();
    remote.run("create role writer login password 'open sesame 4711'; grant create on schema public to writer; grant insert on applied to writer");
    let_in(
        &mut remote,
        "host all writer 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust",
    );
    there
}

#[test]
fn who_is_no_superuser_logs_in_with_a_password() {
    let there = guarded();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run(
        "create role op login; select outbox.grant('op', 'operate'), outbox.grant('op', 'secrets')",
    );
    let mut op = cluster.connect_as("op");
    let as_writer = there
        .url("app")
        .replace("postgres@", "writer:open%20sesame%204711@");
    let as_postgres = there.url("app").replace("postgres@", "postgres:whatever@");
    db.run(&format!(
        "select outbox.set_secret('writer', array[{}])",
        quoted(&as_writer)
    ));
    db.run(&format!(
        "select outbox.set_secret('postgres', array[{}])",
        quoted(&as_postgres)
    ));
    postgres_sink(&mut op, "bare", &there, json!({}), "");
    postgres_sink(
        &mut op,
        "trusted",
        &there,
        json!({"dsn": null, "secret": "postgres"}),
        "",
    );
    postgres_sink(
        &mut op,
        "writer",
        &there,
        json!({"dsn": null, "secret": "writer"}),
        "",
    );
    emit(&mut db, 1..=3);
    let bare = until_status(&mut db, "bare", "an error", |status| {
        status.last_error.is_some()
    });
    assert_eq!(
        bare.last_error.as_deref(),
        Some("the connection string holds no password, and only a superuser's sink may do without")
    );
    let trusted = until_status(&mut db, "trusted", "an error", |status| {
        status.last_error.is_some()
    });
    assert!(
        trusted.last_error.as_deref().is_some_and(|error| error
            .ends_with("asks for no password, and only a superuser's sink may use such a server")),
        "{trusted:?}"
    );
    assert_eq!(until_applied(&mut remote, 3), ids(1..=3));
    until_idle(&mut db, "writer");

    // A superuser's sink is nobody else's to lead elsewhere.
    postgres_sink(&mut db, "super", &there, json!({}), "start => 'tail'");
    let config = json!({"dsn": there.url("app"), "statement": "select $1::jsonb"});
    let refused = op.refused(&format!(
        "select outbox.alter_sink('super', config => {})",
        quoted(&config.to_string())
    ));
    assert_eq!(refused.sqlstate, "42501");
    emit(&mut db, 4..=4);
    until_status(&mut db, "super", "one delivered", |status| {
        status.delivered == 1
    });
}

#[test]
fn a_wrong_password_is_an_outage_and_a_new_one_takes_effect() {
    let there = guarded();
    let mut remote = there.connect();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let with = |password: &str| {
        let url = there
            .url("app")
            .replace("postgres@", &format!("writer:{password}@"));
        format!("select outbox.set_secret('there', array['{url}'])")
    };
    db.run(&with("wrong"));
    postgres_sink(
        &mut db,
        "w",
        &there,
        json!({"dsn": null, "secret": "there"}),
        "",
    );
    emit(&mut db, 1..=3);
    let failing = until_status(&mut db, "w", "some attempts", |status| status.attempts >= 6);
    assert!(
        failing
            .last_error
            .as_deref()
            .is_some_and(|error| error
                .ends_with("password authentication failed for user \"writer\" (28P01)")),
        "{failing:?}"
    );
    assert_eq!(failing.dead_letters, 0);
    db.run(&with("open%20sesame%204711"));
    assert_eq!(until_applied(&mut remote, 3), ids(1..=3));
    until_idle(&mut db, "w");
    let refused = db.refused(
        r#"select outbox.create_sink('x', 'postgres', config => '{"dsn": "postgresql://u:hunter2@db/app", "table": "t"}')"#,
    );
    assert_eq!(
        refused.detail.as_deref(),
        Some("\"dsn\" must not hold a password.")
    );
    assert!(refused.hint.unwrap().contains("outbox.set_secret"));
}

#[test]
fn tls_is_asked_for_and_checked() {
    let there = destination();
    let mut remote = there.connect();
    if remote.one::<String>("show ssl_library").is_empty() {
        eprintln!("this server was built without TLS");
        return;
    }
    let ours = Certificate::make(Tls::Good);
    let others = Certificate::make(Tls::Good);
    let folder: String = remote.one("show data_directory");
    for (file, pem) in [
        ("server.crt", &ours.certificate),
        ("server.key", &ours.key),
        ("ca.pem", &ours.authority),
        ("other.pem", &others.authority),
    ] {
        remote.run(&format!(
            "copy (select unnest(string_to_array({}, chr(10)))) to program 'umask 077; cat > {folder}/{file}'",
            quoted(pem.trim_end())
        ));
    }
    // Both servers run as the same user.
    let (ca, other) = (format!("{folder}/ca.pem"), format!("{folder}/other.pem"));
    remote.run("alter system set ssl = on");
    let_in(&mut remote, "hostssl all all 127.0.0.1/32 trust");
    let url = there.url("app");
    let cluster = quick().start();
    let mut db = cluster.connect();
    emit(&mut db, 1..=1);
    for (sink, mode, ca_file, says) in [
        ("require", "require", None, None),
        ("prefer", "prefer", None, None),
        ("full", "verify-full", Some(&ca), None),
        ("plain", "disable", None, Some("no encryption (28000)")),
        (
            "unknown",
            "verify-full",
            Some(&other),
            Some("refused: its signature is wrong"),
        ),
        (
            "unused",
            "require",
            Some(&ca),
            Some("\"ca_file\" is for sslmode=verify-full"),
        ),
    ] {
        let config = json!({"dsn": format!("{url}?sslmode={mode}"), "ca_file": ca_file});
        postgres_sink(&mut db, sink, &there, config, "");
        match says {
            None => {
                until_status(&mut db, sink, "one delivered", |status| {
                    status.delivered == 1
                });
            }
            Some(says) => {
                let failing = until_status(&mut db, sink, "an error", |status| {
                    status.last_error.is_some()
                });
                assert!(
                    failing
                        .last_error
                        .as_deref()
                        .is_some_and(|error| error.contains(says)),
                    "{failing:?}"
                );
            }
        }
    }
    let encrypted: i64 = remote.one("select count(*) from pg_stat_ssl where ssl");
    assert_eq!(encrypted, 3);
    assert_eq!(status(&mut db, "full").dead_letters, 0);
}
