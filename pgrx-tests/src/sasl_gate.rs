//! A way to a broker that lets in only who logs in, by SASL/PLAIN as clients of Kafka do it. The broker behind it knows nothing of
//! that.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::ports;

/// Kafka's numbers of requests, and of what may be wrong with them.
const SASL_HANDSHAKE: i16 = 17;
const API_VERSIONS: i16 = 18;
const SASL_AUTHENTICATE: i16 = 36;
const UNSUPPORTED_SASL_MECHANISM: i16 = 33;
const SASL_AUTHENTICATION_FAILED: i16 = 58;

const MECHANISM: &[u8] = b"PLAIN";
/// Larger than anything that is sent before the login.
const LARGEST: usize = 1024 * 1024;

/// A port on 127.0.0.1 behind which there is another, for those who know the user and the password.
pub(crate) struct SaslGate {
    address: SocketAddr,
    shared: Arc<Shared>,
    listening: Option<JoinHandle<()>>,
}

struct Shared {
    to: SocketAddr,
    user: String,
    state: Mutex<State>,
}

struct State {
    password: String,
    stopping: bool,
    /// Both ends of every connection that was made, so that they can be cut.
    connections: Vec<TcpStream>,
}

impl SaslGate {
    pub(crate) fn to(port: u16, user: &str, password: &str) -> Self {
        let listener = ports::listen();
        let shared = Arc::new(Shared {
            to: (Ipv4Addr::LOCALHOST, port).into(),
            user: user.to_owned(),
            state: Mutex::new(State {
                password: password.to_owned(),
                stopping: false,
                connections: Vec::new(),
            }),
        });
        let address = listener
            .local_addr()
            .expect("a bound listener has an address");
        let listening = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept_all(&listener)
        });
        Self {
            address,
            shared,
            listening: Some(listening),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(crate) fn user(&self) -> &str {
        &self.shared.user
    }

    pub(crate) fn password(&self) -> String {
        self.shared.state().password.clone()
    }

    /// From now on this is the password. Whoever is in has to log in again.
    pub(crate) fn set_password(&self, password: &str) {
        self.shared.state().password = password.to_owned();
        self.cut();
    }

    fn cut(&self) {
        for connection in self.shared.state().connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for SaslGate {
    fn drop(&mut self) {
        self.shared.state().stopping = true;
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(self.address);
        if let Some(listening) = self.listening.take() {
            let _ = listening.join();
        }
        self.cut();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        for near in listener.incoming() {
            if self.state().stopping {
                return;
            }
            // Without a server behind it, the connection is closed as soon as it is made.
            let Some((near, far)) = near.ok().zip(TcpStream::connect(self.to).ok()) else {
                continue;
            };
            self.state().connections.extend([copy(&near), copy(&far)]);
            let shared = Arc::clone(self);
            std::thread::spawn(move || shared.serve(&near, &far));
        }
    }

    fn serve(&self, near: &TcpStream, far: &TcpStream) {
        if self.log_in(near, far).is_ok() {
            let back = (copy(far), copy(near));
            std::thread::spawn(move || pass(&back.0, &back.1));
            pass(near, far);
        }
        let _ = near.shutdown(Shutdown::Both);
        let _ = far.shutdown(Shutdown::Both);
    }

    /// Answers requests until one of them is a login that is right. Which versions there are, the broker says itself.
    fn log_in(&self, mut near: &TcpStream, mut far: &TcpStream) -> io::Result<()> {
        loop {
            let request = read(&mut near)?;
            let (api, version, correlation, mut body) = parsed(&request)?;
            let mut answer = correlation.to_vec();
            match api {
                API_VERSIONS => {
                    write(&mut far, &request)?;
                    write(&mut near, &read(&mut far)?)?;
                }
                SASL_HANDSHAKE => {
                    let length = number_16(&mut body)?;
                    let known = take(&mut body, length as usize)? == MECHANISM;
                    let error = if known { 0 } else { UNSUPPORTED_SASL_MECHANISM };
                    answer.extend(error.to_be_bytes());
                    answer.extend(1_i32.to_be_bytes());
                    answer.extend((MECHANISM.len() as i16).to_be_bytes());
                    answer.extend(MECHANISM);
                    write(&mut near, &answer)?;
                }
                SASL_AUTHENTICATE => {
                    let length = number_32(&mut body)?;
                    let login = take(&mut body, length as usize)?;
                    let right = format!("\0{}\0{}", self.user, self.state().password);
                    let right = login == right.as_bytes();
                    let error = if right { 0 } else { SASL_AUTHENTICATION_FAILED };
                    answer.extend(error.to_be_bytes());
                    // No message, and no bytes.
                    answer.extend((-1_i16).to_be_bytes());
                    answer.extend(0_i32.to_be_bytes());
                    if version >= 1 {
                        // The login lasts.
                        answer.extend(0_i64.to_be_bytes());
                    }
                    write(&mut near, &answer)?;
                    return if right { Ok(()) } else { Err(unexpected()) };
                }
                _ => return Err(unexpected()),
            }
        }
    }
}

fn copy(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a socket can be shared")
}

fn pass(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// A request's number and version, the bytes that its answer begins with, and what it asks.
fn parsed(request: &[u8]) -> io::Result<(i16, i16, [u8; 4], &[u8])> {
    let mut rest = request;
    let api = number_16(&mut rest)?;
    let version = number_16(&mut rest)?;
    let correlation = number_32(&mut rest)?.to_be_bytes();
    let client = number_16(&mut rest)?;
    take(&mut rest, usize::try_from(client).unwrap_or(0))?;
    Ok((api, version, correlation, rest))
}

fn number_16(bytes: &mut &[u8]) -> io::Result<i16> {
    let number = take(bytes, 2)?.try_into().expect("two bytes");
    Ok(i16::from_be_bytes(number))
}

fn number_32(bytes: &mut &[u8]) -> io::Result<i32> {
    let number = take(bytes, 4)?.try_into().expect("four bytes");
    Ok(i32::from_be_bytes(number))
}

fn take<'b>(bytes: &mut &'b [u8], length: usize) -> io::Result<&'b [u8]> {
    let (taken, rest) = bytes.split_at_checked(length).ok_or_else(unexpected)?;
    *bytes = rest;
    Ok(taken)
}

/// What comes as one message, without its length.
fn read(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > LARGEST {
        return Err(unexpected());
    }
    let mut message = vec![0; length];
    from.read_exact(&mut message)?;
    Ok(message)
}

fn write(to: &mut impl Write, message: &[u8]) -> io::Result<()> {
    let length = (message.len() as u32).to_be_bytes();
    to.write_all(&[&length, message].concat())
}

fn unexpected() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidData)
}
