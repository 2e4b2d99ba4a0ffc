//! Shared memory: which workers serve which database, so that a commit can wake them, and what the launcher is asked for.
//!
//! It is there only when the library is preloaded. Without it a dispatcher looks for events on a timer.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use pgrx::prelude::*;
use pgrx::{PGRXSharedMemory, PgAtomic, pg_sys};

/// Workers of all databases that can be woken, and databases that can be stopped or asked about. When the places run out, workers
/// look on a timer, and the launcher asks every database again.
const PLACES: usize = 256;

struct Place {
    database: AtomicU32,
    latch: AtomicUsize,
    /// The worker does not want to hear of commits now, and whether there was one since it last asked.
    muted: AtomicBool,
    missed: AtomicBool,
    /// It serves a single sink.
    alone: AtomicBool,
    /// It is to end, for other databases wait for its slot.
    yields: AtomicBool,
}

const fn free_place() -> Place {
    Place {
        database: AtomicU32::new(0),
        latch: AtomicUsize::new(0),
        muted: AtomicBool::new(false),
        missed: AtomicBool::new(false),
        alone: AtomicBool::new(false),
        yields: AtomicBool::new(false),
    }
}

struct Board {
    workers: [Place; PLACES],
    launcher: AtomicUsize,
    launcher_pid: AtomicI32,
    /// Databases in which the extension came, went, or was started or stopped by hand.
    asked: [AtomicU32; PLACES],
    ask_all: AtomicBool,
    stopped: [AtomicU32; PLACES],
    /// Databases where a dispatcher found no extension.
    absent: [AtomicU32; PLACES],
    /// Databases for whose dispatcher the server has no worker slot, and how many those are.
    short: [AtomicU32; PLACES],
    short_count: AtomicUsize,
    /// How often the extension was made somewhere.
    announcements: AtomicU32,
    /// How often sinks, streams, secrets or the like were changed somewhere.
    changes: AtomicU32,
}

// SAFETY: it holds atomics alone; the addresses in it are of latches in Postgres' own shared memory, the same in all processes.
unsafe impl PGRXSharedMemory for Board {}

// SAFETY: no other shared memory segment has this name.
static BOARD: PgAtomic<Board> = unsafe { PgAtomic::new(c"pg_outbox board") };
static READY: AtomicBool = AtomicBool::new(false);

fn new_board() -> Board {
    READY.store(true, Ordering::Relaxed);
    Board {
        workers: [const { free_place() }; PLACES],
        launcher: AtomicUsize::new(0),
        launcher_pid: AtomicI32::new(0),
        asked: [const { AtomicU32::new(0) }; PLACES],
        ask_all: AtomicBool::new(true),
        stopped: [const { AtomicU32::new(0) }; PLACES],
        absent: [const { AtomicU32::new(0) }; PLACES],
        short: [const { AtomicU32::new(0) }; PLACES],
        short_count: AtomicUsize::new(0),
        announcements: AtomicU32::new(0),
        changes: AtomicU32::new(0),
    }
}

/// Asks for the memory; called while the library is being preloaded.
pub(crate) fn reserve() {
    pgrx::pg_shmem_init!(BOARD = new_board());
}

fn board() -> Option<&'static Board> {
    READY.load(Ordering::Relaxed).then(|| BOARD.get())
}

/// Whether the library was preloaded, so that there are wake-ups and a launcher.
pub(crate) fn is_there() -> bool {
    READY.load(Ordering::Relaxed)
}

fn my_latch() -> usize {
    // SAFETY: MyLatch of a connected process is its PGPROC's latch, in shared memory for the life of the server.
    unsafe { pg_sys::MyLatch as usize }
}

fn set_latch(latch: usize) {
    if latch != 0 {
        // SAFETY: the address was stored by my_latch(); PGPROC entries are never unmapped, and a wake-up that reaches a later
        // owner of the entry is harmless.
        unsafe { pg_sys::SetLatch(latch as *mut pg_sys::Latch) };
    }
}

/// This worker wants to be woken by commits in its database, where it serves a single sink or all. False if there is no place for it.
pub(crate) fn join(database: pg_sys::Oid, alone: bool) -> bool {
    let Some(board) = board() else { return false };
    let taken = board.workers.iter().find(|place| {
        place
            .database
            .compare_exchange(0, u32::MAX, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    });
    let Some(place) = taken else { return false };
    place.muted.store(false, Ordering::Release);
    place.alone.store(alone, Ordering::Release);
    place.yields.store(false, Ordering::Release);
    place.latch.store(my_latch(), Ordering::Release);
    place.database.store(database.to_u32(), Ordering::Release);
    // SAFETY: registered in the worker itself, and run at its exit on its main thread.
    unsafe { pg_sys::on_shmem_exit(Some(leave), pg_sys::Datum::from(0)) };
    true
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn leave(_code: i32, _arg: pg_sys::Datum) {
    let Some(board) = board() else { return };
    let mine = my_latch();
    for place in board
        .workers
        .iter()
        .filter(|place| place.latch.load(Ordering::Acquire) == mine)
    {
        place.latch.store(0, Ordering::Release);
        place.database.store(0, Ordering::Release);
    }
    // One that an earlier launcher has started is nobody's child.
    set_latch(board.launcher.load(Ordering::Acquire));
}

/// How many workers serve single sinks in other databases.
pub(crate) fn alone_elsewhere(database: pg_sys::Oid) -> usize {
    let elsewhere = |place: &&Place| {
        let serves = place.database.load(Ordering::Acquire);
        serves != 0 && serves != database.to_u32() && place.alone.load(Ordering::Acquire)
    };
    board().map_or(0, |board| board.workers.iter().filter(elsewhere).count())
}

/// Wakes every worker of a database; for mere events, only those that want to hear of them. Called in a commit: it must neither fail
/// nor wait.
pub(crate) fn wake_database(database: pg_sys::Oid, for_events: bool) {
    let Some(board) = board() else { return };
    let wanted = database.to_u32();
    for place in &board.workers {
        if place.database.load(Ordering::Acquire) != wanted {
            continue;
        }
        // Written before the other is read, as `unmute` does it the other way round: at least one of the two sees the other.
        place.missed.store(true, Ordering::SeqCst);
        if !for_events || !place.muted.load(Ordering::SeqCst) {
            set_latch(place.latch.load(Ordering::Acquire));
        }
    }
}

fn my_place() -> Option<&'static Place> {
    let mine = my_latch();
    board()?
        .workers
        .iter()
        .find(|place| place.latch.load(Ordering::Acquire) == mine)
}

/// Until [`unmute`], commits of events do not wake this worker. To be called before it looks: what was committed so far it will see.
pub(crate) fn mute() {
    if let Some(place) = my_place() {
        place.muted.store(true, Ordering::SeqCst);
        place.missed.store(false, Ordering::SeqCst);
    }
}

/// Whether something may have been committed since [`mute`].
pub(crate) fn unmute() -> bool {
    my_place().is_some_and(|place| {
        place.muted.store(false, Ordering::SeqCst);
        place.missed.swap(false, Ordering::SeqCst)
    })
}

/// The launcher stands ready to be asked.
pub(crate) fn launcher_is_me() {
    if let Some(board) = board() {
        board.launcher.store(my_latch(), Ordering::Release);
        board
            .launcher_pid
            .store(std::process::id().cast_signed(), Ordering::Release);
    }
}

/// Whether there is a launcher: the server may have had no worker slot for it.
pub(crate) fn launcher_lives() -> bool {
    let pid = board().map_or(0, |board| board.launcher_pid.load(Ordering::Acquire));
    // SAFETY: no signal is sent.
    pid != 0 && unsafe { libc::kill(pid, 0) } == 0
}

/// The launcher says which databases have no dispatcher for want of a worker slot.
pub(crate) fn set_short(databases: &[pg_sys::Oid]) {
    let Some(board) = board() else { return };
    board.short_count.store(databases.len(), Ordering::Release);
    for (index, place) in board.short.iter().enumerate() {
        let database = databases.get(index).map_or(0, |oid| oid.to_u32());
        place.store(database, Ordering::Release);
    }
}

/// Whether any database waits for a worker slot.
pub(crate) fn any_short() -> bool {
    board().is_some_and(|board| board.short_count.load(Ordering::Acquire) > 0)
}

/// Whether this one does.
pub(crate) fn is_short(database: pg_sys::Oid) -> bool {
    let wanted = database.to_u32();
    board().is_some_and(|board| {
        let mut short = board.short.iter();
        short.any(|place| place.load(Ordering::Acquire) == wanted)
    })
}

/// Asks the dispatcher of a database to give its slot to others.
pub(crate) fn ask_to_yield(database: pg_sys::Oid) {
    let places = board().into_iter().flat_map(|board| &board.workers);
    for place in places {
        let serves = place.database.load(Ordering::Acquire) == database.to_u32();
        if serves && !place.alone.load(Ordering::Acquire) {
            place.yields.store(true, Ordering::Release);
            set_latch(place.latch.load(Ordering::Acquire));
        }
    }
}

/// Whether this worker was asked to.
pub(crate) fn is_asked_to_yield() -> bool {
    any_short() && my_place().is_some_and(|place| place.yields.load(Ordering::Acquire))
}

/// How often sinks and the like were changed, in any database; none where nobody counts.
pub(crate) fn changes() -> Option<u32> {
    board().map(|board| board.changes.load(Ordering::Acquire))
}

/// Counts a change. Called in a commit: it must neither fail nor wait.
pub(crate) fn count_change() {
    if let Some(board) = board() {
        board.changes.fetch_add(1, Ordering::AcqRel);
    }
}

/// How often the extension was made somewhere: read before looking for it, and given to `set_absent`.
pub(crate) fn announcements() -> u32 {
    board().map_or(0, |board| board.announcements.load(Ordering::Acquire))
}

/// A dispatcher found no extension in a database: the launcher need not start another, unless it was made meanwhile.
pub(crate) fn set_absent(database: pg_sys::Oid, announced: u32) {
    let Some(board) = board() else { return };
    if board.announcements.load(Ordering::Acquire) == announced {
        put(&board.absent, database);
    }
}

/// Whether a database is known to lack the extension.
pub(crate) fn is_absent(database: pg_sys::Oid) -> bool {
    board().is_some_and(|board| {
        board
            .absent
            .iter()
            .any(|place| place.load(Ordering::Acquire) == database.to_u32())
    })
}

/// Forgets what is known of a database, or of all: it is to be looked at again.
pub(crate) fn forget_absent(database: Option<pg_sys::Oid>) {
    let Some(board) = board() else { return };
    for place in &board.absent {
        match database {
            Some(database) => {
                let _ = place.compare_exchange(
                    database.to_u32(),
                    0,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
            }
            None => place.store(0, Ordering::Release),
        }
    }
}

/// Drops what is noted of databases that are gone: their oids come again one day, and the places are few.
pub(crate) fn keep_only(exists: impl Fn(pg_sys::Oid) -> bool) {
    let Some(board) = board() else { return };
    for place in board.absent.iter().chain(&board.stopped) {
        let noted = place.load(Ordering::Acquire);
        if noted != 0 && !exists(pg_sys::Oid::from(noted)) {
            let _ = place.compare_exchange(noted, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// The extension was made in a database: asks the launcher to look at it.
pub(crate) fn announce(database: pg_sys::Oid) {
    if let Some(board) = board() {
        board.announcements.fetch_add(1, Ordering::AcqRel);
    }
    ask_launcher(database);
}

/// Asks the launcher to look at a database again, and wakes it.
pub(crate) fn ask_launcher(database: pg_sys::Oid) {
    let Some(board) = board() else { return };
    if !put(&board.asked, database) {
        board.ask_all.store(true, Ordering::Release);
    }
    set_latch(board.launcher.load(Ordering::Acquire));
}

/// What the launcher was asked since it asked last: databases to look at again, or all of them.
pub(crate) enum Asked {
    All,
    Some(Vec<pg_sys::Oid>),
}

pub(crate) fn take_asked() -> Asked {
    let Some(board) = board() else {
        return Asked::Some(Vec::new());
    };
    let named = board
        .asked
        .iter()
        .map(|place| place.swap(0, Ordering::AcqRel))
        .filter(|&oid| oid != 0)
        .collect::<Vec<_>>();
    if board.ask_all.swap(false, Ordering::AcqRel) {
        return Asked::All;
    }
    Asked::Some(named.into_iter().map(pg_sys::Oid::from).collect())
}

/// Marks a database as stopped by hand, or takes the mark away. It lasts until the server restarts.
pub(crate) fn set_stopped(database: pg_sys::Oid, stopped: bool) {
    let Some(board) = board() else { return };
    if stopped {
        put(&board.stopped, database);
    } else {
        for place in &board.stopped {
            let _ =
                place.compare_exchange(database.to_u32(), 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

pub(crate) fn is_stopped(database: pg_sys::Oid) -> bool {
    board().is_some_and(|board| {
        board
            .stopped
            .iter()
            .any(|place| place.load(Ordering::Acquire) == database.to_u32())
    })
}

/// Puts a database into a list if it is not there. False if the list is full.
fn put(list: &[AtomicU32], database: pg_sys::Oid) -> bool {
    let wanted = database.to_u32();
    list.iter()
        .any(|place| place.load(Ordering::Acquire) == wanted)
        || list.iter().any(|place| {
            place
                .compare_exchange(0, wanted, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
}
