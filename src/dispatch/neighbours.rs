//! Which event is tried to find out whether a sink is up. It chooses and remembers what was tried;
//! what the answer means for the head is the engine's to say.

use super::policy::Isolation;
use super::queue::{Entry, Item, Queue};

/// How many pending events behind the head are tried before the first is tried again.
pub(super) const NEIGHBOURS: usize = 16;

/// The tests on behalf of one head, in rounds.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// Offsets from the head that failed in this round; no more than a round has.
    tested: Vec<usize>,
}

impl Neighbours {
    pub(super) fn restore(tested: Vec<usize>) -> Self {
        let mut neighbours = Neighbours { tested };
        neighbours.tested.truncate(NEIGHBOURS);
        neighbours
    }

    pub(super) fn tested(&self) -> &[usize] {
        &self.tested
    }

    /// Whether a test has failed: nothing shows that the sink is up.
    pub(super) fn any_failed(&self) -> bool {
        !self.tested.is_empty()
    }

    /// The next to try, as an offset from the head: of the candidates not tried in this round the
    /// nearest, but one that overtakes none with its own key before one that does, then one that
    /// never failed before one that did, and then one whose key is that of no other tried one. When
    /// all were tried, a new round begins.
    pub(super) fn choose<T: Item>(&self, queue: &Queue<T>, isolation: Isolation) -> Option<usize> {
        let candidates = candidates(queue, isolation);
        self.best(queue, &candidates, &self.tested)
            .or_else(|| self.best(queue, &candidates, &[]))
    }

    fn best<T: Item>(
        &self,
        queue: &Queue<T>,
        candidates: &[(usize, &Entry<T>)],
        tested: &[usize],
    ) -> Option<usize> {
        let seen: Vec<&T::Key> = std::iter::once(&0)
            .chain(tested)
            .filter_map(|offset| Some(queue.get(*offset)?.item().key()))
            .collect();
        candidates
            .iter()
            .filter(|(offset, _)| !tested.contains(offset))
            .min_by_key(|(offset, entry)| {
                (
                    queue.overtakes(*offset),
                    entry.trial.attempts > 0,
                    seen.contains(&entry.item().key()),
                    *offset,
                )
            })
            .map(|(offset, _)| *offset)
    }

    /// The event at `offset` did not go through either.
    pub(super) fn failed(&mut self, offset: usize) {
        if self.tested.len() >= NEIGHBOURS || self.tested.contains(&offset) {
            self.tested.clear();
        }
        self.tested.push(offset);
    }

    /// The head is another one, or nothing is known any more.
    pub(super) fn forget(&mut self) {
        self.tested.clear();
    }
}

/// How many events a test has to choose from.
pub(super) fn available<T: Item>(queue: &Queue<T>, isolation: Isolation) -> usize {
    candidates(queue, isolation).len()
}

/// The nearest pending events behind the head; isolated by key, only such as overtake none of their
/// own. Those that the sink named as failing while it took others say nothing by failing again, so
/// they come in only where there is nothing else: many of them must not hide a good one.
fn candidates<T: Item>(queue: &Queue<T>, isolation: Isolation) -> Vec<(usize, &Entry<T>)> {
    match isolation {
        Isolation::Batch => nearest(|| queue.behind_head()),
        Isolation::Key => nearest(|| queue.first_of_their_keys()),
    }
}

fn nearest<'q, T: Item + 'q, I>(entries: impl Fn() -> I) -> Vec<(usize, &'q Entry<T>)>
where
    I: Iterator<Item = (usize, &'q Entry<T>)>,
{
    let unnamed: Vec<_> = entries()
        .filter(|(_, entry)| !entry.named)
        .take(NEIGHBOURS)
        .collect();
    if unnamed.is_empty() {
        return entries().take(NEIGHBOURS).collect();
    }
    unnamed
}
