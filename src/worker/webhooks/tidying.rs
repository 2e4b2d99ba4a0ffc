//! What is removed: finished deliveries that are old, and all that is left of webhooks that were deleted. One small step at a time, in
//! the transactions that deliveries go on in, and by the process that writes deliveries: so none is written for a webhook after the
//! last of its rows is gone.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::PAUSE;
use crate::pg::spi::Spi;
use crate::settings;
use crate::store::webhooks;

/// How often finished deliveries are looked through for old ones.
const PRUNING: Duration = Duration::from_secs(60);

pub(super) struct Tidying {
    /// There are webhooks.
    any: bool,
    next_pruning: Instant,
    /// What was finished before is gone: no step walks over rows that are dead and not yet vacuumed.
    pruned_to: Option<i64>,
    removals: VecDeque<Removal>,
    /// What others hold is tried again then.
    retry: Instant,
}

struct Removal {
    webhook: String,
    stream: String,
    /// Up to this delivery all have been looked at, for the same reason.
    behind: i64,
    /// Others hold something of it.
    held: bool,
    /// It begins anew at [`Tidying::retry`].
    waits: bool,
}

impl Removal {
    fn of((webhook, stream): (String, String)) -> Self {
        Self {
            webhook,
            stream,
            behind: 0,
            held: false,
            waits: false,
        }
    }
}

impl Tidying {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            any: false,
            next_pruning: now + PRUNING,
            pruned_to: None,
            removals: VecDeque::new(),
            retry: now,
        }
    }

    /// Looks at what is to be removed.
    pub(super) fn look(&mut self, spi: &Spi, any: bool) {
        self.any = any;
        let removals = webhooks::removals(spi);
        self.removals = removals.into_iter().map(Removal::of).collect();
    }

    /// When there is something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        let removal = self.removals.front().map(|next| match next.waits {
            true => self.retry,
            false => Instant::now(),
        });
        let pruning = self.any.then_some(self.next_pruning);
        removal.into_iter().chain(pruning).min()
    }

    /// Goes one step on, if it is time.
    pub(super) fn step(&mut self, spi: &Spi) {
        let now = Instant::now();
        if self.any && now >= self.next_pruning {
            let age = settings::webhooks::retention();
            self.pruned_to = webhooks::prune(spi, age, self.pruned_to);
            let more = self.pruned_to.is_some();
            self.next_pruning = if more { now } else { now + PRUNING };
        }
        let Some(mut removal) = self
            .removals
            .pop_front_if(|next| !next.waits || now >= self.retry)
        else {
            return;
        };
        removal.waits = false;
        if removal.behind == 0 {
            removal.held = !webhooks::drop_idle_cursor(spi, &removal.stream);
        }
        match webhooks::remove(spi, &removal.webhook, removal.behind) {
            Some(removed) => {
                removal.behind = removed.last;
                removal.held |= removed.held;
                self.removals.push_front(removal);
            }
            None if removal.held => {
                self.retry = now + PAUSE;
                removal.behind = 0;
                removal.waits = true;
                self.removals.push_back(removal);
            }
            None => webhooks::forget_removal(spi, &removal.webhook),
        }
    }
}
