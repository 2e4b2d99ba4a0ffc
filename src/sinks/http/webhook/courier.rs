//! One attempt: a request that goes to the address that was checked, and nowhere else.
//!
//! Each attempt makes a connection of its own. The name is resolved, what is not public is left out, and what is left is connected to,
//! so that a name which means something else a moment later gains nothing. Proxies and redirects are not followed. Of the answer only the
//! head is read.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT};

use super::names::{Guarded, Lookup, System};
use super::target::{self, Rules};
use crate::sinks::Secrets;
use crate::sinks::http::config::{Scheme, Signing};
use crate::sinks::http::signing::Keys;
use crate::sinks::http::{answer, request, transport};
use crate::sinks::tls;

const AGENT: &str = concat!("pg_outbox/", env!("CARGO_PKG_VERSION"));
const CONTENT: HeaderValue = HeaderValue::from_static("application/cloudevents+json");

/// For TCP and TLS together, when the whole request may take longer.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);

/// What is to be sent where.
pub(crate) struct Attempt {
    pub(crate) url: String,
    /// What the `webhook-id` is made of: the same at each attempt.
    pub(crate) id: String,
    pub(crate) body: String,
    pub(crate) secrets: Secrets,
}

/// What an attempt came to.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) status: Option<u16>,
    pub(crate) duration: Duration,
    pub(crate) verdict: Verdict,
}

impl Outcome {
    /// Why it failed, if so.
    pub(crate) fn error(&self) -> Option<String> {
        match &self.verdict {
            Verdict::Delivered => None,
            Verdict::Failed { error, .. } => Some(error.clone()),
            Verdict::Gone => Some(answer::refusal(StatusCode::GONE)),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Delivered,
    Failed {
        /// A short reason, without anything of the URL but its origin.
        error: String,
        retry_after: Option<Duration>,
    },
    /// 410: the endpoint wants no more.
    Gone,
}

/// Makes attempts by one set of rules. Cheap to share.
pub(crate) struct Courier {
    client: reqwest::Client,
    rules: Rules,
}

impl Courier {
    /// # Errors
    /// When the system has no trusted certificates and only https is allowed.
    pub(crate) fn new(rules: Rules, timeout: Duration) -> Result<Self, String> {
        Self::asking(System, rules, timeout)
    }

    /// The same; names are looked up there.
    pub(super) fn asking(
        lookup: impl Lookup,
        rules: Rules,
        timeout: Duration,
    ) -> Result<Self, String> {
        let tls = match tls::config(None) {
            Err(_) if rules.plain_http => tls::unused()?,
            config => {
                let mut config = config?;
                config.alpn_protocols = vec![b"http/1.1".to_vec()];
                config
            }
        };
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .dns_resolver(Arc::new(Guarded::new(lookup, rules.clone())))
            .timeout(timeout)
            .connect_timeout(timeout.min(LONGEST_CONNECT))
            .pool_max_idle_per_host(0)
            .http1_only()
            .tcp_nodelay(true)
            .no_proxy()
            .referer(false)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| format!("cannot set up the HTTP client: {}", error.without_url()))?;
        Ok(Self { client, rules })
    }

    /// Tries once. Ends within the time-out.
    pub(crate) async fn send(&self, attempt: &Attempt) -> Outcome {
        let start = Instant::now();
        let (status, verdict) = match self.answer(attempt).await {
            Err(error) => (None, failed(error, None)),
            Ok((status, _)) if status == StatusCode::GONE => (Some(status), Verdict::Gone),
            Ok((status, _)) if status.is_success() => (Some(status), Verdict::Delivered),
            Ok((status, headers)) => {
                let wait = answer::retry_after(&headers, SystemTime::now());
                (Some(status), failed(answer::refusal(status), wait))
            }
        };
        Outcome {
            status: status.map(|status| status.as_u16()),
            duration: start.elapsed(),
            verdict,
        }
    }

    async fn answer(&self, attempt: &Attempt) -> Result<(StatusCode, HeaderMap), String> {
        // The rules may have changed since it was set.
        let url = target::parse(&attempt.url, &self.rules)
            .map_err(|why| format!("not sent: its URL is not allowed. {why}"))?;
        let signing = Signing {
            secret: "of the webhook".to_owned(),
            scheme: Scheme::Standard,
        };
        let keys = Keys::new(Some(&signing), &attempt.secrets)?;
        let mut headers = HeaderMap::new();
        let id = request::id_of_one(&attempt.id);
        keys.sign(&id, attempt.body.as_bytes(), &mut headers).await;
        headers.insert(CONTENT_TYPE, CONTENT);
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        let origin = url.origin().ascii_serialization();
        let request = self
            .client
            .post(url)
            .headers(headers)
            .body(attempt.body.clone());
        let response = request
            .send()
            .await
            .map_err(|error| transport::describe(&error, &origin))?;
        Ok((response.status(), response.headers().clone()))
    }
}

fn failed(error: String, retry_after: Option<Duration>) -> Verdict {
    Verdict::Failed { error, retry_after }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::sinks::http::receiver::{Receiver, Reply};

    fn attempt(url: &str) -> Attempt {
        Attempt {
            url: url.to_owned(),
            id: "evt_1".to_owned(),
            body: json!({"id": "evt_1"}).to_string(),
            secrets: Secrets::new(["whsec_MDEyMzQ1Njc4OWFiY2RlZg==".to_owned()]),
        }
    }

    fn send(private_networks: bool, attempt: &Attempt) -> Outcome {
        let rules = Rules {
            private_networks,
            plain_http: true,
            ports: Vec::new(),
        };
        let courier = Courier::new(rules, Duration::from_secs(5)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(courier.send(attempt))
    }

    fn error(outcome: Outcome) -> String {
        match outcome.verdict {
            Verdict::Failed { error, .. } => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nothing_is_sent_to_what_is_not_public() {
        let receiver = Receiver::start(|_| Reply::ok());
        let port = url::Url::parse(&receiver.url()).unwrap().port().unwrap();
        for host in [
            "127.0.0.1",
            "localhost",
            "LOCALHOST",
            "[::ffff:127.0.0.1]",
            "0x7f.1",
            "2130706433",
            "0",
        ] {
            let outcome = send(false, &attempt(&format!("http://{host}:{port}/")));
            let error = error(outcome);
            assert!(
                error.contains("not of the public Internet"),
                "{host}: {error}"
            );
        }
        assert_eq!(receiver.connections(), 0);
    }

    #[test]
    fn an_answer_is_its_status() {
        for (status, verdict) in [
            (200, Some(Verdict::Delivered)),
            (204, Some(Verdict::Delivered)),
            (410, Some(Verdict::Gone)),
            (302, None),
            (404, None),
            (500, None),
        ] {
            let receiver = Receiver::start(move |_| Reply::status(status));
            let outcome = send(true, &attempt(&receiver.url()));
            assert_eq!(outcome.status, Some(status));
            match verdict {
                Some(verdict) => assert_eq!(outcome.verdict, verdict),
                None => assert!(error(outcome).starts_with(&format!("HTTP {status}"))),
            }
        }
    }

    #[test]
    fn an_endless_answer_ends_with_its_head() {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        let receiver =
            Receiver::start(move |_| Reply::Flood(head.clone(), b"5\r\naaaaa\r\n".to_vec()));
        let outcome = send(true, &attempt(&receiver.url()));
        assert_eq!(outcome.verdict, Verdict::Delivered);
        let receiver = Receiver::start(|_| {
            Reply::Flood(b"HTTP/1.1 200 OK\r\n".to_vec(), b"x: y\r\n".to_vec())
        });
        assert!(error(send(true, &attempt(&receiver.url()))).contains("no answer from"));
    }

    #[test]
    fn without_a_secret_nothing_is_sent() {
        let receiver = Receiver::start(|_| Reply::ok());
        let unsigned = Attempt {
            secrets: Secrets::default(),
            ..attempt(&receiver.url())
        };
        assert!(error(send(true, &unsigned)).starts_with("not sent:"));
        assert_eq!(receiver.connections(), 0);
    }
}
