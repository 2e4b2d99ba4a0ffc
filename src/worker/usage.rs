//! Recording usage: hands closed windows to the registered function, with the rights of the role that supplied it.
//!
//! What is in one call is recorded as a whole or not at all: the call and what is written of it are one transaction. A batch that fails is
//! halved until the failing windows stand alone. One that has failed alone is dead-lettered if what it says is about data, or if another
//! window has gone through and it is not for a passing trouble. The others stay as they are, for the next pass, with the same keys.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::{PgLogLevel, pg_sys};

use super::helpers::has_ended;
use super::maintenance::in_transaction;
use super::user_code::{self, FunctionStatement};
use crate::pg::culprits::Culprit;
use crate::pg::error::Complaint;
use crate::pg::security::Path;
use crate::pg::spi::{Arg, Spi, UserStatement};
use crate::pg::timeout::{self, Limit};
use crate::pg::{background, catalog, latch, lock, transaction};
use crate::settings;
use crate::store::usage::{self, Recorder, Says, UsageWindow};

/// Windows in one call.
const BATCH: usize = 200;
/// Windows in one pass.
const PASS: usize = 1_000;

/// So many calls without one that goes through, and it is the recorder that fails, and no window.
const TRIES: usize = 64;

/// What the recorder may say of a window.
const OUTCOMES: [&str; 4] = ["recorded", "duplicate", "reattributed", DEAD];
const DEAD: &str = "dead-lettered";

/// Classes of errors that pass, whatever the window: connections, conflicts, resources, states, interventions, the system.
const PASSING: [&str; 9] = ["08", "25", "40", "53", "55", "57", "58", "F0", "XX"];

/// What a batch, or a pass, came to.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    pub(crate) taken: usize,
    pub(crate) recorded: usize,
    pub(crate) dead_lettered: usize,
    /// Why windows were left unrecorded.
    pub(crate) error: Option<String>,
    /// It took longer than it was given.
    expired: bool,
}

/// Why a call failed.
struct Refusal {
    code: String,
    message: String,
}

impl Refusal {
    /// Bad data, and what constraints refuse: no other window has to do with it.
    fn is_of_a_window(&self) -> bool {
        self.code.starts_with("22") || self.code.starts_with("23")
    }

    fn passes(&self) -> bool {
        PASSING.iter().any(|class| self.code.starts_with(class))
    }
}

/// What the recorder says of a window.
struct Said {
    outcome: String,
    error: Option<String>,
}

/// How the recorder is called.
struct Call {
    recorder: Recorder,
    statement: Rc<UserStatement>,
    /// Until when all of it has to be over, where others wait.
    end: Option<Instant>,
}

/// Hands over one batch, in the open transaction; what has not ended by `end` is cancelled.
pub(crate) fn batch(spi: &Spi, end: Option<Instant>) -> Passed {
    let mut passed = Passed::default();
    let Some(recorder) = usage::recorder(spi) else {
        return passed;
    };
    let windows = usage::take(spi, BATCH);
    passed.taken = windows.len();
    if !windows.is_empty() {
        let sql = match usage::says(spi, recorder.function) {
            Says::Nothing => silent_sql,
            Says::Outcomes => telling_sql,
            Says::Reasons => explaining_sql,
        };
        match FunctionStatement::new(recorder.function, sql).now() {
            Some(statement) => {
                let call = Call {
                    recorder,
                    statement,
                    end,
                };
                match user_code::check_owner(recorder.owner) {
                    Ok(()) => record(spi, &call, &windows, &mut passed),
                    Err(error) => passed.error = Some(error),
                }
            }
            None => passed.error = Some("its function does not exist any more".to_owned()),
        }
        usage::tell(spi, passed.error.as_deref());
    }
    passed
}

/// One pass within the open transaction: for whoever asks by hand.
pub(crate) fn pass(spi: &Spi) -> Passed {
    let mut all = Passed::default();
    while all.taken < PASS && all.error.is_none() {
        let one = batch(spi, None);
        all.recorded += one.recorded;
        all.dead_lettered += one.dead_lettered;
        all.taken += one.taken;
        all.error = one.error;
        if one.taken < BATCH {
            break;
        }
    }
    all
}

/// Records windows, and halves what fails, the greater parts first: where something goes through is soon found.
fn record(spi: &Spi, call: &Call, windows: &[UsageWindow], passed: &mut Passed) {
    let mut parts = VecDeque::from([windows]);
    let mut suspects = Vec::new();
    let mut is_up = false;
    let mut fruitless = 0;
    while let Some(part) = parts.pop_front() {
        match call.now(part) {
            Ok(said) => {
                is_up = true;
                note(spi, part, &said, passed);
            }
            Err(_) if latch::terminated() => return,
            Err(_) if timeout::take_expired() => {
                passed.expired = true;
                passed.error = Some("it took too long".to_owned());
                return;
            }
            Err(refusal) => {
                fruitless += usize::from(!is_up && !refusal.is_of_a_window());
                if fruitless >= TRIES {
                    passed.error = Some(refusal.message);
                    return;
                }
                match part {
                    [window] if refusal.is_of_a_window() => {
                        bury(spi, window, Some(&refusal.code), &refusal.message, passed);
                    }
                    [window] => suspects.push((window, refusal)),
                    _ => {
                        let (first, second) = part.split_at(part.len() / 2);
                        parts.extend([first, second]);
                    }
                }
            }
        }
    }
    for (window, refusal) in suspects {
        if is_up && !refusal.passes() {
            bury(spi, window, Some(&refusal.code), &refusal.message, passed);
        } else {
            passed.error.get_or_insert(refusal.message);
        }
    }
}

/// Writes what the recorder has said of windows.
fn note(spi: &Spi, windows: &[UsageWindow], said: &[Said], passed: &mut Passed) {
    let (mut keys, mut outcomes) = (Vec::new(), Vec::new());
    for (window, said) in windows.iter().zip(said) {
        if said.outcome == DEAD {
            let error = said.error.as_deref();
            let message = error.unwrap_or("the recorder said dead-lettered");
            bury(spi, window, None, message, passed);
        } else {
            keys.push(window.key.clone());
            outcomes.push(said.outcome.clone());
        }
    }
    usage::settle(spi, &keys, &outcomes);
    passed.recorded += keys.len();
}

fn bury(spi: &Spi, window: &UsageWindow, code: Option<&str>, message: &str, passed: &mut Passed) {
    usage::bury(spi, window, code, message);
    passed.dead_lettered += 1;
}

impl Call {
    /// Calls the recorder; what it did is undone if it fails, or says what it may not.
    fn now(&self, windows: &[UsageWindow]) -> Result<Vec<Said>, Refusal> {
        let limit = self.end.map(|end| Limit {
            time: end.saturating_duration_since(Instant::now()),
            culprit: Culprit::Recorder,
        });
        let members = windows.iter().map(|window| window.json.as_str());
        let json = format!("[{}]", members.collect::<Vec<_>>().join(","));
        let owner = self.recorder.owner;
        let said = user_code::attempt_within(limit, owner, Path::Session, |spi| {
            spi.write("set constraints all immediate", &[]);
            let rows = spi.run_user(&self.statement, &[Arg::Json(Some(&json))]);
            let said = rows.map(|row| (row.text(0), row.text(1), row.text(2)));
            if let Some((_, outcome, _)) = said.iter().find(|(key, outcome, _)| {
                key.is_some() && !OUTCOMES.contains(&outcome.as_deref().unwrap_or("recorded"))
            }) {
                // Raised in here, so that what the function did is undone.
                Complaint::new(
                    pgrx::PgSqlErrorCode::ERRCODE_E_R_I_E_SRF_PROTOCOL_VIOLATED,
                    format!(
                        "the recorder said {:?} of a window, which is not recorded, duplicate, reattributed or dead-lettered",
                        outcome.as_deref().unwrap_or_default()
                    ),
                )
                .raise();
            }
            said
        });
        let said = said.map_err(|error| Refusal {
            message: error.summary(),
            code: error.sqlstate(),
        })?;
        let of_key = |(key, outcome, error)| {
            Some((
                key?,
                Said {
                    outcome: outcome?,
                    error,
                },
            ))
        };
        let mut by_key = said
            .into_iter()
            .filter_map(of_key)
            .collect::<HashMap<String, Said>>();
        let said_of = |window: &UsageWindow| {
            by_key.remove(&window.key).unwrap_or_else(|| Said {
                outcome: "recorded".to_owned(),
                error: None,
            })
        };
        Ok(windows.iter().map(said_of).collect())
    }
}

/// The windows as the function takes them.
const WINDOWS: &str =
    "array(select w from pg_catalog.jsonb_populate_recordset(null::outbox.usage_window, $1) as w)";

fn silent_sql(function: &str) -> String {
    format!("select null::text, null::text, null::text from {function}({WINDOWS}) as f")
}

fn telling_sql(function: &str) -> String {
    format!(
        "select f.idempotency_key::text, f.outcome::text, null::text from {function}({WINDOWS}) as f"
    )
}

fn explaining_sql(function: &str) -> String {
    format!(
        "select f.idempotency_key::text, f.outcome::text, f.error::text from {function}({WINDOWS}) as f"
    )
}

/// By which a process is told that it is the recorder's; no sink is called so.
pub(super) const PROCESS: &str = ":usage";

/// The entry of that process: one pass, a transaction a batch. A recorder may take its time, and must not take that of sinks.
pub(super) fn main(database: pg_sys::Oid) -> ! {
    background::begin_dispatcher(database, Some(PROCESS));
    let mut taken = 0;
    while taken < PASS && !latch::terminated() && !lock::database_is_wanted(database) {
        let passed = recorded(None);
        taken += passed.taken;
        if passed.taken < BATCH || passed.error.is_some() {
            break;
        }
    }
    background::end(0)
}

/// One batch, in a transaction of its own.
fn recorded(end: Option<Instant>) -> Passed {
    match in_transaction(|spi| batch(spi, end)) {
        Ok(passed) => passed.unwrap_or_default(),
        Err(error) => {
            let what = "usage could not be recorded";
            transaction::log(PgLogLevel::WARNING, what, &error);
            Passed::default()
        }
    }
}

/// The dispatcher's part: has windows recorded when they are due, in a process of its own, or here where there is no slot for one.
pub(super) struct Recording {
    next: Option<Instant>,
    /// The recorder is too slow for a process that others share.
    stays_away: bool,
    running: Option<DynamicBackgroundWorker>,
}

/// What a look has found.
enum Found {
    NoRecorder,
    Nothing,
    Due { failing: bool },
}

impl Recording {
    pub(super) fn new() -> Self {
        Self {
            next: Some(Instant::now()),
            stays_away: false,
            running: None,
        }
    }

    /// The recorder has turned out to be too slow to be called here.
    pub(super) fn stay_away(&mut self) {
        self.stays_away = true;
    }

    /// There may be a recorder now, or another one.
    pub(super) fn look_again(&mut self) {
        self.next = Some(Instant::now());
    }

    /// When it wants to run; never, without a recorder.
    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    pub(super) fn run(&mut self, now: Instant) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        if self.running.as_ref().is_some_and(|it| !has_ended(it)) {
            self.next = Some(now + LOOK);
            return;
        }
        let had_run = self.running.take().is_some();
        self.next = match look() {
            Found::NoRecorder => None,
            Found::Nothing => Some(now + settings::poll_interval()),
            Found::Due { failing: true } if had_run => Some(now + retry()),
            Found::Due { .. } => {
                let database = catalog::current_database();
                self.running = background::start_dispatcher(database, Some(PROCESS));
                if self.running.is_some() {
                    Some(now + LOOK)
                } else if self.stays_away {
                    Some(now + retry())
                } else {
                    let passed = recorded(Some(now + HERE));
                    self.stays_away |= passed.expired;
                    let wait = passed.error.map_or(LOOK, |_| retry());
                    Some(Instant::now() + wait)
                }
            }
        };
    }
}

fn look() -> Found {
    let found = in_transaction(|spi| {
        if usage::recorder(spi).is_none() {
            Found::NoRecorder
        } else if usage::is_due(spi) {
            Found::Due {
                failing: usage::is_failing(spi),
            }
        } else {
            Found::Nothing
        }
    });
    match found {
        Ok(found) => found.unwrap_or(Found::Nothing),
        Err(error) => {
            let what = "usage could not be looked at";
            transaction::log(PgLogLevel::WARNING, what, &error);
            Found::Nothing
        }
    }
}

/// How long it may take where it delays sinks.
const HERE: Duration = Duration::from_millis(500);

/// How often to see whether the process has ended.
const LOOK: Duration = Duration::from_millis(200);

/// The pause after an error that belongs to no window.
fn retry() -> Duration {
    (settings::retry_min() * 10).min(settings::retry_max())
}
