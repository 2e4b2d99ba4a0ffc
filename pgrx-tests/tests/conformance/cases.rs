//! What every kind of sink has to do.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use outbox_tests::{Cluster, Receiver, Signal, Sql, cluster, until};
use postgres::Client;
use serde_json::json;

use crate::destination::{Destination, Repeats};
use crate::scene::unseen::{assert_unseen, talkative};
use crate::scene::{
    assert_clear, http_sink, ids, ids_without, quick, quoted, status, until_dead, until_idle,
    until_status,
};

const SINK: &str = "conformant";
const TOPIC: &str = "test.numbered";
/// Events `n` and `n + KEYS` are about the same subject.
const KEYS: i64 = 7;
/// In the payload of every event.
const MARKER: &str = "payload-value-4711";

/// A destination, and a cluster with a sink for it.
struct Scene<D> {
    destination: D,
    db: Client,
    cluster: Cluster,
}

impl<D: Destination> Scene<D> {
    fn start() -> Self {
        Self::on(quick())
    }

    fn on(cluster: cluster::Builder) -> Self {
        let mut scene = Self::without_sink(cluster.start());
        scene.create_sink("");
        scene
    }

    fn without_sink(cluster: Cluster) -> Self {
        let mut scene = Self {
            destination: D::start(),
            db: cluster.connect(),
            cluster,
        };
        scene.destination.prepare(&mut scene.db);
        scene
    }

    fn create_sink(&mut self, arguments: &str) {
        let config = quoted(&self.destination.config().to_string());
        self.db.run(&format!(
            "select outbox.create_sink('{SINK}', '{}', config => {config}, batch_size => 16 {} {arguments})",
            D::KIND,
            D::ARGUMENTS
        ));
    }

    /// Emits events in one transaction, the one with that number under another topic and with a payload of so many bytes.
    fn emit(&mut self, first: i64, last: i64, odd: i64, topic: &str, bytes: usize) {
        let topic = quoted(topic);
        // A test's own statement may be logged, whatever it holds.
        self.db.run("set log_min_duration_statement = -1");
        self.db.run(&format!(
            "select outbox.emit(case n when {odd} then {topic} else '{TOPIC}' end,
                    jsonb_build_object('n', n, 'v', '{MARKER}', 'fill', case n when {odd} then repeat('x', {bytes}) end),
                    subject => (n % {KEYS})::text, source => 'test', id => 'n' || n)
               from generate_series({first}, {last}) n"
        ));
        self.db.run("reset log_min_duration_statement");
    }

    fn emit_good(&mut self, first: i64, last: i64) {
        self.emit(first, last, 0, TOPIC, 0);
    }

    fn arrived(&mut self) -> Vec<String> {
        self.destination.arrived(&mut self.db)
    }

    /// Waits until all is delivered that can be, and says what has arrived.
    #[track_caller]
    fn when_idle(&mut self, delivered: i64) -> Vec<String> {
        until_status(
            &mut self.db,
            SINK,
            &format!("{delivered} delivered"),
            |status| status.delivered >= delivered,
        );
        assert_eq!(until_idle(&mut self.db, SINK).delivered, delivered);
        self.arrived()
    }
}

/// Asserts that these events have arrived and no others, each once.
#[track_caller]
fn assert_once(arrived: &[String], expected: &[String]) {
    let mut sorted = arrived.to_vec();
    let mut expected = expected.to_vec();
    sorted.sort();
    expected.sort();
    assert_eq!(sorted, expected);
}

/// Asserts that events came in their order, as far as the destination has one, wherever each of them was first.
#[track_caller]
fn assert_order<D: Destination>(arrived: &[String]) {
    let number = |id: &String| -> i64 { id[1..].parse().expect("an id such as n7") };
    let mut seen = HashSet::new();
    let first = arrived.iter().map(number).filter(|n| seen.insert(*n));
    let mut of_key: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
    for n in first {
        let key = if D::ONE_ORDER { 0 } else { n % KEYS };
        of_key.entry(key).or_default().push(n);
    }
    for (key, numbers) in of_key {
        assert!(numbers.is_sorted(), "key {key}: {numbers:?}");
    }
}

/// Events of several transactions and several batches arrive in the order of their commits.
pub fn order<D: Destination>() {
    let mut scene = Scene::<D>::start();
    for first in (1..=300).step_by(30) {
        scene.emit_good(first, first + 29);
    }
    let arrived = scene.when_idle(300);
    assert_once(&arrived, &ids(1..=300));
    assert_order::<D>(&arrived);
}

/// A crash between the arrival of events and the save of the cursor loses none, and the destination does what it can with repeats.
pub fn redelivery<D: Destination>() {
    const EVENTS: i64 = 400;
    let mut scene = Scene::<D>::without_sink(quick().start());
    scene.create_sink(", enabled => false");
    scene.emit_good(1, EVENTS);
    // Whoever wants to save the cursor waits for this session, until both are gone.
    let mut holder = scene.cluster.connect();
    if D::REPEATS != Repeats::Impossible {
        holder.run(&format!(
            "begin; select from outbox.cursors where name = 'sink:{SINK}' for update"
        ));
    }
    scene
        .db
        .run(&format!("select outbox.resume_sink('{SINK}')"));
    until("something to arrive", || {
        (!scene.arrived().is_empty()).then_some(())
    });
    let pid = until_status(&mut scene.db, SINK, "held by a process", |status| {
        status.lease_pid.is_some()
    });
    scene
        .cluster
        .kill_backend(pid.lease_pid.expect("it is"), Signal::KILL);
    until("the session to be lost", || {
        scene.db.simple_query("").is_err().then_some(())
    });
    scene.cluster.wait_until_it_answers();
    scene.db = scene.cluster.connect();
    until_status(&mut scene.db, SINK, "all delivered", |status| {
        status.lag_events == 0 && status.state == "idle"
    });
    let arrived = scene.arrived();
    let different: BTreeSet<_> = arrived.iter().cloned().collect();
    assert_eq!(different, ids(1..=EVENTS).into_iter().collect());
    match D::REPEATS {
        Repeats::Shown => assert!(arrived.len() > different.len(), "nothing was repeated"),
        Repeats::Recognised | Repeats::Impossible => assert_eq!(arrived.len(), different.len()),
    }
    assert_order::<D>(&arrived);
    assert_eq!(status(&mut scene.db, SINK).dead_letters, 0);
}

/// One event of a batch that is not taken yet is tried again, alone, and the others are not.
pub fn partial_failure<D: Destination>() {
    let mut scene = Scene::<D>::on(quick().setting("outbox.poison_attempts", "1000"));
    let topic = scene.destination.unwelcome_topic();
    scene.emit(1, 20, 10, &topic, 0);
    until_status(&mut scene.db, SINK, "two attempts", |status| {
        status.attempts >= 2
    });
    let seen = status(&mut scene.db, SINK);
    assert_clear(&seen.last_error.expect("it says why"));
    assert_eq!(seen.dead_letters, 0);
    scene.destination.welcome(&mut scene.db);
    assert_once(&scene.when_idle(20), &ids(1..=20));
}

/// While the destination cannot be reached nothing is set aside; once it can, everything arrives.
pub fn outage_and_recovery<D: Destination>() {
    let mut scene = Scene::<D>::start();
    scene.emit_good(1, 20);
    assert_order::<D>(&scene.when_idle(20));
    scene.destination.go_down(&mut scene.db);
    for first in (21..=60).step_by(10) {
        scene.emit_good(first, first + 9);
    }
    let seen = until_status(&mut scene.db, SINK, "down", |status| status.state == "down");
    assert_clear(&seen.last_error.expect("it says why"));
    assert_eq!(
        (seen.dead_letters, seen.delivered, seen.lag_events),
        (0, 20, 40)
    );
    scene.destination.come_up(&mut scene.db);
    let arrived: BTreeSet<_> = scene.when_idle(60).into_iter().collect();
    assert_eq!(arrived, ids(1..=60).into_iter().collect());
    assert_eq!(status(&mut scene.db, SINK).dead_letters, 0);
}

/// An event that the destination never takes is set aside, and its neighbours flow.
pub fn poison<D: Destination>() {
    let mut scene = Scene::<D>::start();
    let topic = scene.destination.poison_topic();
    scene.emit(1, 30, 10, &topic, 0);
    let dead = until_dead(&mut scene.db, SINK, 1);
    assert_eq!(dead[0].id(), "n10");
    assert_eq!(dead[0].event["type"], topic);
    assert_clear(&dead[0].error);
    let arrived = scene.when_idle(29);
    assert_once(&arrived, &ids_without(30, &[10]));
    assert_order::<D>(&arrived);
}

/// A destination that no longer answers is given up in time, delays nobody else, and gets everything when it is back.
pub fn hang<D: Destination>() {
    let mut scene = Scene::<D>::start();
    let healthy = Receiver::start();
    http_sink(&mut scene.db, "healthy", &healthy, json!({}), "");
    scene.emit_good(1, 20);
    scene.when_idle(20);
    scene.destination.hang();
    scene.emit_good(21, 40);
    healthy.wait_for(40);
    let seen = until_status(&mut scene.db, SINK, "two attempts", |status| {
        status.attempts >= 2
    });
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    assert!(error.contains("within"), "{error}");
    assert_eq!(seen.dead_letters, 0);
    scene.destination.resume();
    let arrived: BTreeSet<_> = scene.when_idle(40).into_iter().collect();
    assert_eq!(arrived, ids(1..=40).into_iter().collect());
    assert_eq!(status(&mut scene.db, SINK).dead_letters, 0);
}

/// An event that is larger than the destination takes is set aside alone.
pub fn too_large<D: Destination>() {
    let mut scene = Scene::<D>::start();
    scene.emit(1, 30, 10, TOPIC, D::TOO_LARGE);
    let dead = until_dead(&mut scene.db, SINK, 1);
    assert_eq!(dead[0].id(), "n10");
    assert_clear(&dead[0].error);
    let arrived = scene.when_idle(29);
    assert_once(&arrived, &ids_without(30, &[10]));
    assert_order::<D>(&arrived);
}

/// Whatever fails, secrets are seen nowhere and payloads in no log.
pub fn secrets<D: Destination>() {
    let mut scene = Scene::<D>::without_sink(talkative());
    scene.create_sink("");
    scene.emit_good(1, 10);
    scene.when_idle(10);
    scene.destination.go_down(&mut scene.db);
    scene.emit_good(11, 20);
    until_status(&mut scene.db, SINK, "two attempts", |status| {
        status.attempts >= 2
    });
    assert_unseen(&scene.cluster, &scene.destination.secrets());
    scene.destination.come_up(&mut scene.db);
    scene.when_idle(20);
    let topic = scene.destination.poison_topic();
    scene.emit(21, 30, 25, &topic, 0);
    until_dead(&mut scene.db, SINK, 1);
    scene.when_idle(29);
    // Nor when the secret is not what it was.
    scene
        .db
        .run("select outbox.set_secret('conformance', array['another-value-4711'])");
    scene.emit_good(31, 40);
    scene.db.run("select * from outbox.tick()");
    assert_unseen(&scene.cluster, &scene.destination.secrets());
    assert_unseen(&scene.cluster, &["another-value-4711"]);
    let log = scene.cluster.log();
    assert_eq!(log.lines().find(|line| line.contains(MARKER)), None);
}

/// What is wrong with a config is said when it is set.
pub fn config<D: Destination>() {
    let mut scene = Scene::<D>::start();
    let mut bad = scene.destination.bad_configs();
    bad.extend([json!(null), json!([]), json!("x"), json!({})]);
    let mut unknown = scene.destination.config();
    unknown["no_such_key"] = json!(1);
    bad.push(unknown);
    for config in bad {
        let literal = quoted(&config.to_string());
        let made = format!(
            "select outbox.create_sink('bad', '{}', config => {literal})",
            D::KIND
        );
        let refusal = scene.db.refused(&made);
        assert_eq!(refusal.sqlstate, "22023", "{config}: {refusal:?}");
        let changed = format!("select outbox.alter_sink('{SINK}', config => {literal})");
        if config != json!(null) {
            assert_eq!(scene.db.refused(&changed).sqlstate, "22023", "{config}");
        }
    }
    scene.emit_good(1, 5);
    assert_once(&scene.when_idle(5), &ids(1..=5));
}
