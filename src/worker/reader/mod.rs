//! What of a stream a sink gets next: reads windows in commit order, and makes what it finds ready.

mod parts;

use self::parts::{Counting, Group, Numbered};
use super::entry::Entry;
use super::shaping::{Patience, Shaped, Shaping};
use crate::dispatch::{Floors, Grouping, Mark, Pattern, Place};
use crate::envelope::{Event, Position};
use crate::pg::spi::Spi;
use crate::sinks::Redaction;
use crate::store::events::{self, Found, Want};
use crate::store::sinks::SinkRow;
use crate::store::streams::{Horizon, Shape, Stream};
use crate::store::transactions::{self, Lookout};

/// Rows that a pass looks at for one sink before others get their turn, whatever its filter leaves of them.
pub(super) const ROWS_A_PASS: usize = 20_000;

/// Rows that a pass walks over to find out which transaction is next.
const WALKED_A_PASS: usize = 2_000;

/// Reads for one sink, ahead of what has been delivered.
#[derive(Clone)]
pub(crate) struct Reader {
    pub(crate) stream: Stream,
    pub(crate) place: Place,
    /// The greatest position that was looked at.
    pub(crate) greatest: Position,
    want: Want,
    shaping: Option<Shaping>,
    redaction: Redaction,
    /// Of windows to come.
    grouping: Grouping,
    lookout: Lookout,
    /// The most events in one entry.
    batch_size: usize,
    numbered: Option<Numbered>,
    counting: Option<Counting>,
}

/// What one read brought.
pub(crate) struct Read {
    /// The events that are wanted.
    pub(crate) shaped: Vec<Shaped>,
    /// How many rows were passed, wanted or not.
    pub(crate) passed: usize,
    /// How many rows were walked over to find out which come next.
    walked: usize,
}

/// What a pass brought.
pub(crate) struct Reading {
    pub(crate) entries: Vec<Entry>,
    /// How many rows were passed, wanted or not: the cursor has something to save.
    pub(crate) passed: usize,
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
        shaping.as_ref().map_or(Ok(()), Shaping::check)?;
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
            records: stream.shape == Shape::Audit,
            parts: false,
            sink: Some(sink.number),
        };
        let want = Want {
            parts: text && shaping.is_none() && want.takes_all(),
            ..want
        };
        Ok(Self {
            stream,
            place,
            greatest: Position::default(),
            want,
            shaping,
            redaction: Redaction::default(),
            grouping: sink.grouping,
            lookout: Lookout::default(),
            batch_size,
            numbered: None,
            counting: None,
        })
    }

    /// What is to be taken out of payloads that are read as text.
    pub(crate) fn redact(&mut self, redaction: Redaction) {
        self.redaction = redaction;
    }

    pub(crate) fn set_patience(&mut self, patience: Patience) {
        if let Some(shaping) = &mut self.shaping {
            shaping.set_patience(patience);
        }
    }

    /// Whether its filter or transform took longer than others can wait: then what was read is not to be used.
    pub(crate) fn is_too_slow(&self) -> bool {
        self.shaping.as_ref().is_some_and(Shaping::is_too_slow)
    }

    /// Whether events go through code that was supplied.
    pub(crate) fn shapes(&self) -> bool {
        self.shaping.is_some()
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
            passed: 0,
            more: true,
        };
        let wanted = match self.stream.shape {
            Shape::Events => wanted,
            Shape::Audit => wanted.max(self.batch_size),
        };
        let mut group = Group::after(self.place.mark, self.numbered.take());
        let mut events = 0;
        let mut walked = 0;
        while (events < wanted && walked < WALKED_A_PASS || !group.events.is_empty())
            && reading.passed < ROWS_A_PASS
        {
            let left = wanted.saturating_sub(events).max(1);
            if !self.has_counted(spi, &group, left) {
                break;
            }
            let Some(read) = self.read_on(spi, horizon, floors, left) else {
                reading.more = false;
                break;
            };
            if self.is_too_slow() {
                return reading;
            }
            reading.passed += read.passed;
            walked += read.walked;
            let shaped = read.shaped;
            events += shaped.len();
            match self.place.window.grouping {
                Grouping::Event if self.stream.shape == Shape::Audit => {
                    self.put_together(shaped, &mut reading.entries);
                }
                Grouping::Event => {
                    let entry = |(found, problem)| Entry::new(found, &self.place.window, problem);
                    reading.entries.extend(shaped.into_iter().map(entry));
                }
                Grouping::Transaction => {
                    self.pack(spi, shaped, &mut group, &mut reading.entries);
                }
            }
        }
        // One with more events that nobody wants than a pass looks at.
        self.close(spi, &mut group, false, &mut reading.entries);
        self.numbered = self.numbered_by(&mut group);
        reading
    }

    /// Reads once within a window, which is opened if the last one is through; nothing if there is no further one.
    pub(crate) fn read_on(
        &mut self,
        spi: &Spi,
        horizon: &Horizon,
        floors: &mut Floors,
        wanted: usize,
    ) -> Option<Read> {
        if self.place.mark == Mark::END {
            let window = horizon.window_after(&self.place.window, self.grouping, floors)?;
            self.place = Place::at_start_of(window);
        }
        let page = match self.place.window.grouping {
            Grouping::Event => events::read(spi, &self.stream, &self.place, wanted, &self.want),
            // A transaction that fits into one delivery is read in one piece.
            Grouping::Transaction => transactions::read(
                spi,
                &self.stream,
                &self.place,
                &mut self.lookout,
                wanted.max(self.batch_size),
                &self.want,
            ),
        };
        self.place.mark = page.end;
        self.greatest = self.greatest.max(page.greatest);
        Some(Read {
            shaped: self.shape(page.found),
            passed: page.looked_at,
            walked: page.walked,
        })
    }

    /// How what comes next is grouped.
    pub(crate) fn grouping(&self) -> Grouping {
        match self.place.mark {
            Mark::END => self.grouping,
            _ => self.place.window.grouping,
        }
    }

    /// Reads these events once more, given by their seqs, in this order. Those that are gone or not wanted any more are left out.
    pub(crate) fn read_these(&self, spi: &Spi, seqs: &[i64]) -> Vec<Shaped> {
        self.shape(events::these(spi, &self.stream, seqs, &self.want))
    }

    fn shape(&self, found: Vec<Found>) -> Vec<Shaped> {
        let shaped = match &self.shaping {
            Some(shaping) => shaping.apply(found),
            None => found.into_iter().map(|found| (found, None)).collect(),
        };
        let say = |(mut found, problem): Shaped| {
            let as_it_is = found.problem.map(str::to_owned);
            let unredacted = self.take_out(&mut found.event);
            (found, problem.or(as_it_is).or(unredacted))
        };
        shaped.into_iter().map(say).collect()
    }

    /// Takes out of a payload what the destination is not to see; all of it, if that cannot be done.
    fn take_out(&self, event: &mut Event) -> Option<String> {
        if self.redaction.is_empty() {
            return None;
        }
        let redacted = self.redaction.apply(event.payload.as_deref()?);
        let problem = redacted.as_ref().err().map(ToString::to_string);
        event.payload = redacted.ok();
        problem
    }

    /// Why no event can be made ready, if that is so.
    pub(crate) fn unfit(&self) -> Option<String> {
        self.shaping.as_ref()?.check().err()
    }

    /// Whether every event of the stream is wanted, as it is and by itself.
    pub(crate) fn takes_all(&self) -> bool {
        self.shaping.is_none() && self.want.takes_all() && self.grouping() == Grouping::Event
    }

    /// Whether the sink leaves events out.
    fn chooses(&self) -> bool {
        self.shaping.is_some() || !self.want.takes_all()
    }

    /// Records of the audit trail go out, and are tried again, by whole batches: each is one entry, which nothing takes apart.
    fn put_together(&self, shaped: Vec<Shaped>, entries: &mut Vec<Entry>) {
        for (found, problem) in shaped {
            match entries.last_mut() {
                Some(last)
                    if last.events.len() < self.batch_size && last.is_of(&self.place.window) =>
                {
                    last.add(found, problem);
                }
                _ => entries.push(Entry::new(found, &self.place.window, problem)),
            }
        }
    }

    /// Puts events together by transaction. One that fits into an entry is not closed before it is complete.
    fn pack(&self, spi: &Spi, shaped: Vec<Shaped>, group: &mut Group, entries: &mut Vec<Entry>) {
        for one in shaped {
            if one.0.mark.group != group.last {
                self.close(spi, group, true, entries);
                group.begin(one.0.mark.group);
            } else if group.events.len() >= self.batch_size {
                self.close(spi, group, false, entries);
            }
            group.events.push(one);
        }
        if !self.place.mark.is_within() {
            self.close(spi, group, true, entries);
        } else if group.events.len() >= self.batch_size {
            self.close(spi, group, false, entries);
        }
    }

    /// Makes an entry of a group; `complete` if no more of its transaction is to come.
    fn close(&self, spi: &Spi, group: &mut Group, complete: bool, entries: &mut Vec<Entry>) {
        if self.numbers() {
            self.number(spi, group, complete);
        }
        let mut events = std::mem::take(&mut group.events).into_iter();
        if let Some((found, problem)) = events.next() {
            let mut entry = Entry::new(found, &self.place.window, problem);
            for (found, problem) in events {
                entry.add(found, problem);
            }
            entries.push(entry);
        }
    }
}
