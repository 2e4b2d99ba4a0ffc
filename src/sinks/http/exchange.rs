//! One request and its answer, within the time-outs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use reqwest::header::{ACCEPT, ACCEPT_ENCODING, HeaderValue, USER_AGENT};
use reqwest::{Method, Request, Response, StatusCode};
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::answer::{self, Answer};
use super::config::{HttpConfig, Mode};
use super::request::Message;
use super::transport;
use crate::dispatch::{Failure, Refusal};
use crate::envelope::Event;
use crate::sinks::Secrets;
use crate::sinks::plain_text::without;
use crate::sinks::tls;

const AGENT: &str = concat!("pg_outbox/", env!("CARGO_PKG_VERSION"));
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// For TCP and TLS together, when the whole request may take longer.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);
/// How long a connection is kept without use.
const KEPT: Duration = Duration::from_secs(60);
/// What is read of an answer, and as much again as the failures of each event may need.
const LARGEST_ANSWER: usize = 1024 * 1024;
const ANSWER_AN_EVENT: usize = 1024;
/// What is read of an answer of no interest, so that its connection can be kept.
const LARGEST_REMAINDER: usize = 64 * 1024;
const LONGEST_REMAINDER: Duration = Duration::from_secs(1);

/// The way to one endpoint, with its connections.
pub(super) struct Endpoint {
    client: reqwest::Client,
    /// What is the same in all requests.
    template: Request,
    origin: String,
    timeout: Duration,
    credentials: Vec<String>,
    /// The latest exchange ended well and left its connection open.
    kept: AtomicBool,
}

/// A request that failed as a whole.
#[derive(Debug)]
pub(super) struct Setback {
    pub(super) refusal: Refusal,
    /// Nobody answered, or the answer was to wait: another request would fare no better.
    pub(super) outage: bool,
}

impl Endpoint {
    /// # Errors
    /// When the certificates of the system or of `ca_file` cannot be used.
    pub(super) fn open(config: &HttpConfig, default_timeout: Duration) -> Result<Self, String> {
        let timeout = config.timeout.unwrap_or(default_timeout);
        let mut tls = match config.url.scheme() {
            "https" => tls::config(config.ca_file.as_deref())?,
            _ => tls::unused()?,
        };
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let connections = match config.mode {
            Mode::Batch => 1,
            Mode::Single { concurrency } => concurrency,
        };
        // A connection of HTTP/2 that no longer answers outlives the requests that time out on it, unless it is asked.
        let ping = (timeout / 4).clamp(Duration::from_secs(1), Duration::from_secs(10));
        let cannot = |error: reqwest::Error| {
            format!("cannot set up the HTTP client: {}", error.without_url())
        };
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .connect_timeout(timeout.min(LONGEST_CONNECT))
            .pool_idle_timeout(KEPT)
            .pool_max_idle_per_host(connections)
            .http2_keep_alive_interval(ping)
            .http2_keep_alive_timeout(ping)
            .tcp_nodelay(true)
            .no_proxy()
            .referer(false)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(cannot)?;
        // A user and password in the URL become a header here, once.
        let template = client
            .post(config.url.clone())
            .header(USER_AGENT, AGENT)
            // A body that is encoded in another way cannot be read here, and it may say which events failed.
            .header(ACCEPT_ENCODING, IDENTITY)
            .headers(config.headers.clone())
            .build()
            .map_err(cannot)?;
        Ok(Self {
            client,
            credentials: credentials(config, &template),
            template,
            origin: config.origin(),
            timeout,
            kept: AtomicBool::new(false),
        })
    }

    /// Whether the latest exchange left a connection to carry on with.
    pub(super) fn is_connected(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    /// Sends `message`, which holds `events`. Returns those that the answer reports as failed, with their places in `events`.
    pub(super) async fn send(
        &self,
        message: Message,
        events: &[Arc<Event>],
        secrets: &Secrets,
    ) -> Result<Vec<Failure>, Setback> {
        let deadline = Instant::now() + self.timeout;
        let late = |what: &str| {
            Setback::outage(format!(
                "{what} from {} within {:?}",
                self.origin, self.timeout
            ))
        };
        let response = timeout_at(deadline, self.answer(message))
            .await
            .map_err(|_| late("no answer"))??;
        let status = response.status();
        if !status.is_success() {
            let refusal = Refusal {
                error: answer::refusal(status),
                retry_after: answer::retry_after(response.headers(), SystemTime::now()),
            };
            let remainder = deadline.min(Instant::now() + LONGEST_REMAINDER);
            let read = timeout_at(remainder, read(response, LARGEST_REMAINDER)).await;
            self.kept
                .store(matches!(read, Ok(Ok(Body::Whole(_)))), Ordering::Relaxed);
            let outage = refusal.retry_after.is_some();
            return Err(Setback { refusal, outage });
        }
        let largest = LARGEST_ANSWER + ANSWER_AN_EVENT * events.len();
        let headers = response.headers().clone();
        let body = timeout_at(deadline, read(response, largest))
            .await
            .map_err(|_| late("no complete answer"))?;
        self.kept
            .store(matches!(body, Ok(Body::Whole(_))), Ordering::Relaxed);
        let body =
            body.map_err(|error| Setback::outage(transport::describe(&error, &self.origin)))?;
        let answer = Answer {
            headers: &headers,
            cut_at: matches!(body, Body::Begun(_)).then_some(largest),
            body: body.bytes(),
        };
        match answer.failures(events) {
            Ok(failures) => Ok(self.shown(failures, secrets)),
            Err(why) => Err(Setback::answered(format!(
                "HTTP {}, but the answer cannot be read: {why}",
                status.as_u16()
            ))),
        }
    }

    /// The body of a small answer; `url` leads to the same place as all requests.
    pub(super) async fn get(&self, url: &Url) -> Result<Vec<u8>, Setback> {
        let mut request = Request::new(Method::GET, url.clone());
        *request.headers_mut() = self.template.headers().clone();
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(ACCEPT, json);
        let exchange = async {
            let failed =
                |error: reqwest::Error| Setback::outage(transport::describe(&error, &self.origin));
            let response = self.client.execute(request).await.map_err(failed)?;
            let status = response.status();
            if status != StatusCode::OK {
                return Err(Setback {
                    refusal: Refusal {
                        error: answer::refusal(status),
                        retry_after: answer::retry_after(response.headers(), SystemTime::now()),
                    },
                    outage: true,
                });
            }
            let headers = response.headers().clone();
            match read(response, LARGEST_REMAINDER).await.map_err(failed)? {
                Body::Whole(body) => answer::text_of(&headers, &body)
                    .map(<[u8]>::to_vec)
                    .map_err(|why| Setback::answered(format!("the answer cannot be read: {why}"))),
                Body::Begun(_) => Err(Setback::answered(format!(
                    "the answer is longer than {LARGEST_REMAINDER} bytes"
                ))),
            }
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .map_err(|_| {
                Setback::outage(format!(
                    "no answer from {} within {:?}",
                    self.origin, self.timeout
                ))
            })?
    }

    /// The head of the answer.
    ///
    /// A receiver may close a kept connection at the very moment at which a request goes out on it. That says nothing about
    /// the receiver, so the request is then sent once more, on a new connection.
    async fn answer(&self, message: Message) -> Result<Response, Setback> {
        let kept = self.kept.load(Ordering::Relaxed);
        let mut result = self.client.execute(self.request(message.clone())).await;
        if kept
            && result
                .as_ref()
                .is_err_and(|error| error.is_request() && !error.is_connect())
        {
            self.kept.store(false, Ordering::Relaxed);
            result = self.client.execute(self.request(message)).await;
        }
        result.map_err(|error| {
            self.kept.store(false, Ordering::Relaxed);
            Setback::outage(transport::describe(&error, &self.origin))
        })
    }

    fn request(&self, message: Message) -> Request {
        let mut request = Request::new(self.template.method().clone(), self.template.url().clone());
        *request.headers_mut() = self.template.headers().clone();
        request.headers_mut().extend(message.headers);
        *request.body_mut() = Some(message.body.into());
        request
    }

    /// The receiver's words may quote what it was sent.
    fn shown(&self, mut failures: Vec<Failure>, secrets: &Secrets) -> Vec<Failure> {
        for failure in &mut failures {
            let hidden = self
                .credentials
                .iter()
                .map(String::as_str)
                .chain(secrets.expose());
            failure.error = without(&failure.error, hidden);
        }
        failures
    }
}

impl Setback {
    pub(super) fn outage(error: String) -> Self {
        Self {
            outage: true,
            ..Self::answered(error)
        }
    }

    pub(super) fn answered(error: String) -> Self {
        Self {
            refusal: Refusal {
                error,
                retry_after: None,
            },
            outage: false,
        }
    }
}

/// What must not be repeated from an answer: receivers like to quote what they were sent, as it came or decoded.
fn credentials(config: &HttpConfig, template: &Request) -> Vec<String> {
    let url = [
        Some(config.url.username()),
        config.url.password(),
        config.url.query(),
    ];
    let decoded = url.into_iter().flatten().map(|text| {
        percent_encoding::percent_decode_str(text)
            .decode_utf8_lossy()
            .into_owned()
    });
    let parameters = config
        .url
        .query_pairs()
        .map(|(_, value)| value.into_owned());
    let headers = template
        .headers()
        .values()
        .filter(|value| value.is_sensitive())
        .filter_map(|value| value.to_str().ok())
        // "Bearer abc": quoted without its scheme it is as good.
        .flat_map(|value| [Some(value), value.split_once(' ').map(|(_, rest)| rest)]);
    let plain = url.into_iter().chain(headers).flatten().map(str::to_owned);
    plain.chain(decoded).chain(parameters).collect()
}

enum Body {
    Whole(Vec<u8>),
    /// The beginning of a body that is longer than was to be read; its connection is closed.
    Begun(Vec<u8>),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Body::Whole(bytes) | Body::Begun(bytes) => bytes,
        }
    }
}

async fn read(mut response: Response, largest: usize) -> Result<Body, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await? {
        if body.len() + piece.len() > largest {
            body.extend_from_slice(&piece[..largest - body.len()]);
            return Ok(Body::Begun(body));
        }
        body.extend_from_slice(&piece);
    }
    Ok(Body::Whole(body))
}
