//! A real broker that speaks Kafka's protocol, and what has arrived in it.
//!
//! It keeps everything in memory, and connections to it go through a [`Gate`], which can be closed. One that is to be restarted
//! keeps what it stores in a [`Bucket`].

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::{Offset, TopicPartitionList};
use rustix::process::Signal;

use crate::bucket::Bucket;
use crate::gate::Gate;
use crate::process::{broker_program, finish, send, spawn};
use crate::receiver::server_config;
use crate::sasl_gate::SaslGate;
use crate::testbed::{new_folder, remove_folder};
use crate::tls_gate::TlsGate;
use crate::{DEADLINE, Tls, ports, wait};

/// A running broker on 127.0.0.1 that dies with the value, or with the process.
pub struct Kafka {
    port: u16,
    way: Way,
    folder: PathBuf,
    options: &'static [&'static str],
    bucket: Option<Bucket>,
    broker: Child,
}

/// How clients get to it.
enum Way {
    Straight,
    Gate(Gate),
    Tls(TlsGate),
    Sasl(SaslGate),
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
        Self::launch(port, Way::Gate(Gate::to(port)), &[], None)
    }

    /// A broker that clients reach without a gate: for benches.
    pub fn start_ungated() -> Self {
        Self::launch(ports::free(), Way::Straight, &[], None)
    }

    /// A broker that can be killed and started again, and has then what it had acknowledged.
    pub fn start_lasting() -> Self {
        let port = ports::free();
        let bucket = Some(Bucket::start());
        Self::launch(port, Way::Gate(Gate::to(port)), &[], bucket)
    }

    /// A broker that clients reach over TLS, with a certificate of that kind, and the file of the authority that signed it.
    pub fn start_over_tls(tls: Tls) -> (Self, PathBuf) {
        let (config, authority) = server_config(tls);
        let port = ports::free();
        let kafka = Self::launch(port, Way::Tls(TlsGate::to(port, config)), &[], None);
        let file = kafka.folder.join("ca.pem");
        fs::write(&file, authority).expect("the broker's folder can be written");
        (kafka, file)
    }

    /// A broker that clients reach after a login by SASL/PLAIN.
    pub fn start_with_login(user: &str, password: &str) -> Self {
        let port = ports::free();
        let gate = SaslGate::to(port, user, password);
        Self::launch(port, Way::Sasl(gate), &[], None)
    }

    /// A broker that lets in only users that it knows, and knows none.
    pub fn start_closed() -> Self {
        Self::launch(ports::free(), Way::Straight, &["--authentication"], None)
    }

    fn launch(
        port: u16,
        way: Way,
        options: &'static [&'static str],
        bucket: Option<Bucket>,
    ) -> Self {
        let folder = new_folder("kafka");
        let broker = run(port, &way, &folder, options, bucket.as_ref());
        let mut kafka = Self {
            port,
            way,
            folder,
            options,
            bucket,
            broker,
        };
        kafka.wait_until_ready();
        kafka
    }

    fn wait_until_ready(&mut self) {
        wait::until("the broker to be ready", || {
            let ended = self.broker.try_wait().expect("the broker is our child");
            assert!(ended.is_none(), "the broker did not start: {}", self.log());
            std::net::TcpStream::connect(("127.0.0.1", self.port)).ok()
        });
    }

    /// Kills the broker, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.broker.kill();
        let _ = self.broker.wait();
    }

    /// Starts it again after [`kill`](Self::kill), on the same port.
    ///
    /// # Panics
    /// If it was started without a store that outlives it.
    pub fn start_again(&mut self) {
        assert!(self.bucket.is_some(), "a broker that lasts");
        let bucket = self.bucket.as_ref();
        self.broker = run(self.port, &self.way, &self.folder, self.options, bucket);
        self.wait_until_ready();
    }

    /// From now on this is the password. Whoever is in has to log in again.
    ///
    /// # Panics
    /// If it was started without a login.
    pub fn set_password(&self, password: &str) {
        match &self.way {
            Way::Sasl(gate) => gate.set_password(password),
            _ => panic!("a broker with a login"),
        }
    }

    /// The brokers' list for a client.
    pub fn brokers(&self) -> String {
        format!("127.0.0.1:{}", self.way.port().unwrap_or(self.port))
    }

    /// The way that clients take to it.
    ///
    /// # Panics
    /// If it was started without one.
    pub fn gate(&mut self) -> &mut Gate {
        match &mut self.way {
            Way::Gate(gate) => gate,
            Way::Straight | Way::Tls(_) | Way::Sasl(_) => panic!("a broker with a gate"),
        }
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
        read_all(&self.consumer(), topic)
    }

    /// Hands over every message of a topic as it arrives, until `done` says so.
    pub fn follow(&self, topic: &str, mut done: impl FnMut(Option<&BorrowedMessage>) -> bool) {
        let consumer = self.consumer();
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

    fn consumer(&self) -> BaseConsumer<Quiet> {
        let mut config = consumer_of(&self.brokers());
        match &self.way {
            Way::Straight | Way::Gate(_) => {}
            Way::Tls(_) => {
                // Whom the sink trusts is the question, not whom we do.
                config.set("security.protocol", "ssl");
                config.set("enable.ssl.certificate.verification", "false");
            }
            Way::Sasl(gate) => {
                config.set("security.protocol", "sasl_plaintext");
                config.set("sasl.mechanism", "PLAIN");
                config.set("sasl.username", gate.user());
                config.set("sasl.password", gate.password());
            }
        }
        made(&config)
    }
}

impl Way {
    fn port(&self) -> Option<u16> {
        match self {
            Way::Straight => None,
            Way::Gate(gate) => Some(gate.port()),
            Way::Tls(gate) => Some(gate.port()),
            Way::Sasl(gate) => Some(gate.port()),
        }
    }
}

fn run(port: u16, way: &Way, folder: &Path, options: &[&str], bucket: Option<&Bucket>) -> Child {
    let advertised = way.port().unwrap_or(port);
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("log"))
        .expect("the broker's folder can be written");
    let storage = match bucket {
        Some(_) => format!("s3://{}/", Bucket::NAME),
        None => "memory://tansu/".to_owned(),
    };
    let mut command = broker_program("tansu");
    command.args(["broker", "--storage-engine", &storage]);
    command.args(["--listener-url", &format!("tcp://127.0.0.1:{port}")]);
    // Clients go where the broker says it is.
    command.args([
        "--advertised-listener-url",
        &format!("tcp://127.0.0.1:{advertised}"),
    ]);
    command.args(options).current_dir(folder);
    command.envs(bucket.into_iter().flat_map(Bucket::environment));
    command.stdout(Stdio::null()).stderr(log);
    spawn(command).expect("setpriv runs")
}

/// Everything that a topic of these brokers holds, partition by partition, in order.
#[track_caller]
pub fn records(brokers: &str, topic: &str) -> Vec<Record> {
    read_all(&made(&consumer_of(brokers)), topic)
}

#[track_caller]
fn read_all(consumer: &BaseConsumer<Quiet>, topic: &str) -> Vec<Record> {
    let partitions = assign_all(consumer, topic);
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

fn consumer_of(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("group.id", "tests")
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .set("fetch.wait.max.ms", "10");
    config
}

fn made(config: &ClientConfig) -> BaseConsumer<Quiet> {
    config
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
        self.kill();
        remove_folder(&self.folder);
    }
}
