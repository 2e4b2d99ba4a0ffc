//! Applications that change rows and emit an event for each change, in every kind of transaction.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use postgres::{Client, NoTls};

use crate::dice::Dice;

pub const SUBJECTS: u64 = 200;

/// What all writers share.
pub struct Run {
    config: postgres::Config,
    /// Changes whose commit was reported.
    committed: AtomicU64,
    pub acknowledged: Mutex<HashSet<String>>,
    /// Changes that were rolled back for sure.
    pub rolled_back: Mutex<HashSet<String>>,
    done: AtomicBool,
}

impl Run {
    pub fn new(config: postgres::Config) -> Self {
        Self {
            config,
            committed: AtomicU64::new(0),
            acknowledged: Mutex::default(),
            rolled_back: Mutex::default(),
            done: AtomicBool::new(false),
        }
    }

    /// A session, as soon as there is a server to have one with; none if the run ends before.
    pub fn connect(&self) -> Option<Client> {
        loop {
            if let Ok(client) = self.config.connect(NoTls) {
                return Some(client);
            }
            if self.is_done() {
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// How many changes are known to be committed.
    pub fn committed(&self) -> u64 {
        self.committed.load(Ordering::SeqCst)
    }

    /// Ends the run when the value goes out of scope, be it that the test has failed.
    pub fn ends_with_this(&self) -> impl Drop {
        Ending(self)
    }

    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }
}

struct Ending<'r>(&'r Run);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::SeqCst);
    }
}

/// One of the applications.
pub struct Writer<'r> {
    run: &'r Run,
    dice: Dice,
    number: u64,
    transactions: u64,
}

impl<'r> Writer<'r> {
    pub fn new(run: &'r Run, dice: Dice, number: u64) -> Self {
        Self {
            run,
            dice,
            number,
            transactions: 0,
        }
    }

    pub fn write(mut self) {
        let mut session = self.run.connect();
        while let Some(db) = session.as_mut().filter(|_| !self.run.is_done()) {
            if self.transaction(db).is_ok() {
                continue;
            }
            // It was a deadlock, or a lock that somebody holds for long, or the end of the session.
            if db.is_closed() || db.simple_query("rollback").is_err() {
                session = self.run.connect();
            }
            if let Some(db) = &mut session {
                self.resolve(db);
            }
        }
    }

    /// What was prepared before a crash is there after it, and holds its locks.
    fn resolve(&mut self, db: &mut Client) {
        let verb = ["commit", "rollback"][self.dice.below(2) as usize];
        let pattern = format!("writer-{}-%", self.number);
        let prepared = db.query(
            "select gid from pg_prepared_xacts where gid like $1",
            &[&pattern],
        );
        for row in prepared.unwrap_or_default() {
            let gid: String = row.get(0);
            let _ = db.batch_execute(&format!("{verb} prepared '{gid}'"));
        }
    }

    fn transaction(&mut self, db: &mut Client) -> Result<(), postgres::Error> {
        self.transactions += 1;
        let dice = &mut self.dice;
        let mut subjects: Vec<u64> = (0..1 + dice.below(4))
            .map(|_| dice.below(SUBJECTS))
            .collect();
        if dice.percent(95) {
            subjects.sort_unstable();
        }
        db.batch_execute("begin; set local lock_timeout = '2s'")?;
        let (mut changes, mut undone) = (Vec::new(), Vec::new());
        for (step, subject) in subjects.into_iter().enumerate() {
            let id = format!("w{}-{}-{step}", self.number, self.transactions);
            let savepoint = self.dice.percent(30);
            if savepoint {
                db.batch_execute("savepoint s")?;
            }
            self.change(db, &id, subject)?;
            if self.dice.percent(20) {
                self.dice.pause(Duration::from_millis(10));
            }
            if savepoint && self.dice.percent(40) {
                db.batch_execute("rollback to savepoint s; release savepoint s")?;
                undone.push(id);
                continue;
            }
            if savepoint && self.dice.percent(50) {
                db.batch_execute("release savepoint s")?;
            }
            changes.push(id);
        }
        if self.dice.percent(2) {
            self.dice.pause(Duration::from_millis(300));
        }
        let took = match self.dice.below(100) {
            0..12 => {
                db.batch_execute("rollback")?;
                false
            }
            12..24 => self.in_two_phases(db)?,
            _ => {
                db.batch_execute("commit")?;
                true
            }
        };
        self.run.rolled_back.lock().unwrap().extend(undone);
        if took {
            let count = changes.len() as u64;
            self.run.acknowledged.lock().unwrap().extend(changes);
            self.run.committed.fetch_add(count, Ordering::SeqCst);
        } else {
            self.run.rolled_back.lock().unwrap().extend(changes);
        }
        Ok(())
    }

    /// Changes a subject, and tells of it in an event.
    fn change(&mut self, db: &mut Client, id: &str, subject: u64) -> Result<(), postgres::Error> {
        let subject = i64::try_from(subject).unwrap_or(0);
        let row = db.query_one(
            "update subjects set version = version + 1 where id = $1 returning version",
            &[&subject],
        )?;
        let version: i64 = row.get(0);
        db.execute(
            "insert into changes (id, subject, version) values ($1, $2, $3)",
            &[&id, &subject, &version],
        )?;
        let emit = if self.dice.percent(50) {
            "select outbox.emit('subject.changed', jsonb_build_object('version', $3::bigint), subject => $2::bigint::text, source => 'subjects', id => $1)"
        } else {
            "insert into outbox.events (id, topic, source, subject, payload)
             values ($1, 'subject.changed', 'subjects', $2::bigint::text, jsonb_build_object('version', $3::bigint))"
        };
        db.execute(emit, &[&id, &subject, &version])?;
        Ok(())
    }

    fn in_two_phases(&mut self, db: &mut Client) -> Result<bool, postgres::Error> {
        let gid = format!("writer-{}-{}", self.number, self.transactions);
        db.batch_execute(&format!("prepare transaction '{gid}'"))?;
        self.dice.pause(Duration::from_millis(50));
        let commits = self.dice.percent(70);
        let verb = if commits { "commit" } else { "rollback" };
        db.batch_execute(&format!("{verb} prepared '{gid}'"))?;
        Ok(commits)
    }
}
