use serde_json::json;

use super::*;

fn refused(config: Value) -> (String, String) {
    let error = PostgresConfig::parse(&config).unwrap_err();
    (error.message, error.detail.unwrap_or_default())
}

#[test]
fn what_is_needed_and_what_has_a_default() {
    let config =
        PostgresConfig::parse(&json!({"secret": "warehouse", "table": "Raw.Events"})).unwrap();
    assert_eq!(config.secret(), Some("warehouse"));
    assert_eq!(config.checkpoint.to_string(), "\"outbox_checkpoint\"");
    assert_eq!(config.remember_hours, 168);
    assert!(!config.is_passwordless());
    for (config, message) in [
        (
            json!({"table": "t"}),
            "the config of a sink of kind \"postgres\" needs \"dsn\" or \"secret\"",
        ),
        (
            json!({"secret": "s"}),
            "the config of a sink of kind \"postgres\" needs \"table\" or \"statement\"",
        ),
        (
            json!({"secret": "s", "tabel": "t"}),
            "unknown key \"tabel\" in the config of a sink of kind \"postgres\"",
        ),
    ] {
        assert_eq!(refused(config).0, message);
    }
}

#[test]
fn a_password_stays_out_of_the_config_and_of_the_error() {
    for dsn in [
        "postgresql://u:hunter2@db/app",
        "host=db user=u password=hunter2",
        "host=db user=u password='hunter2 and more'",
        "postgresql://u@db/app?password=hunter2",
        "host=db user=u password=hunter2 more",
        "postgresql://u:hunter2@@db:x/app",
        "host=db hunter2",
        "host=db hunter2=x",
    ] {
        let error = PostgresConfig::parse(&json!({"dsn": dsn, "table": "t"})).unwrap_err();
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    }
    let (_, detail) = refused(json!({"dsn": "postgresql://u:hunter2@db/app", "table": "t"}));
    assert_eq!(detail, "\"dsn\" must not hold a password.");
}

#[test]
fn values_are_checked() {
    for (key, value, detail) in [
        (
            "dsn",
            json!("http://db"),
            "\"dsn\" is no connection string, or has an option that is not known.",
        ),
        ("dsn", json!("user=me"), "\"dsn\" names no host."),
        (
            "dsn",
            json!("host=db sslmode=maybe"),
            "\"dsn\" has an \"sslmode\" that is not known: it is disable, prefer, require or verify-full.",
        ),
        ("table", json!("a.b.c"), "\"table\" is no name of a table."),
        (
            "checkpoint",
            json!("x; drop"),
            "\"checkpoint\" is no name of a table.",
        ),
        (
            "remember_hours",
            json!(0),
            "\"remember_hours\" must be a whole number between 1 and 87840.",
        ),
        (
            "ca_file",
            json!("ca.pem"),
            "\"ca_file\" must be an absolute path.",
        ),
        (
            "secret",
            json!("s"),
            "\"dsn\" cannot be there beside \"secret\".",
        ),
        (
            "statement",
            json!("select $1"),
            "\"statement\" cannot be there beside \"table\".",
        ),
    ] {
        let mut config = json!({"dsn": "host=db user=u", "table": "t"});
        config[key] = value;
        assert_eq!(refused(config).1, detail, "{key}");
    }
}

#[test]
fn statements_leave_the_transaction_alone_and_take_the_events() {
    for (statement, detail) in [
        (
            " Commit",
            "\"statement\" must not begin or end a transaction.",
        ),
        (
            "rollback; select $1",
            "\"statement\" must not begin or end a transaction.",
        ),
        ("select 1", "\"statement\" does not use its parameter."),
    ] {
        assert_eq!(
            refused(json!({"secret": "s", "statement": statement})).1,
            detail
        );
    }
    let good = json!({"secret": "s", "statement": "select take($1)"});
    assert!(PostgresConfig::parse(&good).is_ok());
}
