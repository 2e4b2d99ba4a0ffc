//! Function sinks: each delivery is a transaction with the save of its cursor. And which sinks go to processes of their own.

use super::super::course::{Course, Pass, Target};
use super::super::now;
use super::super::shaping::Patience;
use super::Dispatcher;
use crate::pg::spi::connected;
use crate::pg::{background, catalog, lock, transaction};

impl Dispatcher {
    /// One delivery to each function sink that is served here, each in a transaction with the save of its cursor. True if one of
    /// them may go on at once.
    pub(super) fn run_functions(&mut self) -> bool {
        let mut busy = false;
        let ids = self
            .courses
            .iter()
            .filter(|(_, course)| matches!(course.target, Target::Function(_)))
            .map(|(id, _)| id.clone())
            .collect::<Vec<_>>();
        for id in ids {
            let Some(mut course) = self.courses.remove(&id) else {
                continue;
            };
            if !course.function_is_due(now()) {
                self.courses.insert(id, course);
                continue;
            }
            self.report("calling functions");
            let (seen, floors) = (&self.seen, &mut self.floors);
            let passed = transaction::run(|| {
                if !catalog::extension().is_some_and(lock::hold_extension) {
                    return Pass::default();
                }
                // What the function did, and the cursor that says so, are lost or kept together.
                background::relax_commit();
                connected(|spi| {
                    let Some(seen) = seen.get(&course.sink.stream) else {
                        return Pass::default();
                    };
                    if !lock::hold_table(seen.stream.oid) {
                        return Pass::default();
                    }
                    let floors = floors.entry(seen.stream.oid).or_default();
                    course.function_pass(spi, &seen.horizon, floors)
                })
            });
            match passed {
                Ok(Pass { goes_on, written }) => {
                    busy |= goes_on;
                    if let Some(written) = written {
                        course.committed(written);
                    }
                    self.courses.insert(id, course);
                    self.end_lost();
                }
                Err(_) if course.is_lost() => {
                    self.let_go(&course);
                    self.look_at_all();
                }
                Err(error) => self.fail(course, &error),
            }
        }
        busy
    }

    /// A function may take its time, and so may a filter, but must not take that of others: where a process of its own can be had,
    /// the sink is served there.
    pub(super) fn leave_to_helpers(&mut self) {
        if self.helpers.have_changed() {
            self.look_at_all();
        }
        let may_start = self.helpers.may_start();
        let mut left = Vec::new();
        for (id, course) in &mut self.courses {
            if course.is_leaving() {
                self.helpers.note_slow(course.version());
            }
            let slow = self.helpers.is_slow(course.version());
            match course.target {
                Target::Function(_) if may_start => left.push(id.clone()),
                Target::Network if slow && may_start => {
                    course.leave();
                    // What is in flight is waited for, or it would be delivered twice.
                    if !course.is_in_flight() {
                        left.push(id.clone());
                    }
                }
                // It must not run here: it is taken again once there is a slot.
                _ if self.helpers.is_stubborn(course.version()) => left.push(id.clone()),
                Target::Network if course.is_leaving() => course.set_patience(Patience::Own),
                Target::Network | Target::Function(_) => {}
            }
        }
        self.save(|course| course.is_leaving() && !course.is_in_flight());
        for id in left {
            let slot = self.helpers.may_start();
            let stubborn = |course: &Course| self.helpers.is_stubborn(course.version());
            if !slot && !self.courses.get(&id).is_some_and(stubborn) {
                continue;
            }
            if let Some(course) = self.courses.remove(&id) {
                self.let_go(&course);
                let calls_function = matches!(course.target, Target::Function(_));
                if !slot || !self.helpers.start(course.version(), calls_function) {
                    // It is taken again with the next look, to be served here if it may be.
                    self.look_at_all();
                }
            }
        }
    }
}
