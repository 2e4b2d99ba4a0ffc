//! The `config` of kind `http`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use url::Url;

use crate::sinks::ConfigError;
use crate::sinks::fields::{Fields, shown};

#[cfg(test)]
mod tests;

const KEYS: &[&str] = &[
    "url",
    "mode",
    "headers",
    "secret",
    "signature",
    "timeout_ms",
    "concurrency",
    "ca_file",
    "checkpoint_url",
];

/// An hour: long enough for any receiver, and short enough that a sink never seems to hang for good.
const LONGEST_TIMEOUT_MS: u64 = 3_600_000;
const MOST_CONCURRENT: u64 = 256;
const DEFAULT_CONCURRENCY: usize = 8;

/// Headers that the sink or the protocol sets.
const RESERVED_HEADERS: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "outbox-checkpoint",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "webhook-id",
    "webhook-signature",
    "webhook-timestamp",
    "x-outbox-signature",
];

/// A valid `config`. Prints without credentials: of the URL only where it leads, of the headers only the names.
#[derive(Clone)]
pub(crate) struct HttpConfig {
    pub(super) url: Url,
    pub(super) mode: Mode,
    /// Sent with each request; the values are marked as sensitive.
    pub(super) headers: HeaderMap,
    pub(super) signing: Option<Signing>,
    pub(super) timeout: Option<Duration>,
    /// PEM certificates that are trusted beside the system's.
    pub(super) ca_file: Option<PathBuf>,
    /// Where the receiver tells how far it has come.
    pub(super) checkpoint: Option<Url>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// One request with an array of all events.
    Batch,
    /// One request an event, so many of them at once.
    Single { concurrency: usize },
}

/// How requests are signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signing {
    /// The name of the secret.
    pub(super) secret: String,
    pub(super) scheme: Scheme,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Github,
    Standard,
}

impl HttpConfig {
    pub(in crate::sinks) fn parse(config: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new("http", config, KEYS)?;
        let url = url(&fields, "url", fields.required_string("url")?)?;
        let headers = headers(&fields)?;
        if has_userinfo(&url) && headers.contains_key("authorization") {
            return Err(fields.invalid(
                "url",
                "must not hold a user name or password when the headers hold an authorization",
            ));
        }
        let ca_file = fields.string("ca_file")?.map(PathBuf::from);
        if let Some(file) = &ca_file {
            if url.scheme() != "https" {
                return Err(fields.invalid("ca_file", "is for URLs that begin with https"));
            }
            if !file.is_absolute() {
                return Err(fields.invalid("ca_file", "must be an absolute path"));
            }
        }
        let mode = mode(&fields)?;
        Ok(Self {
            checkpoint: checkpoint(&fields, &url, mode)?,
            mode,
            signing: signing(&fields)?,
            timeout: fields
                .integer("timeout_ms", 1, LONGEST_TIMEOUT_MS)?
                .map(Duration::from_millis),
            url,
            headers,
            ca_file,
        })
    }

    pub(in crate::sinks) fn secret(&self) -> Option<&str> {
        self.signing.as_ref().map(|signing| signing.secret.as_str())
    }

    pub(in crate::sinks) fn has_checkpoint(&self) -> bool {
        self.checkpoint.is_some()
    }

    pub(in crate::sinks) fn file(&self) -> Option<&'static str> {
        self.ca_file.as_ref().map(|_| "ca_file")
    }

    /// Where the URL leads, such as `https://example.com:8443`. The rest of a URL is often a credential.
    pub(super) fn origin(&self) -> String {
        self.url.origin().ascii_serialization()
    }
}

fn url(fields: &Fields, key: &str, text: &str) -> Result<Url, ConfigError> {
    // The parser would leave them out, so that the URL would be another one than is written.
    if text.contains(char::is_control) {
        return Err(fields.invalid(key, "must not hold control characters"));
    }
    let mut url =
        Url::parse(text).map_err(|error| fields.invalid(key, &format!("is no URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(fields.invalid(key, "must begin with http:// or https://"));
    }
    if url.port() == Some(0) {
        return Err(fields.invalid(key, "must not have port 0"));
    }
    url.set_fragment(None);
    Ok(url)
}

/// It gets the headers and the trust that are meant for the receiver, so it leads to no other.
fn checkpoint(fields: &Fields, to: &Url, mode: Mode) -> Result<Option<Url>, ConfigError> {
    const KEY: &str = "checkpoint_url";
    let Some(text) = fields.string(KEY)? else {
        return Ok(None);
    };
    let url = url(fields, KEY, text)?;
    if url.origin() != to.origin() || has_userinfo(&url) {
        return Err(fields.invalid(
            KEY,
            "must lead to the same scheme, host and port as \"url\"",
        ));
    }
    if mode != Mode::Batch {
        return Err(fields.invalid(KEY, "is for mode \"batch\"").hint(
            "Requests that are under way at once have no order that a checkpoint could tell.",
        ));
    }
    Ok(Some(url))
}

fn has_userinfo(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

fn mode(fields: &Fields) -> Result<Mode, ConfigError> {
    let concurrency = fields.integer("concurrency", 1, MOST_CONCURRENT)?;
    let single = Mode::Single {
        concurrency: concurrency.map_or(DEFAULT_CONCURRENCY, |n| n as usize),
    };
    let mode = fields.choice("mode", &[("batch", Mode::Batch), ("single", single)])?;
    match mode.unwrap_or(Mode::Batch) {
        Mode::Batch if concurrency.is_some() => Err(fields
            .invalid("concurrency", "is for mode \"single\"")
            .hint("A batch is one request; batches are sent one after the other.")),
        mode => Ok(mode),
    }
}

fn signing(fields: &Fields) -> Result<Option<Signing>, ConfigError> {
    let schemes = [("github", Scheme::Github), ("standard", Scheme::Standard)];
    let scheme = fields.choice("signature", &schemes)?;
    match fields.string("secret")? {
        Some(secret) => Ok(Some(Signing {
            secret: secret.to_owned(),
            scheme: scheme.unwrap_or(Scheme::Github),
        })),
        None if scheme.is_some() => Err(fields
            .invalid("signature", "needs a \"secret\"")
            .hint("Name a secret that was stored with outbox.set_secret.")),
        None => Ok(None),
    }
}

fn headers(fields: &Fields) -> Result<HeaderMap, ConfigError> {
    let mut headers = HeaderMap::new();
    for (name, value) in fields.strings("headers")? {
        let key = format!("headers.{}", shown(name));
        let name: HeaderName = name
            .parse()
            .map_err(|_| fields.invalid(&key, "is no name of an HTTP header"))?;
        if RESERVED_HEADERS.binary_search(&name.as_str()).is_ok() {
            return Err(fields.invalid(&key, "is a header that the sink sets itself"));
        }
        let mut value = HeaderValue::from_str(value)
            .ok()
            .filter(|value| value.to_str().is_ok())
            .ok_or_else(|| {
                fields.invalid(&key, "must have a value of visible ASCII characters only")
            })?;
        value.set_sensitive(true);
        if headers.insert(name, value).is_some() {
            return Err(fields.invalid(&key, "is there twice; case does not count"));
        }
    }
    Ok(headers)
}

impl fmt::Debug for HttpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpConfig")
            .field("origin", &self.origin())
            .field("mode", &self.mode)
            .field("headers", &self.headers.keys().collect::<Vec<_>>())
            .field("signing", &self.signing)
            .field("timeout", &self.timeout)
            .field("ca_file", &self.ca_file)
            .finish_non_exhaustive()
    }
}
