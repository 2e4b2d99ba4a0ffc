//! Transactions that are much larger than a batch: what it costs to read them.

use outbox_tests::{Receiver, Sql, until};
use postgres::Client;
use serde_json::json;

use super::scene::{http_sink, quick};
use super::write;

/// Index entries and rows of the stream that were read until now. The dispatcher has to be stopped, so that it has told all.
fn read(db: &mut Client) -> i64 {
    db.run("select outbox.stop()");
    until("the dispatcher to end", || {
        (db.one::<i64>(
            "select count(*) from pg_stat_activity where backend_type = 'pg_outbox dispatcher'",
        ) == 0)
            .then_some(())
    });
    db.one("select sum(idx_tup_read)::bigint from pg_stat_all_indexes where schemaname = 'outbox' and relname = 'events'")
}

#[test]
fn a_row_costs_the_same_whatever_its_transaction_holds() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let (all, some) = (Receiver::start(), Receiver::start());
    db.run(
        "create table seen (n bigint);
         create function take(events outbox.event[]) returns void language sql as 'insert into seen values (cardinality(events))'",
    );
    let ask = r#""grouping" => 'transaction', batch_size => 20"#;
    http_sink(&mut db, "all", &all, json!({}), ask);
    let half = format!("{ask}, topics => '{{half}}', filter => 'subject::int % 4 = 0'");
    http_sink(&mut db, "some", &some, json!({}), &half);
    db.run(&format!(
        r#"select outbox.create_sink('fn', 'function', config => '{{"function": "take"}}', {ask})"#
    ));
    let mut total = 0;
    let mut cost = |db: &mut Client, size: i64| {
        let before = read(db);
        write(db, "half", size);
        total += size;
        db.run("select outbox.start()");
        all.wait_for(total as usize);
        some.wait_for(total as usize / 4);
        until("the function to be called", || {
            (db.one::<Option<i64>>("select sum(n)::bigint from seen") == Some(total)).then_some(())
        });
        (read(db) - before) as f64 / size as f64
    };
    let (small, large) = (cost(&mut db, 1_000), cost(&mut db, 6_000));
    assert!(small > 4.0, "each sink has read each row: {small}");
    assert!(
        large < 1.5 * small,
        "a row costs {small} reads in a transaction of 1,000, and {large} in one of 6,000"
    );
}
