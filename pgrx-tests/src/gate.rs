//! A way to a server that can be closed and opened again without the server's knowing: connections are cut and refused, or
//! nothing passes through them.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::ports;

/// A port on 127.0.0.1 behind which there is another.
pub struct Gate {
    address: SocketAddr,
    to: SocketAddr,
    shared: Arc<Shared>,
    listening: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stopping: bool,
    stuck: bool,
    /// Both ends of every connection that was made, so that they can be cut.
    connections: Vec<TcpStream>,
}

impl Gate {
    /// Opens a way to that port; nobody need listen there yet.
    pub fn to(port: u16) -> Self {
        let listener = ports::listen();
        let mut gate = Self {
            address: listener
                .local_addr()
                .expect("a bound listener has an address"),
            to: (Ipv4Addr::LOCALHOST, port).into(),
            shared: Arc::default(),
            listening: None,
        };
        gate.listen(listener);
        gate
    }

    /// The port to connect to. It stays the same.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Cuts every connection and refuses new ones.
    pub fn close(&mut self) {
        let Some(listening) = self.listening.take() else {
            return;
        };
        self.shared.state().stopping = true;
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(self.address);
        let _ = listening.join();
        self.cut();
    }

    /// Cuts every connection; new ones are let through.
    pub fn cut(&self) {
        for connection in self.shared.state().connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Lets connections through again.
    ///
    /// # Panics
    /// If it is not closed.
    pub fn open(&mut self) {
        let listener = TcpListener::bind(self.address).expect("the gate's port is still free");
        self.listen(listener);
    }

    /// From now on connections are made, but nothing passes through them; or passes again.
    pub fn stick(&self, stuck: bool) {
        self.shared.state().stuck = stuck;
        self.shared.changed.notify_all();
    }

    fn listen(&mut self, listener: TcpListener) {
        self.shared.state().stopping = false;
        let (shared, to) = (Arc::clone(&self.shared), self.to);
        let listening = std::thread::Builder::new()
            .name("gate".into())
            .spawn(move || shared.accept_all(&listener, to));
        self.listening = Some(listening.expect("a thread starts"));
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stick(false);
        self.close();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_all(self: &Arc<Self>, listener: &TcpListener, to: SocketAddr) {
        for near in listener.incoming() {
            if self.state().stopping {
                return;
            }
            // Without a server behind it, the connection is closed as soon as it is made.
            let Some((near, far)) = near.ok().zip(TcpStream::connect(to).ok()) else {
                continue;
            };
            let copy = |stream: &TcpStream| stream.try_clone().expect("a socket can be shared");
            self.state().connections.extend([copy(&near), copy(&far)]);
            for (from, to) in [(copy(&near), copy(&far)), (far, near)] {
                let shared = Arc::clone(self);
                std::thread::spawn(move || {
                    let _ = shared.pass(&from, &to);
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    }

    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let length = io::Read::read(&mut from, &mut bytes)?;
            if length == 0 {
                return Ok(());
            }
            let stuck = self.state();
            drop(self.changed.wait_while(stuck, |state| state.stuck));
            io::Write::write_all(&mut to, &bytes[..length])?;
        }
    }
}
