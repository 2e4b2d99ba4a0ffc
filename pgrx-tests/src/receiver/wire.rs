//! HTTP/1.1 on one connection, byte by byte: a test's server must be able to break the rules, which a server library is
//! there to prevent.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::SockRef;

use super::Request;
use super::reply::{Answer, Reply, Way};

const MAX_HEADERS: usize = 100;

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ServerConnection, TcpStream>>),
}

/// One client's connection.
pub(super) struct Connection {
    number: u64,
    stream: BufReader<Stream>,
}

impl Connection {
    pub(super) fn new(number: u64, tcp: TcpStream, tls: Option<&Arc<ServerConfig>>) -> Self {
        let _ = tcp.set_nodelay(true);
        let stream = match tls {
            None => Stream::Plain(tcp),
            Some(config) => {
                let server = ServerConnection::new(Arc::clone(config)).expect("a valid config");
                Stream::Tls(Box::new(StreamOwned::new(server, tcp)))
            }
        };
        Self {
            number,
            stream: BufReader::with_capacity(64 * 1024, stream),
        }
    }

    /// The next request, or nothing when the client has closed the connection.
    pub(super) fn read(&mut self) -> io::Result<Option<Request>> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if self.stream.read_until(b'\n', &mut head)? == 0 {
                return if head.is_empty() {
                    Ok(None)
                } else {
                    Err(invalid("a head cut short"))
                };
            }
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        parsed.parse(&head).map_err(invalid)?;
        let headers: Vec<_> = parsed
            .headers
            .iter()
            .map(|header| {
                let value = String::from_utf8_lossy(header.value).into_owned();
                (header.name.to_ascii_lowercase(), value)
            })
            .collect();
        let mut request = Request {
            method: parsed.method.unwrap_or_default().to_owned(),
            path: parsed.path.unwrap_or_default().to_owned(),
            headers,
            body: Vec::new(),
            at: SystemTime::UNIX_EPOCH,
            connection: self.number,
            http2: false,
        };
        request.body = self.read_body(&request)?;
        request.at = SystemTime::now();
        Ok(Some(request))
    }

    fn read_body(&mut self, request: &Request) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        if request.header("transfer-encoding") == Some("chunked") {
            loop {
                let mut line = String::new();
                self.stream.read_line(&mut line)?;
                let size = line.trim().split(';').next().unwrap_or_default();
                let size = u64::from_str_radix(size, 16).map_err(invalid)?;
                self.read_exactly(size, &mut body)?;
                self.stream.read_line(&mut line)?;
                if size == 0 {
                    return Ok(body);
                }
            }
        }
        if let Some(length) = request.header("content-length") {
            self.read_exactly(length.parse().map_err(invalid)?, &mut body)?;
        }
        Ok(body)
    }

    fn read_exactly(&mut self, bytes: u64, body: &mut Vec<u8>) -> io::Result<()> {
        let read = (&mut self.stream).take(bytes).read_to_end(body)?;
        if read as u64 == bytes {
            Ok(())
        } else {
            Err(invalid("a body cut short"))
        }
    }

    /// Carries out a reply. False when the connection is of no further use.
    pub(super) fn reply(&mut self, reply: &Reply) -> io::Result<bool> {
        match &reply.way {
            Way::Answer(answer) => self.write(&answer.bytes())?,
            Way::Trickle(answer, pause) => self.trickle(&answer.bytes(), *pause)?,
            Way::HugeBody(bytes) => self.write_huge_body(*bytes)?,
            Way::Raw(bytes) => {
                self.write(bytes)?;
                return Ok(false);
            }
            Way::Hang => {
                // Until the other side, or the receiver, closes the connection.
                io::copy(&mut self.stream, &mut io::sink())?;
                return Ok(false);
            }
            Way::Reset => {
                SockRef::from(self.tcp()).set_linger(Some(Duration::ZERO))?;
                return Ok(false);
            }
            Way::Close => {
                self.tcp().shutdown(Shutdown::Both)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let stream = self.stream.get_mut();
        stream.write_all(bytes)?;
        stream.flush()
    }

    fn trickle(&mut self, bytes: &[u8], pause: Duration) -> io::Result<()> {
        for byte in bytes {
            std::thread::sleep(pause);
            self.write(&[*byte])?;
        }
        Ok(())
    }

    fn write_huge_body(&mut self, bytes: u64) -> io::Result<()> {
        self.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n").as_bytes())?;
        io::copy(&mut io::repeat(b'x').take(bytes), self.stream.get_mut())?;
        Ok(())
    }

    fn tcp(&self) -> &TcpStream {
        match self.stream.get_ref() {
            Stream::Plain(tcp) => tcp,
            Stream::Tls(tls) => tls.get_ref(),
        }
    }
}

impl Answer {
    fn bytes(&self) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} Status\r\n", self.status);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", self.body.len());
        [head.as_bytes(), &self.body].concat()
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.read(buffer),
            Self::Tls(tls) => tls.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.write(bytes),
            Self::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(tcp) => tcp.flush(),
            Self::Tls(tls) => tls.flush(),
        }
    }
}

fn invalid(error: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}
