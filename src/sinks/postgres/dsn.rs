//! Connection strings: `postgresql://…` or `host=… dbname=…`, as libpq has them.
//!
//! Never quoted in an error: any part may be a password, also where one was forgotten to be encoded.

use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

/// What it takes to connect.
#[derive(Clone)]
pub(super) struct Dsn {
    pub(super) config: Config,
    /// Whether the server's certificate must be one that is trusted, and for its name: `sslmode` `verify-full`.
    pub(super) verify: bool,
}

const AGENT: &str = "pg_outbox";
/// After so long without a word, the connection is asked whether it still lives.
const KEEPALIVE: Duration = Duration::from_secs(30);

impl Dsn {
    /// # Errors
    /// What is wrong, as in `"dsn" <error>`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (text, verify) = match without_verify_full(text) {
            Some(text) => (text, true),
            None => (text.to_owned(), false),
        };
        let mut config = text.parse::<Config>().map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            match cause.as_deref() {
                Some("invalid value for option `sslmode`") => {
                    "has an \"sslmode\" that is not known: it is disable, prefer, require or verify-full"
                }
                _ => "is no connection string, or has an option that is not known",
            }
            .to_owned()
        })?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err("names no host".to_owned());
        }
        if config.get_application_name().is_none() {
            config.application_name(AGENT);
        }
        config.keepalives_idle(KEEPALIVE);
        if verify {
            config.ssl_mode(SslMode::Require);
        }
        Ok(Self { config, verify })
    }

    pub(super) fn has_password(&self) -> bool {
        self.config.get_password().is_some()
    }

    /// The same without the password.
    pub(super) fn without_password(&self) -> Config {
        let mut bare = Config::new();
        let config = &self.config;
        for host in config.get_hosts() {
            match host {
                Host::Tcp(name) => bare.host(name),
                Host::Unix(path) => bare.host_path(path),
            };
        }
        for address in config.get_hostaddrs() {
            bare.hostaddr(*address);
        }
        for port in config.get_ports() {
            bare.port(*port);
        }
        if let Some(user) = config.get_user() {
            bare.user(user);
        }
        if let Some(dbname) = config.get_dbname() {
            bare.dbname(dbname);
        }
        bare.ssl_mode(config.get_ssl_mode());
        bare.application_name(AGENT);
        bare
    }

    /// Where it leads, such as `db.example.com:5432`.
    pub(super) fn place(&self) -> String {
        let ports = self.config.get_ports();
        let named = self.config.get_hosts().iter().map(|host| match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        });
        let numbered = self
            .config
            .get_hostaddrs()
            .iter()
            .map(ToString::to_string)
            .filter(|_| self.config.get_hosts().is_empty());
        let places = named.chain(numbered).enumerate().map(|(index, host)| {
            let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
            format!("{host}:{port}")
        });
        places.collect::<Vec<_>>().join(",")
    }
}

/// The client library knows no `verify-full`: the text without it, if it is there.
fn without_verify_full(text: &str) -> Option<String> {
    for option in ["sslmode=verify-full", "sslmode='verify-full'"] {
        for (at, _) in text.match_indices(option) {
            let begins = text[..at].ends_with([' ', '?', '&', '\t', '\n']) || at == 0;
            let rest = &text[at + option.len()..];
            let ends = rest.is_empty() || rest.starts_with([' ', '&', '\t', '\n']);
            if begins && ends {
                return Some(format!("{}sslmode=require{rest}", &text[..at]));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        for (text, place, verify, password) in [
            ("postgresql://u@db/app", "db:5432", false, false),
            (
                "postgres://u:p@db:6000,other/app?sslmode=verify-full",
                "db:6000,other:5432",
                true,
                true,
            ),
            (
                "host=db port=7 sslmode=verify-full user=u",
                "db:7",
                true,
                false,
            ),
            (
                "sslmode='verify-full' host=/run/pg password='a b'",
                "/run/pg:5432",
                true,
                true,
            ),
            ("hostaddr=10.0.0.1 user=u", "10.0.0.1:5432", false, false),
        ] {
            let dsn = Dsn::parse(text).unwrap();
            assert_eq!(
                (dsn.place().as_str(), dsn.verify, dsn.has_password()),
                (place, verify, password),
                "{text}"
            );
            assert!(dsn.without_password().get_password().is_none());
        }
        assert_eq!(
            Dsn::parse("host=db sslmode=verify-full")
                .unwrap()
                .config
                .get_ssl_mode(),
            SslMode::Require
        );
    }
}
