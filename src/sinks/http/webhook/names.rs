//! What a host's name means, as far as that may be connected to.
//!
//! A name is asked about once for each attempt, and the addresses that were checked are the ones that are connected to: whoever gives
//! another answer a moment later is not asked.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::target::{self, NOT_PUBLIC, Rules};

/// Whoever knows the addresses of names.
pub(super) trait Lookup: Send + Sync + 'static {
    fn addresses(&self, name: &str) -> impl Future<Output = io::Result<Vec<IpAddr>>> + Send;
}

/// The system: /etc/hosts, name servers, and whatever it is told to ask.
pub(super) struct System;

impl Lookup for System {
    async fn addresses(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let found = tokio::net::lookup_host((name, 0)).await?;
        Ok(found.map(|address| address.ip()).collect())
    }
}

/// Leaves out what may not be connected to. An address in the URL itself does not come by here; the URL was checked.
pub(super) struct Guarded<L> {
    lookup: Arc<L>,
    rules: Rules,
}

impl<L: Lookup> Guarded<L> {
    pub(super) fn new(lookup: L, rules: Rules) -> Self {
        Self {
            lookup: Arc::new(lookup),
            rules,
        }
    }
}

impl<L: Lookup> Resolve for Guarded<L> {
    fn resolve(&self, name: Name) -> Resolving {
        let (lookup, rules) = (Arc::clone(&self.lookup), self.rules.clone());
        Box::pin(async move {
            let found = lookup.addresses(name.as_str()).await?;
            let allowed: Vec<SocketAddr> = found
                .into_iter()
                .filter(|address| target::may_connect(*address, &rules))
                // The port is that of the URL.
                .map(|address| SocketAddr::new(address, 0))
                .collect();
            if allowed.is_empty() {
                return Err(NOT_PUBLIC.into());
            }
            let allowed: Addrs = Box::new(allowed.into_iter());
            Ok(allowed)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::sinks::Secrets;
    use crate::sinks::http::receiver::{Receiver, Reply};
    use crate::sinks::http::webhook::courier::{Attempt, Courier, Verdict};

    /// Public by all rules, and routed nowhere: nobody is bothered by a test that connects to it.
    const PUBLIC: &str = "2000::1";
    const OWN: &str = "127.0.0.1";

    /// A name server that changes its mind: each question gets the next answer.
    #[derive(Default)]
    struct Fickle {
        answers: &'static [&'static [&'static str]],
        questions: Arc<Mutex<Vec<String>>>,
    }

    impl Lookup for Fickle {
        async fn addresses(&self, name: &str) -> io::Result<Vec<IpAddr>> {
            let mut questions = self.questions.lock().unwrap();
            questions.push(name.to_owned());
            let answer = self.answers[questions.len() - 1];
            Ok(answer.iter().map(|ip| ip.parse().unwrap()).collect())
        }
    }

    struct Scene {
        receiver: Receiver,
        courier: Courier,
        questions: Arc<Mutex<Vec<String>>>,
        attempt: Attempt,
    }

    fn scene(private_networks: bool, answers: &'static [&'static [&'static str]]) -> Scene {
        let receiver = Receiver::start(|_| Reply::ok());
        let port = url::Url::parse(&receiver.url()).unwrap().port().unwrap();
        let rules = Rules {
            private_networks,
            plain_http: true,
            ports: Vec::new(),
        };
        let lookup = Fickle {
            answers,
            ..Fickle::default()
        };
        let questions = Arc::clone(&lookup.questions);
        // Where nothing is routed to, connecting may take for ever.
        let timeout = Duration::from_secs(if private_networks { 30 } else { 1 });
        Scene {
            receiver,
            courier: Courier::asking(lookup, rules, timeout).unwrap(),
            questions,
            attempt: Attempt {
                url: format!("http://rebound.example:{port}/"),
                id: "evt_1".to_owned(),
                body: "{}".to_owned(),
                secrets: Secrets::new(["whsec_MDEyMzQ1Njc4OWFiY2RlZg==".to_owned()]),
            },
        }
    }

    impl Scene {
        /// One attempt: whether it went through, or why not; and how often the name was asked about.
        fn send(&self) -> (Result<(), String>, usize) {
            let before = self.questions.lock().unwrap().len();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let verdict = runtime.block_on(self.courier.send(&self.attempt)).verdict;
            let result = match verdict {
                Verdict::Failed { error, .. } => Err(error),
                _ => Ok(()),
            };
            (result, self.questions.lock().unwrap().len() - before)
        }
    }

    #[test]
    fn a_name_that_changes_its_mind_gains_nothing() {
        let scene = scene(
            false,
            &[
                &[PUBLIC],
                &[OWN],
                &[PUBLIC, OWN],
                &[OWN, "::1", PUBLIC],
                &[],
            ],
        );
        for reaches_out in [true, false, true, true, false] {
            let (result, asked) = scene.send();
            let error = result.unwrap_err();
            assert_eq!(!error.contains(NOT_PUBLIC), reaches_out, "{error}");
            assert_eq!(asked, 1, "once for an attempt");
        }
        assert_eq!(scene.receiver.connections(), 0);
    }

    #[test]
    fn the_address_that_was_checked_is_the_one_that_is_connected_to() {
        // Nobody listens on the second one.
        let scene = scene(true, &[&[OWN], &["127.0.0.2"], &[OWN]]);
        assert_eq!(scene.send(), (Ok(()), 1));
        let (result, asked) = scene.send();
        assert!(result.unwrap_err().starts_with("cannot connect to"));
        assert_eq!(asked, 1);
        assert_eq!(scene.send(), (Ok(()), 1));
        assert_eq!(scene.receiver.connections(), 2);
        assert_eq!(*scene.questions.lock().unwrap(), ["rebound.example"; 3]);
    }
}
