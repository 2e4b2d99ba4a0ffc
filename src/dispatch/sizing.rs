//! How many events are handed over at once: the binary search for the one that fails, and the way
//! back to full batches. It counts from the head of the queue and knows neither events nor times.

/// How far below the full batch size deliveries are, and why.
#[derive(Debug, Default)]
pub(super) struct Sizing {
    /// The size to hand over when nothing is suspect; `None`: full batches.
    reduced: Option<usize>,
    suspects: Option<Suspects>,
}

#[derive(Debug)]
struct Suspects {
    /// A failure lies among the untried events before this offset.
    end: usize,
    error: String,
}

impl Sizing {
    /// Carries on where another left off. A `suspects` of 0 means none.
    pub(super) fn restore(reduced: Option<usize>, suspects: usize, error: &str) -> Self {
        let mut sizing = Sizing {
            reduced: reduced.map(|size| size.max(1)),
            suspects: None,
        };
        if suspects > 0 {
            sizing.suspects = Some(Suspects {
                end: suspects,
                error: error.to_owned(),
            });
        }
        sizing
    }

    pub(super) fn reduced(&self) -> Option<usize> {
        self.reduced
    }

    /// Up to which offset events are suspect; 0 when none is.
    pub(super) fn suspects_end(&self) -> usize {
        self.suspects.as_ref().map_or(0, |suspects| suspects.end)
    }

    /// The failure that the search is about.
    pub(super) fn error(&self) -> Option<&str> {
        self.suspects
            .as_ref()
            .map(|suspects| suspects.error.as_str())
    }

    /// The most to hand over now, if `untried` of the suspects have not been cleared or found yet.
    /// Half of them: that halves the search whichever half it turns out to be.
    pub(super) fn limit(&self, batch_size: usize, untried: usize) -> usize {
        let wanted = match self.suspects {
            Some(_) => untried / 2,
            None => self.reduced.unwrap_or(batch_size),
        };
        wanted.clamp(1, batch_size)
    }

    /// `count` events, several of them, failed together, all of them before the offset `end`.
    pub(super) fn failed(&mut self, count: usize, end: usize, error: &str) {
        self.reduced = Some((count / 2).max(1));
        self.suspects = Some(Suspects {
            end,
            error: error.to_owned(),
        });
    }

    /// The event at the head failed by itself: what was searched for is found.
    pub(super) fn found(&mut self) {
        self.reduced = Some(1);
        self.suspects = None;
    }

    /// `count` events left the head of the queue.
    pub(super) fn advance(&mut self, count: usize) {
        if let Some(suspects) = &mut self.suspects {
            suspects.end = suspects.end.saturating_sub(count);
        }
    }

    /// Nothing is suspect any more.
    pub(super) fn cleared(&mut self) {
        self.suspects = None;
    }

    /// Something went through. While a failure is still searched for, that says nothing about the
    /// size.
    pub(super) fn grow(&mut self, batch_size: usize) {
        if self.suspects.is_none() {
            self.reduced = self
                .reduced
                .map(|size| size.saturating_mul(2))
                .filter(|size| *size < batch_size);
        }
    }
}
