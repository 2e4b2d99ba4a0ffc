//! What operators and users do to the sinks while the writers write: they alter, pause, stop, drop functions and make them again, and leave
//! transactions open.

use std::time::Duration;

use postgres::Client;

use crate::dice::Dice;
use crate::writer::Run;

/// The sinks, and whether each takes whole transactions, too.
const SINKS: [&str; 4] = ["fast", "slow", "function", "reports"];

/// Makes the function of sink "reports", which takes events, fails some and puts some off, but none behind an earlier one of its subject.
pub const REPORTS: &str = "
    create or replace function report(events outbox.event[]) returns table (seq bigint, result text, error text) language plpgsql as $$
    declare
        e outbox.event;
        held text[] := '{}';
        chance double precision;
    begin
        foreach e in array events loop
            chance := random();
            seq := e.seq;
            result := case when e.subject = any (held) then 'skipped' when chance < 0.02 then 'failed' when chance < 0.05 then 'skipped' else 'recorded' end;
            error := case result when 'failed' then 'now and then' end;
            if result = 'recorded' then
                insert into reported (id, subject, version) values (e.id, e.subject, (e.payload ->> 'version')::bigint);
            else
                held := held || e.subject;
            end if;
            return next;
        end loop;
    end $$";

/// One of the things that are done.
fn step(dice: &mut Dice) -> Vec<String> {
    let sink = SINKS[dice.below(SINKS.len() as u64) as usize];
    let call = |arguments: String| format!("select outbox.alter_sink('{sink}', {arguments})");
    match dice.below(10) {
        0..2 => vec![call(format!("batch_size => {}", 1 + dice.below(100)))],
        2..4 => {
            let grouping = ["event", "transaction"][dice.below(2) as usize];
            vec![call(format!("\"grouping\" => '{grouping}'"))]
        }
        4 => vec![
            format!("select outbox.pause_sink('{sink}')"),
            format!("select outbox.resume_sink('{sink}')"),
        ],
        5 => vec![
            "select outbox.stop()".into(),
            "select outbox.start()".into(),
        ],
        6 => vec![
            "drop function if exists report(outbox.event[])".into(),
            REPORTS.into(),
            "select outbox.alter_sink('reports', config => '{\"function\": \"report\"}')".into(),
        ],
        7 => vec!["select outbox.prune()".into()],
        _ => {
            let idle = [
                format!("select outbox.redeliver('{sink}')"),
                format!("select outbox.pause_sink('{sink}')"),
                call("batch_size => 7".into()),
                format!("select outbox.drop_sink('{sink}')"),
                "select outbox.emit('never', id => 'never')".into(),
                format!("select from outbox.cursors where name = 'sink:{sink}' for update"),
            ];
            let which = dice.below(idle.len() as u64) as usize;
            vec!["begin".into(), idle[which].clone(), "rollback".into()]
        }
    }
}

/// Does one thing after the other until the run ends, and then sees to it that every sink is served.
pub fn operate(run: &Run, mut dice: Dice) {
    let mut session = run.connect();
    while let Some(db) = session.as_mut().filter(|_| !run.is_done()) {
        for statement in step(&mut dice) {
            if let Err(error) = db.batch_execute(&statement) {
                println!("{statement}: {error}");
            }
            dice.pause(Duration::from_millis(300));
        }
        if db.is_closed() {
            session = run.connect();
        }
    }
}

/// Puts right whatever an operator, or the end of a session, has left.
pub fn put_right(db: &mut Client) {
    db.batch_execute(REPORTS).expect("the function can be made");
    db.batch_execute("select outbox.alter_sink('reports', config => '{\"function\": \"report\"}')")
        .expect("the sink can be altered");
    for sink in SINKS {
        db.batch_execute(&format!("select outbox.resume_sink('{sink}')"))
            .expect("a sink can be resumed");
    }
    db.batch_execute("select outbox.start()")
        .expect("it starts");
}
