//! One event to an endpoint, now, in the session that asks: to see whether it works.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::envelope::{Event, Position, write_cloudevent};
use crate::pg::{catalog, latch};
use crate::settings;
use crate::sinks::Secrets;
use crate::sinks::webhook::{Attempt, Courier, Outcome, Verdict};
use crate::worker::io::Io;

/// The type of the event that is sent.
const TOPIC: &str = "outbox.test";

/// Sends an event to `url`, and waits for what comes of it.
pub(crate) fn send(tenant: &str, url: String, secrets: Vec<String>) -> Outcome {
    let random = catalog::random_hex().unwrap_or([b'0'; 32]);
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let event = Event {
        position: Position::default(),
        id: format!("evt_{}", String::from_utf8_lossy(&random)),
        topic: TOPIC.to_owned(),
        source: None,
        subject: None,
        tenant: Some(tenant.to_owned()),
        time: i64::try_from(since.as_micros()).unwrap_or(0),
        payload: Some("{}".to_owned()),
        headers: None,
        part: None,
        is_record: false,
    };
    let mut body = Vec::new();
    write_cloudevent(&event, &mut body);
    let attempt = Attempt {
        url,
        id: event.id,
        body: String::from_utf8_lossy(&body).into_owned(),
        secrets: Secrets::new(secrets),
    };
    attempted(attempt).unwrap_or_else(|error| Outcome {
        status: None,
        duration: Duration::ZERO,
        verdict: Verdict::Failed {
            error,
            retry_after: None,
        },
    })
}

fn attempted(attempt: Attempt) -> Result<Outcome, String> {
    let courier = Courier::new(settings::webhooks::rules(), settings::webhooks::timeout())?;
    let io =
        Io::start().map_err(|error| format!("the I/O thread could not be started: {error}"))?;
    io.attempt(0, &Arc::new(courier), attempt);
    loop {
        io.reports();
        if let Some(attempted) = io.attempted().into_iter().next() {
            return Ok(attempted.outcome);
        }
        latch::wait(Duration::from_secs(1), Some(io.readable()));
    }
}
