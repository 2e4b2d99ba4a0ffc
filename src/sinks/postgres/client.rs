//! The client of kind `postgres`: keeps a session between deliveries, and says what came of each.

use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::timeout;

use super::config::{PostgresConfig, Server};
use super::refusal::{Blame, Setback};
use super::session::{Session, Target};
use super::trust::Trust;
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::sinks::{Batch, Defaults, Sink};

/// The server's own time-out speaks first: it says more, and leaves the connection as it was.
const GRACE: Duration = Duration::from_millis(500);

pub(crate) struct Postgres {
    config: PostgresConfig,
    timeout: Duration,
    /// Taken out while it is in use: what is given up in the middle of a transaction is not used again.
    session: Mutex<Option<Session>>,
    trust: std::sync::Mutex<Trust>,
}

impl Postgres {
    pub(in crate::sinks) fn open(config: &PostgresConfig, defaults: &Defaults) -> Self {
        Self {
            config: config.clone(),
            timeout: config.timeout.unwrap_or(defaults.http_timeout),
            session: Mutex::new(None),
            trust: std::sync::Mutex::default(),
        }
    }

    fn dsn<'a>(&'a self, batch: &'a Batch) -> Result<&'a str, String> {
        match &self.config.server {
            Server::Dsn(dsn) => Ok(dsn),
            Server::Secret(name) => batch
                .secrets
                .expose()
                .next()
                .ok_or_else(|| format!("not sent: {}", batch.secrets.why_none(name, "log in"))),
        }
    }

    /// On the session at hand, or on a new one. One that broke while nobody looked says nothing of the server.
    async fn apply(
        &self,
        kept: Option<Session>,
        dsn: &str,
        batch: &Batch,
    ) -> Result<Session, (Option<Session>, Setback)> {
        let target = Target {
            config: &self.config,
            origin: &batch.origin,
            timeout: self.timeout,
        };
        if let Some(mut session) = kept {
            match session.apply(&batch.events, &target).await {
                Err(setback) if setback.blame == Blame::Connection => {}
                done => return settle(session, done).await,
            }
        }
        let mut session = Session::open(dsn, &target)
            .await
            .map_err(|setback| (None, setback))?;
        let done = session.apply(&batch.events, &target).await;
        settle(session, done).await
    }

    fn trust(&self) -> std::sync::MutexGuard<'_, Trust> {
        self.trust.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outcome(&self, setback: Setback, events: usize) -> Outcome {
        let Setback { error, blame } = setback;
        if blame == Blame::Events && self.trust().refused(events) {
            return Outcome::Partial(vec![Failure {
                index: 0,
                error,
                permanent: true,
            }]);
        }
        Outcome::Failed(Refusal {
            error,
            retry_after: None,
        })
    }
}

/// What is left of a session after a delivery.
async fn settle(
    session: Session,
    done: Result<(), Setback>,
) -> Result<Session, (Option<Session>, Setback)> {
    match done {
        Ok(()) => Ok(session),
        // After any other setback the server is asked anew what its tables look like.
        Err(setback) if setback.blame == Blame::Events && session.roll_back().await => {
            Err((Some(session), setback))
        }
        Err(setback) => Err((None, setback)),
    }
}

impl Sink for Postgres {
    async fn deliver(&self, batch: &Batch) -> Outcome {
        if batch.events.is_empty() {
            return Outcome::Delivered;
        }
        let mut kept = self.session.lock().await;
        let dsn = match self.dsn(batch) {
            Ok(dsn) => dsn,
            Err(error) => return self.outcome(Setback::of_server(error), batch.events.len()),
        };
        let session = kept.take().filter(|session| session.dsn == dsn);
        match timeout(self.timeout + GRACE, self.apply(session, dsn, batch)).await {
            Ok(Ok(session)) => {
                *kept = Some(session);
                self.trust().taken();
                Outcome::Delivered
            }
            Ok(Err((session, setback))) => {
                *kept = session;
                self.outcome(setback, batch.events.len())
            }
            Err(_) => {
                let error = format!("no answer within {:?}", self.timeout);
                self.outcome(Setback::of_server(error), batch.events.len())
            }
        }
    }
}
