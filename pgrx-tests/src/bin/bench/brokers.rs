//! JetStream and Kafka: how fast a backlog is acknowledged, and how soon a consumer has an event.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::SystemTime;

use outbox_tests::{Kafka, Nats};
use rdkafka::Message;

use crate::Run;
use crate::drain::{Kind, measured};
use crate::latency::{Arrivals, Latency, lines, measure_to};
use crate::report::Line;
use crate::stage::Stage;

const RATE: u64 = 1000;
/// The topic of the bench's events, as Kafka gets it.
const TOPIC: &str = "outbox.order.placed";

/// A server with a stream on disk.
pub(crate) fn nats() -> Nats {
    let server = Nats::start();
    server.create_stream("BENCH", &["order.>"]);
    server
}

/// A broker with a topic in memory.
pub(crate) fn kafka() -> Kafka {
    let broker = Kafka::start_ungated();
    broker.create_topic(TOPIC, 3);
    broker
}

pub(crate) fn nats_sink(server: &Nats) -> String {
    format!(r#"'nats', '{{"url": "{}"}}'"#, server.url())
}

pub(crate) fn kafka_sink(broker: &Kafka) -> String {
    format!(r#"'kafka', '{{"brokers": "{}"}}'"#, broker.brokers())
}

pub(crate) fn nats_figure(run: &Run) -> Vec<Line> {
    let mut figure = drained(
        run,
        Kind::Nats,
        "drain-nats",
        "drain to JetStream, batches of 1,000",
    );
    if run.profile.is_none() {
        let rounds = latencies(run, |stage, seconds| {
            let server = Arc::new(nats());
            let sink = nats_sink(&server);
            followed(stage, &sink, seconds, move |arrivals, over, ready| {
                server.follow("order.>", ready, |message| {
                    if let Some(bytes) = message {
                        arrivals.note(bytes, SystemTime::now());
                    }
                    over.load(Ordering::SeqCst)
                });
            })
        });
        figure.extend(lines("over NATS ", RATE, &rounds));
    }
    figure
}

pub(crate) fn kafka_figure(run: &Run) -> Vec<Line> {
    let mut figure = drained(
        run,
        Kind::Kafka,
        "drain-kafka",
        "drain to a Kafka broker, batches of 1,000",
    );
    if run.profile.is_none() {
        let rounds = latencies(run, |stage, seconds| {
            let broker = kafka();
            let sink = kafka_sink(&broker);
            followed(stage, &sink, seconds, move |arrivals, over, ready| {
                ready();
                broker.follow(TOPIC, |message| {
                    if let Some(message) = message {
                        arrivals.note(message.payload().unwrap_or_default(), SystemTime::now());
                    }
                    over.load(Ordering::SeqCst)
                });
            })
        });
        figure.extend(lines("over Kafka ", RATE, &rounds));
    }
    figure
}

fn drained(run: &Run, kind: Kind, name: &str, what: &str) -> Vec<Line> {
    let drained = measured(run, kind, name);
    drained
        .map(|drained| drained.line(what).at_least(100_000.0))
        .into_iter()
        .collect()
}

pub(crate) fn latencies(run: &Run, measure: impl Fn(&mut Stage, u64) -> Latency) -> Vec<Latency> {
    let mut stage = Stage::new(run.settings());
    (0..run.of(6, 1))
        .map(|_| measure(&mut stage, run.of(5, 2)))
        .collect()
}

/// Measures while another thread follows what arrives. It calls the last argument once nothing can escape it any more.
pub(crate) fn followed(
    stage: &mut Stage,
    sink: &str,
    seconds: u64,
    follow: impl FnOnce(&Arrivals, &AtomicBool, &mut dyn FnMut()) + Send + 'static,
) -> Latency {
    let arrivals = Arrivals::default();
    let over = Arc::new(AtomicBool::new(false));
    let (is_ready, ready) = std::sync::mpsc::channel();
    let follower = thread::spawn({
        let (arrivals, over) = (arrivals.clone(), Arc::clone(&over));
        move || {
            follow(&arrivals, &over, &mut || {
                is_ready.send(()).expect("it is waited for")
            })
        }
    });
    ready.recv().expect("the follower gets ready");
    let latency = measure_to(stage, sink, &arrivals, RATE, seconds);
    over.store(true, Ordering::SeqCst);
    follower.join().expect("the follower ends");
    latency
}
