//! NOTIFY outbox: tells those who listen that a stream has got events, once for many commits.
//!
//! Two kinds of clients listen. Consumers of pull sinks can have an event as soon as its transaction has committed, so what a look
//! finds new in commit order is told at once. Readers of pairs can have it only when no older transaction is open any more; if one
//! was, they are told again when it has ended.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pgrx::PgLogLevel;

use super::maintenance::in_transaction;
use crate::dispatch::{Floors, Grouping, Snapshot, Window};
use crate::pg::spi::Arg;
use crate::pg::{lock, transaction};
use crate::settings;
use crate::store::events;
use crate::store::streams::{Horizon, Stream};

/// At most one NOTIFY a stream in this time: commits with a NOTIFY wait for each other.
const GAP: Duration = Duration::from_millis(20);

/// What could not be told, for somebody holds the table or another commit that notifies takes long, is told then.
const UNTOLD_RETRY: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Announcements {
    next: Option<Instant>,
    /// Streams that may have something new, and how far they have come; by the oid of the table, as is the other.
    pending: BTreeMap<u32, (Stream, Horizon)>,
    told: BTreeMap<u32, Told>,
}

/// What has been told of a stream.
#[derive(Clone)]
struct Told {
    /// All up to the end of this.
    window: Window,
    /// Readers of pairs cannot have all of it as long as a transaction below this is open.
    unread_below: Option<u64>,
}

impl Told {
    fn has_become_readable(&self, horizon: &Horizon) -> bool {
        self.unread_below
            .is_some_and(|xid| xid <= horizon.snapshot.oldest_unseen())
    }
}

impl Announcements {
    /// A look has found how far a stream has come.
    pub(super) fn saw(&mut self, stream: &Stream, horizon: &Horizon) {
        let told = self.told.entry(stream.oid).or_insert_with(|| Told {
            window: Window::empty(Snapshot::empty(), stream.pruned_seq),
            unread_below: None,
        });
        if horizon.snapshot != told.window.upto || told.has_become_readable(horizon) {
            let pending = (stream.clone(), horizon.clone());
            self.pending.insert(stream.oid, pending);
        }
    }

    /// When there is something to tell.
    pub(super) fn due(&self) -> Option<Instant> {
        (!self.pending.is_empty()).then(|| self.next.unwrap_or_else(Instant::now))
    }

    /// Before this there is nothing to tell, whatever is committed.
    pub(super) fn not_before(&self) -> Option<Instant> {
        self.next
    }

    /// Tells what is due.
    pub(super) fn run(&mut self, now: Instant, floors: &mut BTreeMap<u32, Floors>) {
        if self.pending.is_empty() || self.next.is_some_and(|next| now < next) {
            return;
        }
        self.next = Some(now + GAP);
        for (oid, (stream, horizon)) in std::mem::take(&mut self.pending) {
            let floors = floors.entry(oid).or_default();
            if let Some(told) = self.told.get_mut(&oid)
                && !tell(&stream, &horizon, told, floors)
            {
                self.pending.insert(oid, (stream, horizon));
                self.next = Some(now + UNTOLD_RETRY);
            }
        }
    }
}

/// False if that has to wait.
fn tell(stream: &Stream, horizon: &Horizon, told: &mut Told, floors: &mut Floors) -> bool {
    let mut after = told.clone();
    let window = horizon.window_after(&told.window, Grouping::Event, floors);
    if let Some(window) = &window {
        after.window = window.clone();
    }
    let readable = told.has_become_readable(horizon);
    if readable {
        after.unread_below = None;
    }
    if settings::notify() {
        let written = in_transaction(|spi| {
            if !lock::hold_table(stream.oid) {
                return false;
            }
            let new = window
                .as_ref()
                .and_then(|window| events::last_of_window(spi, stream, window));
            if new.is_some() && !horizon.snapshot.running().is_empty() {
                after.unread_below = Some(horizon.snapshot.xmax());
            }
            let position = match new {
                None if readable => events::last_readable(spi, stream),
                new => new,
            };
            if let Some(position) = position {
                let payload = format!("{} {position}", stream.name);
                let args = [Arg::Text(Some(&payload))];
                spi.write("select pg_catalog.pg_notify('outbox', $1)", &args);
            }
            true
        });
        match written {
            Ok(Some(true)) => {}
            Ok(_) => return false,
            Err(error) => {
                let what = "listeners could not be notified";
                transaction::log(PgLogLevel::WARNING, what, &error);
                return false;
            }
        }
    }
    *told = after;
    true
}
