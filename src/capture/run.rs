//! What happens when the trigger of a captured table fires.

use std::rc::Rc;

use super::order::{self, Ended};
use super::programs::{self, Program};
use crate::pg::catalog;
use crate::pg::error::Complaint;
use crate::pg::firing::{self, ChangedRows, Firing, Operation};
use crate::pg::security::{self, Path, as_extension_printing};
use crate::pg::spi::{Spi, UserStatement, connected};
use crate::store::captures::{self, Capture};

/// A statement on a captured table begins.
pub(crate) fn begin(firing: Firing) {
    let (relation, operation) = (firing.relation(), firing.operation());
    if operation == Operation::Truncate {
        order::begin_truncation(relation);
    } else if let Some(program) = programs::of(relation, operation) {
        order::begin(
            relation,
            program.capture.root,
            operation,
            firing.has_code_before_rows(),
        );
    }
}

/// A statement on a captured table is through, or a row of one was changed by replication.
pub(crate) fn change(firing: Firing) {
    let (relation, operation) = (firing.relation(), firing.operation());
    let ended = order::end(relation, operation);
    if operation != Operation::Truncate && firing.count() == 0 {
        return;
    }
    let wanted = |program: &Rc<Program>| program.is_wanted(operation);
    if !programs::of(relation, operation).is_some_and(|program| wanted(&program)) {
        return;
    }
    let Some(program) = programs::held(relation, operation).filter(wanted) else {
        return;
    };
    if operation == Operation::Truncate {
        if order::truncated_by_itself(&program.capture.ancestors) {
            program.write(None, None);
        }
        return;
    }
    let rows = match operation {
        Operation::Update => firing.pairs(&program.pairing()),
        _ if program.condition.is_none() && program.recipe().is_some() => firing.rows_unnamed(),
        _ => firing.rows(),
    };
    let kept = program.kept(&rows);
    let rows = kept.as_ref().unwrap_or(&rows);
    if !rows.is_empty() {
        program.write(Some(rows), ended.as_ref());
    }
}

impl Program {
    fn is_wanted(&self, operation: Operation) -> bool {
        let name = operation.name();
        self.capture.enabled && self.capture.operations.iter().any(|wanted| wanted == name)
    }

    /// The rows that the condition holds for; none if there is no condition.
    pub(super) fn kept(&self, rows: &ChangedRows) -> Option<ChangedRows> {
        let condition = self.condition.as_ref().filter(|_| !rows.is_empty())?;
        Some(rows.only(&self.capture.places(condition, rows)))
    }

    /// Writes an event for each row.
    pub(super) fn write(&self, rows: Option<&ChangedRows>, ended: Option<&Ended>) {
        let marking = ended.filter(|ended| ended.wants_mark());
        let mark = ended.and_then(|ended| ended.mark);
        let recipe = self.recipe().zip(rows);
        let by_statement = recipe.is_none() || marking.is_some() || mark.is_some();
        as_extension_printing(self.printed(by_statement), || {
            let last_seq = || connected(|spi| captures::last_seq(spi, &self.capture.sequence));
            let before = (marking.is_some() || mark.is_some()).then(last_seq);
            if let (Some(marking), Some(before)) = (marking, before) {
                marking.set_mark(before);
            }
            match recipe {
                Some((recipe, rows)) => recipe.write(rows, &Self::of_session()),
                None => self.write_by_statement(rows),
            }
            if let (Some(mark), Some(before)) = (mark, before) {
                connected(|spi| captures::move_behind(spi, &self.capture.stream, mark, before));
            }
        });
    }
}

/// Runs a statement of ours that writes events and asks for nothing else, in the name of a stream's owner where somebody's code belongs to
/// its table.
pub(super) fn run_for_stream(capture: &Capture, statement: &UserStatement) {
    if capture.stream_is_plain {
        connected(|spi| {
            spi.run_user(statement, &[]);
        });
        return;
    }
    connected(|spi| captures::check_code_of_stream(spi, capture));
    as_owner_of_stream(capture, |spi| {
        spi.run_user(statement, &[]);
    });
}

fn as_owner_of_stream(capture: &Capture, body: impl FnOnce(&Spi)) {
    security::as_table_owner(capture.stream_owner, capture.stream_defers, || {
        connected(body);
    });
}

impl Program {
    /// To a stream's table that is not as it was made belongs somebody's code: triggers, defaults, checks, indexes of expressions. It runs
    /// as the owner of the table, whoever has written what is captured.
    fn write_by_statement(&self, rows: Option<&ChangedRows>) {
        let lend = |spi: &Spi| {
            if let Some(rows) = rows {
                rows.lend(spi);
            }
        };
        if self.capture.stream_is_plain {
            connected(|spi| {
                lend(spi);
                spi.run_user(self.insert(), &[]);
            });
            return;
        }
        let events = connected(|spi| {
            captures::check_code_of_stream(spi, &self.capture);
            lend(spi);
            ChangedRows::collected(spi, &self.gather)
        });
        as_owner_of_stream(&self.capture, |spi| {
            events.lend(spi);
            spi.run_user(&self.insert_gathered, &[]);
        });
    }
}

impl Capture {
    /// The places of the rows that the condition holds for. It is run as the role that has supplied it.
    fn places(&self, condition: &UserStatement, rows: &ChangedRows) -> Vec<i64> {
        if !catalog::role_exists(self.owner) {
            Complaint::denied(format!("the owner of the capture of {} is gone", self.source))
                .detail("Its condition has nobody to run as.")
                .hint("Have another role set it: select outbox.alter_capture(relation, condition => '…').")
                .raise();
        }
        let mut places = security::as_role(self.owner, Path::Ours, || {
            connected(|spi| {
                rows.lend(spi);
                spi.run_user(condition, &[])
                    .map(|row| row.i64(0).unwrap_or(0))
            })
        });
        places.sort_unstable();
        places
    }
}

/// The most columns that rows can have in a statement.
const MOST_COLUMNS: usize = 1664;

/// Tries the statements of a capture on no rows at all: raises what is wrong with it.
pub(crate) fn try_out(capture: &Capture, operation: Operation) -> Result<(), Complaint> {
    let program = Rc::new(Program::new(capture.clone(), operation));
    if program.cells().len() >= MOST_COLUMNS {
        return Err(Complaint::bad_argument(format!(
            "{} has too many columns to be captured in this way",
            capture.source
        ))
        .detail(format!(
            "{} values of a changed row would be looked at.",
            program.cells().len()
        ))
        .hint("Choose fewer columns, payload full, or no condition."));
    }
    if operation == Operation::Truncate {
        return Ok(());
    }
    let rows = firing::no_rows(capture.root, operation, &program.pairing());
    if let Some(condition) = &program.condition {
        capture.places(condition, &rows);
    }
    as_extension_printing(program.printed(true), || {
        program.write_by_statement(Some(&rows));
    });
    Ok(())
}
