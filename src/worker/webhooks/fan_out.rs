//! From events to deliveries: reads a stream in commit order, as a sink does, and writes a row for each event and webhook that match,
//! with the cursor in the same transaction.

use std::collections::{BTreeMap, BTreeSet};

use crate::dispatch::{Floors, Grouping, Mark, Pattern, Place, Snapshot};
use crate::envelope::{Position, write_cloudevent};
use crate::pg::lock;
use crate::pg::spi::Spi;
use crate::store::cursors::{self, Stand};
use crate::store::events::{self, Found, Want};
use crate::store::streams::{Horizon, Stream};
use crate::store::webhooks::{self, New};

/// Rows looked at in one pass.
const PAGE: usize = 500;

pub(super) struct FanOut {
    name: String,
    stream: Option<Stream>,
    horizon: Option<Horizon>,
    /// Where it stands; read from the cursor at first.
    place: Option<Place>,
    greatest: Position,
    more: bool,
}

/// A webhook, ready to be compared with.
struct Wish {
    id: String,
    topics: Option<Vec<Pattern>>,
    since: Option<Snapshot>,
}

impl Wish {
    fn wants(&self, topic: &str, txid: u64) -> bool {
        self.since.as_ref().is_none_or(|since| !since.sees(txid))
            && self
                .topics
                .as_ref()
                .is_none_or(|topics| topics.iter().any(|pattern| pattern.matches(topic)))
    }
}

impl FanOut {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            stream: None,
            horizon: None,
            place: None,
            greatest: Position::default(),
            more: false,
        }
    }

    pub(super) fn saw(&mut self, stream: &Stream, horizon: &Horizon) {
        let is_new = self
            .horizon
            .as_ref()
            .is_none_or(|known| known.snapshot != horizon.snapshot);
        self.stream = Some(stream.clone());
        self.horizon = Some(horizon.clone());
        self.more |= is_new;
    }

    pub(super) fn has_more(&self) -> bool {
        self.more && self.horizon.is_some()
    }

    /// Reads on, once, and writes what is to be delivered. Returns the ids of the deliveries, and their webhooks.
    pub(super) fn pass(
        &mut self,
        spi: &Spi,
        floors: &mut BTreeMap<u32, Floors>,
    ) -> Vec<(i64, String)> {
        let (Some(stream), Some(horizon), true) = (&self.stream, &self.horizon, self.more) else {
            return Vec::new();
        };
        let cursor = webhooks::cursor_of(&self.name);
        if !lock::hold_table(stream.oid) {
            return Vec::new();
        }
        let mut place = match self.place.clone() {
            Some(place) => place,
            None => match cursors::load_named(spi, &cursor, false) {
                Some(saved) => {
                    self.greatest = saved.pair;
                    saved.stand.place
                }
                None => return Vec::new(),
            },
        };
        if place.mark == Mark::END {
            let floors = floors.entry(stream.oid).or_default();
            match horizon.window_after(&place.window, Grouping::Event, floors) {
                Some(window) => place = Place::at_start_of(window),
                None => {
                    self.more = false;
                    return Vec::new();
                }
            }
        }
        let want = Want {
            text: true,
            ..Want::default()
        };
        let page = events::read(spi, stream, &place, PAGE, &want);
        place.mark = page.end;
        self.greatest = self.greatest.max(page.greatest);
        if page.looked_at == 0 {
            // Nothing to save: to pass it again costs nothing.
            self.place = Some(place);
            return Vec::new();
        }
        let written = deliver(spi, &self.name, &page.found);
        let pair = cursors::pair_of(&place, Some(self.greatest));
        let count = u64::try_from(written.len()).unwrap_or(0);
        let to = Stand::at(place);
        if cursors::advance(spi, &cursor, None, &to, pair, count) {
            self.place = Some(to.place);
        } else {
            // It was deleted, and perhaps made anew: what it says now counts.
            self.place = None;
        }
        written
    }
}

/// Writes the deliveries of these events.
fn deliver(spi: &Spi, stream: &str, found: &[Found]) -> Vec<(i64, String)> {
    let tenants = found.iter().filter_map(|found| found.event.tenant.clone());
    let tenants = tenants.collect::<BTreeSet<_>>();
    if tenants.is_empty() {
        return Vec::new();
    }
    let mut wishes: BTreeMap<String, Vec<Wish>> = BTreeMap::new();
    for wish in webhooks::wishes(spi, stream, &tenants.into_iter().collect::<Vec<_>>()) {
        let parse = |topics: Vec<String>| {
            let patterns = topics.iter().filter_map(|topic| Pattern::parse(topic).ok());
            patterns.collect()
        };
        wishes.entry(wish.tenant).or_default().push(Wish {
            id: wish.id,
            topics: wish.topics.map(parse),
            since: wish.since.and_then(|since| since.parse().ok()),
        });
    }
    let mut new = New::default();
    for Found { event, problem, .. } in found {
        let tenant = event.tenant.as_deref().unwrap_or_default();
        let wanted = wishes.get(tenant).into_iter().flatten();
        let wanted = wanted.filter(|wish| wish.wants(&event.topic, event.position.txid));
        let ids = wanted.map(|wish| wish.id.clone()).collect::<Vec<_>>();
        if ids.is_empty() {
            continue;
        }
        if let Some(problem) = problem {
            pgrx::warning!(
                "pg_outbox: event {} is delivered to no webhook: {problem}",
                event.position
            );
            continue;
        }
        let mut json = Vec::new();
        write_cloudevent(event, &mut json);
        let json = String::from_utf8_lossy(&json).into_owned();
        for id in ids {
            new.webhooks.push(id);
            new.tenants.push(tenant.to_owned());
            new.event_ids.push(event.id.clone());
            new.topics.push(event.topic.clone());
            new.events.push(json.clone());
        }
    }
    webhooks::write(spi, &new)
}
