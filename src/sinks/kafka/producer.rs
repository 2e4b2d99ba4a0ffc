//! A producer under way, and producers that have been given up.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::error::KafkaError;
use rdkafka::producer::{Producer as _, PurgeConfig, ThreadedProducer};
use tokio::time::sleep;

use super::reports::Reports;

/// How long the end of a sink waits for the client's threads.
const LONGEST_END: Duration = Duration::from_secs(2);
/// How long messages that wait for a connection may take to be given back.
const LONGEST_WITHDRAWAL: Duration = Duration::from_millis(100);

pub(super) type Producer = ThreadedProducer<Reports>;

/// Starts the client's threads; they inherit our blocked signals.
///
/// # Errors
/// For people to read: what the client says of its configuration.
pub(super) fn start(config: &ClientConfig) -> Result<Producer, String> {
    config
        .create_with_context(Reports::default())
        .map_err(|error| match error {
            KafkaError::ClientCreation(why) => format!("the Kafka client cannot be set up: {why}"),
            KafkaError::ClientConfig(_, _, name, _) => {
                format!("the Kafka client cannot be set up: it refuses the value of \"{name}\"")
            }
            _ => "the Kafka client cannot be set up".to_owned(),
        })
}

/// Whether the producer can send no more, as when a broker has forgotten it.
pub(super) fn is_spent(producer: &Producer) -> bool {
    producer.client().fatal_error().is_some()
}

/// Takes back what has not been sent. Returns whether that was everything.
pub(super) async fn withdraw(producer: &Producer) -> bool {
    producer.purge(PurgeConfig::default().queue().non_blocking());
    let end = Instant::now() + LONGEST_WITHDRAWAL;
    loop {
        match producer.in_flight_count() {
            0 => return true,
            _ if Instant::now() >= end => return false,
            _ => sleep(Duration::from_millis(2)).await,
        }
    }
}

/// Producers on their way out. To end one takes a moment, in which others want the thread.
#[derive(Default)]
pub(super) struct Retired(Vec<JoinHandle<()>>);

impl Retired {
    /// Gives up what the producer has not sent, and ends its threads.
    pub(super) fn take(&mut self, producer: Option<Producer>) {
        let Some(producer) = producer else { return };
        self.0.retain(|ending| !ending.is_finished());
        let ending = std::thread::Builder::new()
            .name("outbox kafka".to_owned())
            .spawn(move || drop(producer));
        // Without a thread, the producer was dropped here.
        self.0.extend(ending);
    }

    /// Waits until they are gone: threads of a library must not run on while the process tears the library down.
    pub(super) fn wait(&mut self) {
        let end = Instant::now() + LONGEST_END;
        while self.0.iter().any(|ending| !ending.is_finished()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
