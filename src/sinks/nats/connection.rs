//! One connection to one server, from the greeting to its end. It is never mended: whoever finds it broken makes another.

use std::fmt::Write;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::config::Server;
use super::login::Login;
use super::wire::{Incoming, Info, Said};
use crate::sinks::tls;

/// How long a connection is kept without use: less than servers keep one that does not answer their pings.
const KEPT: Duration = Duration::from_secs(60);
const AT_ONCE: usize = 64 * 1024;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection on which events can be published.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    incoming: Incoming,
    /// The most bytes of a message.
    pub(super) largest: usize,
    /// What every subject for answers begins with.
    pub(super) inbox: String,
    /// The number of the next message, which is the rest of that subject.
    pub(super) next: u64,
    used: Instant,
}

/// Why there is no connection.
pub(super) enum Trouble {
    /// The server does not let this login in; another might do.
    Unauthorized(String),
    Other(String),
}

impl Connection {
    /// Connects and logs in. `required` is whether the server has to speak TLS.
    pub(super) async fn open(
        server: &Server,
        required: bool,
        config: &Arc<ClientConfig>,
        login: &Login,
    ) -> Result<Self, Trouble> {
        let failed =
            |error: io::Error| Trouble::Other(format!("cannot connect to {server}: {error}"));
        let tcp = TcpStream::connect((server.host.as_str(), server.port))
            .await
            .map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        let mut incoming = Incoming::default();
        let mut stream: Box<dyn Stream> = Box::new(tcp);
        let info = greeting(&mut stream, &mut incoming)
            .await
            .map_err(|why| why.at(server))?;
        if !info.headers {
            return Err(Trouble::Other(format!(
                "{server} does not know headers: it is too old, or told not to"
            )));
        }
        let encrypted = required || info.tls_required;
        if encrypted {
            stream = encrypt(stream, server, config).await?;
        }
        let mut connection = Self {
            stream,
            incoming,
            largest: info.max_payload,
            inbox: inbox(),
            next: 0,
            used: Instant::now(),
        };
        let hello = connection
            .hello(&info, encrypted, login)
            .map_err(|why| Trouble::Other(why.to_owned()))?;
        connection
            .enter(hello.as_bytes())
            .await
            .map_err(|why| why.at(server))?;
        Ok(connection)
    }

    /// What the client says first, with a question whose answer shows that it was let in.
    fn hello(&self, info: &Info, encrypted: bool, login: &Login) -> Result<String, &'static str> {
        let mut connect: Map<String, Value> = Map::new();
        let said = json!({
            "verbose": false, "pedantic": false, "echo": false, "headers": true, "no_responders": true, "protocol": 1,
            "name": "pg_outbox", "lang": "rust", "version": env!("CARGO_PKG_VERSION"), "tls_required": encrypted,
        });
        if let Value::Object(said) = said {
            connect.extend(said);
        }
        login.add_to(&mut connect, info.nonce.as_deref())?;
        let connect = Value::Object(connect);
        Ok(format!(
            "CONNECT {connect}\r\nSUB {}.* 1\r\nPING\r\n",
            self.inbox
        ))
    }

    async fn enter(&mut self, hello: &[u8]) -> Result<(), Why> {
        self.write(hello).await.map_err(Why::Lost)?;
        loop {
            match self.incoming.next().map_err(Why::Nonsense)? {
                Some(Said::Pong) => return Ok(()),
                Some(Said::Error(text)) => {
                    return Err(Why::Refused(String::from_utf8_lossy(text).into_owned()));
                }
                // Whoever has logged in may be allowed less than others.
                Some(Said::Info(json)) => {
                    if let Ok(info) = serde_json::from_slice::<Info>(json) {
                        self.largest = info.max_payload;
                    }
                }
                Some(_) => {}
                None => self.read().await.map_err(Why::Lost)?,
            }
        }
    }

    /// Whether it is fit for another delivery, as far as can be seen without asking the server.
    pub(super) async fn is_alive(&mut self) -> bool {
        if self.used.elapsed() > KEPT {
            return false;
        }
        // Everything that has come in meanwhile; at its end there is the end of the connection, or nothing yet.
        loop {
            let mut bytes = [0; 4096];
            let read = poll_fn(|context| {
                let mut buffer = ReadBuf::new(&mut bytes);
                match Pin::new(&mut self.stream).poll_read(context, &mut buffer) {
                    Poll::Pending => Poll::Ready(Ok(None)),
                    Poll::Ready(result) => {
                        Poll::Ready(result.map(|()| Some(buffer.filled().len())))
                    }
                }
            });
            match read.await {
                Ok(None) => break,
                Ok(Some(0)) | Err(_) => return false,
                Ok(Some(length)) => self.incoming.space().extend_from_slice(&bytes[..length]),
            }
        }
        let mut pings = 0;
        loop {
            match self.incoming.next() {
                Ok(Some(Said::Ping)) => pings += 1,
                Ok(Some(Said::Error(_))) | Err(_) => return false,
                Ok(Some(_)) => {}
                Ok(None) => break,
            }
        }
        pings == 0 || self.write(&b"PONG\r\n".repeat(pings)).await.is_ok()
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// Waits for more to come in.
    pub(super) async fn read(&mut self) -> io::Result<()> {
        self.used = Instant::now();
        read(&mut self.stream, &mut self.incoming).await
    }

    /// The next thing that the server has said.
    pub(super) fn said(&mut self) -> Result<Option<Said<'_>>, &'static str> {
        self.incoming.next()
    }
}

/// What went wrong, before it is said with whom.
enum Why {
    Lost(io::Error),
    Nonsense(&'static str),
    Refused(String),
}

impl Why {
    fn at(self, server: &Server) -> Trouble {
        match self {
            Why::Lost(error) => {
                Trouble::Other(format!("the connection to {server} was lost: {error}"))
            }
            Why::Nonsense(what) => Trouble::Other(format!("cannot use {server}: {what}")),
            Why::Refused(text) => {
                let said = format!("{server} refuses the connection: {text}");
                let lower = text.to_ascii_lowercase();
                match lower.contains("authorization")
                    || lower.contains("authentication")
                    || lower.contains("expired")
                {
                    true => Trouble::Unauthorized(said),
                    false => Trouble::Other(said),
                }
            }
        }
    }
}

async fn greeting(stream: &mut Box<dyn Stream>, incoming: &mut Incoming) -> Result<Info, Why> {
    loop {
        match incoming.next().map_err(Why::Nonsense)? {
            Some(Said::Info(json)) => {
                return serde_json::from_slice(json)
                    .map_err(|_| Why::Nonsense("its greeting cannot be read"));
            }
            Some(Said::Error(text)) => {
                return Err(Why::Refused(String::from_utf8_lossy(text).into_owned()));
            }
            Some(_) => return Err(Why::Nonsense("it does not greet as NATS servers do")),
            None => read(stream, incoming).await.map_err(Why::Lost)?,
        }
    }
}

async fn read(stream: &mut Box<dyn Stream>, incoming: &mut Incoming) -> io::Result<()> {
    let space = incoming.space();
    space.reserve(AT_ONCE);
    match stream.read_buf(space).await? {
        0 => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the server closed it",
        )),
        _ => Ok(()),
    }
}

async fn encrypt(
    stream: Box<dyn Stream>,
    server: &Server,
    config: &Arc<ClientConfig>,
) -> Result<Box<dyn Stream>, Trouble> {
    let name = ServerName::try_from(server.host.clone()).map_err(|_| {
        Trouble::Other(format!(
            "{server} has no name that a certificate can be for"
        ))
    })?;
    match TlsConnector::from(Arc::clone(config))
        .connect(name, stream)
        .await
    {
        Ok(stream) => Ok(Box::new(stream)),
        Err(error) => {
            let reason = error.get_ref().and_then(|inner| inner.downcast_ref());
            Err(Trouble::Other(match reason {
                Some(reason) => tls::describe(reason, &server.to_string()),
                None => format!("TLS with {server} failed: {error}"),
            }))
        }
    }
}

/// A subject that nobody else gets answers on.
fn inbox() -> String {
    let mut bytes = [0; 12];
    // Without randomness there is still the time; the server keeps accounts apart in any case.
    if SystemRandom::new().fill(&mut bytes).is_err() {
        let now = std::time::UNIX_EPOCH
            .elapsed()
            .unwrap_or_default()
            .as_nanos();
        bytes.copy_from_slice(&now.to_le_bytes()[..12]);
    }
    let mut inbox = "_INBOX.".to_owned();
    for byte in bytes {
        let _ = write!(inbox, "{byte:02x}");
    }
    inbox
}
