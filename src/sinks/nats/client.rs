//! The client of kind `nats`: keeps a connection between deliveries, and makes another when it is not fit any more.

use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};

use super::config::{Authentication, NatsConfig, Server};
use super::connection::{Connection, Trouble};
use super::login::Login;
use super::message::Route;
use super::publish::publish;
use crate::dispatch::{Outcome, Refusal};
use crate::sinks::plain_text::{LONGEST, one_line, without};
use crate::sinks::{Batch, Secrets, Sink, tls};

/// For one server, when the whole delivery may take longer.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);

pub(crate) struct Nats {
    servers: Vec<Server>,
    tls_required: bool,
    tls: Arc<ClientConfig>,
    auth: Option<Authentication>,
    route: Route,
    timeout: Duration,
    /// Taken out while it is in use, so that a delivery that is given up leaves none behind.
    connection: Mutex<Option<Connection>>,
}

impl Nats {
    /// # Errors
    /// When the certificates of the system or of `ca_file` cannot be used.
    pub(in crate::sinks) fn open(config: &NatsConfig) -> Result<Self, String> {
        let tls = match config.tls {
            true => tls::config(config.ca_file.as_deref())?,
            false => tls::unused()?,
        };
        Ok(Self {
            servers: config.servers.clone(),
            tls_required: config.tls,
            tls: Arc::new(tls),
            auth: config.auth.clone(),
            route: Route::new(config.subject.clone(), config.stream.as_deref()),
            timeout: config.timeout,
            connection: Mutex::new(None),
        })
    }

    async fn attempt(&self, batch: &Batch) -> Result<Outcome, String> {
        let mut kept = self.connection.lock().await;
        let mut alive = None;
        if let Some(mut connection) = kept.take()
            && connection.is_alive().await
        {
            alive = Some(connection);
        }
        let mut connection = match alive {
            Some(connection) => connection,
            None => self.connect(&batch.secrets).await?,
        };
        let outcome = publish(&mut connection, &batch.events, &self.route, &batch.watch).await?;
        *kept = Some(connection);
        Ok(outcome)
    }

    /// The first server that lets one of the logins in.
    async fn connect(&self, secrets: &Secrets) -> Result<Connection, String> {
        let logins = self.logins(secrets)?;
        let limit = self.timeout.min(LONGEST_CONNECT);
        let mut first = None;
        for server in &self.servers {
            for login in &logins {
                let opened = Connection::open(server, self.tls_required, &self.tls, login);
                let (error, other_login) = match timeout(limit, opened).await {
                    Ok(Ok(connection)) => return Ok(connection),
                    Ok(Err(Trouble::Unauthorized(error))) => (error, true),
                    Ok(Err(Trouble::Other(error))) => (error, false),
                    Err(_) => (format!("no connection to {server} within {limit:?}"), false),
                };
                first.get_or_insert(error);
                if !other_login {
                    break;
                }
            }
        }
        Err(first.unwrap_or_else(|| "there is no server to connect to".to_owned()))
    }

    /// One for each active value of the secret: during a rotation either may be the one that is known.
    fn logins(&self, secrets: &Secrets) -> Result<Vec<Login>, String> {
        let Some(Authentication { auth, secret }) = &self.auth else {
            return Ok(vec![Login::Anonymous]);
        };
        if secrets.is_empty() {
            return Err(format!(
                "not sent: secret \"{secret}\" has no active value to log in with"
            ));
        }
        secrets
            .expose()
            .map(|value| Login::new(*auth, value))
            .collect::<Result<_, _>>()
            .map_err(|why| format!("not sent: a value of secret \"{secret}\" {why}"))
    }

    /// A server may quote what it was sent.
    fn shown(&self, error: &str, secrets: &Secrets) -> String {
        let parts = secrets
            .expose()
            .flat_map(|value| value.split([':', '\n']).map(str::trim));
        one_line(&without(&without(error, secrets.expose()), parts), LONGEST)
    }
}

impl Sink for Nats {
    async fn deliver(&self, batch: &Batch) -> Outcome {
        if batch.events.is_empty() {
            return Outcome::Delivered;
        }
        let deadline = Instant::now() + self.timeout;
        let failed = |error: &str| {
            Outcome::Failed(Refusal {
                error: self.shown(error, &batch.secrets),
                retry_after: None,
            })
        };
        match timeout_at(deadline, self.attempt(batch)).await {
            Ok(Ok(outcome)) => outcome.with_errors(|error| self.shown(error, &batch.secrets)),
            Ok(Err(error)) => failed(&error),
            Err(_) => failed(&format!("not acknowledged within {:?}", self.timeout)),
        }
    }
}
