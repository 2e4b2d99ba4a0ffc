//! Signatures over the bytes that are sent: HMAC-SHA256, as GitHub's webhooks and Standard Webhooks spell it.

use base64::Engine;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Padding is often lost when a secret is copied; it carries nothing.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// One signature in the making. The bytes may come in pieces, so that a large body need not be hashed at one go.
#[derive(Clone)]
pub(crate) struct Signer(Hmac<Sha256>);

impl Signer {
    pub(crate) fn new(key: &[u8]) -> Self {
        Self(Hmac::new_from_slice(key).expect("HMAC takes keys of any length"))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// `sha256=<hex>`: the form of GitHub's `X-Hub-Signature-256`. The signed bytes are the body.
    pub(crate) fn github(self) -> String {
        use std::fmt::Write;
        let mut text = String::with_capacity(7 + 64);
        text.push_str("sha256=");
        for byte in self.0.finalize().into_bytes() {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// `v1,<base64>`: one signature of a `webhook-signature`. The signed bytes are `<id>.<timestamp>.<body>`.
    pub(crate) fn standard(self) -> String {
        let mut text = String::from("v1,");
        STANDARD.encode_string(self.0.finalize().into_bytes(), &mut text);
        text
    }
}

/// The key in a Standard Webhooks secret, `whsec_<base64>`; the prefix may be missing. `None` when that is not what it is.
pub(crate) fn standard_key(secret: &str) -> Option<Vec<u8>> {
    let encoded = secret.strip_prefix("whsec_").unwrap_or(secret);
    LENIENT.decode(encoded).ok().filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From GitHub's documentation, "Validating webhook deliveries".
    #[test]
    fn githubs_documented_vector() {
        let mut signer = Signer::new(b"It's a Secret to Everybody");
        signer.update(b"Hello, World!");
        assert_eq!(
            signer.github(),
            "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
        );
    }

    /// From the documentation and the reference libraries of Standard Webhooks.
    #[test]
    fn standard_webhooks_vector() {
        let key = standard_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let mut signer = Signer::new(&key);
        signer.update(b"msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.");
        signer.update(br#"{"test": 2432232314}"#);
        assert_eq!(
            signer.standard(),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }

    #[test]
    fn pieces_sign_like_the_whole() {
        let mut whole = Signer::new(b"k");
        let mut pieces = whole.clone();
        whole.update(b"abc");
        pieces.update(b"a");
        pieces.update(b"");
        pieces.update(b"bc");
        assert_eq!(whole.github(), pieces.github());
    }

    #[test]
    fn standard_secrets() {
        let key = Some(b"0123456789".to_vec());
        assert_eq!(standard_key("whsec_MDEyMzQ1Njc4OQ=="), key);
        assert_eq!(standard_key("MDEyMzQ1Njc4OQ=="), key);
        assert_eq!(standard_key("whsec_MDEyMzQ1Njc4OQ"), key);
        for secret in ["", "whsec_", "whsec_not base64", "whsec_===="] {
            assert_eq!(standard_key(secret), None, "{secret}");
        }
    }
}
