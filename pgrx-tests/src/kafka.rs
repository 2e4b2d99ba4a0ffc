//! A real broker that speaks Kafka's protocol, and what has arrived in it.
//!
//! It keeps everything in memory, so it is not restarted: connections to it go through a [`Gate`], which is closed instead.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::{Offset, TopicPartitionList};
use rustix::process::Signal;

use crate::gate::Gate;
use crate::process::{broker_program, finish, send, spawn};
use crate::testbed::{new_folder, remove_folder};
use crate::{DEADLINE, ports, wait};

/// A running broker on 127.0.0.1 that dies with the value, or with the process.
pub struct Kafka {
    port: u16,
    gate: Option<Gate>,
    folder: PathBuf,
    broker: Child,
}

/// What is stored in a topic.
#[derive(Debug, Clone)]
pub struct Record {
    pub partition: i32,
    pub offset: i64,
    pub key: Option<String>,
    pub headers: HashMap<String, String>,
    /// None is what deletes a key.
    pub value: Option<Vec<u8>>,
}

impl Record {
    /// The event's id, where the attributes are headers.
    pub fn id(&self) -> &str {
        self.headers.get("ce_id").map_or("", String::as_str)
    }
}

/// Says nothing of a broker that is gone for a while.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}
    fn error(&self, _error: KafkaError, _reason: &str) {}
}

impl ConsumerContext for Quiet {}

impl Kafka {
    pub fn start() -> Self {
        let port = ports::free();
        Self::launch(port, Some(Gate::to(port)))
    }

    /// A broker that clients reach without a gate: for benches.
    pub fn start_ungated() -> Self {
        Self::launch(ports::free(), None)
    }

    fn launch(port: u16, gate: Option<Gate>) -> Self {
        let advertised = gate.as_ref().map_or(port, Gate::port);
        let folder = new_folder("kafka");
        let log = fs::File::create(folder.join("log")).expect("the broker's folder can be written");
        let mut command = broker_program("tansu");
        command.args(["broker", "--storage-engine", "memory://tansu/"]);
        command.args(["--listener-url", &format!("tcp://127.0.0.1:{port}")]);
        // Clients go where the broker says it is.
        command.args([
            "--advertised-listener-url",
            &format!("tcp://127.0.0.1:{advertised}"),
        ]);
        command.current_dir(&folder);
        command.stdout(Stdio::null()).stderr(log);
        let mut kafka = Self {
            port,
            gate,
            broker: spawn(command).expect("setpriv runs"),
            folder,
        };
        wait::until("the broker to be ready", || {
            let ended = kafka.broker.try_wait().expect("the broker is our child");
            assert!(ended.is_none(), "the broker did not start: {}", kafka.log());
            std::net::TcpStream::connect(("127.0.0.1", port)).ok()
        });
        kafka
    }

    /// The brokers' list for a client.
    pub fn brokers(&self) -> String {
        format!(
            "127.0.0.1:{}",
            self.gate.as_ref().map_or(self.port, Gate::port)
        )
    }

    /// The way that clients take to it.
    ///
    /// # Panics
    /// If it was started without one.
    pub fn gate(&mut self) -> &mut Gate {
        self.gate.as_mut().expect("a broker with a gate")
    }

    /// What the broker logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Stops the broker in its tracks: connections stay, and nothing is answered.
    pub fn hang(&self) {
        send(self.broker.id(), Signal::STOP);
    }

    pub fn resume(&self) {
        send(self.broker.id(), Signal::CONT);
    }

    #[track_caller]
    pub fn create_topic(&self, name: &str, partitions: u32) {
        let mut command = broker_program("tansu");
        command.args([
            "topic",
            "create",
            name,
            "--partitions",
            &partitions.to_string(),
        ]);
        command.args(["--broker", &format!("tcp://127.0.0.1:{}", self.port)]);
        finish(command);
    }

    /// Everything that a topic holds, partition by partition, in order.
    #[track_caller]
    pub fn records(&self, topic: &str) -> Vec<Record> {
        records(&self.direct(), topic)
    }

    /// Hands over every message of a topic as it arrives, until `done` says so.
    pub fn follow(&self, topic: &str, mut done: impl FnMut(Option<&BorrowedMessage>) -> bool) {
        let consumer = consumer(&self.direct());
        assign_all(&consumer, topic);
        loop {
            let over = match consumer.poll(Duration::from_millis(20)) {
                Some(Ok(message)) => done(Some(&message)),
                _ => done(None),
            };
            if over {
                return;
            }
        }
    }

    /// Around the gate, as far as the broker lets clients.
    fn direct(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

/// Everything that a topic of these brokers holds, partition by partition, in order.
#[track_caller]
pub fn records(brokers: &str, topic: &str) -> Vec<Record> {
    let consumer = consumer(brokers);
    let partitions = assign_all(&consumer, topic);
    let mut records = Vec::new();
    let mut ended = 0;
    while ended < partitions {
        match consumer.poll(DEADLINE).expect("the broker answers") {
            Ok(message) => records.push(record(&message)),
            Err(KafkaError::PartitionEOF(_)) => ended += 1,
            Err(error) => panic!("the tests' consumer: {error}"),
        }
    }
    records.sort_by_key(|record: &Record| (record.partition, record.offset));
    records
}

fn consumer(brokers: &str) -> BaseConsumer<Quiet> {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "tests")
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .set("fetch.wait.max.ms", "10")
        .create_with_context(Quiet)
        .expect("a consumer can be made")
}

/// Reads all partitions from their beginning. Returns how many there are.
fn assign_all(consumer: &BaseConsumer<Quiet>, topic: &str) -> usize {
    let metadata = consumer
        .fetch_metadata(Some(topic), DEADLINE)
        .expect("the broker answers");
    let mut list = TopicPartitionList::new();
    for topic in metadata.topics() {
        for partition in topic.partitions() {
            list.add_partition_offset(topic.name(), partition.id(), Offset::Beginning)
                .expect("an offset can be asked for");
        }
    }
    consumer.assign(&list).expect("partitions can be assigned");
    list.count()
}

fn record(message: &BorrowedMessage) -> Record {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let headers = message.headers().map(|headers| {
        headers
            .iter()
            .map(|header| {
                (
                    header.key.to_owned(),
                    header.value.map_or_else(String::new, text),
                )
            })
            .collect()
    });
    Record {
        partition: message.partition(),
        offset: message.offset(),
        key: message.key().map(text),
        headers: headers.unwrap_or_default(),
        value: message.payload().map(<[u8]>::to_vec),
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        let _ = self.broker.kill();
        let _ = self.broker.wait();
        remove_folder(&self.folder);
    }
}
