//! What a `config` may say, and what is answered to one that may not.

use serde_json::json;

use super::*;

fn parse(config: Value) -> HttpConfig {
    HttpConfig::parse(&config).unwrap_or_else(|error| panic!("{error:?}"))
}

fn detail(config: Value) -> String {
    let error = HttpConfig::parse(&config).expect_err("an error");
    error
        .detail
        .unwrap_or_else(|| panic!("no detail: {}", error.message))
}

fn with(key: &str, value: Value) -> Value {
    let mut config = json!({"url": "https://example.com"});
    config[key] = value;
    config
}

#[test]
fn reserved_headers_are_sorted_for_the_search() {
    assert!(RESERVED_HEADERS.is_sorted());
}

#[test]
fn the_defaults() {
    let config = parse(json!({"url": "https://example.com/hook", "mode": null}));
    assert_eq!(config.mode, Mode::Batch);
    assert_eq!(config.timeout, None);
    assert_eq!(config.signing, None);
    assert!(config.headers.is_empty() && config.ca_file.is_none());
}

#[test]
fn everything_set() {
    let config = parse(json!({
        "url": "https://example.com:8443/hook?x=1#part",
        "mode": "single",
        "headers": {"Authorization": "Bearer abc", "X-Env": "prod"},
        "secret": "billing",
        "signature": "standard",
        "timeout_ms": 2500,
        "concurrency": 4,
        "ca_file": "/etc/ssl/own.pem",
    }));
    assert_eq!(config.url.as_str(), "https://example.com:8443/hook?x=1");
    assert_eq!(config.origin(), "https://example.com:8443");
    assert_eq!(config.mode, Mode::Single { concurrency: 4 });
    assert_eq!(config.headers["x-env"], "prod");
    assert_eq!(config.secret(), Some("billing"));
    assert_eq!(config.signing.unwrap().scheme, Scheme::Standard);
    assert_eq!(config.timeout, Some(Duration::from_millis(2500)));
}

#[test]
fn a_secret_signs_as_github_does_unless_told_otherwise() {
    let signing = parse(with("secret", json!("s"))).signing.unwrap();
    assert_eq!(signing.scheme, Scheme::Github);
    assert_eq!(
        detail(with("signature", json!("github"))),
        "\"signature\" needs a \"secret\"."
    );
}

#[test]
fn bad_urls() {
    for (url, why) in [
        ("example.com/hook", "is no URL: relative URL without a base"),
        ("/hook", "is no URL: relative URL without a base"),
        ("ftp://example.com", "must begin with http:// or https://"),
        ("file:///etc/passwd", "must begin with http:// or https://"),
        ("http://", "is no URL: empty host"),
        (
            "http://a b/",
            "is no URL: invalid international domain name",
        ),
        ("http://example.com:99999", "is no URL: invalid port number"),
        ("http://example.com:0", "must not have port 0"),
        (
            "http://example.com/a\r\nb",
            "must not hold control characters",
        ),
        ("http://example.com/\n", "must not hold control characters"),
        ("http://exa\tmple.com/", "must not hold control characters"),
        ("", "must not be empty"),
    ] {
        assert_eq!(detail(with("url", json!(url))), format!("\"url\" {why}."));
    }
    let error = HttpConfig::parse(&json!({})).unwrap_err();
    assert_eq!(
        error.message,
        "the config of a sink of kind \"http\" needs \"url\""
    );
}

#[test]
fn an_unknown_key_is_named_with_the_one_that_is_meant() {
    let error = HttpConfig::parse(&with("timeoutms", json!(1))).unwrap_err();
    assert_eq!(
        error.message,
        "unknown key \"timeoutms\" in the config of a sink of kind \"http\""
    );
    assert!(error.detail.unwrap().contains("\"concurrency\""));
    assert_eq!(
        error.hint.as_deref(),
        Some("Perhaps \"timeout_ms\" is meant.")
    );
}

#[test]
fn wrong_types_and_ranges() {
    for (key, value, why) in [
        ("url", json!(1), "must be a string, not a number"),
        ("mode", json!([]), "must be a string, not an array"),
        (
            "mode",
            json!("both"),
            "must be one of \"batch\" and \"single\"",
        ),
        (
            "signature",
            json!("md5"),
            "must be one of \"github\" and \"standard\"",
        ),
        ("secret", json!({}), "must be a string, not an object"),
        ("timeout_ms", json!("10"), "must be a number, not a string"),
        (
            "timeout_ms",
            json!(0),
            "must be a whole number between 1 and 3600000",
        ),
        (
            "timeout_ms",
            json!(1.5),
            "must be a whole number between 1 and 3600000",
        ),
        (
            "timeout_ms",
            json!(-1),
            "must be a whole number between 1 and 3600000",
        ),
        (
            "concurrency",
            json!(257),
            "must be a whole number between 1 and 256",
        ),
        ("concurrency", json!(2), "is for mode \"single\""),
        (
            "headers",
            json!("x"),
            "must be an object of strings, not a string",
        ),
        ("ca_file", json!("ca.pem"), "must be an absolute path"),
    ] {
        assert_eq!(detail(with(key, value)), format!("\"{key}\" {why}."));
    }
    assert_eq!(
        detail(json!({"url": "http://example.com", "ca_file": "/ca.pem"})),
        "\"ca_file\" is for URLs that begin with https."
    );
}

#[test]
fn headers_are_checked() {
    for (name, value, why) in [
        (
            "Content-Type",
            json!("x"),
            "is a header that the sink sets itself",
        ),
        ("HOST", json!("x"), "is a header that the sink sets itself"),
        (
            "webhook-id",
            json!("x"),
            "is a header that the sink sets itself",
        ),
        ("X Y", json!("x"), "is no name of an HTTP header"),
        ("", json!("x"), "is no name of an HTTP header"),
        ("X-A", json!(1), "must be a string, not a number"),
        (
            "X-A",
            json!("a\r\nB: c"),
            "must have a value of visible ASCII characters only",
        ),
        (
            "X-A",
            json!("ü"),
            "must have a value of visible ASCII characters only",
        ),
    ] {
        assert_eq!(
            detail(with("headers", json!({name: value}))),
            format!("\"headers.{name}\" {why}.")
        );
    }
    assert_eq!(
        detail(with("headers", json!({"X-A": "1", "x-a": "2"}))),
        "\"headers.x-a\" is there twice; case does not count."
    );
}

#[test]
fn a_checkpoint_is_the_receivers_own() {
    let mut config =
        json!({"url": "https://u:p@example.com/hook", "checkpoint_url": "https://example.com/at"});
    assert_eq!(parse(config.clone()).checkpoint.unwrap().path(), "/at");
    for (url, why) in [
        (
            "https://example.org/at",
            "must lead to the same scheme, host and port as \"url\"",
        ),
        (
            "http://example.com/at",
            "must lead to the same scheme, host and port as \"url\"",
        ),
        (
            "https://u@example.com/at",
            "must lead to the same scheme, host and port as \"url\"",
        ),
        (
            "ftp://example.com/at",
            "must begin with http:// or https://",
        ),
    ] {
        config["checkpoint_url"] = json!(url);
        assert_eq!(detail(config.clone()), format!("\"checkpoint_url\" {why}."));
    }
    config["checkpoint_url"] = json!("https://example.com/at");
    config["mode"] = json!("single");
    assert_eq!(detail(config), "\"checkpoint_url\" is for mode \"batch\".");
}

#[test]
fn credentials_are_in_no_error_and_no_debug_text() {
    let secrets = ["hunter2", "swordfish", "tok-en"];
    let config = json!({
        "url": "https://user:hunter2@example.com/hook?key=swordfish",
        "headers": {"X-Api-Key": "tok-en"},
    });
    let mut texts = vec![format!("{:?}", parse(config.clone()))];
    for (key, value) in [
        ("headers", json!({"Authorization": "tok-en"})),
        ("headers", json!({"X-A": "tok-en\n"})),
        ("url", json!("ftp://user:hunter2@example.com/?swordfish")),
        ("url", json!("https://user:hunter2@example.com:swordfish/")),
        ("secret", json!({"value": "swordfish"})),
        ("mode", json!("hunter2")),
    ] {
        let mut config = config.clone();
        config[key] = value;
        texts.push(format!("{:?}", HttpConfig::parse(&config).unwrap_err()));
    }
    for text in texts {
        assert!(
            !secrets.iter().any(|secret| text.contains(secret)),
            "{text}"
        );
    }
}
