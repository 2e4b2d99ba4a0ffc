//! User code that would not end when it was cancelled, so that the process which ran it had to: whoever comes after that process
//! learns here what not to run like that again.
//!
//! It is noted in shared memory, by a signal handler. Without that memory, which is there only when the library is preloaded,
//! nothing is noted; nobody starts such a dispatcher again either.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};

use pgrx::prelude::*;
use pgrx::{PGRXSharedMemory, PgAtomic, pg_sys};

/// When they run out, what comes next is not noted.
const PLACES: usize = 256;

/// Whose code it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Culprit {
    /// The number of the sink whose filter, transform or function it is.
    Sink(i32),
    /// The id of the backfill whose condition it is.
    Backfill(i64),
    /// The function that records usage.
    Recorder,
}

const RECORDER: i64 = i64::MIN;

impl Culprit {
    /// Ids of both kinds begin at 1.
    pub(super) fn code(self) -> i64 {
        match self {
            Culprit::Sink(number) => i64::from(number),
            Culprit::Backfill(id) => -id,
            Culprit::Recorder => RECORDER,
        }
    }

    fn of_code(code: i64) -> Option<Self> {
        if code == RECORDER {
            Some(Culprit::Recorder)
        } else if code < 0 {
            Some(Culprit::Backfill(-code))
        } else {
            i32::try_from(code).ok().map(Culprit::Sink)
        }
    }
}

struct Place {
    /// 0 if the place is free, the greatest number while it is written.
    database: AtomicU32,
    code: AtomicI64,
}

struct Culprits([Place; PLACES]);

// SAFETY: it holds atomics alone.
unsafe impl PGRXSharedMemory for Culprits {}

// SAFETY: no other shared memory segment has this name.
static CULPRITS: PgAtomic<Culprits> = unsafe { PgAtomic::new(c"pg_outbox culprits") };
static READY: AtomicBool = AtomicBool::new(false);

fn nobody() -> Culprits {
    READY.store(true, Ordering::Relaxed);
    Culprits(
        [const {
            Place {
                database: AtomicU32::new(0),
                code: AtomicI64::new(0),
            }
        }; PLACES],
    )
}

/// Asks for the memory; called while the library is being preloaded.
pub(crate) fn reserve() {
    pgrx::pg_shmem_init!(CULPRITS = nobody());
}

fn places() -> &'static [Place] {
    if READY.load(Ordering::Relaxed) {
        &CULPRITS.get().0
    } else {
        &[]
    }
}

/// Called in a signal handler.
pub(super) fn note(database: pg_sys::Oid, code: i64) {
    let taken = places().iter().find(|place| {
        place
            .database
            .compare_exchange(0, u32::MAX, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    });
    if let Some(place) = taken {
        place.code.store(code, Ordering::Release);
        place.database.store(database.to_u32(), Ordering::Release);
    }
}

/// What was noted of a database since this was asked last.
pub(crate) fn take(database: pg_sys::Oid) -> Vec<Culprit> {
    let noted = |place: &&Place| place.database.load(Ordering::Acquire) == database.to_u32();
    let taken = places().iter().filter(noted).filter_map(|place| {
        let culprit = Culprit::of_code(place.code.load(Ordering::Acquire));
        place.database.store(0, Ordering::Release);
        culprit
    });
    taken.collect()
}
