//! One delivery on one connection: events are published in order, many before the first is acknowledged, and each waits for
//! its own acknowledgement.

use std::io;
use std::sync::Arc;

use super::answer::{self, Answer};
use super::connection::Connection;
use super::message::{Route, Writer};
use super::wire::Said;
use crate::dispatch::{Failure, Outcome, Refusal};
use crate::envelope::Event;
use crate::sinks::Watch;
use crate::sinks::plain_text::{LONGEST, one_line};

/// The most events that wait for acknowledgement: a server queues no more than 10,000 for a stream.
const WINDOW: usize = 2_048;
/// The most bytes of them.
const WINDOW_BYTES: usize = 16 * 1024 * 1024;
/// How much is written at once: the server stores the first events while the others are still being written.
const AT_ONCE: usize = 64 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    Unanswered,
    Stored,
    Failed {
        error: String,
        permanent: bool,
        /// The server has judged this very event, so it is up.
        judged: bool,
    },
}

/// Publishes `events`, until it is called off, and says what became of them.
///
/// # Errors
/// When the connection broke: what is unanswered may be stored or not. It must not be used again.
pub(super) async fn publish(
    connection: &mut Connection,
    events: &[Arc<Event>],
    route: &Route,
    watch: &Watch,
) -> Result<Outcome, String> {
    let first = connection.next;
    connection.next += events.len() as u64;
    let mut end = events.len();
    let mut pass = Pass {
        events,
        route,
        first,
        fates: vec![Fate::Unanswered; events.len()],
        waiting: 0,
    };
    let mut writer = Writer::default();
    let mut out = Vec::new();
    let mut index = 0;
    loop {
        let mut bytes = 0;
        while index < end && pass.waiting < WINDOW && bytes < WINDOW_BYTES {
            let before = out.len();
            let reply = (connection.inbox.as_str(), first + index as u64);
            match writer.write(&events[index], route, reply, connection.largest, &mut out) {
                Ok(()) => pass.waiting += 1,
                Err(error) => {
                    pass.fates[index] = Fate::Failed {
                        error,
                        permanent: true,
                        judged: false,
                    };
                }
            }
            bytes += out.len() - before;
            index += 1;
            if out.len() >= AT_ONCE {
                connection.write(&out).await.map_err(lost)?;
                out.clear();
            }
        }
        connection.write(&out).await.map_err(lost)?;
        out.clear();
        // The next ones are written once there is room for many.
        let enough = match index < end {
            true if bytes < WINDOW_BYTES => WINDOW / 2,
            _ => 0,
        };
        while pass.waiting > enough {
            connection.read().await.map_err(lost)?;
            pass.listen(connection, &mut out)?;
        }
        if watch.is_called_off() {
            end = index;
        }
        if index == end && pass.waiting == 0 {
            if !out.is_empty() {
                connection.write(&out).await.map_err(lost)?;
            }
            pass.fates.truncate(end);
            return Ok(pass.outcome().cut_at(end, events.len()));
        }
    }
}

fn lost(error: io::Error) -> String {
    format!("the connection was lost before all events were acknowledged: {error}")
}

struct Pass<'p> {
    events: &'p [Arc<Event>],
    route: &'p Route,
    /// The number of the first event's message.
    first: u64,
    fates: Vec<Fate>,
    /// How many are published and unanswered.
    waiting: usize,
}

impl Pass<'_> {
    /// Takes everything that has come in. What it asks to be answered goes to `out`.
    fn listen(&mut self, connection: &mut Connection, out: &mut Vec<u8>) -> Result<(), String> {
        // The dot behind the inbox, too.
        let prefix = connection.inbox.len() + 1;
        while let Some(said) = connection.said()? {
            match said {
                Said::Message {
                    subject,
                    status,
                    payload,
                } => {
                    let number = subject
                        .get(prefix..)
                        .and_then(|text| std::str::from_utf8(text).ok());
                    let number = number.and_then(|text| text.parse::<u64>().ok());
                    // One of an earlier delivery, which was given up, is of no interest.
                    let index = number.and_then(|number| number.checked_sub(self.first));
                    if let Some(index) = index.and_then(|index| usize::try_from(index).ok()) {
                        self.answered(index, answer::read(status, payload));
                    }
                }
                Said::Ping => out.extend_from_slice(b"PONG\r\n"),
                Said::Error(text) => {
                    let text = String::from_utf8_lossy(text).into_owned();
                    self.complaint(&text)?;
                }
                Said::Info(_) | Said::Pong | Said::Done => {}
            }
        }
        Ok(())
    }

    fn answered(&mut self, index: usize, answer: Answer) {
        let fate = match answer {
            Answer::Stored => Fate::Stored,
            Answer::NobodyThere => Fate::Failed {
                error: format!(
                    "no stream takes {}: the server has no responders for it",
                    self.route.named()
                ),
                permanent: false,
                judged: false,
            },
            Answer::Refused { error, permanent } => Fate::Failed {
                error,
                permanent,
                judged: permanent,
            },
        };
        self.settle(index, fate);
    }

    fn settle(&mut self, index: usize, fate: Fate) {
        if let Some(old @ Fate::Unanswered) = self.fates.get_mut(index) {
            *old = fate;
            self.waiting -= 1;
        }
    }

    /// What the server says of no message in particular. What it may not be sent it drops, and never answers.
    fn complaint(&mut self, text: &str) -> Result<(), String> {
        const DENIED: &str = "Permissions Violation for Publish to ";
        let Some(denied) = text.strip_prefix(DENIED) else {
            return Err(one_line(&format!("the server complains: {text}"), LONGEST));
        };
        let denied = denied.trim_matches('"');
        let mut subject = String::new();
        for index in 0..self.fates.len() {
            subject.clear();
            if self.fates[index] == Fate::Unanswered
                && self
                    .route
                    .subject(&self.events[index], &mut subject)
                    .is_ok()
                && subject == denied
            {
                let error = format!("no permission to publish to {}", self.route.named());
                self.settle(
                    index,
                    Fate::Failed {
                        error,
                        permanent: false,
                        judged: false,
                    },
                );
            }
        }
        Ok(())
    }

    fn outcome(self) -> Outcome {
        let up = self
            .fates
            .iter()
            .any(|fate| matches!(fate, Fate::Stored | Fate::Failed { judged: true, .. }));
        let all_permanent = self.fates.iter().all(|fate| {
            matches!(
                fate,
                Fate::Failed {
                    permanent: true,
                    ..
                }
            )
        });
        let failures: Vec<Failure> = self
            .fates
            .into_iter()
            .enumerate()
            .filter_map(|(index, fate)| match fate {
                Fate::Failed {
                    error, permanent, ..
                } => Some(Failure {
                    index,
                    error,
                    permanent,
                }),
                Fate::Unanswered | Fate::Stored => None,
            })
            .collect();
        if failures.is_empty() {
            return Outcome::Delivered;
        }
        // Nothing got through, and what is wrong may be wrong with all events.
        let refusal = failures.iter().find(|failure| !failure.permanent);
        match refusal {
            Some(failure) if !up && !all_permanent => Outcome::Failed(Refusal {
                error: failure.error.clone(),
                retry_after: None,
            }),
            _ => Outcome::Partial(failures),
        }
    }
}
