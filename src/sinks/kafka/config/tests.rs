//! What a `config` may say, and what is answered to one that may not.

use serde_json::json;

use super::*;

fn parse(config: Value) -> KafkaConfig {
    KafkaConfig::parse(&config).unwrap_or_else(|error| panic!("{error:?}"))
}

fn refused(config: Value) -> ConfigError {
    KafkaConfig::parse(&config).expect_err("an error")
}

fn detail(config: Value) -> String {
    let error = refused(config);
    error
        .detail
        .unwrap_or_else(|| panic!("no detail: {}", error.message))
}

fn with(key: &str, value: Value) -> Value {
    let mut config = json!({"brokers": "localhost:9092"});
    config[key] = value;
    config
}

#[test]
fn the_defaults() {
    let config = parse(json!({"brokers": "a:9092,b"}));
    assert_eq!(config.mode, Mode::Binary);
    assert_eq!(config.timeout, Duration::from_secs(10));
    assert!(config.topic.is_none() && config.secret().is_none() && config.file().is_none());
    let client = config.client();
    for (name, value) in [
        ("bootstrap.servers", "a:9092,b"),
        ("enable.idempotence", "true"),
        ("acks", "all"),
        ("message.timeout.ms", "11000"),
        ("linger.ms", "0"),
    ] {
        assert_eq!(client.get(name), Some(value), "{name}");
    }
    assert!(client.create_native_config().is_ok());
}

#[test]
fn everything_set() {
    let config = parse(json!({
        "brokers": "a.example.com:9093, [::1]:9093",
        "topic": "events.{tenant}",
        "mode": "structured",
        "properties": {"linger.ms": "5", "security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "outbox"},
        "secret": "kafka",
        "ca_file": "/etc/ssl/own.pem",
        "timeout_ms": 30000,
    }));
    assert_eq!(config.mode, Mode::Structured);
    assert_eq!(config.property("linger.ms"), Some("5"));
    assert_eq!(config.property("batch.size"), Some("262144"));
    assert_eq!(config.file(), Some("ca_file"));
    assert_eq!(
        config.client().get("ssl.ca.location"),
        Some("/etc/ssl/own.pem")
    );
    let secret = config.secret.unwrap();
    assert_eq!(
        (secret.name.as_str(), secret.property),
        ("kafka", "sasl.password")
    );
}

#[test]
fn lists_of_brokers() {
    for brokers in [
        "a:",
        "a:0",
        "a:99999",
        ":9092",
        "kafka://a:9092",
        "a,,b",
        "user:pw@a:9092",
        " ",
    ] {
        assert_eq!(
            detail(json!({"brokers": brokers})),
            "\"brokers\" must be a list of host:port, separated by commas.",
            "{brokers}"
        );
    }
}

#[test]
fn topics() {
    for (topic, why) in [
        (
            "a b",
            "is no name of a topic: it holds other characters than letters, digits and . _ -",
        ),
        (
            "{topic}/x",
            "is no name of a topic: it holds other characters than letters, digits and . _ -",
        ),
        ("..", "is no name of a topic: it is \".\" or \"..\""),
        (
            "{nothing}",
            "has an unknown place {nothing}; there are {topic}, {source}, {subject}, {tenant}, {schema}, {table} and {header.<name>}",
        ),
    ] {
        assert_eq!(
            detail(with("topic", json!(topic))),
            format!("\"topic\" {why}.")
        );
    }
}

#[test]
fn properties_that_cannot_be_set() {
    for (name, why, hint) in [
        (
            "acks",
            "is set by the sink itself",
            "What a sink guarantees rests on it.",
        ),
        (
            "enable.idempotence",
            "is set by the sink itself",
            "What a sink guarantees rests on it.",
        ),
        (
            "bootstrap.servers",
            "has a key of its own",
            "Set \"brokers\" in the config.",
        ),
        (
            "ssl.ca.location",
            "has a key of its own",
            "Set \"ca_file\" in the config.",
        ),
        (
            "sasl.password",
            "is a secret",
            "Store it with outbox.set_secret, name it by \"secret\", and set \"secret_property\" to \"sasl.password\".",
        ),
        (
            "linger.mss",
            "is no property that can be set",
            "Perhaps \"linger.ms\" is meant.",
        ),
    ] {
        let error = refused(with("properties", json!({name: "hunter2"})));
        assert_eq!(
            error.detail.unwrap(),
            format!("\"properties.{name}\" {why}.")
        );
        assert_eq!(error.hint.as_deref(), Some(hint));
    }
    assert!(
        refused(with("properties", json!({"plugin.library.paths": "x"})))
            .hint
            .is_none()
    );
}

#[test]
fn values_that_the_client_refuses() {
    for (name, value, why) in [
        ("linger.ms", "fast", "is refused by the client"),
        (
            "linger.ms",
            "-9",
            "is refused by the client: outside of 0..900000",
        ),
        ("compression.type", "squeezed", "is refused by the client"),
        ("security.protocol", "telnet", "is refused by the client"),
        (
            "max.in.flight.requests.per.connection",
            "6",
            "must be at most 5, or a retry could change the order",
        ),
        ("ssl.key.location", "key.pem", "must be an absolute path"),
    ] {
        let told = detail(with("properties", json!({name: value})));
        assert_eq!(told, format!("\"properties.{name}\" {why}."));
    }
    let told = detail(with("properties", json!({"linger.ms": 5})));
    assert_eq!(
        told,
        "\"properties.linger.ms\" must be a string, not a number."
    );
}

#[test]
fn files_are_told() {
    let config = parse(with("properties", json!({"ssl.key.location": "/k.pem"})));
    assert_eq!(config.file(), Some("properties"));
    assert_eq!(
        detail(with("ca_file", json!("ca.pem"))),
        "\"ca_file\" must be an absolute path."
    );
}

#[test]
fn secrets() {
    assert_eq!(
        detail(with("secret_property", json!("sasl.password"))),
        "\"secret_property\" needs a \"secret\"."
    );
    let config = parse(json!({"brokers": "a", "secret": "key", "secret_property": "ssl.key.pem"}));
    assert_eq!(config.secret.unwrap().property, "ssl.key.pem");
}

#[test]
fn what_prints_holds_no_values() {
    let config = parse(with(
        "properties",
        json!({"ssl.certificate.pem": "hunter2"}),
    ));
    assert!(!format!("{config:?}").contains("hunter2"));
}
