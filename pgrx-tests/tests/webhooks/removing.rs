//! A deleted webhook is gone at once; its deliveries follow in small steps.

use outbox_tests::{Receiver, Reply, Sql, until};
use postgres::Client;

use super::{emit, started, until_fanned_out, until_states, webhook};

/// Writes deliveries of a webhook, each with one attempt, none of which has gone through.
fn pile_up(db: &mut Client, id: &str, count: i64) {
    db.run(&format!(
        "with d as (
             insert into outbox.webhook_deliveries (webhook, tenant, event_id, topic, event, state, attempts, next_attempt_at)
             select '{id}', 'acme', 'p' || n, 'a', '{{}}', (array['pending', 'dead'])[n % 2 + 1], 1, 'infinity' from generate_series(1, {count}) n
             returning id)
         insert into outbox.webhook_attempts (delivery, attempt, tenant, duration_ms) select id, 1, 'acme', 1 from d"
    ));
}

/// Waits until nothing is left of webhooks that were deleted.
#[track_caller]
fn until_removed(db: &mut Client) {
    until("all to be removed", || {
        db.one::<bool>("select not exists (select from outbox.webhook_removals)")
            .then_some(())
    });
}

fn left(db: &mut Client) -> i64 {
    db.one(
        "select (select count(*) from outbox.cursors) + (select count(*) from outbox.webhook_deliveries)
              + (select count(*) from outbox.webhook_attempts) + (select count(*) from outbox.webhook_secrets)",
    )
}

#[test]
fn its_deliveries_are_removed_in_small_steps() {
    let (_cluster, mut db) = started();
    let (receiver, other) = (Receiver::start(), Receiver::start());
    let id = webhook(&mut db, "acme", &receiver, "");
    let kept = webhook(&mut db, "globex", &other, "");
    pile_up(&mut db, &id, 9_000);
    db.run(
        "create table steps (rows bigint);
         create function note_step() returns trigger language plpgsql as
            $$ begin insert into public.steps select count(*) from gone having count(*) > 0; return null; end $$;
         create trigger note_step after delete on outbox.webhook_deliveries referencing old table as gone
            for each statement execute function note_step()",
    );
    let one: i64 = db.one("select min(id) from outbox.webhook_deliveries");
    db.run(&format!("begin; select outbox.delete_webhook('{id}')"));
    // In the transaction itself already, and it has not walked over the deliveries.
    assert_eq!(db.one::<i64>("select count(*) from outbox.webhooks"), 1);
    assert_eq!(db.one::<i64>("select count(*) from steps"), 0);
    db.run("savepoint before");
    assert_eq!(
        db.refused(&format!("select outbox.redeliver_webhook({one})"))
            .sqlstate,
        "42704"
    );
    db.run("rollback to before; commit");
    emit(&mut db, "globex", "a", 1..=2);
    until_removed(&mut db);
    until_states(&mut db, &["delivered 2"]);
    let (steps, most, all): (i64, i64, i64) = {
        let row = db
            .query_one(
                "select count(*), max(rows), sum(rows)::bigint from steps",
                &[],
            )
            .expect("the steps");
        (row.get(0), row.get(1), row.get(2))
    };
    assert!(
        steps > 1 && most <= 2_000 && all == 9_000,
        "{steps} {most} {all}"
    );
    assert_eq!(receiver.requests().len(), 0);
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.webhook_attempts a where not exists (select from outbox.webhook_deliveries d where d.id = a.delivery)"),
        0
    );
    // With the last one nothing is left, and nothing is held back.
    db.run(&format!("select outbox.delete_webhook('{kept}')"));
    until_removed(&mut db);
    until("the cursor to go", || (left(&mut db) == 0).then_some(()));
}

#[test]
fn what_no_dispatcher_has_removed_yet_is_removed_later_and_never_sent() {
    let (cluster, mut db) = started();
    let receiver = Receiver::start();
    receiver.reply_always(Reply::status(500));
    let id = webhook(&mut db, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=1);
    receiver.wait_for_requests(1);
    db.run("select outbox.stop()");
    let before = receiver.requests().len();
    emit(&mut db, "acme", "a", 2..=5);
    pile_up(&mut db, &id, 100);
    db.run("update outbox.webhook_deliveries set state = 'pending', next_attempt_at = now()");
    db.run(&format!("select outbox.delete_webhook('{id}')"));
    // A dump takes along that it is to be removed.
    cluster.restore("restored", &cluster.dump("app"));
    let mut restored = cluster.connect_to("restored");
    until_removed(&mut restored);
    until("the cursor to go", || {
        (left(&mut restored) == 0).then_some(())
    });
    db.run("select outbox.start()");
    until_removed(&mut db);
    until("the cursor to go", || (left(&mut db) == 0).then_some(()));
    assert_eq!(receiver.requests().len(), before);
}

/// Whoever makes a webhook while the last one goes needs the cursor.
#[test]
fn the_cursor_stays_for_a_webhook_that_is_made_meanwhile() {
    let (cluster, mut db) = started();
    let receiver = Receiver::start();
    let old = webhook(&mut db, "acme", &receiver, "");
    let mut maker = cluster.connect();
    maker.run("begin");
    webhook(&mut maker, "globex", &receiver, "");
    db.run(&format!("select outbox.delete_webhook('{old}')"));
    emit(&mut db, "globex", "a", 1..=1);
    until_fanned_out(&mut db);
    maker.run("commit");
    emit(&mut db, "globex", "a", 2..=2);
    receiver.wait_for_requests(1);
    // One that is rolled back keeps it no longer than that.
    let made: String = db.one("select id from outbox.webhooks");
    maker.run("begin");
    webhook(&mut maker, "initech", &receiver, "");
    db.run(&format!("select outbox.delete_webhook('{made}')"));
    maker.run("rollback");
    until_removed(&mut db);
    until("the cursor to go", || (left(&mut db) == 0).then_some(()));
}
