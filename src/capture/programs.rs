//! What a session keeps of the captures that it has met: statements with their plans, until the table or its capture changes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use pgrx::pg_sys;

use super::recipe;
use super::statement::{self, Stamp, Statement};
use crate::pg::append::{OfSession, Recipe};
use crate::pg::exact::Printed;
use crate::pg::firing::{Cell, Operation, Pairing};
use crate::pg::invalidation::{self, Stale};
use crate::pg::security::as_extension;
use crate::pg::spi::{Spi, UserStatement, connected};
use crate::pg::{lock, transaction};
use crate::settings;
use crate::store::captures::{self, Capture};

/// What a capture comes to for one operation on one table.
pub(super) struct Program {
    pub(super) capture: Capture,
    insert: UserStatement,
    insert_without_session: UserStatement,
    pub(super) gather: UserStatement,
    pub(super) insert_gathered: UserStatement,
    pub(super) condition: Option<UserStatement>,
    /// How to do without that statement, where that can be done.
    recipe: Option<Recipe>,
    statement: Statement,
    prefix: String,
}

impl Program {
    pub(super) fn new(capture: Capture, operation: Operation) -> Self {
        Self::stamped(capture, operation, &Stamp::default())
    }

    pub(super) fn stamped(capture: Capture, operation: Operation, stamp: &Stamp) -> Self {
        let prefix = settings::topic_prefix();
        let statement = statement::of(&capture, operation, &prefix, stamp);
        let recipe =
            recipe::of(&capture, operation, &prefix, stamp, &statement.cells).map(Recipe::new);
        Self {
            recipe,
            insert: UserStatement::new(statement.sql.clone()),
            insert_without_session: UserStatement::new(statement.sql_without_session.clone()),
            gather: UserStatement::new(statement.gather.clone()),
            insert_gathered: UserStatement::new(statement.insert_gathered.clone()),
            condition: statement.condition.clone().map(UserStatement::new),
            statement,
            capture,
            prefix,
        }
    }

    /// The statement that writes the events into a table that is as it was made.
    pub(super) fn insert(&self) -> &UserStatement {
        if settings::has_tenant() || settings::has_headers() {
            &self.insert
        } else {
            &self.insert_without_session
        }
    }

    /// How to write the events without it, if they can be.
    pub(super) fn recipe(&self) -> Option<&Recipe> {
        self.recipe.as_ref()
    }

    pub(super) fn of_session() -> OfSession {
        OfSession {
            tenant: settings::tenant(),
            headers: settings::headers(),
        }
    }

    /// Which settings of a session must be ours while events are written. Where it takes a statement all of them, search_path being among
    /// them: an operator of the session's schemas would be called with the rights of the extension.
    pub(super) fn printed(&self, by_statement: bool) -> Printed {
        match &self.recipe {
            Some(recipe) if !by_statement => recipe.depends_on(),
            _ => Printed::BySettings,
        }
    }

    pub(super) fn pairing(&self) -> Pairing<'_> {
        Pairing {
            cells: &self.statement.cells,
            compared: &self.statement.compared,
            names: self.statement.names.as_deref(),
        }
    }

    pub(super) fn cells(&self) -> &[Cell] {
        &self.statement.cells
    }

    /// Whether it still says what the setting says.
    fn is_current(&self) -> bool {
        self.capture.topic.is_some() || settings::is_topic_prefix(&self.prefix)
    }
}

type Key = (pg_sys::Oid, Operation);

thread_local! {
    /// None for a table that no capture is found for.
    static PROGRAMS: RefCell<HashMap<Key, Option<Rc<Program>>>> = RefCell::new(HashMap::new());
}

/// The program for an operation on a table; none if it is not captured.
pub(super) fn of(relation: pg_sys::Oid, operation: Operation) -> Option<Rc<Program>> {
    drop_stale();
    let key = (relation, operation);
    let kept = PROGRAMS.with_borrow(|programs| programs.get(&key).cloned());
    match kept {
        Some(Some(program)) if program.is_current() => return Some(program),
        Some(None) => return None,
        _ => {}
    }
    let program = transaction::under_latest_snapshot(|| {
        as_extension(|| connected(|spi| captures::of(spi, relation)))
    })
    .map(|capture| Rc::new(Program::new(capture, operation)));
    let replaced = PROGRAMS.with_borrow_mut(|programs| programs.insert(key, program.clone()));
    drop(replaced);
    program
}

/// The same, while the stream that its events go to is held as it is: what was found before the lock was there is found again.
pub(super) fn held(relation: pg_sys::Oid, operation: Operation) -> Option<Rc<Program>> {
    let mut program = of(relation, operation)?;
    loop {
        lock::hold_for_writing(program.capture.stream_oid);
        let now = of(relation, operation)?;
        if Rc::ptr_eq(&program, &now) {
            return Some(now);
        }
        program = now;
    }
}

/// The capture of a table, while both the table and the stream that its events go to are held as they are.
pub(super) fn capture_held(spi: &Spi, relation: pg_sys::Oid) -> Option<Capture> {
    lock::hold_for_locking_rows(relation);
    let look = || transaction::under_latest_snapshot(|| captures::of(spi, relation));
    let mut capture = look()?;
    loop {
        lock::hold_for_writing(capture.stream_oid);
        let now = look()?;
        if now.stream_oid == capture.stream_oid {
            return Some(now);
        }
        capture = now;
    }
}

fn drop_stale() {
    invalidation::watch();
    // Programs are dropped when nothing is borrowed any more: it frees their plans.
    let gone = match invalidation::take() {
        Stale::Nothing => Vec::new(),
        Stale::Everything => PROGRAMS.take().into_values().collect(),
        Stale::These(ref relations) => PROGRAMS.with_borrow_mut(|programs| {
            let is_gone = |(relation, _): &Key, program: &Option<Rc<Program>>| {
                let program = program.as_ref();
                relations.contains(relation)
                    || program.is_some_and(|it| it.capture.hangs_on_any(relations))
            };
            let gone = programs
                .iter()
                .filter(|(key, program)| is_gone(key, program));
            let keys = gone.map(|(key, _)| *key).collect::<Vec<_>>();
            keys.iter().filter_map(|key| programs.remove(key)).collect()
        }),
    };
    drop(gone);
}
