//! The commit order: what sinks and pull consumers get, and when.

use std::collections::BTreeMap;
use std::thread;

use outbox_tests::{Cluster, Mode, Receiver, Sql, until};
use postgres::Client;
use serde_json::{Value, json};

/// A cluster with three consumers of one stream: an HTTP endpoint, a function that writes down what it gets, and a pull sink.
struct Scene {
    receiver: Receiver,
    cluster: Cluster,
}

impl Scene {
    fn without_sinks() -> Self {
        let cluster = Cluster::builder()
            .setting("outbox.poll_interval", "1s")
            .start();
        cluster.connect().run(
            "create table seen (n bigint generated always as identity, sink text, topic text, subject text, payload jsonb);
             create function take(events outbox.event[]) returns void language sql as
                'insert into seen (topic, subject, payload)
                 select topic, subject, payload from unnest(events) with ordinality order by ordinality'",
        );
        let receiver = Receiver::start();
        Self { receiver, cluster }
    }

    fn start() -> Self {
        let scene = Self::without_sinks();
        scene.create_sinks();
        scene
    }

    fn create_sinks(&self) {
        let config = json!({"url": self.receiver.url()});
        self.cluster.connect().run(&format!(
            "select outbox.create_sink('web', 'http', config => '{config}');
             select outbox.create_sink('fn', 'function', config => '{{\"function\": \"take\"}}');
             select outbox.create_sink('pull', 'pull')"
        ));
    }

    /// Waits until each consumer has had as many events, and says what each got since the scene began: the endpoint may have got
    /// one again after a crash, and the first time counts.
    fn wait_for(&self, pulled: &mut Vec<Arrival>, count: usize) -> [Vec<Arrival>; 2] {
        let mut db = self.cluster.connect();
        let web = self
            .receiver
            .wait_for_distinct(count)
            .into_iter()
            .map(|event| Arrival {
                payload: event.data(),
                topic: event.topic,
                subject: event.subject,
            })
            .collect();
        let called = until("the function to be called", || {
            let rows = arrivals(
                &mut db,
                "select topic, subject, payload from seen order by n",
            );
            (rows.len() >= count).then_some(rows)
        });
        until("the pull sink to have had all", || {
            pulled.extend(pull(&mut db));
            (pulled.len() >= count).then_some(())
        });
        [web, called]
    }

    /// The same, with the topics only; all three must have got the same.
    #[track_caller]
    fn topics(&self, pulled: &mut Vec<Arrival>, count: usize) -> Vec<String> {
        let [web, called] = self.wait_for(pulled, count);
        assert_eq!(&web, pulled);
        assert_eq!(&called, pulled);
        pulled.iter().map(|event| event.topic.clone()).collect()
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Arrival {
    topic: String,
    subject: Option<String>,
    payload: Value,
}

fn arrivals(db: &mut Client, query: &str) -> Vec<Arrival> {
    let rows = db.query(query, &[]).unwrap();
    rows.iter()
        .map(|row| Arrival {
            topic: row.get(0),
            subject: row.get(1),
            payload: row.get::<_, Option<Value>>(2).unwrap_or_default(),
        })
        .collect()
}

/// The next batch of the pull sink, acknowledged.
fn pull(db: &mut Client) -> Vec<Arrival> {
    let events = arrivals(
        db,
        "select topic, subject, payload from outbox.poll('pull')",
    );
    if !events.is_empty() {
        assert!(db.one::<bool>("select outbox.ack('pull')"));
    }
    events
}

#[test]
fn transactions_that_commit_out_of_the_order_of_their_events() {
    let scene = Scene::start();
    let (mut first, mut second) = (scene.cluster.connect(), scene.cluster.connect());
    let mut pulled = Vec::new();
    first.run("begin; select outbox.emit('first to emit')");
    second.run("select outbox.emit('first to commit')");
    assert_eq!(scene.topics(&mut pulled, 1), ["first to commit"]);
    first.run("commit");
    assert_eq!(
        scene.topics(&mut pulled, 2),
        ["first to commit", "first to emit"]
    );

    // The more entangled, the same: each event arrives when its transaction has committed, once.
    let mut sessions: Vec<_> = (0..5).map(|_| scene.cluster.connect()).collect();
    for (n, session) in sessions.iter_mut().enumerate() {
        session.run(&format!("begin; select outbox.emit('{n}')"));
    }
    for (done, n) in [3, 0, 4, 2, 1].into_iter().enumerate() {
        sessions[n].run("commit");
        let topics = scene.topics(&mut pulled, 3 + done);
        assert_eq!(topics.last().unwrap(), &n.to_string());
    }
}

/// T1 takes its id elsewhere, T2 changes the row and commits, T1 then changes the row and commits.
fn invert(cluster: &Cluster) {
    let (mut t1, mut t2) = (cluster.connect(), cluster.connect());
    let change = |value: i32| {
        format!(
            "update stock set value = {value} where id = 'k';
             select outbox.emit('changed', subject => 'k', payload => to_jsonb(value)) from stock where id = 'k'"
        )
    };
    t1.run("begin; insert into elsewhere default values");
    t2.run(&format!("begin; {}; commit", change(2)));
    t1.run(&format!("{}; commit", change(3)));
}

#[test]
fn changes_of_a_row_arrive_in_the_order_in_which_they_were_made() {
    let scene = Scene::without_sinks();
    let mut db = scene.cluster.connect();
    db.run(
        "create table stock (id text primary key, value int); insert into stock values ('k', 1)",
    );
    db.run("create table elsewhere (n int generated always as identity)");
    let payloads = |events: &[Arrival]| {
        events
            .iter()
            .map(|event| event.payload.clone())
            .collect::<Vec<_>>()
    };

    // Both changes in one window: the sinks are made when all is done.
    invert(&scene.cluster);
    scene.create_sinks();
    let mut pulled = Vec::new();
    let [web, called] = scene.wait_for(&mut pulled, 2);
    for events in [&web, &called, &pulled] {
        assert_eq!(payloads(events), [json!(2), json!(3)]);
    }

    // And with consumers that look whenever they like.
    for round in 2..=20 {
        invert(&scene.cluster);
        let [web, called] = scene.wait_for(&mut pulled, 2 * round);
        for events in [&web, &called, &pulled] {
            assert_eq!(payloads(&events[2 * round - 2..]), [json!(2), json!(3)]);
        }
    }

    // The pair order, which readers with nothing but a pair get, inverts it: by the ids of the transactions.
    let read: Vec<Value> = db.all("select payload from outbox.read()");
    assert_eq!(read[..4], [json!(3), json!(2), json!(3), json!(2)]);
}

/// Writers that change a few rows in transactions of all kinds.
fn change_rows(db: &mut Client, writer: usize) {
    db.run("set statement_timeout = '60s'");
    for step in 0..50 {
        let pick = (step * 7 + writer * 3) % 11;
        db.run("begin");
        if pick.is_multiple_of(3) {
            db.run("insert into elsewhere default values");
        }
        // In the order of the keys, so that writers do not deadlock.
        for key in 0..4 {
            if (step + writer + key).is_multiple_of(3) {
                continue;
            }
            let change = format!(
                "update stock set value = value + 1 where id = 'k{key}';
                 select outbox.emit('changed', subject => id, payload => to_jsonb(value)) from stock where id = 'k{key}'"
            );
            match pick {
                4 => db.run(&format!("savepoint s; {change}; rollback to s")),
                5 => db.run(&format!("savepoint s; {change}; release s")),
                _ => db.run(&change),
            }
        }
        match pick {
            6 => db.run("rollback"),
            7 => {
                db.run(&format!("prepare transaction 'w{writer}'"));
                db.run(&format!("commit prepared 'w{writer}'"));
            }
            _ => db.run("commit"),
        }
    }
}

#[test]
fn many_writers_of_the_same_rows() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    db.run("create table stock (id text primary key, value int)");
    db.run("insert into stock select 'k' || n, 0 from generate_series(0, 3) n");
    db.run("create table elsewhere (n int generated always as identity)");
    let mut pulled = thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let mut db = scene.cluster.connect();
                scope.spawn(move || change_rows(&mut db, writer))
            })
            .collect();
        let mut pulled = Vec::new();
        while !writers.iter().all(thread::ScopedJoinHandle::is_finished) {
            pulled.extend(pull(&mut db));
        }
        pulled
    });
    // Each committed change of a row raised its value by one and told the value.
    let values: BTreeMap<String, i64> = db
        .query("select id, value::bigint from stock", &[])
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    let changes = values.values().sum::<i64>();
    assert!(changes > 200, "{changes}");
    let [web, called] = scene.wait_for(&mut pulled, usize::try_from(changes).unwrap());
    for (who, events) in [("web", &web), ("fn", &called), ("pull", &pulled)] {
        assert_eq!(events.len() as i64, changes, "{who}");
        assert_eq!(scene.receiver.count() as i64, changes, "each once");
        for (key, value) in &values {
            let seen: Vec<_> = events
                .iter()
                .filter(|event| event.subject.as_ref() == Some(key))
                .map(|event| event.payload.as_i64().unwrap())
                .collect();
            assert_eq!(seen, (1..=*value).collect::<Vec<_>>(), "{who} of {key}");
        }
    }
}

#[test]
fn an_open_transaction_holds_back_its_own_events_only() {
    let scene = Scene::start();
    scene
        .cluster
        .connect_to("postgres")
        .run("create database elsewhere");
    let mut db = scene.cluster.connect();
    let mut pulled = Vec::new();

    let mut here = scene.cluster.connect();
    here.run("begin; select outbox.emit('here')");
    let mut there = scene.cluster.connect_to("elsewhere");
    there.run("begin; create table t (n int)");
    let mut prepared = scene.cluster.connect();
    prepared.run("begin; select outbox.emit('prepared'); prepare transaction 'orphan'");
    drop(prepared);
    for n in 1..=20 {
        db.run(&format!("select outbox.emit('{n}')"));
        assert_eq!(scene.topics(&mut pulled, n).last().unwrap(), &n.to_string());
    }
    // Also when the transaction that holds on is the one that took the last id.
    let mut newest = scene.cluster.connect();
    db.run("begin; select outbox.emit('21')");
    newest.run("begin; select outbox.emit('newest')");
    db.run("commit");
    assert_eq!(scene.topics(&mut pulled, 21).last().unwrap(), "21");

    here.run("select outbox.emit('here again'); commit");
    assert_eq!(scene.topics(&mut pulled, 23)[21..], ["here", "here again"]);
    there.run("commit");
    newest.run("commit");
    assert_eq!(scene.topics(&mut pulled, 24)[23], "newest");
    db.run("commit prepared 'orphan'");
    assert_eq!(scene.topics(&mut pulled, 25)[24], "prepared");
}

#[test]
fn an_orphaned_prepared_transaction_outlives_the_server() {
    let mut scene = Scene::start();
    let mut pulled = Vec::new();
    let mut db = scene.cluster.connect();
    db.run("begin; select outbox.emit('kept'); prepare transaction 'kept'");
    db.run("begin; select outbox.emit('given up'); prepare transaction 'given up'");
    db.run("select outbox.emit('1')");
    assert_eq!(scene.topics(&mut pulled, 1), ["1"]);
    drop(db);
    for mode in [Mode::Fast, Mode::Immediate] {
        scene.cluster.stop(mode);
        scene.cluster.start_again();
        scene.cluster.connect().run("select outbox.emit('2')");
        let count = pulled.len() + 1;
        assert_eq!(scene.topics(&mut pulled, count)[count - 1], "2");
    }
    let mut db = scene.cluster.connect();
    db.run("rollback prepared 'given up'");
    db.run("commit prepared 'kept'");
    assert_eq!(scene.topics(&mut pulled, 4)[3], "kept");
    db.run("select outbox.emit('last')");
    assert_eq!(scene.topics(&mut pulled, 5)[4], "last");
}

#[test]
fn subtransactions_count_with_their_transaction() {
    let scene = Scene::start();
    let mut db = scene.cluster.connect();
    let mut pulled = Vec::new();
    db.run(
        "begin;
         select outbox.emit('1');
         savepoint a;
           select outbox.emit('undone');
           savepoint b;
             select outbox.emit('undone too');
           release b;
         rollback to a;
         select outbox.emit('2');
         savepoint c;
           select outbox.emit('3');
           savepoint d;
             insert into outbox.events (topic) values ('undone');
           rollback to d;
           insert into outbox.events (topic) values ('4');
         release c;
         do $$
         begin
             perform outbox.emit('undone');
             raise exception 'on purpose';
         exception when others then
             perform outbox.emit('5');
         end $$;
         commit",
    );
    assert_eq!(scene.topics(&mut pulled, 5), ["1", "2", "3", "4", "5"]);
    assert_eq!(
        db.one::<i64>("select count(distinct txid) from outbox.events"),
        1
    );

    // A transaction all of whose events were undone has none, and one that only emits in a subtransaction has those.
    db.run("begin; savepoint s; select outbox.emit('undone'); rollback to s; commit");
    db.run("begin; savepoint s; select outbox.emit('6'); release s; commit");
    db.run("begin; savepoint s; select outbox.emit('undone'); release s; rollback");
    db.run("select outbox.emit('7')");
    assert_eq!(scene.topics(&mut pulled, 7)[5..], ["6", "7"]);
}

#[test]
fn a_transaction_is_never_given_its_own_events() {
    // Without a dispatcher, so that only the passes of this test deliver.
    let cluster = Cluster::builder().preload(false).start();
    let receiver = Receiver::start();
    let config = json!({"url": receiver.url()});
    let mut db = cluster.connect();
    db.run(
        "create table seen (n bigint generated always as identity, topic text);
         create function take(events outbox.event[]) returns void language sql as
            'insert into seen (topic) select topic from unnest(events) with ordinality order by ordinality'",
    );
    db.run(&format!(
        "select outbox.create_sink('web', 'http', config => '{config}');
         select outbox.create_sink('fn', 'function', config => '{{\"function\": \"take\"}}');
         select outbox.create_sink('pull', 'pull')"
    ));
    let seen = |db: &mut Client| -> Vec<String> { db.all("select topic from seen order by n") };
    let web = || -> Vec<String> {
        let topics = receiver.events().into_iter().map(|event| event.topic);
        topics.collect()
    };
    let tick = "select sink || ' ' || delivered || ' ' || outcome from outbox.tick() where outcome <> 'pull' order by sink";
    let poll = "select topic from outbox.poll('pull')";

    cluster.connect().run("select outbox.emit('other 1')");
    db.run("begin; select outbox.emit('own 1'); savepoint s; select outbox.emit('own 2')");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 1 delivered", "web 1 delivered"]
    );
    assert_eq!(
        (seen(&mut db), web()),
        (vec!["other 1".into()], vec!["other 1".into()])
    );
    assert_eq!(db.all::<String>(poll), ["other 1"]);
    db.run("select outbox.emit('own 3')");
    cluster.connect().run("select outbox.emit('other 2')");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 1 delivered", "web 1 delivered"]
    );
    assert!(db.one::<bool>("select outbox.ack('pull')"));
    assert_eq!(db.all::<String>(poll), ["other 2"]);
    assert!(db.one::<bool>("select outbox.ack('pull')"));
    assert_eq!(db.all::<String>(poll), Vec::<String>::new());
    assert_eq!(db.all::<String>(tick), ["fn 0 idle", "web 0 idle"]);
    db.run("commit");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 3 delivered", "web 3 delivered"]
    );
    let all = ["other 1", "other 2", "own 1", "own 2", "own 3"];
    assert_eq!(seen(&mut db), all);
    assert_eq!(web(), all);
    assert_eq!(db.all::<String>(poll), all[2..]);
    assert!(db.one::<bool>("select outbox.ack('pull')"));

    // A transaction that delivers first, and so gets its id from that, and emits then.
    cluster.connect().run("select outbox.emit('other 3')");
    db.run("begin");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 1 delivered", "web 1 delivered"]
    );
    assert_eq!(db.all::<String>(poll), ["other 3"]);
    assert!(db.one::<bool>("select outbox.ack('pull')"));
    db.run("select outbox.emit('own 4')");
    assert_eq!(db.all::<String>(tick), ["fn 0 idle", "web 0 idle"]);
    assert_eq!(db.all::<String>(poll), Vec::<String>::new());
    db.run("commit");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 1 delivered", "web 1 delivered"]
    );
    assert_eq!(db.all::<String>(poll), ["own 4"]);
    assert!(db.one::<bool>("select outbox.ack('pull')"));

    // Rolled back: a function's effects and the cursor go together, so it is called again; its own events are gone.
    cluster.connect().run("select outbox.emit('other 4')");
    db.run("begin; select outbox.emit('never')");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 1 delivered", "web 1 delivered"]
    );
    db.run("rollback");
    assert_eq!(
        db.all::<String>(tick),
        ["fn 1 delivered", "web 1 delivered"]
    );
    assert_eq!(db.all::<String>(poll), ["other 4"]);
    assert_eq!(
        seen(&mut db)[5..],
        ["other 3", "own 4", "other 4"],
        "effect once"
    );
    assert_eq!(
        web()[5..],
        ["other 3", "own 4", "other 4", "other 4"],
        "at least once"
    );
}
