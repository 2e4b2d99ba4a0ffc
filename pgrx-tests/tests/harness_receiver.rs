//! The receiver itself, spoken to by hand.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use outbox_tests::{Receiver, Reply, Tls};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

const EVENT: &str = r#"{"specversion":"1.0","id":"evt_1","source":"public.orders","type":"order.placed",
    "subject":"7","time":"2026-01-01T00:00:00Z","sequence":"731:1","traceparent":"00-aa-bb-01",
    "data":{"n":0.10,"lone":"\ud800"}}"#;

fn address(receiver: &Receiver) -> String {
    receiver.url().split('/').nth(2).unwrap().to_owned()
}

fn post(receiver: &Receiver, headers: &str, body: &str) -> std::io::Result<String> {
    let mut tcp = TcpStream::connect(address(receiver))?;
    let length = body.len();
    let kind = "application/cloudevents-batch+json";
    write!(
        tcp,
        "POST /events HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n\
         {headers}content-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = vec![0; 1 << 16];
    let read = tcp.read(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..read]).into_owned())
}

#[test]
fn it_keeps_accepted_events_as_they_came() {
    let receiver = Receiver::start();
    receiver.reply_next([Reply::status(503)]);
    assert!(
        post(&receiver, "", &format!("[{EVENT}]"))
            .unwrap()
            .starts_with("HTTP/1.1 503")
    );
    assert_eq!(receiver.count(), 0);
    assert!(
        post(&receiver, "", &format!("[{EVENT}]"))
            .unwrap()
            .starts_with("HTTP/1.1 200")
    );
    let events = receiver.wait_for(1);
    assert_eq!(events[0].id, "evt_1");
    assert_eq!(events[0].subject.as_deref(), Some("7"));
    assert_eq!(events[0].txid_and_seq(), (731, 1));
    assert_eq!(
        events[0].data_text.as_deref(),
        Some(r#"{"n":0.10,"lone":"\ud800"}"#)
    );
    assert_eq!(events[0].extensions["traceparent"], r#""00-aa-bb-01""#);
    assert_eq!(receiver.requests().len(), 2);
}

#[test]
fn events_that_it_names_as_failed_are_not_accepted() {
    let receiver = Receiver::start();
    receiver.reply_next([Reply::failures(&[("evt_1", "no", true)])]);
    let other = EVENT.replace("evt_1", "evt_2");
    let answer = post(&receiver, "", &format!("[{EVENT},{other}]")).unwrap();
    assert!(answer.ends_with(r#"{"failures":[{"id":"evt_1","error":"no","permanent":true}]}"#));
    assert_eq!(receiver.ids(), ["evt_2"]);
}

#[test]
fn a_signature_is_checked_against_the_body() {
    let receiver = Receiver::start();
    // printf '[]' | openssl dgst -sha256 -hmac key
    let good = "8cf3d584bac42070e44f249a550910bd0077d18a9cc62a54c59c6758458bf01a";
    post(
        &receiver,
        &format!("X-Outbox-Signature: sha256={good}\r\n"),
        "[]",
    )
    .unwrap();
    let requests = receiver.wait_for_requests(1);
    assert!(requests[0].is_signed_with("key"));
    assert!(!requests[0].is_signed_with("another"));
}

#[test]
fn it_breaks_the_rules_when_told_to() {
    let receiver = Receiver::start();
    receiver.reply_next([
        Reply::reset(),
        Reply::close(),
        Reply::raw("HTP/9 what"),
        Reply::redirect("http://elsewhere.example/"),
    ]);
    assert_eq!(
        post(&receiver, "", "[]").unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    assert_eq!(post(&receiver, "", "[]").unwrap(), "");
    assert_eq!(post(&receiver, "", "[]").unwrap(), "HTP/9 what");
    let redirect = post(&receiver, "", "[]").unwrap();
    assert!(redirect.contains("\r\nlocation: http://elsewhere.example/\r\n"));
    assert_eq!(receiver.count(), 0);
}

#[test]
fn stopping_cuts_who_waits_for_an_answer() {
    let receiver = Receiver::start();
    receiver.reply_next([Reply::hang()]);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| post(&receiver, "", "[]"));
        receiver.wait_for_requests(1);
        assert!(!waiting.is_finished());
        receiver.stop();
        assert_eq!(waiting.join().unwrap().unwrap(), "");
    });
}

#[test]
fn it_comes_back_at_the_same_address() {
    let receiver = Receiver::start();
    receiver.stop();
    assert_eq!(
        post(&receiver, "", "[]").unwrap_err().kind(),
        ErrorKind::ConnectionRefused
    );
    receiver.start_again();
    assert!(
        post(&receiver, "", "[]")
            .unwrap()
            .starts_with("HTTP/1.1 200")
    );
}

#[test]
fn bodies_in_chunks_are_put_together() {
    let receiver = Receiver::start();
    let mut tcp = TcpStream::connect(address(&receiver)).unwrap();
    let head = "POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\
                content-type: application/cloudevents-batch+json\r\n\r\n";
    write!(tcp, "{head}1\r\n[\r\n1\r\n]\r\n0\r\n\r\n").unwrap();
    write!(tcp, "{head}2\r\n[]\r\n0\r\n\r\n").unwrap();
    let requests = receiver.wait_for_requests(2);
    assert!(requests.iter().all(|request| request.body == b"[]"));
    assert!(requests.iter().all(|request| request.connection == 0));
}

#[test]
fn it_counts_without_keeping() {
    let receiver = Receiver::builder().counting().start();
    post(&receiver, "", &format!("[{EVENT},{EVENT}]")).unwrap();
    assert_eq!(receiver.count(), 2);
    assert!(receiver.requests().is_empty());
}

/// What a client says of the receiver's certificate that trusts only the receiver's authority.
fn handshake(receiver: &Receiver) -> Result<(), rustls::Error> {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(receiver.ca_file()).unwrap();
    roots.add(authority).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let host = "127.0.0.1".try_into().unwrap();
    let mut client = ClientConnection::new(Arc::new(config), host)?;
    let mut tcp = TcpStream::connect(address(receiver)).unwrap();
    while client.is_handshaking() {
        while client.wants_write() {
            client.write_tls(&mut tcp).unwrap();
        }
        client.read_tls(&mut tcp).unwrap();
        client.process_new_packets()?;
    }
    Ok(())
}

#[test]
fn its_certificates_are_what_they_say() {
    let told = |tls| handshake(&Receiver::builder().tls(tls).start());
    assert_eq!(told(Tls::Good), Ok(()));
    for (tls, verdict) in [
        (Tls::Expired, "Expired"),
        (Tls::WrongHost, "NotValidForName"),
        (Tls::SelfSigned, "UnknownIssuer"),
    ] {
        let error = format!("{:?}", told(tls).unwrap_err());
        assert!(error.contains(verdict), "{tls:?}: {error}");
    }
}
