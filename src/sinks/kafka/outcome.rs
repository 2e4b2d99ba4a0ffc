//! What reports of single messages come to for the delivery.

use rdkafka::error::RDKafkaErrorCode as Code;

use crate::dispatch::{Failure, Outcome, Refusal};

/// What went wrong with one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It has no topic to go to: nobody was asked.
    Misrouted(String),
    /// It is larger than the client may send: nobody was asked either.
    TooLarge,
    /// The client or a broker does not take it.
    Refused(Code),
}

/// What an event is to its faults.
pub(super) struct Suspect {
    pub(super) index: usize,
    /// The topic, as errors call it.
    pub(super) topic: String,
    /// Whether it went to the broker in company, so that what was said of all may be another's fault.
    pub(super) in_company: bool,
}

enum Verdict {
    /// No retry of this event can help.
    Permanent(String),
    /// A retry might.
    Passing(String),
    /// It says nothing of this event.
    Whole(String),
}

fn verdict(fault: Fault, suspect: &Suspect) -> Verdict {
    let code = match fault {
        Fault::Misrouted(why) => return Verdict::Permanent(why),
        Fault::TooLarge => {
            let why = "larger than the property \"message.max.bytes\" lets it be";
            return Verdict::Permanent(why.to_owned());
        }
        Fault::Refused(code) => code,
    };
    let topic = &suspect.topic;
    match code {
        Code::MessageSizeTooLarge | Code::InvalidRecord if suspect.in_company => Verdict::Whole(
            format!("a batch for {topic} was refused: {}", describe(code)),
        ),
        Code::MessageSizeTooLarge => Verdict::Permanent(format!("larger than {topic} takes")),
        Code::InvalidRecord => {
            Verdict::Permanent(format!("{topic} takes no such record, as without a key"))
        }
        Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
            Verdict::Passing(format!(
                "{topic} does not exist, and the broker has not created it"
            ))
        }
        Code::TopicAuthorizationFailed => {
            Verdict::Passing(format!("no permission to write to {topic}"))
        }
        // Of what stands behind it, some may be through: all of it comes again, in order.
        _ => Verdict::Whole(format!("{topic}: {}", describe(code))),
    }
}

/// The client's words for a code, such as `Broker: Not leader for partition`.
fn describe(code: Code) -> String {
    let text = code.to_string();
    let words = text
        .split_once(" (")
        .and_then(|(_, words)| words.strip_suffix(')'));
    words.unwrap_or(&text).to_owned()
}

/// The outcome of a delivery of `count` events of which these failed.
pub(super) fn outcome(count: usize, faults: Vec<(Fault, Suspect)>) -> Outcome {
    let mut failures = Vec::new();
    // Whoever was not even asked does not show that brokers are up.
    let mut asked = count;
    for (fault, suspect) in faults {
        asked -= usize::from(!matches!(fault, Fault::Refused(_)));
        let (error, permanent) = match verdict(fault, &suspect) {
            Verdict::Permanent(error) => (error, true),
            Verdict::Passing(error) => (error, false),
            Verdict::Whole(error) => return failed(error),
        };
        failures.push(Failure {
            index: suspect.index,
            error,
            permanent,
        });
    }
    if failures.is_empty() {
        return Outcome::Delivered;
    }
    let passing = failures.iter().filter(|failure| !failure.permanent);
    let first = passing.clone().next();
    match first {
        Some(failure) if passing.count() == asked => failed(failure.error.clone()),
        _ => {
            failures.sort_by_key(|failure| failure.index);
            Outcome::Partial(failures)
        }
    }
}

pub(super) fn failed(error: String) -> Outcome {
    Outcome::Failed(Refusal {
        error,
        retry_after: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suspect(index: usize, in_company: bool) -> Suspect {
        Suspect {
            index,
            topic: "topic \"t\"".to_owned(),
            in_company,
        }
    }

    fn refused(index: usize, code: Code, in_company: bool) -> (Fault, Suspect) {
        (Fault::Refused(code), suspect(index, in_company))
    }

    fn partial(outcome: Outcome) -> Vec<(usize, bool)> {
        match outcome {
            Outcome::Partial(failures) => failures
                .iter()
                .map(|failure| (failure.index, failure.permanent))
                .collect(),
            other => panic!("{other:?}"),
        }
    }

    fn whole(outcome: Outcome) -> String {
        match outcome {
            Outcome::Failed(refusal) => refusal.error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_went_through() {
        assert_eq!(outcome(3, vec![]), Outcome::Delivered);
    }

    #[test]
    fn one_that_is_too_large_by_itself() {
        let faults = vec![refused(1, Code::MessageSizeTooLarge, false)];
        assert_eq!(partial(outcome(3, faults)), [(1, true)]);
    }

    #[test]
    fn a_batch_that_is_too_large_condemns_nobody() {
        let faults = vec![
            refused(1, Code::MessageSizeTooLarge, true),
            refused(2, Code::MessageSizeTooLarge, true),
        ];
        assert!(whole(outcome(3, faults)).contains("a batch for topic \"t\" was refused"));
    }

    #[test]
    fn a_topic_that_is_not_there_is_an_outage_unless_others_are() {
        let faults = vec![refused(0, Code::UnknownTopic, false)];
        assert_eq!(partial(outcome(2, faults)), [(0, false)]);
        let faults = vec![
            refused(0, Code::UnknownTopic, false),
            refused(1, Code::UnknownTopicOrPartition, false),
        ];
        assert_eq!(
            whole(outcome(2, faults)),
            "topic \"t\" does not exist, and the broker has not created it"
        );
    }

    #[test]
    fn what_has_no_topic_does_not_show_that_brokers_are_up() {
        let misrouted = |index| {
            (
                Fault::Misrouted("no topic".to_owned()),
                suspect(index, true),
            )
        };
        assert_eq!(partial(outcome(2, vec![misrouted(0)])), [(0, true)]);
        whole(outcome(
            2,
            vec![misrouted(0), refused(1, Code::UnknownTopic, false)],
        ));
        assert_eq!(partial(outcome(1, vec![misrouted(0)])), [(0, true)]);
    }

    #[test]
    fn one_that_the_client_may_not_send_does_not_show_that_brokers_are_up() {
        let too_large = || (Fault::TooLarge, suspect(0, true));
        assert_eq!(partial(outcome(2, vec![too_large()])), [(0, true)]);
        let faults = vec![too_large(), refused(1, Code::UnknownTopic, false)];
        whole(outcome(2, faults));
    }

    #[test]
    fn what_timed_out_brings_all_again() {
        let faults = vec![
            refused(0, Code::MessageSizeTooLarge, false),
            refused(1, Code::MessageTimedOut, true),
        ];
        assert_eq!(
            whole(outcome(9, faults)),
            "topic \"t\": Local: Message timed out"
        );
    }
}
