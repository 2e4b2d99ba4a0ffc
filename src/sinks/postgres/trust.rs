//! Whether a refusal is the fault of the one event that was refused.
//!
//! A value that does not fit its column is refused with the same SQLSTATE as each value of a column that somebody has just made too
//! narrow. The one event is bad, the other is an outage. What tells them apart is that the server takes other events *after* it has
//! begun to refuse: the search for the bad event hands over good ones on its way. Without that, the dispatcher's own tests decide.

/// What the latest deliveries have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Trust {
    /// Nothing has been refused for long.
    #[default]
    Calm,
    /// Something was refused, and nothing has been taken since.
    Doubted,
    /// Something was refused, and so many deliveries in a row were taken since.
    Shown(u32),
}

/// After so many, what was refused before says nothing any more. A search never hands over as many in a row.
const LONG: u32 = 64;

impl Trust {
    pub(super) fn taken(&mut self) {
        *self = match *self {
            Trust::Calm => Trust::Calm,
            Trust::Doubted => Trust::Shown(1),
            Trust::Shown(LONG..) => Trust::Calm,
            Trust::Shown(deliveries) => Trust::Shown(deliveries + 1),
        };
    }

    /// Something was refused for what it holds, an event by itself or several. True if that is the fault of the event alone.
    pub(super) fn refused(&mut self, events: usize) -> bool {
        match (*self, events) {
            (Trust::Shown(_), 1) => {
                // Another must go through before the next is laid to itself.
                *self = Trust::Doubted;
                true
            }
            (Trust::Shown(_), _) => {
                *self = Trust::Shown(1);
                false
            }
            _ => {
                *self = Trust::Doubted;
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_found_good_events_on_its_way_ends_at_the_bad_one() {
        let mut trust = Trust::default();
        trust.taken();
        assert!(!trust.refused(8));
        assert!(!trust.refused(4));
        trust.taken();
        assert!(!trust.refused(2));
        assert!(trust.refused(1));
        // The next one, although the first was given up.
        assert!(!trust.refused(1));
        trust.taken();
        assert!(trust.refused(1));
    }

    #[test]
    fn a_table_that_takes_nothing_any_more_condemns_no_event() {
        let mut trust = Trust::default();
        assert!(!trust.refused(3));
        trust.taken();
        for _ in 0..=LONG {
            trust.taken();
        }
        for events in [8, 4, 2, 1, 1, 1] {
            assert!(!trust.refused(events), "{events}");
        }
    }
}
