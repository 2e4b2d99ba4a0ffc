//! What is done to the server and a receiver while the writers write.

use std::sync::RwLock;
use std::time::Duration;

use outbox_tests::{Cluster, Mode, Receiver, Signal};

use crate::dice::Dice;
use crate::writer::Run;

#[derive(Debug, Clone, Copy)]
pub enum Blow {
    EndDispatcher,
    EndWriter,
    KillBackend,
    StopAtOnce,
    StopFast,
    CutReceiver,
}

pub const BLOWS: [Blow; 14] = [
    Blow::EndDispatcher,
    Blow::CutReceiver,
    Blow::KillBackend,
    Blow::EndDispatcher,
    Blow::EndWriter,
    Blow::StopAtOnce,
    Blow::EndDispatcher,
    Blow::CutReceiver,
    Blow::KillBackend,
    Blow::EndDispatcher,
    Blow::StopFast,
    Blow::EndWriter,
    Blow::StopAtOnce,
    Blow::EndDispatcher,
];

pub fn strike(
    blow: Blow,
    run: &Run,
    cluster: &RwLock<Cluster>,
    receiver: &Receiver,
    dice: &mut Dice,
) {
    let one_of = |kind: &str, dice: &mut Dice| -> Option<i32> {
        let mut db = run.connect()?;
        let sql = format!(
            "select pid from pg_stat_activity where {kind} and pid <> pg_backend_pid() order by pid"
        );
        let rows = db.query(&sql, &[]).ok()?;
        let pids: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
        let index = dice.below(pids.len().max(1) as u64) as usize;
        pids.get(index).copied()
    };
    let end = |pid: Option<i32>| {
        if let (Some(pid), Some(mut db)) = (pid, run.connect()) {
            let _ = db.execute("select pg_terminate_backend($1)", &[&pid]);
        }
    };
    match blow {
        Blow::EndDispatcher => end(one_of("backend_type = 'pg_outbox dispatcher'", dice)),
        Blow::EndWriter => end(one_of("backend_type = 'client backend'", dice)),
        Blow::KillBackend => {
            let kinds = [
                "backend_type = 'client backend'",
                "backend_type = 'pg_outbox dispatcher'",
            ];
            let kind = kinds[dice.below(2) as usize];
            if let Some(pid) = one_of(kind, dice) {
                cluster.read().unwrap().kill_backend(pid, Signal::KILL);
            }
        }
        Blow::StopAtOnce | Blow::StopFast => {
            let mode = match blow {
                Blow::StopAtOnce => Mode::Immediate,
                _ => Mode::Fast,
            };
            let mut cluster = cluster.write().unwrap();
            cluster.stop(mode);
            cluster.start_again();
        }
        Blow::CutReceiver => {
            receiver.stop();
            dice.pause(Duration::from_secs(3));
            receiver.start_again();
        }
    }
}
