//! TLS: whom a sink talks to, and what it says of the others.

use super::*;

const SERVER: &str = include_str!("../testdata/server.pem");
const EXPIRED: &str = include_str!("../testdata/expired.pem");
const ELSEWHERE: &str = include_str!("../testdata/elsewhere.pem");

fn ca_file() -> Value {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/sinks/http/testdata/ca.pem"
    );
    json!({"ca_file": file})
}

fn refused(certificate: &str, config: Value) -> String {
    let receiver = Receiver::start_tls(certificate, |_| Reply::ok());
    // A machine without any authorities says so when the client is opened.
    let sender = Sender::try_new(&format!("{}?key=swordfish", receiver.url()), config).unwrap();
    let error = sender.refused(&batch(1)).error;
    assert!(receiver.received().is_empty());
    assert!(!error.contains("swordfish"));
    let (known, reason) = error
        .split_once(" refused: ")
        .unwrap_or_else(|| panic!("{error}"));
    assert_eq!(known, format!("certificate of {}", receiver.origin()));
    reason.to_owned()
}

#[test]
fn an_own_authority_is_trusted() {
    let receiver = Receiver::start_tls(SERVER, |_| Reply::ok());
    let sender = Sender::new(&receiver.url(), ca_file());
    assert_eq!(sender.deliver(&batch(2)), Outcome::Delivered);
    assert_eq!(sender.deliver(&batch(2)), Outcome::Delivered);
    assert_eq!(receiver.received().len(), 2);
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn bad_certificates_are_refused_with_the_reason() {
    assert_eq!(refused(EXPIRED, ca_file()), "it has expired");
    assert_eq!(refused(ELSEWHERE, ca_file()), "it is for another name");
}

#[test]
fn an_unknown_authority_is_refused() {
    // Another authority than the one that signed: the server's own certificate will do.
    let file = std::env::temp_dir().join(format!("pg_outbox-{}-other.pem", std::process::id()));
    std::fs::write(&file, ELSEWHERE).unwrap();
    let reason = refused(SERVER, json!({"ca_file": file}));
    std::fs::remove_file(&file).unwrap();
    assert_eq!(
        reason,
        "it is signed by no authority that is trusted here; \"ca_file\" can name one"
    );
}

#[test]
fn a_receiver_without_tls() {
    let receiver = Receiver::start(|_| Reply::ok());
    // It waits for the end of a line that never comes, unless the handshake holds one: then it sees no HTTP and hangs up.
    let url = receiver.url().replace("http://", "https://");
    let mut config = ca_file();
    config["timeout_ms"] = json!(300);
    let error = Sender::new(&url, config).refused(&batch(1)).error;
    assert!(
        error.contains(&receiver.origin().replace("http://", "https://")),
        "{error}"
    );
}

#[test]
fn a_client_is_not_opened_without_its_certificates() {
    let error = Sender::try_new("https://127.0.0.1/", json!({"ca_file": "/nowhere/ca.pem"}));
    assert_eq!(
        error.err().unwrap(),
        "cannot use ca_file /nowhere/ca.pem: No such file or directory (os error 2)"
    );
}
