//! What is signed and with what, and the headers that carry it.

use std::time::{SystemTime, UNIX_EPOCH};

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::config::{Scheme, Signing};
use crate::envelope::{Signer, standard_key};
use crate::sinks::Secrets;

const GITHUB_SIGNATURE: HeaderName = HeaderName::from_static("x-outbox-signature");
const STANDARD_ID: HeaderName = HeaderName::from_static("webhook-id");
const STANDARD_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const STANDARD_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// How much is hashed before others get their turn on the thread: less than a millisecond's worth.
const AT_ONCE: usize = 256 * 1024;

/// The keys of one delivery, one for each active value of the secret. Without any, nothing is signed.
pub(super) struct Keys {
    scheme: Scheme,
    signers: Vec<Signer>,
}

impl Keys {
    /// # Errors
    /// When the sink names a secret that has no usable value: then nothing may be sent.
    pub(super) fn new(signing: Option<&Signing>, secrets: &Secrets) -> Result<Self, String> {
        let Some(Signing { secret, scheme }) = signing else {
            return Ok(Self {
                scheme: Scheme::Github,
                signers: Vec::new(),
            });
        };
        if secrets.is_empty() {
            return Err(format!("not sent: {}", secrets.why_none(secret, "sign")));
        }
        let signer = |value: &str| {
            match scheme {
            Scheme::Github => Ok(Signer::new(value.as_bytes())),
            Scheme::Standard => standard_key(value).map(|key| Signer::new(&key)).ok_or_else(|| {
                format!(
                    "not sent: a value of secret \"{secret}\" is not of the form whsec_<base64>, which signature \"standard\" needs"
                )
            }),
        }
        };
        Ok(Self {
            scheme: *scheme,
            signers: secrets.expose().map(signer).collect::<Result<_, _>>()?,
        })
    }

    /// Adds the signatures of `body`, which is sent under `id`.
    pub(super) async fn sign(&self, id: &HeaderValue, body: &[u8], headers: &mut HeaderMap) {
        if self.signers.is_empty() {
            return;
        }
        match self.scheme {
            Scheme::Github => {
                for signer in self.signers.iter().cloned() {
                    let signature = hashed(signer, body).await.github();
                    headers.append(GITHUB_SIGNATURE, header(&signature));
                }
            }
            Scheme::Standard => {
                let timestamp = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |since| since.as_secs());
                let mut signatures = Vec::with_capacity(self.signers.len());
                for mut signer in self.signers.iter().cloned() {
                    signer.update(id.as_bytes());
                    signer.update(format!(".{timestamp}.").as_bytes());
                    signatures.push(hashed(signer, body).await.standard());
                }
                headers.insert(STANDARD_ID, id.clone());
                headers.insert(STANDARD_TIMESTAMP, timestamp.into());
                headers.insert(STANDARD_SIGNATURE, header(&signatures.join(" ")));
            }
        }
    }
}

async fn hashed(mut signer: Signer, body: &[u8]) -> Signer {
    let mut pieces = body.chunks(AT_ONCE).peekable();
    while let Some(piece) = pieces.next() {
        signer.update(piece);
        if pieces.peek().is_some() {
            tokio::task::yield_now().await;
        }
    }
    signer
}

fn header(signature: &str) -> HeaderValue {
    HeaderValue::from_str(signature).expect("hex and base64 are visible ASCII")
}
