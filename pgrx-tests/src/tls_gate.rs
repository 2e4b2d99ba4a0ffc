//! A way to a server that does not speak TLS, for clients that do.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustls::ServerConfig;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

use crate::ports;

/// A port on 127.0.0.1 with TLS, behind which there is another without.
pub(crate) struct TlsGate {
    address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
}

impl TlsGate {
    pub(crate) fn to(port: u16, config: Arc<ServerConfig>) -> Self {
        let listener = ports::listen();
        let address = listener
            .local_addr()
            .expect("a bound listener has an address");
        let (end, ended) = oneshot::channel();
        let serving = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime starts");
            runtime.block_on(async {
                let serving =
                    tokio::spawn(serve(listener, (Ipv4Addr::LOCALHOST, port).into(), config));
                let _ = ended.await;
                serving.abort();
            });
        });
        Self {
            address,
            end: Some(end),
            serving: Some(serving),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }
}

async fn serve(listener: std::net::TcpListener, to: SocketAddr, config: Arc<ServerConfig>) {
    listener
        .set_nonblocking(true)
        .expect("a socket can be told so");
    let listener = TcpListener::from_std(listener).expect("a runtime is there");
    let acceptor = TlsAcceptor::from(config);
    while let Ok((near, _)) = listener.accept().await {
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            let mut near = acceptor.accept(near).await?;
            let mut far = TcpStream::connect(to).await?;
            copy_bidirectional(&mut near, &mut far).await
        });
    }
}

impl Drop for TlsGate {
    fn drop(&mut self) {
        self.end.take();
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}
