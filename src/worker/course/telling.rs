//! What the log is told of a sink: that it has left good order, that it is back, and now and then how its attempts go on. Not the error
//! itself: a function or a receiver may quote the event in it. outbox.status has that.

use std::time::Duration;

use super::super::until;
use crate::dispatch::Time;
use crate::store::health::Health;

/// A sink that falters every second must not fill the log.
const BETWEEN_TROUBLES: Duration = Duration::from_secs(10);
const BETWEEN_ATTEMPTS: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Telling {
    last: Option<Time>,
    /// The log knows that the sink is in trouble.
    in_trouble: bool,
}

impl Telling {
    /// Of a sink that was left with that health.
    pub(super) fn of(health: &Health) -> Self {
        Self {
            last: None,
            in_trouble: !health.is_well(),
        }
    }

    fn is_long_ago(&self, at: Time, wait: Duration) -> bool {
        self.last.is_none_or(|last| until(at, last) >= wait)
    }

    /// The health of a sink has changed. What to log of that, if anything.
    pub(super) fn changed(
        &mut self,
        sink: &str,
        before: &Health,
        after: &Health,
        at: Time,
    ) -> Option<String> {
        let attempts = before.attempts.max(after.attempts);
        let message = if after.is_well() {
            std::mem::take(&mut self.in_trouble).then(|| {
                format!("sink \"{sink}\" is in good order again, attempts before: {attempts}")
            })
        } else if self.in_trouble {
            let changed = before.state != after.state && !before.is_well();
            let goes_on = after.attempts > before.attempts;
            (changed || (goes_on && self.is_long_ago(at, BETWEEN_ATTEMPTS))).then(|| {
                let state = &after.state;
                format!("sink \"{sink}\" is still {state}, attempts: {attempts}, see outbox.status")
            })
        } else {
            self.in_trouble = self.is_long_ago(at, BETWEEN_TROUBLES);
            let state = &after.state;
            self.in_trouble.then(|| {
                format!("sink \"{sink}\" is {state}, attempts: {attempts}, see outbox.status")
            })
        };
        if message.is_some() {
            self.last = Some(at);
        }
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health(state: &str, attempts: u32) -> Health {
        Health {
            state: state.to_owned(),
            attempts,
            ..Health::default()
        }
    }

    #[test]
    fn trouble_is_told_when_it_begins_when_it_changes_when_it_lasts_and_when_it_ends() {
        let mut telling = Telling::default();
        let mut before = health("flowing", 0);
        let steps = [
            (0, "retrying", 1, Some("is retrying, attempts: 1")),
            (2, "retrying", 2, None),
            (4, "down", 3, Some("is still down, attempts: 3")),
            (6, "down", 4, None),
            (65, "down", 5, Some("is still down, attempts: 5")),
            (
                70,
                "flowing",
                0,
                Some("in good order again, attempts before: 5"),
            ),
            // Faltering.
            (71, "retrying", 1, None),
            (72, "flowing", 0, None),
            (90, "retrying", 1, Some("is retrying, attempts: 1")),
        ];
        for (second, state, attempts, expected) in steps {
            let after = health(state, attempts);
            let told = telling.changed("s", &before, &after, Time(second * 1_000));
            match expected {
                Some(part) => assert!(told.unwrap().contains(part), "{second}"),
                None => assert_eq!(told, None, "{second}"),
            }
            before = after;
        }
    }
}
