//! What pg_outbox does, shown on a throwaway cluster: events that commit with the data arrive, in order and signed, also
//! when the receiver was down in between.

use std::time::{Duration, Instant};

use outbox_tests::{Cluster, Receiver, Sql, until};

const SECRET: &str = "a secret that both sides know";

/// The life of a few orders: each line is one transaction.
const FIRST: &[&str] = &[
    "insert into orders values (1, 'placed'), (2, 'placed');
     select outbox.emit('order.placed', '{\"total\": 19.90}', subject => '1', source => 'shop');
     select outbox.emit('order.placed', '{\"total\": 5.00}', subject => '2', source => 'shop')",
    "update orders set state = 'paid' where id = 1;
     select outbox.emit('order.paid', '{\"method\": \"card\"}', subject => '1', source => 'shop')",
];
const ROLLED_BACK: &str = "update orders set state = 'refunded' where id = 1;
     select outbox.emit('order.refunded', '{}', subject => '1', source => 'shop')";
const WHILE_DOWN: &[&str] = &[
    "update orders set state = 'shipped' where id = 1;
     select outbox.emit('order.shipped', '{\"parcel\": \"P-77\"}', subject => '1', source => 'shop')",
    "update orders set state = 'cancelled' where id = 2;
     select outbox.emit('order.cancelled', '{\"reason\": \"out of stock\"}', subject => '2', source => 'shop')",
];
const LAST: &[&str] = &["update orders set state = 'delivered' where id = 1;
     select outbox.emit('order.delivered', null, subject => '1', source => 'shop')"];

fn main() {
    let stay = std::env::args().any(|arg| arg == "--stay");

    step("a throwaway PostgreSQL with pg_outbox preloaded, and an HTTP receiver");
    let cluster = Cluster::start();
    let receiver = Receiver::start();
    let mut db = cluster.connect();
    note(&format!(
        "PostgreSQL {} at {}",
        db.one::<String>("show server_version"),
        cluster.url("app")
    ));
    note(&format!("receiver at {}", receiver.url()));

    step("a table of orders, and a sink that posts every event to the receiver, signed");
    db.run("create table orders (id int primary key, state text)");
    db.run(&format!(
        "select outbox.set_secret('demo', array['{SECRET}'])"
    ));
    db.run(&format!(
        "select outbox.create_sink('demo', 'http', config => '{{\"url\": \"{}\", \"secret\": \"demo\"}}')",
        receiver.url()
    ));

    step("orders are placed and paid; each event commits with its order");
    commit(&mut db, FIRST);
    receiver.wait_for_distinct(3);
    note("3 events committed, 3 received");

    step("a refund is rolled back, and so is its event");
    db.run(&format!("begin; {ROLLED_BACK}; rollback"));

    step("the receiver is killed, and two more orders change meanwhile");
    receiver.stop();
    commit(&mut db, WHILE_DOWN);
    let error: String = until("the sink to notice", || {
        db.one("select last_error from outbox.status where sink = 'demo'")
    });
    note(&format!("the sink waits and tries again: {error}"));

    step("the receiver is back");
    let back = Instant::now();
    receiver.start_again();
    commit(&mut db, LAST);
    let events = receiver.wait_for_distinct(6);
    note(&format!(
        "everything is there {} after",
        rounded(back.elapsed())
    ));

    step("what arrived, in order");
    println!(
        "    {:<12}{:<18}{:<9}{:<38}data",
        "position", "type", "subject", "id"
    );
    for event in &events {
        println!(
            "    {:<12}{:<18}{:<9}{:<38}{}",
            event.position,
            event.topic,
            event.subject.as_deref().unwrap_or_default(),
            event.id,
            event.data_text.as_deref().unwrap_or_default(),
        );
    }
    let requests = receiver.requests();
    let signed = requests
        .iter()
        .filter(|request| request.is_signed_with(SECRET))
        .count();
    note(&format!(
        "{} requests, {signed} of them with a good signature",
        requests.len()
    ));

    step("select * from outbox.status");
    until("the sink's cursor to be saved", || {
        let lag: i64 = db.one("select lag_events from outbox.status where sink = 'demo'");
        (lag == 0).then_some(())
    });
    print!(
        "{}",
        indented(&cluster.table("app", "select * from outbox.status"))
    );

    assert_eq!(signed, requests.len(), "every request is signed");
    let topics: Vec<_> = events.iter().map(|event| event.topic.as_str()).collect();
    let expected = [
        "placed",
        "placed",
        "paid",
        "shipped",
        "cancelled",
        "delivered",
    ];
    assert!(
        topics
            .iter()
            .map(|topic| &topic["order.".len()..])
            .eq(expected),
        "{topics:?}"
    );

    if stay {
        step("it stays up until Ctrl-C; look around with");
        println!("    {}", cluster.psql_command("app"));
        loop {
            std::thread::park();
        }
    }
}

/// Runs each of these in a transaction of its own.
fn commit(db: &mut postgres::Client, transactions: &[&str]) {
    for transaction in transactions {
        db.run(&format!("begin; {transaction}; commit"));
    }
}

fn step(text: &str) {
    println!("\n\x1b[1m==> {text}\x1b[0m");
}

fn note(text: &str) {
    println!("    {text}");
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

fn rounded(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
