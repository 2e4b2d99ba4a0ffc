//! Signatures over the very bytes that arrived, reckoned here by other means than the sink's.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::*;

/// HMAC-SHA256 as RFC 2104 defines it.
fn hmac(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    use sha2::{Digest, Sha256};
    assert!(key.len() <= 64);
    let mut block = [0; 64];
    block[..key.len()].copy_from_slice(key);
    let mut inner = Sha256::new_with_prefix(block.map(|byte| byte ^ 0x36));
    parts.iter().for_each(|part| inner.update(part));
    let mut outer = Sha256::new_with_prefix(block.map(|byte| byte ^ 0x5c));
    outer.update(inner.finalize());
    outer.finalize().to_vec()
}

fn github(key: &str, body: &[u8]) -> String {
    let hex: String = hmac(key.as_bytes(), &[body])
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256={hex}")
}

#[test]
fn github_has_one_header_for_each_value() {
    let receiver = Receiver::start(|_| Reply::ok());
    for mode in ["batch", "single"] {
        let sender = Sender::new(&receiver.url(), json!({"mode": mode, "secret": "hook"}));
        let batch = Batch {
            secrets: secrets(&["new value", "old value"]),
            ..batch(1)
        };
        assert_eq!(sender.deliver(&batch), Outcome::Delivered);
        let request = receiver.received().pop().unwrap();
        assert_eq!(
            request.all("x-outbox-signature"),
            [
                github("new value", &request.body),
                github("old value", &request.body)
            ]
        );
        assert_eq!(request.header("idempotency-key"), Some("evt_1"));
    }
}

#[test]
fn standard_has_one_header_with_all_signatures() {
    let receiver = Receiver::start(|_| Reply::ok());
    let config = json!({"secret": "hook", "signature": "standard"});
    let keys = [
        b"the new key, 24 bytes...".as_slice(),
        b"the old key, 24 bytes...",
    ];
    let values = keys.map(|key| format!("whsec_{}", STANDARD.encode(key)));
    let batch = Batch {
        secrets: secrets(&values.each_ref().map(String::as_str)),
        ..batch(3)
    };
    let before = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    assert_eq!(
        Sender::new(&receiver.url(), config).deliver(&batch),
        Outcome::Delivered
    );
    let after = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();

    let request = &receiver.received()[0];
    let id = request.header("webhook-id").unwrap();
    assert!(id.starts_with("evt_1~"));
    assert_eq!(request.header("idempotency-key"), Some(id));
    let timestamp = request.header("webhook-timestamp").unwrap();
    assert!((before..=after).contains(&timestamp.parse().unwrap()));
    let signatures = keys.map(|key| {
        let parts: [&[u8]; 5] = [
            id.as_bytes(),
            b".",
            timestamp.as_bytes(),
            b".",
            &request.body,
        ];
        format!("v1,{}", STANDARD.encode(hmac(key, &parts)))
    });
    assert_eq!(
        request.header("webhook-signature"),
        Some(signatures.join(" ").as_str())
    );
}

#[test]
fn nothing_is_sent_without_a_usable_secret() {
    let receiver = Receiver::start(|_| Reply::ok());
    for mode in ["batch", "single"] {
        for signature in ["github", "standard"] {
            let config = json!({"mode": mode, "secret": "hook", "signature": signature});
            let sender = Sender::new(&receiver.url(), config);
            for values in [&[][..], &[""]] {
                let batch = Batch {
                    secrets: secrets(values),
                    ..batch(2)
                };
                assert_eq!(
                    sender.refused(&batch),
                    Refusal {
                        error: "not sent: secret \"hook\" has no active value to sign with".into(),
                        retry_after: None
                    }
                );
            }
        }
        let config = json!({"mode": mode, "secret": "hook", "signature": "standard"});
        let batch = Batch {
            secrets: secrets(&["whsec_MDEyMzQ1Njc4OQ==", "swordfish!"]),
            ..batch(2)
        };
        let error = Sender::new(&receiver.url(), config).refused(&batch).error;
        assert!(
            error.starts_with(
                "not sent: a value of secret \"hook\" is not of the form whsec_<base64>"
            )
        );
        assert!(!error.contains("swordfish"));
    }
    assert_eq!(receiver.connections(), 0);
}

#[test]
fn a_rotation_counts_from_the_next_delivery_on() {
    let receiver = Receiver::start(|_| Reply::ok());
    let sender = Sender::new(&receiver.url(), json!({"secret": "hook"}));
    for values in [&["first"][..], &["second", "first"], &["second"]] {
        let batch = Batch {
            secrets: secrets(values),
            ..batch(1)
        };
        assert_eq!(sender.deliver(&batch), Outcome::Delivered);
        let request = receiver.received().pop().unwrap();
        let expected: Vec<_> = values
            .iter()
            .map(|value| github(value, &request.body))
            .collect();
        assert_eq!(request.all("x-outbox-signature"), expected);
    }
}
