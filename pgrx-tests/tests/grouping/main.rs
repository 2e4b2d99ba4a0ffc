//! Whole transactions: `grouping => 'transaction'`.

#[path = "../scene/mod.rs"]
mod scene;

mod altering;
mod large;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::mpsc::sync_channel;
use std::thread;

use outbox_tests::{Cluster, Event, Mode, Receiver, Reply, Sql, until};
use postgres::Client;
use scene::{http_sink, quick};
use serde_json::{Value, json};

/// The number of events in each request that the receiver accepted, with the transactions they are of.
fn batches(receiver: &Receiver) -> Vec<Vec<String>> {
    let requests = receiver.requests();
    let bodies = requests.iter().map(|request| {
        serde_json::from_slice::<Vec<Value>>(&request.body).expect("a batch of CloudEvents")
    });
    bodies
        .map(|events| {
            let transactions = events.iter().map(|event| {
                let name = event["transaction"].as_str().expect("a transaction");
                name.to_owned()
            });
            transactions.collect()
        })
        .collect()
}

/// What an event says about its place in its transaction.
fn part(event: &Event) -> (u64, u64) {
    let number = |name: &str| {
        let text = event.extensions.get(name);
        text.and_then(|text| text.parse().ok())
            .unwrap_or_else(|| panic!("{name} of {event:?}"))
    };
    assert_eq!(
        event.extensions["transaction"],
        format!("\"{}\"", event.txid_and_seq().0)
    );
    (number("transactionindex"), number("transactioncount"))
}

/// Asserts that no transaction is interleaved with another, that each is complete and in order, and says in which order they came.
#[track_caller]
fn whole(events: &[(String, i64)], sizes: &BTreeMap<String, i64>) -> Vec<String> {
    let mut order = Vec::new();
    let mut events = events.iter().peekable();
    while let Some((transaction, first)) = events.next() {
        assert_eq!(*first, 1, "{transaction} begins");
        let mut count = 1;
        while let Some((_, n)) = events.next_if(|(other, _)| other == transaction) {
            count += 1;
            assert_eq!(*n, count, "{transaction} goes on");
        }
        assert_eq!(count, sizes[transaction], "{transaction} is whole");
        assert!(!order.contains(transaction), "{transaction} came twice");
        order.push(transaction.clone());
    }
    assert_eq!(order.len(), sizes.len());
    order
}

/// A transaction of so many events, named by its topic and numbered by their subjects.
fn write(db: &mut Client, name: &str, size: i64) {
    db.run(&format!(
        "select outbox.emit('{name}', subject => n::text) from generate_series(1, {size}) n"
    ));
}

fn named(events: &[Event]) -> Vec<(String, i64)> {
    events
        .iter()
        .map(|event| {
            let n = event.subject.as_ref().unwrap().parse().unwrap();
            (event.topic.clone(), n)
        })
        .collect()
}

#[test]
fn transactions_are_neither_interleaved_nor_split() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    db.run(
        "create table seen (n bigint generated always as identity, call int, topic text, subject bigint);
         create sequence calls;
         create function take(events outbox.event[]) returns void language plpgsql as
            $$ declare call int := nextval('calls');
               begin
                   insert into seen (call, topic, subject)
                   select call, events[n].topic, events[n].subject::bigint from generate_subscripts(events, 1) n order by n;
               end $$",
    );
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        r#""grouping" => 'transaction', batch_size => 20"#,
    );
    db.run(
        r#"select outbox.create_sink('fn', 'function', config => '{"function": "take"}', "grouping" => 'transaction', batch_size => 20);
           select outbox.create_sink('pull', 'pull', "grouping" => 'transaction')"#,
    );
    // Writers whose events interleave in the numbering.
    let sizes = thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let mut db = cluster.connect();
                scope.spawn(move || {
                    let mut sizes = BTreeMap::new();
                    for transaction in 0..25 {
                        let name = format!("w{writer}.t{transaction}");
                        let size = 1 + (transaction * 7 + writer * 5) % 15;
                        db.run("begin");
                        for n in 1..=size {
                            db.run(&format!("select outbox.emit('{name}', subject => '{n}')"));
                        }
                        db.run("commit");
                        sizes.insert(name, size);
                    }
                    sizes
                })
            })
            .collect();
        let mut all = BTreeMap::new();
        for writer in writers {
            all.extend(writer.join().unwrap());
        }
        all
    });
    let total = sizes.values().sum::<i64>();

    let events = receiver.wait_for(usize::try_from(total).unwrap());
    whole(&named(&events), &sizes);
    for event in &events {
        let (index, count) = part(event);
        assert_eq!(
            index,
            event.subject.as_ref().unwrap().parse::<u64>().unwrap()
        );
        assert_eq!(count, sizes[&event.topic].cast_unsigned());
    }
    let mut seen = BTreeMap::new();
    for (number, batch) in batches(&receiver).iter().enumerate() {
        assert!(batch.len() <= 20, "{}", batch.len());
        for transaction in batch {
            let first = *seen.entry(transaction.clone()).or_insert(number);
            assert_eq!(first, number, "{transaction} is split over requests");
        }
    }

    until("the function to be called", || {
        (db.one::<i64>("select count(*) from seen") == total).then_some(())
    });
    let rows = db
        .query("select topic, subject from seen order by n", &[])
        .unwrap();
    let rows: Vec<(String, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    whole(&rows, &sizes);
    assert_eq!(
        db.one::<i64>("select count(*) from (select from seen group by topic having count(distinct call) > 1) s"),
        0
    );
    assert!(
        db.one::<i64>("select max(c) from (select count(*) c from seen group by call) s") <= 20
    );

    let mut pulled = Vec::new();
    loop {
        let rows = db
            .query(
                "select topic, subject::bigint from outbox.poll('pull', 20)",
                &[],
            )
            .unwrap();
        if rows.is_empty() {
            break;
        }
        let batch: Vec<(String, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert!(batch.len() <= 20);
        let (last, n) = batch.last().unwrap();
        assert_eq!(*n, sizes[last], "{last} is split over batches");
        pulled.extend(batch);
        assert!(db.one::<bool>("select outbox.ack('pull')"));
    }
    whole(&pulled, &sizes);
}

#[test]
fn a_transaction_larger_than_the_limit_comes_in_parts_that_say_so() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    write(&mut db, "small", 3);
    write(&mut db, "large", 95);
    write(&mut db, "tiny", 1);
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        r#""grouping" => 'transaction', batch_size => 10"#,
    );
    let events = receiver.wait_for(99);
    let sizes = BTreeMap::from([
        ("small".into(), 3),
        ("large".into(), 95),
        ("tiny".into(), 1),
    ]);
    assert_eq!(whole(&named(&events), &sizes), ["small", "large", "tiny"]);
    for event in &events {
        let n: u64 = event.subject.as_ref().unwrap().parse().unwrap();
        assert_eq!(part(event), (n, sizes[&event.topic].cast_unsigned()));
    }
    assert!(batches(&receiver).iter().all(|batch| batch.len() <= 10));

    // A pull sink's limit is what its consumer asks for.
    db.run(r#"select outbox.create_sink('pull', 'pull', "grouping" => 'transaction')"#);
    let mut pulled = Vec::new();
    loop {
        let poll = "select topic || subject from outbox.poll('pull', 30)";
        let batch: Vec<String> = db.all(poll);
        if batch.is_empty() {
            break;
        }
        assert!(batch.len() <= 30);
        assert_eq!(db.all::<String>(poll), batch);
        pulled.extend(batch);
        assert!(db.one::<bool>("select outbox.ack('pull')"));
    }
    let expected: Vec<_> = named(&events)
        .iter()
        .map(|(name, n)| format!("{name}{n}"))
        .collect();
    assert_eq!(pulled, expected);
}

#[test]
fn a_part_may_be_acknowledged_and_the_rest_comes() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    db.run(r#"select outbox.create_sink('pull', 'pull', "grouping" => 'transaction')"#);
    write(&mut db, "a", 5);
    write(&mut db, "b", 5);
    let batch: Vec<String> = db.all("select position from outbox.poll('pull', 10)");
    assert_eq!(batch.len(), 10);
    assert!(db.one::<bool>(&format!("select outbox.ack('pull', '{}')", batch[6])));
    let poll = "select topic || subject from outbox.poll('pull', 10)";
    assert_eq!(db.all::<String>(poll), ["b3", "b4", "b5"]);
    assert_eq!(scene::status(&mut db, "pull").delivered, 7);
    assert!(db.one::<bool>("select outbox.ack('pull')"));
    assert_eq!(db.all::<String>(poll), Vec::<String>::new());
}

#[test]
fn transactions_that_depend_on_each_other_stay_in_order() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("create table stock (id int primary key, value int); insert into stock select n, 0 from generate_series(0, 2) n");
    db.run(r#"select outbox.create_sink('pull', 'pull', "grouping" => 'transaction')"#);
    let receiver = Receiver::start();
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        r#""grouping" => 'transaction', batch_size => 15"#,
    );
    // Each transaction emits before, between and after the changes that make it depend on others.
    thread::scope(|scope| {
        for writer in 0..4 {
            let mut db = cluster.connect();
            scope.spawn(move || {
                for step in 0..30 {
                    db.run("begin; select outbox.emit('other')");
                    for key in (0..3).filter(|key| (key + step + writer) % 2 == 0) {
                        db.run(&format!(
                            "update stock set value = value + 1 where id = {key};
                             select outbox.emit('changed', subject => id::text, payload => to_jsonb(value)) from stock where id = {key};
                             select outbox.emit('other')"
                        ));
                    }
                    db.run("commit");
                }
            });
        }
    });
    let total: i64 = db.one("select count(*) from outbox.events");
    let last: BTreeMap<String, i64> = db
        .query("select id::text, value::bigint from stock", &[])
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    let in_order = |events: Vec<(String, Option<String>, Value)>| {
        for (key, value) in &last {
            let seen: Vec<_> = events
                .iter()
                .filter(|(topic, subject, _)| topic == "changed" && subject.as_ref() == Some(key))
                .map(|(_, _, payload)| payload.as_i64().unwrap())
                .collect();
            assert_eq!(seen, (1..=*value).collect::<Vec<_>>(), "row {key}");
        }
        assert_eq!(events.len() as i64, total);
    };
    let events = receiver.wait_for(usize::try_from(total).unwrap());
    in_order(
        events
            .iter()
            .map(|event| (event.topic.clone(), event.subject.clone(), event.data()))
            .collect(),
    );
    let mut pulled = Vec::new();
    loop {
        let rows = db
            .query(
                "select topic, subject, payload from outbox.poll('pull', 37)",
                &[],
            )
            .unwrap();
        if rows.is_empty() {
            break;
        }
        pulled.extend(rows.iter().map(|row| {
            (
                row.get(0),
                row.get(1),
                row.get::<_, Option<Value>>(2).unwrap_or_default(),
            )
        }));
        assert!(db.one::<bool>("select outbox.ack('pull')"));
    }
    in_order(pulled);
}

#[test]
fn what_a_sink_leaves_out_of_a_transaction_does_not_count() {
    let mut cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    // Of each third event a sink gets: of one transaction less than its limit, though it is larger; of another one more.
    let sizes = BTreeMap::from([
        ("a", 3),
        ("fits", 9),
        ("none", 0),
        ("b", 1),
        ("large", 30),
        ("c", 2),
    ]);
    for (name, size) in [
        ("a", 10),
        ("fits", 28),
        ("none", 2),
        ("b", 3),
        ("large", 91),
        ("c", 7),
    ] {
        write(&mut db, name, size);
    }
    let ask = r#""grouping" => 'transaction', filter => 'subject::int % 3 = 0'"#;
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        &format!("{ask}, batch_size => 10"),
    );
    let check = |events: &[Event]| {
        let mut counts = BTreeMap::<&str, u64>::new();
        for event in events {
            let seen = counts.entry(&event.topic).or_default();
            *seen += 1;
            assert_eq!(part(event), (*seen, sizes[&*event.topic]), "{event:?}");
        }
        assert_eq!(counts.len(), 5);
    };
    check(&receiver.wait_for(45));
    let mut requests = BTreeMap::<String, usize>::new();
    for batch in batches(&receiver) {
        assert!(batch.len() <= 10);
        let mut transactions = batch;
        transactions.dedup();
        for transaction in transactions {
            *requests.entry(transaction).or_default() += 1;
        }
    }
    let mut requests: Vec<_> = requests.into_values().collect();
    requests.sort_unstable();
    assert_eq!(requests, [1, 1, 1, 1, 3], "only the large one is split");

    // The numbers are the same when somebody else goes on in the middle.
    receiver.clear();
    db.run("select outbox.drop_sink('web')");
    let (sender, answers) = sync_channel(0);
    let answers = Mutex::new(answers);
    receiver.reply_with(move |_| {
        // One request at a time, as the test says.
        let _ = answers.lock().unwrap().recv();
        Reply::ok()
    });
    http_sink(
        &mut db,
        "web",
        &receiver,
        json!({}),
        &format!("{ask}, batch_size => 10"),
    );
    for request in 1.. {
        sender.send(()).unwrap();
        receiver.wait_for_requests(request + 1);
        if receiver.events().iter().any(|event| event.topic == "large") {
            break;
        }
    }
    drop(db);
    cluster.stop(Mode::Fast);
    drop(sender);
    cluster.start_again();
    check(&receiver.wait_for_distinct(45));

    // A pull sink's batches likewise.
    let mut db = cluster.connect();
    db.run(&format!("select outbox.create_sink('pull', 'pull', {ask})"));
    let mut pulled = Vec::new();
    loop {
        let batch: Vec<String> = db.all("select topic from outbox.poll('pull', 10)");
        if batch.is_empty() {
            break;
        }
        assert!(batch.len() <= 10);
        assert_eq!(
            db.all::<String>("select topic from outbox.poll('pull', 10)"),
            batch
        );
        assert!(db.one::<bool>("select outbox.ack('pull')"));
        pulled.push(batch);
    }
    for (name, size) in &sizes {
        let has = |batch: &&Vec<String>| batch.iter().any(|topic| topic == name);
        let batches = pulled.iter().filter(has).count();
        assert_eq!(batches, size.div_ceil(10) as usize, "{name}");
        let events = pulled
            .iter()
            .flatten()
            .filter(|topic| topic == name)
            .count();
        assert_eq!(events as u64, *size, "{name}");
    }
}

#[test]
fn grouping_changes_under_way() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    http_sink(&mut db, "web", &receiver, json!({}), "batch_size => 10");
    write(&mut db, "a", 25);
    let events = receiver.wait_for(25);
    assert!(!events[0].extensions.contains_key("transaction"));
    db.run(r#"select outbox.alter_sink('web', "grouping" => 'transaction')"#);
    write(&mut db, "b", 25);
    let events = receiver.wait_for(50);
    assert_eq!(part(&events[25]), (1, 25));
    // In the middle of a window: what is left is told as it is.
    db.run("select outbox.pause_sink('web')");
    write(&mut db, "c", 5);
    write(&mut db, "d", 5);
    db.run(r#"select outbox.alter_sink('web', "grouping" => 'event'); select outbox.resume_sink('web')"#);
    let events = receiver.wait_for(60);
    assert!(!events[55].extensions.contains_key("transaction"));
    assert_eq!(events.len(), 60);
    assert_eq!(
        db.refused(r#"select outbox.alter_sink('web', "grouping" => 'row')"#)
            .sqlstate,
        "22023"
    );
}
