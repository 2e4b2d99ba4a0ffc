//! Waiting for something to happen, instead of for time to pass.

use std::time::{Duration, Instant};

/// How long anything is waited for before that is a failure: far longer than it ever takes on a slow machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(5);

/// Asks again and again until there is an answer, and returns it.
///
/// # Panics
/// After [`DEADLINE`], with `what` was waited for.
#[track_caller]
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(PAUSE);
    }
}
