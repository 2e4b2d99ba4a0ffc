//! Recording usage: hands closed windows to the registered function, with the rights of the role that supplied it.
//!
//! A batch is recorded as a whole or not at all: the call and what is written of it are one transaction. An error that belongs to a
//! window has its batch bisected down to it; after any other error the windows stay as they are, for the next pass, with the same keys.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::{PgLogLevel, pg_sys};

use super::helpers::has_ended;
use super::maintenance::in_transaction;
use super::user_code::{self, FunctionStatement};
use crate::pg::security::Path;
use crate::pg::spi::{Arg, Spi, UserStatement};
use crate::pg::{background, catalog, latch, lock, transaction};
use crate::settings;
use crate::store::usage::{self, Recorder, UsageWindow};

/// Windows in one call.
const BATCH: usize = 200;
/// Windows in one pass.
const PASS: usize = 1_000;

/// What the recorder may say of a window.
const OUTCOMES: [&str; 3] = ["recorded", "duplicate", "reattributed"];

/// What a batch, or a pass, came to.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    pub(crate) taken: usize,
    pub(crate) recorded: usize,
    pub(crate) dead_lettered: usize,
    /// Why windows were left unrecorded.
    pub(crate) error: Option<String>,
}

/// Why a call failed.
struct Refusal {
    code: String,
    message: String,
    /// It is about a window, and not about the recorder.
    of_a_window: bool,
}

/// Hands over one batch, in the open transaction.
pub(crate) fn batch(spi: &Spi) -> Passed {
    let mut passed = Passed::default();
    let Some(recorder) = usage::recorder(spi) else {
        return passed;
    };
    let windows = usage::take(spi, BATCH);
    passed.taken = windows.len();
    if !windows.is_empty() {
        let sql = if usage::says_outcomes(spi, recorder.function) {
            telling_sql
        } else {
            silent_sql
        };
        let statement = FunctionStatement::new(recorder.function, sql);
        match statement.now() {
            Some(statement) => record(spi, recorder, &statement, &windows, &mut passed),
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
        let one = batch(spi);
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

/// Records windows, and bisects them as long as one of them is at fault. After another error the rest is left.
fn record(
    spi: &Spi,
    recorder: Recorder,
    statement: &Rc<UserStatement>,
    windows: &[UsageWindow],
    passed: &mut Passed,
) {
    if passed.error.is_some() {
        return;
    }
    match call(recorder, statement, windows) {
        Ok(outcomes) => {
            let keys = windows.iter().map(|window| window.key.clone());
            usage::settle(spi, &keys.collect::<Vec<_>>(), &outcomes);
            passed.recorded += windows.len();
        }
        Err(refusal) if !refusal.of_a_window => passed.error = Some(refusal.message),
        Err(refusal) => match windows {
            [window] => {
                usage::bury(spi, window, &refusal.code, &refusal.message);
                passed.dead_lettered += 1;
            }
            _ => {
                let (first, second) = windows.split_at(windows.len() / 2);
                record(spi, recorder, statement, first, passed);
                record(spi, recorder, statement, second, passed);
            }
        },
    }
}

/// Calls the recorder; what it did is undone if it fails, or says what it may not.
fn call(
    recorder: Recorder,
    statement: &Rc<UserStatement>,
    windows: &[UsageWindow],
) -> Result<Vec<String>, Refusal> {
    let other = |message: String| Refusal {
        code: String::new(),
        message,
        of_a_window: false,
    };
    user_code::check_owner(recorder.owner).map_err(other)?;
    let members = windows.iter().map(|window| window.json.as_str());
    let json = format!("[{}]", members.collect::<Vec<_>>().join(","));
    let said = user_code::attempt(recorder.owner, Path::Session, |spi| {
        spi.write("set constraints all immediate", &[]);
        let rows = spi.run_user(statement, &[Arg::Json(Some(&json))]);
        let said = rows.map(|row| (row.text(0), row.text(1)));
        if let Some((_, outcome)) = said.iter().find(|(key, outcome)| {
            key.is_some() && !OUTCOMES.contains(&outcome.as_deref().unwrap_or("recorded"))
        }) {
            // Raised in here, so that what the function did is undone.
            crate::pg::error::Complaint::new(
                pgrx::PgSqlErrorCode::ERRCODE_E_R_I_E_SRF_PROTOCOL_VIOLATED,
                format!(
                    "the recorder said {:?} of a window, which is not recorded, duplicate or reattributed",
                    outcome.as_deref().unwrap_or_default()
                ),
            )
            .raise();
        }
        said
    });
    let said = said.map_err(|error| {
        let code = error.sqlstate();
        Refusal {
            // Bad data, and what constraints refuse: no other window has to do with it.
            of_a_window: code.starts_with("22") || code.starts_with("23"),
            message: error.summary(),
            code,
        }
    })?;
    let mut by_key = said
        .into_iter()
        .filter_map(|(key, outcome)| Some((key?, outcome?)))
        .collect::<HashMap<_, _>>();
    let outcome = |window: &UsageWindow| {
        let said = by_key.remove(&window.key);
        said.unwrap_or_else(|| "recorded".to_owned())
    };
    Ok(windows.iter().map(outcome).collect())
}

/// The windows as the function takes them.
const WINDOWS: &str =
    "array(select w from pg_catalog.jsonb_populate_recordset(null::outbox.usage_window, $1) as w)";

fn silent_sql(function: &str) -> String {
    format!("select null::text, null::text from {function}({WINDOWS}) as f")
}

fn telling_sql(function: &str) -> String {
    format!("select f.idempotency_key::text, f.outcome::text from {function}({WINDOWS}) as f")
}

/// By which a process is told that it is the recorder's; no sink is called so.
pub(super) const PROCESS: &str = ":usage";

/// The entry of that process: one pass, a transaction a batch. A recorder may take its time, and must not take that of sinks.
pub(super) fn main(database: pg_sys::Oid) -> ! {
    background::begin_dispatcher(database, Some(PROCESS));
    let mut taken = 0;
    while taken < PASS && !latch::terminated() && !lock::database_is_wanted(database) {
        let passed = recorded();
        taken += passed.taken;
        if passed.taken < BATCH || passed.error.is_some() {
            break;
        }
    }
    background::end(0)
}

/// One batch, in a transaction of its own.
fn recorded() -> Passed {
    match in_transaction(batch) {
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
            running: None,
        }
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
                if self.running.is_none() && recorded().error.is_some() {
                    Some(now + retry())
                } else {
                    Some(now + LOOK)
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

/// How often to see whether the process has ended.
const LOOK: Duration = Duration::from_millis(200);

/// The pause after an error that belongs to no window.
fn retry() -> Duration {
    (settings::retry_min() * 10).min(settings::retry_max())
}
