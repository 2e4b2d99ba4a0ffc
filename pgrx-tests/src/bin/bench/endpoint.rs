//! An HTTP endpoint that does as little as it can, so that it is not what is measured: one thread for all connections, and every
//! request that has come in whole is answered at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::SystemTime;

use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

/// What is done with each body, besides counting it.
type Note = Arc<dyn Fn(&[u8], SystemTime) + Send + Sync>;

/// A running endpoint on 127.0.0.1 that takes everything.
pub(crate) struct Endpoint {
    url: String,
    requests: Arc<AtomicU64>,
    end: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
}

impl Endpoint {
    pub(crate) fn start(note: impl Fn(&[u8], SystemTime) + Send + Sync + 'static) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let address = listener
            .local_addr()
            .expect("a bound listener has an address");
        let requests = Arc::new(AtomicU64::new(0));
        let (end, ended) = oneshot::channel();
        let serving = std::thread::spawn({
            let requests = Arc::clone(&requests);
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_io()
                    .build()
                    .expect("a runtime starts");
                runtime.block_on(async {
                    let serving = tokio::spawn(serve(listener, requests, Arc::new(note)));
                    let _ = ended.await;
                    serving.abort();
                });
            }
        });
        Self {
            url: format!("http://{address}/events"),
            requests,
            end: Some(end),
            serving: Some(serving),
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// How many requests have come in whole.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.end.take();
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

async fn serve(listener: std::net::TcpListener, requests: Arc<AtomicU64>, note: Note) {
    listener
        .set_nonblocking(true)
        .expect("a socket can be told so");
    let listener = TcpListener::from_std(listener).expect("a runtime is there");
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer(stream, Arc::clone(&requests), Arc::clone(&note)));
    }
}

async fn answer(mut stream: TcpStream, requests: Arc<AtomicU64>, note: Note) {
    let _ = stream.set_nodelay(true);
    let mut bytes = Vec::with_capacity(64 * 1024);
    while stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {
        while let Some((head, whole)) = request(&bytes) {
            note(&bytes[head..whole], SystemTime::now());
            requests.fetch_add(1, Ordering::Relaxed);
            bytes.drain(..whole);
            if stream.write_all(ANSWER).await.is_err() {
                return;
            }
        }
    }
}

/// Where the head of the first request ends, and where all of it does; none if it has not come in whole.
fn request(bytes: &[u8]) -> Option<(usize, usize)> {
    const LENGTH: &[u8] = b"content-length: ";
    let head = memmem::find(bytes, b"\r\n\r\n")? + 4;
    let length = match memmem::find(&bytes[..head], LENGTH) {
        Some(at) => bytes[at + LENGTH.len()..head]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .fold(0, |length, byte| length * 10 + usize::from(byte - b'0')),
        None => 0,
    };
    let whole = head + length;
    (bytes.len() >= whole).then_some((head, whole))
}
