//! One pass by hand, in the session that asks for it: for tests, and for looking at a sink that does not do what it should.
//!
//! The transaction is the caller's, and so it stays open while the network is waited on; dispatchers do better.

use std::time::Duration;

use super::course::{Course, Handover, Next, Taken, Target};
use super::io::Io;
use super::now;
use crate::dispatch::Floors;
use crate::pg::spi::Spi;
use crate::pg::{latch, lock, transaction};
use crate::settings;
use crate::sinks::Came;
use crate::store::sinks::{self, Version};
use crate::store::streams;

/// What a pass of one sink came to.
pub(crate) struct Passed {
    pub(crate) sink: String,
    pub(crate) delivered: u64,
    pub(crate) outcome: &'static str,
    pub(crate) error: Option<String>,
}

/// Runs a pass of each of these sinks; positions have been looked after. None if there is no such sink.
pub(crate) fn run(spi: &Spi, wanted: Option<&str>) -> Option<Vec<Passed>> {
    let mut versions = sinks::versions(spi);
    if let Some(wanted) = wanted {
        versions.retain(|version| version.id == wanted);
        if versions.is_empty() {
            return None;
        }
    }
    Some(versions.iter().map(|version| pass(spi, version)).collect())
}

fn pass(spi: &Spi, version: &Version) -> Passed {
    // The next holder must see what this transaction saved.
    let taken = Course::take(spi, version, lock::take_lease_for_transaction);
    let (delivered, outcome, error) = match taken {
        Taken::Leased => (0, "leased", None),
        Taken::Paused => (0, "paused", None),
        Taken::Pull => (0, "pull", None),
        Taken::Gone => (0, "gone", None),
        Taken::Unfit(problem) => (0, "failed", Some(problem)),
        Taken::Course(mut course) => transaction::under_new_snapshot(|| drive(spi, &mut course)),
    };
    Passed {
        sink: version.id.clone(),
        delivered,
        outcome,
        error,
    }
}

fn drive(spi: &Spi, course: &mut Course) -> (u64, &'static str, Option<String>) {
    let Some(stream) = streams::named(spi, &course.sink.stream) else {
        return (0, "gone", None);
    };
    let mut floors = Floors::default();
    let horizon = stream.look(spi, &mut floors);
    let mut delivered = 0;
    course.retry_now();
    course.fill(spi, &horizon, &mut floors);
    while course.goes_on() {
        course.fill(spi, &horizon, &mut floors);
    }
    course.fill_redelivery(spi);
    match course.target {
        Target::Function(_) => {
            // Nothing more is read: what the pass has read is what it delivers.
            course.has_more = false;
            let mut turns = Turns::default();
            while (course.is_ready_now() || turns.go_on(course)) && course.unfit().is_none() {
                let pass = course.function_pass(spi, &horizon, &mut floors);
                course.has_more = false;
                delivered += course.unsaved_delivered();
                // In this very transaction: if that is rolled back, the course is gone, too.
                if let Some(written) = pass.written {
                    course.committed(written);
                }
            }
        }
        Target::Network => {
            if let Err(error) = drive_network(spi, course) {
                return (0, "failed", Some(error));
            }
        }
    }
    delivered += course.unsaved_delivered();
    // The course ends here.
    let _ = course.save(spi);
    if let Some(problem) = course.unfit() {
        return (delivered, "failed", Some(problem.to_owned()));
    }
    match course.last_error() {
        Some(error) => (delivered, "failed", Some(error)),
        None if delivered > 0 => (delivered, "delivered", None),
        None => (0, "idle", None),
    }
}

fn drive_network(spi: &Spi, course: &mut Course) -> Result<(), String> {
    let io =
        Io::start().map_err(|error| format!("the I/O thread could not be started: {error}"))?;
    io.open(&course.sink.id, &course.config, settings::sink_defaults());
    loop {
        match course.next(now()) {
            Next::Again => {}
            Next::Deliver(Handover::Network { serial, batch }) => {
                io.deliver(&course.sink.id, serial, batch);
                course.came(await_report(&io));
                course.verify(spi);
            }
            Next::Deliver(Handover::Function { .. }) | Next::Idle => break,
        }
    }
    let mut turns = Turns::default();
    while turns.go_on(course) {
        course.fill_parked(spi);
        let Some(Handover::Network { serial, batch }) = course.next_parked() else {
            break;
        };
        io.deliver(&course.sink.id, serial, batch);
        course.parked_came(await_report(&io));
    }
    if let Some((serial, event)) = course.next_redelivery() {
        let batch = course.batch_of(vec![event]);
        io.deliver(&course.sink.id, serial, batch);
        course.redelivery.came(&await_report(&io));
    }
    Ok(())
}

/// Counts the tries of parked events, so that a pass ends: each key gets its turn, and more as long as something is settled.
#[derive(Default)]
struct Turns {
    parked: usize,
    fruitless: usize,
}

impl Turns {
    fn go_on(&mut self, course: &Course) -> bool {
        let (parked, keys) = course.parked();
        if parked == self.parked {
            self.fruitless += 1;
        } else {
            self.fruitless = 0;
        }
        self.parked = parked;
        self.fruitless <= keys && course.wants_to_read_parked(now())
    }
}

fn await_report(io: &Io) -> Came {
    loop {
        if let Some(report) = io.reports().into_iter().next() {
            return report.came;
        }
        latch::wait(Duration::from_secs(1), Some(io.readable()));
    }
}
