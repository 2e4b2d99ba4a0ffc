//! An HTTP endpoint for events that remembers what came, and answers as the test says, also against the rules.
//!
//! A thread for each connection, so that what a test lets an answer wait for may simply block.

mod event;
mod http2;
mod reply;
mod request;
mod tls;
mod wire;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use memchr::memmem::Finder;
use rustls::ServerConfig;

pub use event::Event;
pub use reply::Reply;
pub use request::Request;
pub(crate) use tls::server_config;
pub use tls::{Certificate, Tls};

use crate::testbed::{new_folder, remove_folder};
use crate::{DEADLINE, ports};
use wire::Connection;

type Script = Arc<dyn Fn(&Request) -> Reply + Send + Sync>;

/// What an endpoint has seen, and how it goes on.
struct State {
    script: Script,
    /// Answers that come before the script's.
    next: VecDeque<Reply>,
    requests: Vec<Arc<Request>>,
    events: Vec<Event>,
    /// Accepted events, also when they are not kept.
    count: u64,
    /// Why what was accepted could not be read.
    unreadable: Option<String>,
    /// Live connections, so that stopping can cut them.
    connections: HashMap<u64, TcpStream>,
    accepted_connections: u64,
    stopping: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    tls: Option<Arc<ServerConfig>>,
    /// Speaks HTTP/2, and nothing else.
    http2: bool,
    /// Only counts events.
    counting: bool,
}

/// An endpoint to be.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    tls: Option<Tls>,
    http2: bool,
    counting: bool,
}

impl Builder {
    /// Speaks TLS with that certificate.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Speaks HTTP/2, over TLS with a good certificate.
    pub fn http2(mut self) -> Self {
        self.tls = Some(Tls::Good);
        self.http2 = true;
        self
    }

    /// Keeps neither requests nor events, only [`count`](Receiver::count): for benches.
    pub fn counting(mut self) -> Self {
        self.counting = true;
        self
    }

    /// Starts it on a free port.
    pub fn start(self) -> Receiver {
        let (mut tls, ca) = self.tls.map(server_config).unzip();
        if let Some(tls) = tls.as_mut().filter(|_| self.http2) {
            Arc::make_mut(tls).alpn_protocols = http2::offered();
        }
        let listener = ports::listen();
        let state = State {
            script: Arc::new(|_| Reply::ok()),
            next: VecDeque::new(),
            requests: Vec::new(),
            events: Vec::new(),
            count: 0,
            unreadable: None,
            connections: HashMap::new(),
            accepted_connections: 0,
            stopping: false,
        };
        let ca_file = ca.map(|pem| {
            let file = new_folder("receiver").join("ca.pem");
            std::fs::write(&file, pem).expect("the receiver's folder can be written");
            file
        });
        let receiver = Receiver {
            address: listener
                .local_addr()
                .expect("a bound listener has an address"),
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                changed: Condvar::new(),
                tls,
                http2: self.http2,
                counting: self.counting,
            }),
            ca_file,
            listening: Mutex::new(None),
        };
        receiver.listen(listener);
        receiver
    }
}

/// A running, or stopped, HTTP endpoint on 127.0.0.1.
pub struct Receiver {
    address: SocketAddr,
    shared: Arc<Shared>,
    ca_file: Option<PathBuf>,
    /// The thread that accepts connections, while there is one.
    listening: Mutex<Option<JoinHandle<()>>>,
}

impl Receiver {
    /// An endpoint that answers 200 to everything.
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// An endpoint with TLS, or one that only counts.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Its address; it stays the same when it is stopped and started again.
    pub fn url(&self) -> String {
        let scheme = if self.shared.tls.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}/events", self.address)
    }

    /// The certificate of the authority that signed its own, in a file that the server can read.
    ///
    /// # Panics
    /// If it does not speak TLS.
    pub fn ca_file(&self) -> &Path {
        self.ca_file.as_deref().expect("a receiver with TLS")
    }

    /// From now on, answers what this says. It may block, and holds back only the connection that it answers.
    pub fn reply_with(&self, script: impl Fn(&Request) -> Reply + Send + Sync + 'static) {
        self.state().script = Arc::new(script);
    }

    /// From now on, answers this to everything.
    pub fn reply_always(&self, reply: Reply) {
        self.reply_with(move |_| reply.clone());
    }

    /// Answers these to the next requests, in that order, and then as before.
    pub fn reply_next(&self, replies: impl IntoIterator<Item = Reply>) {
        self.state().next.extend(replies);
    }

    /// Stops listening and cuts every connection: from now on, connecting is refused. What it saw is kept.
    pub fn stop(&self) {
        let Some(listening) = self.listening().take() else {
            return;
        };
        self.state().stopping = true;
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(self.address);
        let _ = listening.join();
        for (_, connection) in self.state().connections.drain() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Listens again, on the same port.
    ///
    /// # Panics
    /// If it listens already.
    pub fn start_again(&self) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, self.address.port()));
        self.listen(listener.expect("the receiver's port is still free"));
    }

    /// Every request that was read to its end, in order of arrival, accepted or not.
    pub fn requests(&self) -> Vec<Arc<Request>> {
        self.state().requests.clone()
    }

    /// The events of all requests that were answered with success, less those that the answer named as failed, in the
    /// order in which they were accepted. A redelivered event is there again.
    ///
    /// # Panics
    /// If something was accepted that is no CloudEvents JSON.
    #[track_caller]
    pub fn events(&self) -> Vec<Event> {
        readable(&self.state()).clone()
    }

    /// The same, without redeliveries: each event where it was first.
    #[track_caller]
    pub fn first_arrivals(&self) -> Vec<Event> {
        let mut seen = HashSet::new();
        let mut events = self.events();
        events.retain(|event| seen.insert(event.id.clone()));
        events
    }

    /// The ids of [`events`](Self::events).
    #[track_caller]
    pub fn ids(&self) -> Vec<String> {
        let state = self.state();
        readable(&state)
            .iter()
            .map(|event| event.id.clone())
            .collect()
    }

    /// How many events were accepted, redeliveries among them.
    pub fn count(&self) -> u64 {
        self.state().count
    }

    /// How many connections were made.
    pub fn connections(&self) -> u64 {
        self.state().accepted_connections
    }

    /// Forgets what it saw. Connections and answers stay.
    pub fn clear(&self) {
        let mut state = self.state();
        state.requests.clear();
        state.events.clear();
        state.count = 0;
    }

    /// Waits until that many events were accepted, redeliveries among them, and returns them all.
    #[track_caller]
    pub fn wait_for(&self, events: usize) -> Vec<Event> {
        let state = self.wait(&format!("{events} events"), |state| {
            state.unreadable.is_some() || state.count >= events as u64
        });
        readable(&state).clone()
    }

    /// Waits until that many different events were accepted, and returns each where it was first.
    #[track_caller]
    pub fn wait_for_distinct(&self, events: usize) -> Vec<Event> {
        let (mut seen, mut read) = (HashSet::new(), 0);
        drop(self.wait(&format!("{events} different events"), |state| {
            seen.extend(state.events[read..].iter().map(|event| event.id.clone()));
            read = state.events.len();
            state.unreadable.is_some() || seen.len() >= events
        }));
        self.first_arrivals()
    }

    /// Waits until that many requests were read to their end, accepted or not, and returns them all.
    #[track_caller]
    pub fn wait_for_requests(&self, requests: usize) -> Vec<Arc<Request>> {
        self.wait(&format!("{requests} requests"), |state| {
            state.requests.len() >= requests
        })
        .requests
        .clone()
    }

    #[track_caller]
    fn wait(&self, what: &str, mut done: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        let end = Instant::now() + DEADLINE;
        let mut state = self.state();
        while !done(&state) {
            let left = end.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "waited {DEADLINE:?} for {what}; got {} events in {} requests",
                state.count,
                state.requests.len()
            );
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    fn listening(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.listening
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, listener: TcpListener) {
        self.state().stopping = false;
        let shared = Arc::clone(&self.shared);
        let listening = std::thread::Builder::new()
            .name("receiver".into())
            .spawn(move || shared.accept_all(&listener));
        *self.listening() = Some(listening.expect("a thread starts"));
    }
}

#[track_caller]
fn readable(state: &State) -> &Vec<Event> {
    if let Some(reason) = &state.unreadable {
        panic!("the receiver accepted what is no CloudEvents: {reason}");
    }
    &state.events
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Receiver").field(&self.url()).finish()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop();
        if let Some(folder) = self.ca_file.as_deref().and_then(Path::parent) {
            remove_folder(folder);
        }
    }
}

impl Shared {
    /// A test that fails in its script, or while it holds the state, does not take the receiver with it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        for tcp in listener.incoming() {
            let Ok(tcp) = tcp else { continue };
            let mut state = self.state();
            if state.stopping {
                return;
            }
            let number = state.accepted_connections;
            state.accepted_connections += 1;
            let copy = tcp.try_clone().expect("a socket can be shared");
            state.connections.insert(number, copy);
            drop(state);
            let shared = Arc::clone(self);
            let serving = std::thread::Builder::new()
                .name(format!("receiver {number}"))
                .spawn(move || shared.serve(number, tcp));
            drop(serving.expect("a thread starts"));
        }
    }

    fn serve(self: Arc<Self>, number: u64, tcp: TcpStream) {
        if let Some(tls) = self.tls.as_ref().filter(|_| self.http2) {
            let shared = Arc::clone(&self);
            http2::serve(number, tcp, tls, move |request| shared.take(request));
            self.state().connections.remove(&number);
            return;
        }
        let mut connection = Connection::new(number, tcp, self.tls.as_ref());
        while let Ok(Some(request)) = connection.read() {
            let reply = self.take(request);
            if !matches!(connection.reply(&reply), Ok(true)) {
                break;
            }
        }
        // First the copy, then the connection: a reset goes out only when the last of the two is closed.
        self.state().connections.remove(&number);
    }

    /// Remembers a request and decides on the answer.
    fn take(&self, request: Request) -> Reply {
        let request = Arc::new(request);
        let mut state = self.state();
        if !self.counting {
            state.requests.push(Arc::clone(&request));
            self.changed.notify_all();
        }
        let reply = match state.next.pop_front() {
            Some(reply) => reply,
            None => {
                let script = Arc::clone(&state.script);
                drop(state);
                let reply = script(&request);
                state = self.state();
                reply
            }
        };
        if reply.accepts() && request.method != "GET" {
            if self.counting {
                drop(state);
                let events = count_events(&request.body);
                state = self.state();
                state.count += events;
            } else {
                accept(&mut state, &request, &reply);
            }
            self.changed.notify_all();
        }
        reply
    }
}

fn accept(state: &mut State, request: &Request, reply: &Reply) {
    let content_type = request.header("content-type").unwrap_or_default();
    match Event::parse(content_type, &request.body) {
        Ok(mut events) => {
            let failed = reply.failed_ids();
            events.retain(|event| !failed.contains(&event.id));
            state.count += events.len() as u64;
            state.events.extend(events);
        }
        Err(reason) => {
            state.unreadable.get_or_insert(reason);
        }
    }
}

/// How many events a body holds, without parsing it: a bench's payloads do not hold the name that is counted.
fn count_events(body: &[u8]) -> u64 {
    Finder::new(b"\"specversion\"").find_iter(body).count() as u64
}
