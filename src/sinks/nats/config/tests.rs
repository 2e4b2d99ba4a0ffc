//! What a `config` may say, and what is answered to one that may not.

use serde_json::json;

use super::*;

fn parse(config: Value) -> NatsConfig {
    NatsConfig::parse(&config).unwrap_or_else(|error| panic!("{error:?}"))
}

fn detail(config: Value) -> String {
    let error = NatsConfig::parse(&config).expect_err("an error");
    error
        .detail
        .unwrap_or_else(|| panic!("no detail: {}", error.message))
}

fn with(key: &str, value: &str) -> Value {
    let mut config = json!({"url": "nats://example.com"});
    config[key] = value.into();
    config
}

fn server(host: &str, port: u16) -> Server {
    Server {
        host: host.to_owned(),
        port,
    }
}

#[test]
fn the_defaults() {
    let config = parse(json!({"url": "nats://example.com", "subject": null}));
    assert_eq!(config.servers, [server("example.com", 4222)]);
    assert_eq!(config.timeout, Duration::from_secs(10));
    assert!(!config.tls && config.subject.is_none() && config.stream.is_none());
    assert!(config.secret().is_none() && config.file().is_none());
}

#[test]
fn everything_set() {
    let config = parse(json!({
        "url": "tls://a.example.com:4223, tls://[::1]/",
        "subject": "events.{topic}",
        "stream": "EVENTS",
        "auth": "credentials",
        "secret": "nats",
        "ca_file": "/etc/ssl/own.pem",
        "timeout_ms": 2500,
    }));
    assert_eq!(
        config.servers,
        [server("a.example.com", 4223), server("::1", 4222)]
    );
    assert_eq!(config.servers[1].to_string(), "[::1]:4222");
    assert!(config.tls);
    assert_eq!(config.subject.unwrap().to_string(), "events.{topic}");
    assert_eq!(config.stream.as_deref(), Some("EVENTS"));
    assert_eq!(config.auth.unwrap().auth, Auth::Credentials);
    assert_eq!(config.timeout, Duration::from_millis(2500));
}

#[test]
fn bad_urls() {
    for (url, why) in [
        ("example.com", "is no URL: relative URL without a base"),
        ("http://example.com", "must begin with nats:// or tls://"),
        ("ws://example.com", "must begin with nats:// or tls://"),
        ("nats://", "must name a host, and no port 0"),
        ("nats://a:0", "must name a host, and no port 0"),
        (
            "nats://user:hunter2@a",
            "must not hold a user name or password",
        ),
        ("nats://token@a", "must not hold a user name or password"),
        ("nats://a/b", "must end with the port"),
        ("nats://a,\nnats://b", "must not hold control characters"),
        ("nats://a?b", "must end with the port"),
        (
            "nats://a,tls://b",
            "must name servers with TLS or without, not both",
        ),
        ("nats://a,", "is no URL: relative URL without a base"),
    ] {
        let told = detail(json!({"url": url}));
        assert_eq!(told, format!("\"url\" {why}."), "{url}");
    }
}

#[test]
fn bad_subjects() {
    for (subject, why) in [
        (
            "a b",
            "is no subject to publish to: it has white space or control characters in it",
        ),
        (
            "a..{topic}",
            "is no subject to publish to: it is empty or has an empty token",
        ),
        (
            "{topic}.",
            "is no subject to publish to: it is empty or has an empty token",
        ),
        (
            "{topic}.>",
            "is no subject to publish to: it has a wildcard in it",
        ),
        (
            "$JS.{topic}",
            "is no subject to publish to: it begins with $, which is reserved for the server",
        ),
        (
            "{topic",
            "has a { that is not closed; a brace itself is written {{",
        ),
    ] {
        assert_eq!(
            detail(with("subject", subject)),
            format!("\"subject\" {why}.")
        );
    }
}

#[test]
fn a_secret_and_what_it_is_belong_together() {
    assert_eq!(
        detail(with("secret", "nats")),
        "\"secret\" needs an \"auth\"."
    );
    assert_eq!(
        detail(with("auth", "token")),
        "\"auth\" needs a \"secret\"."
    );
    assert_eq!(
        detail(with("auth", "jwt")),
        "\"auth\" must be one of \"token\", \"password\", \"credentials\" and \"nkey\"."
    );
}

#[test]
fn the_rest() {
    for (key, value, why) in [
        ("stream", "a.b", "is no name of a stream"),
        ("stream", "a b", "is no name of a stream"),
        ("ca_file", "/ca.pem", "is for URLs that begin with tls://"),
        ("timeout_ms", "1s", "must be a number, not a string"),
    ] {
        assert_eq!(detail(with(key, value)), format!("\"{key}\" {why}."));
    }
    let relative = json!({"url": "tls://example.com", "ca_file": "ca.pem"});
    assert_eq!(detail(relative), "\"ca_file\" must be an absolute path.");
}
