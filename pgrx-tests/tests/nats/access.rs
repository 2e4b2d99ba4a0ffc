//! Who is let in, by what, and over which certificates.

use async_nats::ConnectOptions;
use outbox_tests::{Certificate, Cluster, Nats, Sql, Tls};
use postgres::Client;
use serde_json::{Value, json};

use super::{nats_sink, stored_ids, trouble};
use crate::scene::{emit, ids, quick, quoted, until_status};

/// The pair in the documentation of nats-server.
const SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
const USER: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";

/// Runs a sink against a server that lets in only whoever knows this secret; at first it is another one.
fn let_in(
    configuration: &str,
    options: fn() -> ConnectOptions,
    auth: &str,
    wrong: &str,
    right: &str,
) {
    let server = Nats::start_with(configuration, &[], options);
    server.create_stream("EVENTS", &["test.>"]);
    let cluster = quick().start();
    let mut db = cluster.connect();
    nats_sink(
        &mut db,
        &server,
        json!({"auth": auth, "secret": "nats"}),
        "",
    );
    emit(&mut db, 1..=3);
    let error = trouble(&mut db);
    assert_eq!(
        error,
        "not sent: secret \"nats\" has no active value to log in with"
    );
    db.run(&format!(
        "select outbox.set_secret('nats', array[{}])",
        quoted(wrong)
    ));
    until_status(&mut db, "js", "refused", |status| {
        let error = status.last_error.as_deref().unwrap_or_default();
        error.contains("refuses the connection") || error.contains("a value of secret")
    });
    let error = trouble(&mut db);
    assert!(!error.contains(wrong) && !error.contains(right), "{error}");
    // During a rotation either may be the one that is known.
    let both = format!(
        "{}, {}",
        quoted(if error.contains("a value") {
            right
        } else {
            wrong
        }),
        quoted(right)
    );
    db.run(&format!("select outbox.set_secret('nats', array[{both}])"));
    until_status(&mut db, "js", "through", |status| status.delivered == 3);
    assert_eq!(stored_ids(&server), ids(1..=3));
}

#[test]
fn a_token_lets_in() {
    let options = || ConnectOptions::with_token("right-token-4711".to_owned());
    let configuration = "authorization { token: \"right-token-4711\" }";
    let_in(
        configuration,
        options,
        "token",
        "wrong-token-4711",
        "right-token-4711",
    );
}

#[test]
fn a_user_and_password_let_in() {
    let options =
        || ConnectOptions::with_user_and_password("app".to_owned(), "right:4711".to_owned());
    let configuration = "authorization { user: app, password: \"right:4711\" }";
    let_in(
        configuration,
        options,
        "password",
        "app:wrong-4711",
        "app:right:4711",
    );
}

#[test]
fn what_is_no_user_and_password_is_not_sent() {
    let options =
        || ConnectOptions::with_user_and_password("app".to_owned(), "right:4711".to_owned());
    let configuration = "authorization { user: app, password: \"right:4711\" }";
    let_in(
        configuration,
        options,
        "password",
        "no-colon-4711",
        "app:right:4711",
    );
}

#[test]
fn an_nkey_lets_in() {
    let options = || ConnectOptions::with_user_and_password("tests".to_owned(), "tests".to_owned());
    let configuration = format!(
        "authorization {{ users: [ {{ nkey: {USER} }}, {{ user: tests, password: tests }} ] }}"
    );
    let_in(&configuration, options, "nkey", "SUAB", SEED);
}

#[test]
fn what_the_user_may_not_publish_is_said() {
    let options = || ConnectOptions::with_user_and_password("tests".to_owned(), "tests".to_owned());
    let configuration = "authorization { users: [
        { user: app, password: app-4711, permissions: { publish: [\"order.>\"], subscribe: [\"_INBOX.>\"] } },
        { user: tests, password: tests } ] }";
    let server = Nats::start_with(configuration, &[], options);
    server.create_stream("EVENTS", &["test.>", "order.>"]);
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.set_secret('nats', array['app:app-4711'])");
    nats_sink(
        &mut db,
        &server,
        json!({"auth": "password", "secret": "nats"}),
        "",
    );
    emit(&mut db, 1..=2);
    let error = trouble(&mut db);
    assert_eq!(error, "no permission to publish to the topic of this event");
}

/// A server with TLS, and a sink that trusts its authority, if that is what its certificate says.
fn over_tls(tls: Tls, trusting: bool) -> (Nats, Cluster, Client) {
    let papers = Certificate::make(tls);
    let files = [
        ("cert.pem", papers.certificate.as_str()),
        ("key.pem", &papers.key),
        ("ca.pem", &papers.authority),
    ];
    // The tests' own client need not be bothered with it.
    let configuration = "allow_non_tls: true
        tls { cert_file: \"{folder}/cert.pem\", key_file: \"{folder}/key.pem\" }";
    let server = Nats::start_with(configuration, &files, ConnectOptions::new);
    server.create_stream("EVENTS", &["test.>"]);
    let cluster = quick().start();
    let mut db = cluster.connect();
    let url = server.url().replace("nats://", "tls://");
    let mut config = json!({"url": url});
    if trusting {
        config["ca_file"] = json!(server.folder().join("ca.pem"));
    }
    nats_sink(&mut db, &server, config, "");
    emit(&mut db, 1..=3);
    (server, cluster, db)
}

#[test]
fn over_tls_with_a_certificate_that_is_trusted() {
    let (server, _cluster, mut db) = over_tls(Tls::Good, true);
    until_status(&mut db, "js", "through", |status| status.delivered == 3);
    assert_eq!(stored_ids(&server), ids(1..=3));
}

#[test]
fn certificates_that_are_not_trusted() {
    for (tls, trusting, says) in [
        (
            Tls::Good,
            false,
            "it is signed by no authority that is trusted here; \"ca_file\" can name one",
        ),
        (Tls::Expired, true, "it has expired"),
        (Tls::WrongHost, true, "it is for another name"),
    ] {
        let (server, _cluster, mut db) = over_tls(tls, trusting);
        let error = trouble(&mut db);
        let expected = format!("certificate of 127.0.0.1:{} refused: {says}", server.port());
        assert_eq!(error, expected);
        assert_eq!(server.count("EVENTS"), 0);
    }
}

/// A JWT as NATS signs them, of `subject` by `issuer`.
fn signed(issuer: &nkeys::KeyPair, subject: &nkeys::KeyPair, claims: Value) -> String {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    let body = json!({
        "jti": subject.public_key(), "iat": 1_700_000_000, "name": "tests",
        "iss": issuer.public_key(), "sub": subject.public_key(), "nats": claims,
    });
    let header = json!({"typ": "JWT", "alg": "ed25519-nkey"});
    let encoded = |json: &Value| URL_SAFE_NO_PAD.encode(json.to_string());
    let text = format!("{}.{}", encoded(&header), encoded(&body));
    let signature = issuer.sign(text.as_bytes()).expect("the key has its seed");
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

#[test]
fn credentials_let_in() {
    use nkeys::KeyPair;
    let (operator, user) = (KeyPair::new_operator(), KeyPair::new_user());
    let (account, system) = (KeyPair::new_account(), KeyPair::new_account());
    let unlimited = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
        "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    });
    let accounts = json!({"type": "account", "version": 2, "limits": unlimited});
    let users = json!({"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}});
    let user_jwt = signed(&account, &user, users);
    let seed = user.seed().expect("the key has its seed");
    let credentials = format!(
        "-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    );
    // JetStream wants an account for the system beside those that use it.
    let of_system = json!({"type": "account", "version": 2, "limits": {"conn": -1, "subs": -1, "data": -1, "payload": -1}});
    let configuration = format!(
        "operator: {}\nresolver: MEMORY\nsystem_account: {}\nresolver_preload: {{ {}: {}, {}: {} }}",
        signed(
            &operator,
            &operator,
            json!({"type": "operator", "version": 2})
        ),
        system.public_key(),
        account.public_key(),
        signed(&operator, &account, accounts),
        system.public_key(),
        signed(&operator, &system, of_system),
    );
    let text = credentials.clone();
    let options = move || ConnectOptions::with_credentials(&text).expect("they can be read");
    let server = Nats::start_with(&configuration, &[], options);
    server.create_stream("EVENTS", &["test.>"]);
    let cluster = quick().start();
    let mut db = cluster.connect();
    nats_sink(
        &mut db,
        &server,
        json!({"auth": "credentials", "secret": "nats"}),
        "",
    );
    db.run(&format!(
        "select outbox.set_secret('nats', array[{}])",
        quoted(&credentials)
    ));
    emit(&mut db, 1..=3);
    until_status(&mut db, "js", "through", |status| status.delivered == 3);
    assert_eq!(stored_ids(&server), ids(1..=3));
}
