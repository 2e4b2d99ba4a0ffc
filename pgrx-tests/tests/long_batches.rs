//! A batch that takes long, in mode `single`: what is through is saved meanwhile, and each request is looked at before it goes out.

mod scene;
mod workers;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use outbox_tests::{Cluster, Mode, Receiver, Reply, Request, Sql, until};
use postgres::Client;
use scene::{emit, http_sink, quick, until_idle, until_status};
use serde_json::json;
use workers::{another_dispatcher, dispatcher, kill_dispatcher, terminate, until_quiet};

/// Lets so many requests pass, and holds the others until it is opened.
#[derive(Default)]
struct Barrier {
    upto: Mutex<u64>,
    changed: Condvar,
}

impl Barrier {
    /// In front of a receiver: the first so many events pass, in whatever order they arrive.
    fn before(receiver: &Receiver, upto: u64) -> Arc<Self> {
        let barrier = Arc::new(Self {
            upto: Mutex::new(upto),
            changed: Condvar::new(),
        });
        let script = Arc::clone(&barrier);
        receiver.reply_with(move |request| {
            script.pass(id_of(request)[1..].parse().unwrap());
            Reply::ok()
        });
        barrier
    }

    fn pass(&self, number: u64) {
        let upto = self.upto.lock().unwrap();
        drop(
            self.changed
                .wait_while(upto, |upto| number > *upto)
                .unwrap(),
        );
    }

    fn open(&self) {
        *self.upto.lock().unwrap() = u64::MAX;
        self.changed.notify_all();
    }
}

/// One event a request, two at once, in batches of any size.
fn single(db: &mut Client, id: &str, receiver: &Receiver) {
    let config = json!({"mode": "single", "concurrency": 2, "timeout_ms": 3_600_000});
    http_sink(db, id, receiver, config, "batch_size => 1000");
}

fn id_of(request: &Request) -> String {
    let event: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
    event["id"].as_str().unwrap().to_owned()
}

/// The ids that were sent more than once.
fn repeated(receiver: &Receiver) -> Vec<String> {
    let mut times = BTreeMap::<String, usize>::new();
    for request in receiver.requests() {
        *times.entry(id_of(&request)).or_default() += 1;
    }
    let mut often = times.into_iter().filter(|(_, times)| *times > 1);
    let often = often.by_ref().map(|(id, _)| id);
    often.collect()
}

#[test]
fn what_is_through_is_saved_as_it_goes() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let barrier = Barrier::before(&receiver, 40);
    single(&mut db, "w", &receiver);
    emit(&mut db, 1..=100);
    until_status(&mut db, "w", "saved what is through", |status| {
        status.delivered == 40 && status.lag_events == 60
    });
    // What is committed is on disk now, also what did not wait for it.
    db.run("create table flushed ()");
    kill_dispatcher(&cluster, "app");
    barrier.open();
    receiver.wait_for_distinct(100);
    let mut db = cluster.connect();
    assert_eq!(until_idle(&mut db, "w").delivered, 100);
    let repeated = repeated(&receiver);
    assert_eq!(repeated, ["n41", "n42"], "what was under way");
}

#[test]
fn what_is_through_ahead_of_one_that_takes_long_is_saved_too() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let first = Mutex::new(true);
    receiver.reply_with(move |request| {
        let is_first = id_of(request) == "n2" && std::mem::take(&mut *first.lock().unwrap());
        if is_first { Reply::hang() } else { Reply::ok() }
    });
    single(&mut db, "w", &receiver);
    // The first request of all goes out alone.
    emit(&mut db, 1..=1);
    until_idle(&mut db, "w");
    emit(&mut db, 2..=31);
    receiver.wait_for_requests(31);
    until("the dispatcher to remember what is through", || {
        let remembered: Option<i32> =
            db.one("select cardinality(ahead) from outbox.cursors where name = 'sink:w'");
        (remembered == Some(29)).then_some(())
    });
    db.run("create table flushed ()");
    kill_dispatcher(&cluster, "app");
    receiver.wait_for_distinct(31);
    let mut db = cluster.connect();
    assert_eq!(until_idle(&mut db, "w").lag_events, 0);
    assert_eq!(repeated(&receiver), ["n2"]);
}

/// Something that ends the dispatcher in good order, and sees to it that there is one again.
type End = fn(&mut Cluster);

#[test]
fn an_end_in_good_order_repeats_nothing() {
    let stop_and_start: End = |cluster| {
        let mut db = cluster.connect();
        assert!(db.one::<bool>("select outbox.stop()"));
        until_quiet(cluster, "app");
        db.run("select outbox.start()");
    };
    let terminate: End = |cluster| {
        let pid = dispatcher(cluster, "app");
        terminate(cluster, pid);
        another_dispatcher(cluster, "app", pid);
    };
    let restart: End = |cluster| {
        cluster.stop(Mode::Fast);
        cluster.start_again();
    };
    let disable: End = |cluster| {
        cluster.set("outbox.enabled", "off");
        until_quiet(cluster, "app");
        cluster.set("outbox.enabled", "on");
    };
    let pause: End = |cluster| {
        let mut db = cluster.connect();
        db.run("select outbox.pause_sink('w')");
        until_status(&mut db, "w", "no holder of its lease", |status| {
            status.lease_pid.is_none()
        });
        db.run("select outbox.resume_sink('w')");
    };
    let mut cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    // Each answer takes a moment, so that two are always under way.
    receiver.reply_with(|_| {
        std::thread::sleep(Duration::from_millis(25));
        Reply::ok()
    });
    single(&mut db, "w", &receiver);
    for (n, end) in [stop_and_start, terminate, restart, disable, pause]
        .into_iter()
        .enumerate()
    {
        let before = receiver.requests().len();
        let first = 1 + 100 * n as i64;
        emit(&mut cluster.connect(), first..=first + 99);
        receiver.wait_for_requests(before + 15);
        end(&mut cluster);
        receiver.wait_for_distinct(before + 100);
        let mut db = cluster.connect();
        until_idle(&mut db, "w");
        let none: [&str; 0] = [];
        assert_eq!(repeated(&receiver), none, "after end {n}");
        assert_eq!(receiver.requests().len(), before + 100);
    }
}

/// An end waits for what is under way only so long; what is through ahead of it is not lost by that.
#[test]
fn at_an_end_what_is_through_ahead_is_remembered() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let first = Mutex::new(true);
    receiver.reply_with(move |request| {
        let is_first = id_of(request) == "n2" && std::mem::take(&mut *first.lock().unwrap());
        if is_first { Reply::hang() } else { Reply::ok() }
    });
    single(&mut db, "w", &receiver);
    emit(&mut db, 1..=1);
    until_idle(&mut db, "w");
    emit(&mut db, 2..=31);
    receiver.wait_for_requests(31);
    terminate(&cluster, dispatcher(&cluster, "app"));
    receiver.wait_for_distinct(31);
    until_idle(&mut db, "w");
    assert_eq!(repeated(&receiver), ["n2"]);
    let remembered: i64 =
        db.one("select count(*) from outbox.sink_health where checkpoint -> 'ahead' is not null");
    assert_eq!(remembered, 0, "what is behind the cursor is forgotten");
}

/// What is done to a sink while two requests are under way, and whether it goes on.
#[test]
fn a_sink_that_is_changed_sends_nothing_more_by_its_old_settings() {
    let new = Receiver::start();
    let alter = format!(
        r#"select outbox.alter_sink('w', config => '{{"url": "{}", "mode": "single", "concurrency": 2}}')"#,
        new.url()
    );
    for (change, goes_on) in [
        (alter.as_str(), true),
        ("select outbox.pause_sink('w')", false),
        ("select outbox.drop_sink('w')", false),
        ("select outbox.set_secret('s', array['new', 'newer'])", true),
    ] {
        let cluster = quick().start();
        let mut db = cluster.connect();
        let old = Receiver::start();
        let barrier = Barrier::before(&old, 10);
        new.clear();
        db.run("select outbox.set_secret('s', array['old'])");
        let config = json!({
            "mode": "single", "concurrency": 2, "timeout_ms": 3_600_000, "secret": "s"
        });
        http_sink(&mut db, "w", &old, config, "batch_size => 1000");
        emit(&mut db, 1..=60);
        old.wait_for_requests(12);
        // What is looked at together is known together.
        let other = Receiver::start();
        let marker = format!(
            r#"select outbox.create_sink('marker', 'http', config => '{{"url": "{}"}}')"#,
            other.url()
        );
        db.run(&format!("begin; {change}; {marker}; commit"));
        other.wait_for(60);
        assert_eq!(old.requests().len(), 12, "{change}");
        barrier.open();
        if !goes_on {
            until_status(&mut db, "marker", "idle", |status| status.state == "idle");
            until("its lease to be free", || {
                db.all::<i32>("select lease_pid from outbox.status where sink = 'w' and lease_pid is not null")
                    .is_empty()
                    .then_some(())
            });
            assert_eq!(old.requests().len(), 12, "{change}");
            continue;
        }
        assert_eq!(until_idle(&mut db, "w").delivered, 60, "{change}");
        let requests = old.requests();
        if change == alter {
            assert_eq!((requests.len(), new.count()), (12, 48));
            continue;
        }
        assert_eq!(requests.len(), 60);
        assert!(repeated(&old).is_empty());
        let signatures = requests
            .iter()
            .map(|request| request.headers("x-outbox-signature").count());
        let signatures = signatures.collect::<Vec<_>>();
        assert_eq!(signatures, [vec![1; 12], vec![2; 48]].concat());
    }
}
