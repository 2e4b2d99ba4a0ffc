//! What we send, read by libraries that are not ours: the CloudEvents SDK, the Standard Webhooks verifier and a client of Kafka for Python.

mod records;
#[path = "../scene/mod.rs"]
mod scene;

use std::io::Write;
use std::process::{Command, Stdio};

use outbox_tests::{Receiver, Request, Sql, python_libraries};
use scene::{http_sink, quick};
use serde_json::{Value, json};

const CHECK: &str = include_str!("check.py");

/// What the libraries make of a request.
#[track_caller]
fn read(request: &Request, secrets: &[&str]) -> Value {
    let headers: serde_json::Map<String, Value> = request
        .headers
        .iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    let line = json!({"headers": headers, "body": base64(&request.body), "secrets": secrets});
    let mut python = Command::new("python3")
        .args(["-c", CHECK])
        .env("PYTHONPATH", python_libraries())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 runs");
    let mut stdin = python.stdin.take().expect("piped");
    writeln!(stdin, "{line}").expect("python reads");
    drop(stdin);
    let output = python.wait_with_output().expect("python ends");
    assert!(output.status.success(), "the libraries refuse the request");
    serde_json::from_slice(&output.stdout).expect("one line of JSON")
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes
        .chunks(3)
        .flat_map(|chunk| {
            let bits = chunk
                .iter()
                .fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
                << (8 * (3 - chunk.len()));
            (0..4).map(move |digit| match digit <= chunk.len() {
                true => char::from(DIGITS[(bits >> (18 - 6 * digit)) as usize & 63]),
                false => '=',
            })
        })
        .collect()
}

#[test]
fn signatures_and_events_are_what_others_take_them_for() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    // Two active values, as during a rotation; a third one signs nothing.
    let secrets = [
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "whsec_bmV3IHZhbHVlIG9mIDI0IGJ5dGVz",
        "whsec_bm9ib2R5IHNpZ25zIHdpdGggdGhpcw==",
    ];
    db.run(&format!(
        "select outbox.set_secret('hook', array['{}', '{}'])",
        secrets[0], secrets[1]
    ));
    let (batch, single) = (Receiver::start(), Receiver::start());
    let signed = json!({"secret": "hook", "signature": "standard"});
    http_sink(
        &mut db,
        "batch",
        &batch,
        signed.clone(),
        "\"grouping\" => 'transaction'",
    );
    let mut one_by_one = signed;
    one_by_one["mode"] = json!("single");
    http_sink(&mut db, "single", &single, one_by_one, "");
    db.run(
        r#"insert into outbox.events (id, topic, source, subject, tenant, "time", payload, headers) values
           ('a "quoted" id', 'order.placed', 'public."Order Items"', 'ü:7', 'acme', '2024-02-29 12:00:00.123456+00',
            '{"n": 1.5, "s": "ü \" \\ \u0001 👍", "deep": [[{"a": null}]]}', '{"traceparent": "00-4bf9", "retries": 3, "sampled": true}'),
           ('b', 'x', null, null, null, '1970-01-01 00:00:00+00', null, null),
           ('c', 'x', 's', '', '', 'infinity', '"text"', '{}')"#,
    );
    batch.wait_for(3);
    single.wait_for(3);
    let mut seen = Vec::new();
    for request in batch.requests().iter().chain(&single.requests()) {
        let answer = read(request, &secrets);
        assert_eq!(answer["verified"], json!([true, true, false]));
        seen.extend(answer["events"].as_array().unwrap().clone());
    }
    assert_eq!(seen.len(), 6);
    for a in seen
        .iter()
        .filter(|event| event["attributes"]["id"] == "a \"quoted\" id")
    {
        let attributes = &a["attributes"];
        for (name, value) in [
            ("specversion", json!("1.0")),
            ("type", json!("order.placed")),
            ("subject", json!("ü:7")),
            ("tenant", json!("acme")),
            ("time", json!("2024-02-29T12:00:00.123456+00:00")),
            ("datacontenttype", json!("application/json")),
            ("traceparent", json!("00-4bf9")),
            ("retries", json!(3)),
            ("sampled", json!(true)),
        ] {
            assert_eq!(attributes[name], value, "{name}");
        }
        assert_eq!(a["data"]["s"], json!("ü \" \\ \u{1} 👍"));
        assert_eq!(a["data"]["deep"], json!([[{"a": null}]]));
    }
    let without_data = seen
        .iter()
        .find(|event| event["attributes"]["id"] == "b")
        .unwrap();
    assert_eq!(without_data["data"], Value::Null);

    // One byte more, and it is not what was signed.
    let mut changed = Request::clone(&batch.requests()[0]);
    changed.body.push(b' ');
    assert_eq!(
        read(&changed, &secrets)["verified"],
        json!([false, false, false])
    );
}
