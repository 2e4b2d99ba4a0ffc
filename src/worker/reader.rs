//! What of a stream a sink gets next: reads windows in commit order, and makes what it finds ready.

use super::entry::Entry;
use super::shaping::{Shaped, Shaping};
use crate::dispatch::{Floors, Mark, Pattern, Place};
use crate::pg::spi::Spi;
use crate::store::events::{self, Want};
use crate::store::sinks::{Grouping, SinkRow};
use crate::store::streams::{Horizon, Stream};
use crate::store::transactions;

/// Rows that a pass looks at for one sink before others get their turn, whatever its filter leaves of them.
pub(super) const ROWS_A_PASS: usize = 20_000;

/// Reads for one sink, ahead of what has been delivered.
#[derive(Clone)]
pub(crate) struct Reader {
    pub(crate) stream: Stream,
    pub(crate) place: Place,
    want: Want,
    shaping: Option<Shaping>,
    grouping: Grouping,
    /// The most events in one entry.
    batch_size: usize,
}

/// What a pass brought.
pub(crate) struct Reading {
    pub(crate) entries: Vec<Entry>,
    /// Rows were passed, wanted or not: the cursor has something to save.
    pub(crate) moved: bool,
    /// There may be more where this came from.
    pub(crate) more: bool,
}

impl Reader {
    pub(crate) fn new(
        sink: &SinkRow,
        stream: Stream,
        place: Place,
        text: bool,
        batch_size: usize,
    ) -> Result<Self, String> {
        let shaping = Shaping::of(sink)?;
        let topics = sink.topics.as_ref().map(|topics| {
            topics
                .iter()
                .filter_map(|topic| Pattern::parse(topic).ok())
                .collect()
        });
        let want = Want {
            topics,
            tenant: sink.tenant.clone(),
            text,
            record: !text || shaping.is_some(),
        };
        Ok(Self {
            stream,
            place,
            want,
            shaping,
            grouping: sink.grouping,
            batch_size,
        })
    }

    pub(crate) fn set_batch_size(&mut self, batch_size: usize) {
        self.batch_size = batch_size;
    }

    /// Reads until `wanted` events are there, the stream is through, or the pass has taken its share.
    pub(crate) fn read(
        &mut self,
        spi: &Spi,
        horizon: &Horizon,
        floors: &mut Floors,
        wanted: usize,
    ) -> Reading {
        let mut reading = Reading {
            entries: Vec::new(),
            moved: false,
            more: true,
        };
        let (mut events, mut rows) = (0, 0);
        while events < wanted && rows < ROWS_A_PASS {
            let Some((shaped, looked_at)) = self.read_on(spi, horizon, floors, wanted - events)
            else {
                reading.more = false;
                break;
            };
            reading.moved |= looked_at > 0;
            rows += looked_at;
            events += shaped.len();
            self.pack(shaped, &mut reading.entries);
        }
        reading
    }

    /// Reads once within a window, which is opened if the last one is through. Returns the events that are wanted and how many
    /// rows were looked at; nothing if there is no further window.
    pub(crate) fn read_on(
        &mut self,
        spi: &Spi,
        horizon: &Horizon,
        floors: &mut Floors,
        wanted: usize,
    ) -> Option<(Vec<Shaped>, usize)> {
        if self.place.mark == Mark::END {
            self.place = Place::at_start_of(horizon.window_after(&self.place.window, floors)?);
        }
        let page = match self.grouping {
            Grouping::Event => events::read(spi, &self.stream, &self.place, wanted, &self.want),
            // A transaction that fits into one delivery is read in one piece.
            Grouping::Transaction => transactions::read(
                spi,
                &self.stream,
                &self.place,
                wanted.max(self.batch_size),
                &self.want,
            ),
        };
        self.place.mark = page.end;
        let shaped = match &self.shaping {
            Some(shaping) => shaping.apply(page.found),
            None => page.found.into_iter().map(|found| (found, None)).collect(),
        };
        Some((shaped, page.looked_at))
    }

    /// Whether every event of the stream is wanted, as it is and by itself.
    pub(crate) fn takes_all(&self) -> bool {
        self.shaping.is_none() && self.want.takes_all() && self.grouping == Grouping::Event
    }

    fn pack(&self, shaped: Vec<Shaped>, entries: &mut Vec<Entry>) {
        for (found, problem) in shaped {
            if self.grouping == Grouping::Transaction
                && let Some(last) = entries.last_mut()
                && last.is_of_transaction(found.event.position.txid)
                && last.events.len() < self.batch_size
            {
                last.add(found, problem);
            } else {
                entries.push(Entry::new(found, &self.place.window, problem));
            }
        }
    }
}
