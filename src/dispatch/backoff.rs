//! Points in time and how long to wait until the next one. It never asks what time it is.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::policy::Policy;

/// Milliseconds since the Unix epoch, as the caller's clock says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Time(pub u64);

impl Time {
    /// The first millisecond that is at least `wait` later.
    pub(super) fn after(self, wait: Duration) -> Time {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        Time(
            self.0
                .saturating_add(u64::try_from(millis).unwrap_or(u64::MAX)),
        )
    }
}

/// How long to wait after the `attempts`-th failure of an event, if the sink asked for
/// `retry_after`.
pub(super) fn delay(policy: &Policy, attempts: u32, retry_after: Option<Duration>) -> Duration {
    let doublings = attempts.saturating_sub(1).min(31);
    policy
        .retry_min
        .saturating_mul(1 << doublings)
        .max(retry_after.unwrap_or_default())
        .min(policy.retry_max)
}

/// Whether `due` still lies ahead, and until when to wait for it. One that has come is forgotten,
/// so that a clock that jumps back does not bring it again; one further off than the longest wait
/// comes from such a clock and is drawn in.
pub(super) fn remaining(due: &mut Option<Time>, now: Time, longest: Duration) -> Option<Time> {
    *due = due
        .map(|due| due.min(now.after(longest)))
        .filter(|due| *due > now);
    *due
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(min: u64, max: u64) -> Policy {
        Policy {
            batch_size: 1,
            retry_min: Duration::from_millis(min),
            retry_max: Duration::from_millis(max),
            poison_attempts: 1,
        }
    }

    #[test]
    fn doubles_up_to_the_longest() {
        let policy = policy(1_000, 300_000);
        let seconds: Vec<u64> = (1..=11)
            .map(|attempts| delay(&policy, attempts, None).as_secs())
            .collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(delay(&policy, u32::MAX, None), policy.retry_max);
    }

    #[test]
    fn a_sink_may_ask_for_more_but_not_for_less_nor_for_more_than_the_longest() {
        let policy = policy(1_000, 300_000);
        let asked = |seconds| delay(&policy, 3, Some(Duration::from_secs(seconds))).as_secs();
        assert_eq!(
            [asked(0), asked(3), asked(60), asked(u64::MAX)],
            [4, 4, 60, 300]
        );
    }

    #[test]
    fn odd_limits_do_no_harm() {
        assert_eq!(delay(&policy(9, 5), 1, None).as_millis(), 5);
        assert_eq!(delay(&policy(0, 5), 7, None).as_millis(), 0);
        assert_eq!(
            delay(&policy(u64::MAX, u64::MAX), 40, None).as_millis(),
            u64::MAX.into()
        );
        assert_eq!(Time(u64::MAX).after(Duration::MAX), Time(u64::MAX));
        assert_eq!(Time(5).after(Duration::from_nanos(1)), Time(6));
    }

    #[test]
    fn a_due_time_comes_once() {
        let longest = Duration::from_millis(100);
        let mut due = Some(Time(1_050));
        assert_eq!(remaining(&mut due, Time(1_000), longest), Some(Time(1_050)));
        assert_eq!(remaining(&mut due, Time(1_050), longest), None);
        assert_eq!(remaining(&mut due, Time(0), longest), None);
    }

    #[test]
    fn a_clock_that_went_back_prolongs_no_wait_beyond_the_longest() {
        let longest = Duration::from_millis(100);
        let mut due = Some(Time(1_050));
        assert_eq!(remaining(&mut due, Time(10), longest), Some(Time(110)));
        assert_eq!(remaining(&mut due, Time(60), longest), Some(Time(110)));
    }
}
