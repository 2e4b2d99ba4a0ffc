//! A request as it came in.

use std::time::SystemTime;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// One request that was read to its end.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// In order, names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// When its last byte was read.
    pub at: SystemTime,
    /// Counts the receiver's connections from 0.
    pub connection: u64,
    /// Whether it came by HTTP/2.
    pub http2: bool,
}

impl Request {
    /// The first header of that name, in any case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers(name).next()
    }

    /// Every header of that name, in any case.
    pub fn headers(&self, name: &str) -> impl Iterator<Item = &str> {
        let name = name.to_ascii_lowercase();
        self.headers
            .iter()
            .filter(move |(have, _)| *have == name)
            .map(|(_, value)| value.as_str())
    }

    /// Whether one of its `X-Outbox-Signature` headers is this secret's HMAC-SHA256 of the body.
    pub fn is_signed_with(&self, secret: &str) -> bool {
        self.headers("x-outbox-signature").any(|value| {
            let code = value
                .strip_prefix("sha256=")
                .and_then(|hex| hex::decode(hex).ok());
            let Some(code) = code else { return false };
            let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes())
                .expect("HMAC takes keys of any length");
            mac.update(&self.body);
            mac.verify_slice(&code).is_ok()
        })
    }
}
