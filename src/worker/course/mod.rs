//! The course of one sink: what has been read for it, what is in flight, what is delivered and not yet saved.
//!
//! Here the pure engine meets the tables. A course is held under the sink's lease, by one process at a time; whoever takes the
//! lease loads it from the tables. Nothing here waits.

mod delivery;
mod parked;
mod progress;
mod reading;
mod saving;
mod telling;

use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) use delivery::{Handover, Next, Pass};
use progress::Delivery;
use saving::Unsaved;
pub(crate) use saving::Written;
use telling::Telling;

use super::entry::Entry;
use super::function::Call;
use super::now;
use super::parking::Parking;
use super::reader::Reader;
use super::redelivery::Redelivery;
use crate::dispatch::{Engine, Place, Policy, Time};
use crate::envelope::Position;
use crate::pg::spi::Spi;
use crate::pg::{catalog, lock, security};
use crate::settings;
use crate::sinks::{self, Config, Origin, SecretSource, Secrets, Watch, Witness};
use crate::store::cursors::Stand;
use crate::store::health::{self, Health};
use crate::store::secrets::{self, Stored};
use crate::store::sinks::{SinkRow, Version};
use crate::store::{cursors, sinks as sink_rows, streams};

/// How a sink takes events.
pub(crate) enum Target {
    /// A network client on the I/O thread.
    Network,
    /// A function in this database.
    Function(Call),
}

/// One sink under way.
pub(crate) struct Course {
    pub(crate) sink: SinkRow,
    pub(crate) config: Config,
    pub(crate) target: Target,
    pub(crate) reader: Reader,
    pub(crate) redelivery: Redelivery,
    parking: Parking,
    engine: Engine<Entry>,
    secrets: SecretSource,
    origin: Arc<Origin>,
    version: Version,
    /// Everything up to here is settled.
    settled: Place,
    /// Where the cursor stands.
    saved: Stand,
    greatest: Position,
    unsaved: Unsaved,
    saved_health: Health,
    /// It has got on since it was taken: it is not what it was set aside for any more.
    gets_on: bool,
    telling: Telling,
    /// The seqs of events that went through ahead and have not been read again yet.
    ahead: BTreeSet<i64>,
    /// Counts deliveries, to tell a report of an earlier one.
    serial: u64,
    in_flight: bool,
    /// What is in flight of the stream.
    delivery: Option<Delivery>,
    /// Of the parked events in flight.
    parked_watch: Option<Arc<Watch>>,
    /// Nothing more is handed over: the sink has changed, or the process ends.
    called_off: bool,
    /// It must be known of this event whether it is here before anything more is handed over.
    asked: Option<Witness>,
    lost: bool,
    /// Nothing can be saved before.
    postponed: Option<Time>,
    /// Why the sink cannot run any longer.
    unfit: Option<String>,
    /// A filter or transform has failed on something that was read.
    misshapen: bool,
    /// It is to have a process of its own, and reads nothing more here.
    leaving: bool,
    /// The last read was not enough to find out what comes next.
    goes_on: bool,
    /// There may be more to read without anything new having been committed.
    pub(crate) has_more: bool,
}

/// What taking a sink came to.
pub(crate) enum Taken {
    Course(Box<Course>),
    /// Another process holds the lease.
    Leased,
    Paused,
    /// Kind pull: its consumers hold the lease.
    Pull,
    /// It was dropped.
    Gone,
    /// It cannot run as it is.
    Unfit(String),
}

/// Records of the audit trail in one delivery, where the sink does not say otherwise.
const AUDIT_BATCH: usize = 500;

/// The limits of a sink's engine. The audit trail has no holes: a batch of it, which is one entry, is tried until it goes through,
/// whatever is wrong with it.
fn policy(sink: &SinkRow) -> Policy {
    let policy = settings::policy(sink.batch_size);
    if sink.stream != streams::AUDIT {
        return policy;
    }
    Policy {
        batch_size: 1,
        poison_attempts: u32::MAX,
        ..policy
    }
}

/// The most events in one entry.
fn batch_size(sink: &SinkRow) -> usize {
    let of_its_own = sink.batch_size.and_then(|size| usize::try_from(size).ok());
    match of_its_own {
        Some(size) => size,
        None if sink.stream == streams::AUDIT => AUDIT_BATCH,
        None => settings::policy(None).batch_size,
    }
}

impl Course {
    /// Takes the lease of a sink, by `take_lease`, and loads where it stands; a transaction is open.
    pub(crate) fn take(spi: &Spi, version: &Version, take_lease: fn(i32) -> bool) -> Taken {
        let Some(sink) = sink_rows::named(spi, &version.id) else {
            return Taken::Gone;
        };
        if sink.kind == "pull" {
            return Taken::Pull;
        }
        if !sink.enabled {
            return Taken::Paused;
        }
        if !take_lease(sink.number) {
            return Taken::Leased;
        }
        match Self::load(spi, version, sink) {
            Ok(Some(course)) => Taken::Course(Box::new(course)),
            Ok(None) => Taken::Gone,
            Err(problem) => {
                lock::give_lease_back(version.number);
                Taken::Unfit(problem)
            }
        }
    }

    fn load(spi: &Spi, version: &Version, sink: SinkRow) -> Result<Option<Self>, String> {
        let Some(cursor) = cursors::load(spi, &sink.id, false) else {
            return Ok(None);
        };
        let Some(stream) = streams::named(spi, &sink.stream) else {
            return Ok(None);
        };
        let value = serde_json::from_str(&sink.config).map_err(|error| error.to_string())?;
        let mut config = sinks::parse(&sink.kind, &value).map_err(|error| error.message)?;
        if let Config::Postgres(postgres) = &mut config
            && security::may_be_server(sink.owner)
        {
            postgres.allow_passwordless();
        }
        let policy = policy(&sink);
        let target = match &config {
            Config::Function(config) => Target::Function(Call::of(spi, &sink, config)?),
            _ => Target::Network,
        };
        let text = matches!(target, Target::Network);
        let at_once = batch_size(&sink);
        let mut reader = Reader::new(&sink, stream, cursor.stand.place.clone(), text, at_once)?;
        if text {
            let redaction = sinks::redaction(&sink.kind, &value);
            reader.redact(redaction.map_err(|error| error.message)?);
        }
        let saved_health = health::load(spi, &sink.id).unwrap_or_default();
        let checkpoint = saved_health.checkpoint.as_deref();
        let checkpoint = checkpoint.and_then(|text| serde_json::from_str(text).ok());
        let mut course = Self {
            secrets: secret_source(spi, config.secret()),
            origin: Arc::new(Origin {
                sink: sink.id.clone(),
                life: sink.life.clone(),
                cluster: catalog::system_identifier().to_string(),
                takeover: takeover()?,
                verified: None,
            }),
            engine: Engine::restore(policy, checkpoint.unwrap_or_default()),
            redelivery: Redelivery::new(),
            parking: Parking::load(spi, &sink.id, policy, now()),
            settled: cursor.stand.place.clone(),
            ahead: cursor.stand.ahead.clone(),
            saved: cursor.stand,
            greatest: cursor.pair,
            unsaved: Unsaved::default(),
            version: version.clone(),
            serial: 0,
            in_flight: false,
            delivery: None,
            parked_watch: None,
            called_off: false,
            asked: None,
            lost: false,
            postponed: None,
            unfit: None,
            misshapen: false,
            leaving: false,
            goes_on: false,
            has_more: true,
            gets_on: false,
            telling: Telling::of(&saved_health),
            saved_health,
            sink,
            config,
            target,
            reader,
        };
        course.hold_parked_keys();
        Ok(Some(course))
    }

    /// Whether the sink or its secret has changed since it was taken.
    pub(crate) fn is_version(&self, version: &Version) -> bool {
        self.version == *version
    }

    /// Settings were read again.
    pub(crate) fn set_policy(&mut self) {
        let policy = policy(&self.sink);
        self.engine.set_policy(policy);
        self.reader.set_batch_size(batch_size(&self.sink));
        self.redelivery.set_policy();
        self.parking.set_policy(policy);
    }

    /// The sink was changed or resumed: it is tried without waiting for its back-off.
    pub(crate) fn retry_now(&mut self) {
        self.engine.retry_now();
        self.parking.retry_now(now());
    }

    /// Why the sink cannot run any longer, if so: whoever holds it must give it up.
    pub(crate) fn unfit(&self) -> Option<&str> {
        self.unfit.as_deref()
    }

    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    pub(crate) fn last_error(&self) -> Option<String> {
        let parked = || self.parking.trial()?.error.as_deref();
        self.engine.last_error().or_else(parked).map(str::to_owned)
    }

    pub(crate) fn unsaved_delivered(&self) -> u64 {
        self.unsaved.delivered
    }
}

/// A word that nobody else takes a sink over with.
fn takeover() -> Result<String, String> {
    let digits = catalog::random_hex().ok_or("the server gives no random numbers")?;
    Ok(String::from_utf8_lossy(&digits).into_owned())
}

fn secret_source(spi: &Spi, name: Option<&str>) -> SecretSource {
    match name.map(|name| secrets::named(spi, name)) {
        Some(Stored::Values(values)) => SecretSource::Stored(Secrets::new(values)),
        Some(Stored::File(path)) => SecretSource::file(&path),
        Some(Stored::Variable(name)) => SecretSource::Variable(name),
        None => SecretSource::Stored(Secrets::default()),
    }
}
