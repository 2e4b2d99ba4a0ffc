//! A receiver for tests: a thread that listens on a free port and does to each request what the test says.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A request as it came.
#[derive(Clone, Debug, Default)]
pub(super) struct Received {
    pub(super) line: String,
    /// Names in lower case, in the order of the wire.
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

/// What to do to a request.
pub(super) enum Reply {
    /// An answer with this status, these header lines and this body; the connection is kept.
    Answer(u16, &'static str, Vec<u8>),
    /// These bytes, and then the connection is closed.
    Raw(Vec<u8>),
    /// These bytes, and then silence until the other side hangs up.
    Hang(Vec<u8>),
    /// The first, and the second over and over until the other side hangs up.
    Flood(Vec<u8>, Vec<u8>),
    /// The connection is torn down.
    Reset,
}

impl Reply {
    pub(super) fn ok() -> Self {
        Self::status(200)
    }

    pub(super) fn status(status: u16) -> Self {
        Self::Answer(status, "", Vec::new())
    }
}

pub(super) struct Receiver {
    address: SocketAddr,
    scheme: &'static str,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    script: Box<dyn Fn(&Received) -> Reply + Send + Sync>,
    received: Mutex<Vec<Received>>,
    connections: AtomicUsize,
    closing: AtomicBool,
    tls: Option<Arc<rustls::ServerConfig>>,
}

impl Receiver {
    pub(super) fn start(script: impl Fn(&Received) -> Reply + Send + Sync + 'static) -> Self {
        Self::listen("http", None, script)
    }

    /// With one of the certificates of `testdata`.
    pub(super) fn start_tls(
        certificate: &str,
        script: impl Fn(&Received) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let key = PrivateKeyDer::from_pem_slice(include_bytes!("testdata/server.key")).unwrap();
        let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        Self::listen("https", Some(Arc::new(config)), script)
    }

    fn listen(
        scheme: &'static str,
        tls: Option<Arc<rustls::ServerConfig>>,
        script: impl Fn(&Received) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            script: Box::new(script),
            received: Mutex::default(),
            connections: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            tls,
        });
        let acceptor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                for stream in listener.incoming() {
                    if shared.closing.load(Ordering::SeqCst) {
                        return;
                    }
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || shared.serve(stream.unwrap()));
                }
            }
        });
        Self {
            address,
            scheme,
            shared,
            acceptor: Some(acceptor),
        }
    }

    pub(super) fn url(&self) -> String {
        format!("{}://{}/hook", self.scheme, self.address)
    }

    pub(super) fn origin(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    pub(super) fn received(&self) -> Vec<Received> {
        self.shared.received.lock().unwrap().clone()
    }

    pub(super) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

impl Shared {
    fn serve(&self, stream: TcpStream) {
        self.connections.fetch_add(1, Ordering::SeqCst);
        stream.set_nodelay(true).unwrap();
        let raw = stream.try_clone().unwrap();
        let stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(stream),
            Some(config) => {
                let session = rustls::ServerConnection::new(Arc::clone(config)).unwrap();
                Box::new(rustls::StreamOwned::new(session, stream))
            }
        };
        let mut stream = BufReader::new(stream);
        while let Some(request) = request(&mut stream) {
            self.received.lock().unwrap().push(request.clone());
            let stream = stream.get_mut();
            let sent = match (self.script)(&request) {
                Reply::Answer(status, headers, body) => {
                    let head = format!(
                        "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n",
                        body.len()
                    );
                    let sent = stream.write_all(&[head.as_bytes(), &body].concat());
                    if sent.is_ok() {
                        continue;
                    }
                    sent
                }
                Reply::Raw(bytes) => stream.write_all(&bytes),
                Reply::Hang(bytes) => {
                    let sent = stream.write_all(&bytes);
                    let _ = std::io::copy(stream, &mut std::io::sink());
                    sent
                }
                Reply::Flood(mut bytes, more) => loop {
                    if let Err(error) = stream.write_all(&bytes) {
                        break Err(error);
                    }
                    bytes.clone_from(&more);
                },
                Reply::Reset => {
                    // Closing with a linger of zero resets the connection instead of ending it.
                    reset_on_close(&raw);
                    Ok(())
                }
            };
            if let Err(error) = sent {
                let hung_up = matches!(
                    error.kind(),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                );
                assert!(hung_up, "{error}");
            }
            return;
        }
    }
}

fn reset_on_close(stream: &TcpStream) {
    // The standard library has no stable way to set it; tokio's sockets do.
    let stream = stream.try_clone().unwrap();
    stream.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let stream = tokio::net::TcpStream::from_std(stream).unwrap();
    stream.set_zero_linger().unwrap();
}

/// The next request, or none when the other side has hung up.
fn request(stream: &mut impl BufRead) -> Option<Received> {
    let mut request = Received::default();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        match line.split_once(": ") {
            Some((name, value)) => {
                request
                    .headers
                    .push((name.to_ascii_lowercase(), value.to_owned()));
            }
            None => request.line = line.to_owned(),
        }
    }
    // A request without a body says nothing of its length.
    let length = request.header("content-length").unwrap_or("0");
    let length = length.parse().ok()?;
    request.body.resize(length, 0);
    stream.read_exact(&mut request.body).ok()?;
    Some(request)
}

impl Received {
    pub(super) fn all(&self, name: &str) -> Vec<&str> {
        self.headers
            .iter()
            .filter(|(header, _)| header == name)
            .map(|(_, value)| value.as_str())
            .collect()
    }

    /// The value of a header that is there exactly once.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        match self.all(name)[..] {
            [value] => Some(value),
            _ => None,
        }
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The ids of the events in it, be it one or many.
    pub(super) fn ids(&self) -> Vec<String> {
        let body = self.json();
        let events = body.as_array().cloned().unwrap_or_else(|| vec![body]);
        events
            .iter()
            .map(|event| event["id"].as_str().unwrap().to_owned())
            .collect()
    }
}
