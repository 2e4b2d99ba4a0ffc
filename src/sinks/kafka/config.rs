//! The `config` of kind `kafka`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;
use serde_json::Value;

use super::{properties, route};
use crate::sinks::ConfigError;
use crate::sinks::fields::{Fields, shown};
use crate::sinks::plain_text::one_line;
use crate::sinks::template::Template;

#[cfg(test)]
mod tests;

const KEYS: &[&str] = &[
    "brokers",
    "topic",
    "mode",
    "properties",
    "secret",
    "secret_property",
    "ca_file",
    "timeout_ms",
];

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// An hour: long enough for any cluster, and short enough that a sink never seems to hang for good.
const LONGEST_TIMEOUT_MS: u64 = 3_600_000;
/// With more, the order within a partition would not survive a retry.
const MOST_IN_FLIGHT: u64 = 5;

/// How much longer than a delivery a message may live in the client.
const GRACE: Duration = Duration::from_secs(1);

/// Events are sent as they come, many at once when there are many; a delivery knows its end and has nothing to linger for. A
/// batch is smaller than brokers limit it to, so that only an event that is too large by itself is refused.
const DEFAULTS: &[(&str, &str)] = &[
    ("batch.size", "262144"),
    ("client.id", "pg_outbox"),
    ("linger.ms", "0"),
    ("message.max.bytes", "1000000000"),
    // The keys' partitions are those of Java's clients.
    ("partitioner", "murmur2_random"),
    ("reconnect.backoff.max.ms", "1000"),
    ("socket.keepalive.enable", "true"),
];

/// A valid `config`. Prints without what may be a credential.
#[derive(Clone)]
pub(crate) struct KafkaConfig {
    pub(super) brokers: String,
    /// Without one, the topic is made of the source.
    pub(super) topic: Option<Template>,
    pub(super) mode: Mode,
    /// The defaults, and over them what was set.
    properties: Vec<(String, String)>,
    pub(super) secret: Option<Secret>,
    /// For a whole delivery, from connecting to the last report.
    pub(super) timeout: Duration,
    ca_file: Option<PathBuf>,
}

/// CloudEvents' ways to be a Kafka message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The attributes are headers, and the payload is the value.
    Binary,
    /// The value is the whole event.
    Structured,
}

/// The property whose value is a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Secret {
    pub(super) name: String,
    pub(super) property: &'static str,
}

impl KafkaConfig {
    pub(in crate::sinks) fn parse(config: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new("kafka", config, KEYS)?;
        let ca_file = fields.string("ca_file")?.map(PathBuf::from);
        if ca_file.as_ref().is_some_and(|file| !file.is_absolute()) {
            return Err(fields.invalid("ca_file", "must be an absolute path"));
        }
        Ok(Self {
            brokers: brokers(&fields)?,
            topic: topic(&fields)?,
            mode: fields
                .choice(
                    "mode",
                    &[("binary", Mode::Binary), ("structured", Mode::Structured)],
                )?
                .unwrap_or(Mode::Binary),
            properties: properties(&fields)?,
            secret: secret(&fields)?,
            timeout: fields
                .integer("timeout_ms", 1, LONGEST_TIMEOUT_MS)?
                .map_or(DEFAULT_TIMEOUT, Duration::from_millis),
            ca_file,
        })
    }

    pub(in crate::sinks) fn secret(&self) -> Option<&str> {
        self.secret.as_ref().map(|secret| secret.name.as_str())
    }

    pub(in crate::sinks) fn file(&self) -> Option<&'static str> {
        let named = |(name, _): &(String, String)| properties::is_file(name);
        match &self.ca_file {
            Some(_) => Some("ca_file"),
            None => self.properties.iter().any(named).then_some("properties"),
        }
    }

    pub(super) fn property(&self, name: &str) -> Option<&str> {
        let found = self
            .properties
            .iter()
            .rev()
            .find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// What a producer is made from, but for its secret.
    pub(super) fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        // Longer than we wait: what the client says then is less clear than what we do.
        let timeout = self.timeout.saturating_add(GRACE).as_millis().to_string();
        client.set("bootstrap.servers", &self.brokers);
        client.set("enable.idempotence", "true");
        client.set("acks", "all");
        client.set("message.timeout.ms", timeout);
        // Soon enough that a topic that is not there is told from brokers that are not.
        let propagation = (self.timeout / 2).as_millis().clamp(1, 30_000);
        client.set("topic.metadata.propagation.max.ms", propagation.to_string());
        for (name, value) in &self.properties {
            client.set(name, value);
        }
        if let Some(file) = &self.ca_file {
            client.set("ssl.ca.location", file.to_string_lossy());
        }
        client
    }
}

fn brokers(fields: &Fields) -> Result<String, ConfigError> {
    let text = fields.required_string("brokers")?;
    for broker in text.split(',') {
        let broker = broker.trim();
        let (host, port) = match broker.rsplit_once(':') {
            Some((host, port)) if !broker.ends_with(']') => (host, Some(port)),
            _ => (broker, None),
        };
        let legal_host = !host.is_empty()
            && host
                .chars()
                .all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | '[' | ']' | ':'));
        let legal_port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
        if !legal_host || !legal_port {
            return Err(fields
                .invalid("brokers", "must be a list of host:port, separated by commas")
                .hint("TLS and SASL are chosen by \"properties\": {\"security.protocol\": \"SASL_SSL\", …}."));
        }
    }
    Ok(text.to_owned())
}

fn topic(fields: &Fields) -> Result<Option<Template>, ConfigError> {
    let Some(text) = fields.string("topic")? else {
        return Ok(None);
    };
    let template = Template::parse(text).map_err(|why| fields.invalid("topic", &why))?;
    match route::problem(&template.sample("x")) {
        Some(why) => Err(fields.invalid("topic", &format!("is no name of a topic: it {why}"))),
        None => Ok(Some(template)),
    }
}

fn properties(fields: &Fields) -> Result<Vec<(String, String)>, ConfigError> {
    let mut all: Vec<(String, String)> = Vec::new();
    let mut client = ClientConfig::new();
    for (name, value) in DEFAULTS {
        all.push(((*name).to_owned(), (*value).to_owned()));
    }
    for (name, value) in fields.strings("properties")? {
        let key = format!("properties.{}", shown(name));
        if let Err(refused) = properties::check(name) {
            let error = fields.invalid(&key, &refused.why);
            return Err(match refused.hint {
                Some(hint) => error.hint(hint),
                None => error,
            });
        }
        let in_flight = name == "max.in.flight.requests.per.connection";
        if in_flight
            && value
                .parse::<u64>()
                .is_ok_and(|number| number > MOST_IN_FLIGHT)
        {
            return Err(
                fields.invalid(&key, "must be at most 5, or a retry could change the order")
            );
        }
        if properties::is_file(name) && !value.starts_with('/') {
            return Err(fields.invalid(&key, "must be an absolute path"));
        }
        client.set(name, value);
        all.retain(|(known, _)| known != name);
        all.push((name.to_owned(), value.to_owned()));
    }
    match client.create_native_config() {
        Ok(_) => Ok(all),
        Err(KafkaError::ClientConfig(_, why, name, value)) => {
            let key = format!("properties.{}", shown(&name));
            Err(fields.invalid(
                &key,
                &format!("is refused by the client{}", reason(&why, &value)),
            ))
        }
        Err(_) => Err(fields.invalid("properties", "must not hold NUL characters")),
    }
}

/// The client's reason, where it can be told without the value that was given.
fn reason(why: &str, value: &str) -> String {
    let told = match why.split_once(" is outside allowed range ") {
        Some((_, range)) => format!("outside of {}", range.trim_end_matches('.')),
        None => return String::new(),
    };
    match value.len() > 3 && told.contains(value) {
        true => String::new(),
        false => format!(": {}", one_line(&told, 100)),
    }
}

fn secret(fields: &Fields) -> Result<Option<Secret>, ConfigError> {
    let property = fields.choice(
        "secret_property",
        &[
            ("sasl.password", "sasl.password"),
            ("ssl.key.password", "ssl.key.password"),
            ("ssl.key.pem", "ssl.key.pem"),
        ],
    )?;
    match fields.string("secret")? {
        Some(name) => Ok(Some(Secret {
            name: name.to_owned(),
            property: property.unwrap_or("sasl.password"),
        })),
        None if property.is_some() => Err(fields
            .invalid("secret_property", "needs a \"secret\"")
            .hint("Name a secret that was stored with outbox.set_secret.")),
        None => Ok(None),
    }
}

impl fmt::Debug for KafkaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.properties.iter().map(|(name, _)| name).collect();
        f.debug_struct("KafkaConfig")
            .field("brokers", &self.brokers)
            .field("topic", &self.topic)
            .field("mode", &self.mode)
            .field("properties", &names)
            .field("secret", &self.secret)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
