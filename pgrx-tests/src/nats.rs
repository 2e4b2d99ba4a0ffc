//! A real NATS server with JetStream, and what has arrived in it, read by a client that is not ours.

use std::collections::HashMap;
use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use async_nats::jetstream::{self, stream};
use futures_util::StreamExt;
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::process::{broker_program, send, spawn};
use crate::testbed::{new_folder, remove_folder};
use crate::{DEADLINE, ports, wait};

/// A running, or stopped, server on 127.0.0.1 that dies with the value, or with the process.
pub struct Nats {
    port: u16,
    folder: PathBuf,
    server: Option<Child>,
    runtime: Runtime,
    options: Box<dyn Fn() -> async_nats::ConnectOptions + Send + Sync>,
}

/// What is stored in a stream.
#[derive(Debug, Clone)]
pub struct Stored {
    pub subject: String,
    pub headers: HashMap<String, String>,
    pub payload: Vec<u8>,
}

impl Stored {
    /// The event's id, as JetStream knows it.
    pub fn id(&self) -> &str {
        self.headers.get("Nats-Msg-Id").map_or("", String::as_str)
    }
}

impl Nats {
    /// A server that lets everybody in.
    pub fn start() -> Self {
        Self::start_with("", &[], async_nats::ConnectOptions::new)
    }

    /// A server with more lines in its configuration, in which `{folder}` stands for the folder of these files, by name and
    /// content; and how the tests' own client connects to it.
    pub fn start_with(
        configuration: &str,
        files: &[(&str, &str)],
        options: impl Fn() -> async_nats::ConnectOptions + Send + Sync + 'static,
    ) -> Self {
        let folder = new_folder("nats");
        for (name, content) in files {
            fs::write(folder.join(name), content).expect("the server's folder can be written");
        }
        let mut nats = Self {
            port: ports::free(),
            folder,
            server: None,
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime starts"),
            options: Box::new(options),
        };
        let folder = nats.folder.display().to_string();
        let text = format!(
            "listen: \"127.0.0.1:{}\"\njetstream {{ store_dir: \"{folder}/store\" }}\n{}\n",
            nats.port,
            configuration.replace("{folder}", &folder)
        );
        fs::write(nats.configuration(), text).expect("the server's folder can be written");
        nats.start_again();
        nats
    }

    fn configuration(&self) -> PathBuf {
        self.folder.join("nats.conf")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// What the server logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Starts the server again, on the same port, with what it had stored.
    #[track_caller]
    pub fn start_again(&mut self) {
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(self.folder.join("log"));
        let log = log.expect("the server's log can be written");
        let mut command = broker_program("nats-server");
        command.arg("-c").arg(self.configuration());
        command.stdout(Stdio::null()).stderr(log);
        self.server = Some(spawn(command).expect("setpriv runs"));
        wait::until("the NATS server to be ready", || {
            let server = self.server.as_mut().expect("it was started");
            assert!(
                server
                    .try_wait()
                    .expect("the server is our child")
                    .is_none(),
                "the NATS server did not start: {}",
                fs::read_to_string(self.folder.join("log")).unwrap_or_default()
            );
            std::net::TcpStream::connect(("127.0.0.1", self.port)).ok()
        });
        wait::until("JetStream to be ready", || {
            self.block_on(async { self.try_jetstream().await?.query_account().await.ok() })
        });
    }

    /// Kills the server: what it has acknowledged is on disk, and what was on its way is lost.
    pub fn stop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }

    /// Stops the server in its tracks: connections stay, and nothing is answered.
    pub fn hang(&self) {
        self.signal(Signal::STOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        send(self.server.as_ref().expect("the server runs").id(), signal);
    }

    /// Makes a stream that takes these subjects.
    #[track_caller]
    pub fn create_stream(&self, name: &str, subjects: &[&str]) {
        self.create_stream_with(stream::Config {
            name: name.to_owned(),
            subjects: subjects
                .iter()
                .map(|subject| (*subject).to_owned())
                .collect(),
            ..stream::Config::default()
        });
    }

    #[track_caller]
    pub fn create_stream_with(&self, config: stream::Config) {
        self.block_on(async {
            let created = self.jetstream().await.create_stream(config).await;
            created.unwrap_or_else(|error| panic!("the stream cannot be created: {error}"));
        });
    }

    #[track_caller]
    pub fn delete_stream(&self, name: &str) {
        self.block_on(async {
            let deleted = self.jetstream().await.delete_stream(name).await;
            deleted.unwrap_or_else(|error| panic!("the stream cannot be deleted: {error}"));
        });
    }

    /// How many messages a stream holds.
    #[track_caller]
    pub fn count(&self, stream: &str) -> u64 {
        self.block_on(async {
            let stream = self.jetstream().await.get_stream(stream).await;
            stream
                .expect("the stream exists")
                .cached_info()
                .state
                .messages
        })
    }

    /// Everything that a stream holds, in order.
    #[track_caller]
    pub fn stored(&self, stream: &str) -> Vec<Stored> {
        self.block_on(async {
            let stream = self.jetstream().await.get_stream(stream).await;
            let stream = stream.expect("the stream exists");
            let state = &stream.cached_info().state;
            let mut all = Vec::new();
            for sequence in state.first_sequence..=state.last_sequence {
                let Ok(message) = stream.get_raw_message(sequence).await else {
                    continue;
                };
                let headers = message.headers.iter().map(|(name, values)| {
                    let value = values.first().map_or("", |value| value.as_str());
                    (name.to_string(), value.to_owned())
                });
                all.push(Stored {
                    subject: message.subject.to_string(),
                    headers: headers.collect(),
                    payload: message.payload.to_vec(),
                });
            }
            all
        })
    }

    /// Hands over every message on these subjects as it arrives, until `done` says so; `ready` is called when none can be missed.
    pub fn follow(
        &self,
        subjects: &str,
        ready: &mut dyn FnMut(),
        mut done: impl FnMut(Option<&[u8]>) -> bool,
    ) {
        self.runtime.block_on(async {
            let client = self.client().await;
            let subscribed = client.subscribe(subjects.to_owned()).await;
            let mut messages = subscribed.expect("the subjects are legal");
            client.flush().await.expect("the server answers");
            ready();
            loop {
                let next = tokio::time::timeout(Duration::from_millis(20), messages.next()).await;
                let message = next.ok().flatten();
                if done(message.as_ref().map(|message| message.payload.as_ref())) {
                    return;
                }
            }
        });
    }

    /// A connection of the tests' own client, for what is not here.
    pub async fn client(&self) -> async_nats::Client {
        let connected = (self.options)().connect(self.url()).await;
        connected.unwrap_or_else(|error| panic!("the tests' client cannot connect: {error}"))
    }

    async fn jetstream(&self) -> jetstream::Context {
        jetstream::new(self.client().await)
    }

    async fn try_jetstream(&self) -> Option<jetstream::Context> {
        (self.options)()
            .connect(self.url())
            .await
            .ok()
            .map(jetstream::new)
    }

    /// Runs what the tests' client does to its end.
    #[track_caller]
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let done = self
            .runtime
            .block_on(async { tokio::time::timeout(DEADLINE, work).await });
        done.expect("the NATS server answers")
    }

    /// Where its files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.stop();
        remove_folder(&self.folder);
    }
}
