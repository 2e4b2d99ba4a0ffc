//! Ports on 127.0.0.1 that nobody else takes while their server is down.
//!
//! They lie below the range that the kernel gives to clients. A port in that range can be taken by any connection while
//! its server is stopped, and a client that retries it can even connect to itself.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

const FIRST: u16 = 10_000;
const COUNT: u16 = 22_000;

static NEXT: AtomicU16 = AtomicU16::new(0);

/// A listener on a free port that this process has not handed out before.
pub(crate) fn listen() -> TcpListener {
    // Processes start at different places, so that two of them seldom try the same port.
    let start = (std::process::id() % u32::from(COUNT)) as u16;
    for _ in 0..COUNT {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let offset = (u32::from(start) * 97 + u32::from(step)) % u32::from(COUNT);
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, FIRST + offset as u16)) {
            return listener;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}

/// A port that was free just now.
pub(crate) fn free() -> u16 {
    listen()
        .local_addr()
        .expect("a bound listener has an address")
        .port()
}
