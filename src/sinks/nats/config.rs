//! The `config` of kind `nats`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use url::Url;

use super::login::Auth;
use super::subject;
use crate::sinks::ConfigError;
use crate::sinks::fields::Fields;
use crate::sinks::template::Template;

#[cfg(test)]
mod tests;

const KEYS: &[&str] = &[
    "url",
    "subject",
    "stream",
    "auth",
    "secret",
    "ca_file",
    "timeout_ms",
];

const DEFAULT_PORT: u16 = 4222;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// An hour: long enough for any server, and short enough that a sink never seems to hang for good.
const LONGEST_TIMEOUT_MS: u64 = 3_600_000;

/// A valid `config`. Holds no credentials, only the name of the secret.
#[derive(Clone, Debug)]
pub(crate) struct NatsConfig {
    /// Any of them will do; they are tried in this order.
    pub(super) servers: Vec<Server>,
    /// Whether all of them are to speak TLS.
    pub(super) tls: bool,
    /// Without one, the subject is the topic.
    pub(super) subject: Option<Template>,
    /// The stream that has to take the events.
    pub(super) stream: Option<String>,
    pub(super) auth: Option<Authentication>,
    /// For a whole delivery, from connecting to the last acknowledgement.
    pub(super) timeout: Duration,
    /// PEM certificates that are trusted beside the system's.
    pub(super) ca_file: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    /// A name or an address, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Authentication {
    pub(super) auth: Auth,
    /// The name of the secret.
    pub(super) secret: String,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl NatsConfig {
    pub(in crate::sinks) fn parse(config: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new("nats", config, KEYS)?;
        let (servers, tls) = servers(&fields)?;
        let ca_file = fields.string("ca_file")?.map(PathBuf::from);
        if let Some(file) = &ca_file {
            if !tls {
                return Err(fields.invalid("ca_file", "is for URLs that begin with tls://"));
            }
            if !file.is_absolute() {
                return Err(fields.invalid("ca_file", "must be an absolute path"));
            }
        }
        Ok(Self {
            servers,
            tls,
            subject: subject(&fields)?,
            stream: stream(&fields)?,
            auth: authentication(&fields)?,
            timeout: fields
                .integer("timeout_ms", 1, LONGEST_TIMEOUT_MS)?
                .map_or(DEFAULT_TIMEOUT, Duration::from_millis),
            ca_file,
        })
    }

    pub(in crate::sinks) fn secret(&self) -> Option<&str> {
        self.auth.as_ref().map(|auth| auth.secret.as_str())
    }

    pub(in crate::sinks) fn file(&self) -> Option<&'static str> {
        self.ca_file.as_ref().map(|_| "ca_file")
    }
}

fn servers(fields: &Fields) -> Result<(Vec<Server>, bool), ConfigError> {
    let mut servers = Vec::new();
    let mut schemes = Vec::new();
    let list = fields.required_string("url")?;
    // The parser would leave them out, so that the URL would be another one than is written.
    if list.contains(char::is_control) {
        return Err(fields.invalid("url", "must not hold control characters"));
    }
    for text in list.split(',') {
        let url = Url::parse(text.trim())
            .map_err(|error| fields.invalid("url", &format!("is no URL: {error}")))?;
        let tls = match url.scheme() {
            "nats" => false,
            "tls" => true,
            _ => return Err(fields.invalid("url", "must begin with nats:// or tls://")),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(fields
                .invalid("url", "must not hold a user name or password")
                .hint(
                    "Store them with outbox.set_secret, and name them by \"secret\" and \"auth\".",
                ));
        }
        if !matches!(url.path(), "" | "/") || url.query().is_some() || url.fragment().is_some() {
            return Err(fields.invalid("url", "must end with the port"));
        }
        let host = url.host_str().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || url.port() == Some(0) {
            return Err(fields.invalid("url", "must name a host, and no port 0"));
        }
        servers.push(Server {
            host: host.to_owned(),
            port: url.port().unwrap_or(DEFAULT_PORT),
        });
        schemes.push(tls);
    }
    match schemes.as_slice() {
        [first, others @ ..] if others.iter().all(|tls| tls == first) => Ok((servers, *first)),
        _ => Err(fields.invalid("url", "must name servers with TLS or without, not both")),
    }
}

fn subject(fields: &Fields) -> Result<Option<Template>, ConfigError> {
    let Some(text) = fields.string("subject")? else {
        return Ok(None);
    };
    let template = Template::parse(text).map_err(|why| fields.invalid("subject", &why))?;
    match subject::problem(&template.sample("x")) {
        Some(why) => {
            Err(fields.invalid("subject", &format!("is no subject to publish to: it {why}")))
        }
        None => Ok(Some(template)),
    }
}

fn stream(fields: &Fields) -> Result<Option<String>, ConfigError> {
    let Some(name) = fields.string("stream")? else {
        return Ok(None);
    };
    let legal = |c: char| c.is_ascii_graphic() && !matches!(c, '.' | '*' | '>' | '/' | '\\');
    match name.len() <= 255 && name.chars().all(legal) {
        true => Ok(Some(name.to_owned())),
        false => Err(fields.invalid("stream", "is no name of a stream")),
    }
}

fn authentication(fields: &Fields) -> Result<Option<Authentication>, ConfigError> {
    let auth = fields.choice(
        "auth",
        &[
            ("token", Auth::Token),
            ("password", Auth::Password),
            ("credentials", Auth::Credentials),
            ("nkey", Auth::Nkey),
        ],
    )?;
    match (auth, fields.string("secret")?) {
        (None, None) => Ok(None),
        (Some(auth), Some(secret)) => Ok(Some(Authentication {
            auth,
            secret: secret.to_owned(),
        })),
        (Some(_), None) => Err(fields
            .invalid("auth", "needs a \"secret\"")
            .hint("Name a secret that was stored with outbox.set_secret.")),
        (None, Some(_)) => Err(fields
            .invalid("secret", "needs an \"auth\"")
            .hint("It says what the secret is: token, password (user:password), credentials (the text of a .creds file) or nkey (a seed).")),
    }
}
