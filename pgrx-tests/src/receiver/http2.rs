//! HTTP/2 on one connection, over TLS: any number of requests at once, by a library that keeps the rules.

use std::error::Error;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::SystemTime;

use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::Response;
use rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use super::reply::{Reply, Way};
use super::request::Request;

/// What a server says that offers HTTP/2: it comes first.
pub(super) fn offered() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec(), b"http/1.1".to_vec()]
}

/// Serves a connection to its end. `take` may block; it holds back only the request that it is asked about.
pub(super) fn serve(
    number: u64,
    tcp: TcpStream,
    tls: &Arc<ServerConfig>,
    take: impl Fn(Request) -> Reply + Send + Sync + 'static,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .expect("a runtime starts");
    // A client that goes away is no failure of the test.
    let _ = runtime.block_on(connection(number, tcp, Arc::clone(tls), Arc::new(take)));
    // What still blocks in `take` has lost its connection.
    runtime.shutdown_background();
}

type Take = Arc<dyn Fn(Request) -> Reply + Send + Sync>;

async fn connection(
    number: u64,
    tcp: TcpStream,
    tls: Arc<ServerConfig>,
    take: Take,
) -> Result<(), Box<dyn Error>> {
    tcp.set_nonblocking(true)?;
    let tcp = tokio::net::TcpStream::from_std(tcp)?;
    let stream = TlsAcceptor::from(tls).accept(tcp).await?;
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err("the client does not want HTTP/2".into());
    }
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        tokio::spawn(answer(number, request, respond, Arc::clone(&take)));
    }
    Ok(())
}

async fn answer(
    number: u64,
    request: http::Request<RecvStream>,
    mut respond: SendResponse<bytes::Bytes>,
    take: Take,
) -> Result<(), h2::Error> {
    let (head, mut stream) = request.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = stream.data().await {
        let piece = piece?;
        body.extend_from_slice(&piece);
        stream.flow_control().release_capacity(piece.len())?;
    }
    let headers = head.headers.iter().map(|(name, value)| {
        let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
        (name.as_str().to_owned(), value)
    });
    let request = Request {
        method: head.method.to_string(),
        path: head
            .uri
            .path_and_query()
            .map_or_else(String::new, ToString::to_string),
        headers: headers.collect(),
        body,
        at: SystemTime::now(),
        connection: number,
        http2: true,
    };
    let reply = tokio::task::spawn_blocking(move || take(request)).await;
    match reply.map(|reply| reply.way) {
        Ok(Way::Answer(answer)) => {
            let mut response = Response::builder().status(answer.status);
            for (name, value) in &answer.headers {
                response = response.header(name, value);
            }
            let response = response.body(()).expect("a valid answer");
            let mut stream = respond.send_response(response, answer.body.is_empty())?;
            if !answer.body.is_empty() {
                stream.send_data(answer.body.into(), true)?;
            }
        }
        // Until the client gives up.
        Ok(Way::Hang) => {
            let _ = std::future::poll_fn(|context| respond.poll_reset(context)).await?;
        }
        // What breaks the rules of HTTP/1.1 has no like here.
        _ => respond.send_reset(Reason::INTERNAL_ERROR),
    }
    Ok(())
}
