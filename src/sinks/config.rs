//! The `config` of a sink, read and checked as a whole when it is set.

use serde_json::Value;

use super::fields::{Fields, listed, nearest, shown};
use super::function::FunctionConfig;
use super::http::HttpConfig;
use super::kafka::KafkaConfig;
use super::nats::NatsConfig;
use super::postgres::PostgresConfig;
use super::redact::Redaction;

/// The kinds of sinks that there are.
const KINDS: &[&str] = &["function", "http", "kafka", "nats", "postgres", "pull"];

/// A valid `config`. Prints without credentials.
#[derive(Clone, Debug)]
pub(crate) enum Config {
    Function(FunctionConfig),
    Http(Box<HttpConfig>),
    Kafka(Box<KafkaConfig>),
    Nats(Box<NatsConfig>),
    Postgres(Box<PostgresConfig>),
    Pull,
}

/// What is wrong with a `config`, as an error of Postgres says it. Holds names, never values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ConfigError {
    pub(crate) message: String,
    pub(crate) detail: Option<String>,
    pub(crate) hint: Option<String>,
}

/// What the `config` of a sink of `kind` says is to be taken out of payloads.
pub(crate) fn redaction(kind: &str, config: &Value) -> Result<Redaction, ConfigError> {
    Redaction::of(kind, config)
}

/// Reads the `config` of a sink of `kind`. Touches neither files nor network.
pub(crate) fn parse(kind: &str, config: &Value) -> Result<Config, ConfigError> {
    let parsed = parse_kind(kind, config)?;
    redaction(kind, config)?;
    Ok(parsed)
}

fn parse_kind(kind: &str, config: &Value) -> Result<Config, ConfigError> {
    match kind {
        "function" => FunctionConfig::parse(config).map(Config::Function),
        "http" => HttpConfig::parse(config).map(|http| Config::Http(Box::new(http))),
        "kafka" => KafkaConfig::parse(config).map(|kafka| Config::Kafka(Box::new(kafka))),
        "nats" => NatsConfig::parse(config).map(|nats| Config::Nats(Box::new(nats))),
        "postgres" => {
            PostgresConfig::parse(config).map(|postgres| Config::Postgres(Box::new(postgres)))
        }
        "pull" => Fields::new("pull", config, &[]).map(|_| Config::Pull),
        "usage" => Err(
            ConfigError::new("sinks of kind \"usage\" cannot be created".to_owned()).hint(
                "Usage is written by outbox.record_usage, in the transaction that uses something.",
            ),
        ),
        _ => {
            let error = ConfigError::new(format!("unknown kind of sink \"{}\"", shown(kind)))
                .detail(format!("The kinds are {}.", listed(KINDS)));
            Err(match nearest(kind, KINDS) {
                Some(near) => error.hint(format!("Perhaps \"{near}\" is meant.")),
                None => error,
            })
        }
    }
}

impl Config {
    /// The name of the secret whose active values each delivery needs.
    pub(crate) fn secret(&self) -> Option<&str> {
        match self {
            Config::Http(http) => http.secret(),
            Config::Kafka(kafka) => kafka.secret(),
            Config::Nats(nats) => nats.secret(),
            Config::Postgres(postgres) => postgres.secret(),
            Config::Function(_) | Config::Pull => None,
        }
    }

    /// The name of a secret whose values go to where the config says, or let the sink do there what they allow. A signature does neither.
    pub(crate) fn handed_secret(&self) -> Option<&str> {
        match self {
            Config::Http(_) => None,
            _ => self.secret(),
        }
    }

    /// The key that names a file of the server's, if there is one.
    pub(crate) fn file(&self) -> Option<&'static str> {
        match self {
            Config::Http(http) => http.file(),
            Config::Kafka(kafka) => kafka.file(),
            Config::Nats(nats) => nats.file(),
            Config::Postgres(postgres) => postgres.file(),
            Config::Function(_) | Config::Pull => None,
        }
    }

    /// Whether a sink with this config can be isolated by key: a failing event must be told apart from others, and be left out while
    /// they go on.
    ///
    /// # Errors
    /// With the reason.
    pub(crate) fn may_isolate_keys(&self) -> Result<(), ConfigError> {
        const LEAVE: &str = "Leave isolation at \"batch\".";
        let kind = self.kind();
        let (reason, hint) = match self {
            Config::Http(http) if http.has_checkpoint() => (
                "The checkpoint of its receiver says up to where it has everything, and parked events lie before that.",
                "Leave isolation at \"batch\", or \"checkpoint_url\" out.",
            ),
            Config::Function(_) | Config::Http(_) | Config::Postgres(_) => return Ok(()),
            Config::Nats(_) | Config::Kafka(_) => (
                "Its server keeps the order of what it was given, and refuses no event for what it says.",
                LEAVE,
            ),
            Config::Pull => (
                "Its consumer acknowledges what it was given up to a position, not event by event.",
                LEAVE,
            ),
        };
        let message = format!("isolation \"key\" does not fit this sink of kind \"{kind}\"");
        Err(ConfigError::new(message).detail(reason).hint(hint))
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Config::Function(_) => "function",
            Config::Http(_) => "http",
            Config::Kafka(_) => "kafka",
            Config::Nats(_) => "nats",
            Config::Postgres(_) => "postgres",
            Config::Pull => "pull",
        }
    }
}

impl ConfigError {
    pub(super) fn new(message: String) -> Self {
        Self {
            message,
            detail: None,
            hint: None,
        }
    }

    pub(super) fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_is_read_and_knows_its_name() {
        for (kind, config) in [
            ("function", json!({"function": "take(outbox.event[])"})),
            ("http", json!({"url": "https://example.com/hook"})),
            ("kafka", json!({"brokers": "kafka.example.com:9092"})),
            ("nats", json!({"url": "nats://nats.example.com"})),
            (
                "postgres",
                json!({"secret": "warehouse", "table": "events"}),
            ),
            ("pull", json!({})),
        ] {
            assert_eq!(parse(kind, &config).unwrap().kind(), kind);
            assert!(KINDS.contains(&kind));
        }
        assert_eq!(KINDS.len(), 6);
    }

    #[test]
    fn an_unknown_kind_lists_the_known_ones() {
        let error = parse("htttp", &json!({})).unwrap_err();
        assert_eq!(error.message, "unknown kind of sink \"htttp\"");
        assert_eq!(
            error.detail.as_deref(),
            Some(
                "The kinds are \"function\", \"http\", \"kafka\", \"nats\", \"postgres\" and \"pull\"."
            )
        );
        assert_eq!(error.hint.as_deref(), Some("Perhaps \"http\" is meant."));
    }

    #[test]
    fn usage_is_no_sink() {
        let error = parse("usage", &json!({})).unwrap_err();
        assert!(error.hint.unwrap().contains("outbox.record_usage"));
    }

    #[test]
    fn a_config_is_an_object() {
        for (config, what) in [
            (json!(null), "null"),
            (json!([]), "an array"),
            (json!("x"), "a string"),
            (json!(1), "a number"),
            (json!(true), "a boolean"),
        ] {
            for kind in KINDS {
                let error = parse(kind, &config).unwrap_err();
                assert!(
                    error
                        .message
                        .ends_with(&format!("must be a JSON object, not {what}")),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn functions_are_named() {
        let error = parse("function", &json!({})).unwrap_err();
        assert_eq!(
            error.message,
            "the config of a sink of kind \"function\" needs \"function\""
        );
        let error = parse("function", &json!({"function": 7})).unwrap_err();
        assert_eq!(
            error.detail.as_deref(),
            Some("\"function\" must be a string, not a number.")
        );
        let error = parse("function", &json!({"function": ""})).unwrap_err();
        assert_eq!(
            error.detail.as_deref(),
            Some("\"function\" must not be empty.")
        );
    }

    #[test]
    fn functions_may_have_a_time_limit() {
        let config = |limit| json!({"function": "take", "timeout_ms": limit});
        let Ok(Config::Function(read)) = parse("function", &config(250)) else {
            panic!("it is fine");
        };
        assert_eq!(read.timeout, Some(std::time::Duration::from_millis(250)));
        let error = parse("function", &config(0)).unwrap_err();
        assert_eq!(
            error.detail.as_deref(),
            Some("\"timeout_ms\" must be a whole number between 1 and 86400000.")
        );
    }

    #[test]
    fn keys_are_isolated_where_events_can_be_told_apart() {
        for (kind, config, fits) in [
            (
                "function",
                json!({"function": "take(outbox.event[])"}),
                true,
            ),
            (
                "http",
                json!({"url": "https://example.com/", "mode": "single"}),
                true,
            ),
            ("http", json!({"url": "https://example.com/"}), true),
            (
                "http",
                json!({"url": "https://example.com/", "checkpoint_url": "https://example.com/at"}),
                false,
            ),
            ("pull", json!({}), false),
        ] {
            let refused = parse(kind, &config).unwrap().may_isolate_keys().err();
            assert_eq!(refused.is_none(), fits, "{kind} {config}");
            if let Some(error) = refused {
                assert!(error.detail.is_some() && error.hint.is_some());
            }
        }
    }

    #[test]
    fn pull_takes_no_config() {
        let error = parse("pull", &json!({"url": "http://x"})).unwrap_err();
        assert_eq!(
            error.message,
            "unknown key \"url\" in the config of a sink of kind \"pull\""
        );
        assert_eq!(
            error.detail.as_deref(),
            Some("A sink of kind \"pull\" takes no config.")
        );
    }
}
