//! The README's examples of subscriptions, as it shows them: each gets every event from when it began, over lost connections, too.

mod scene;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use outbox_tests::{
    Cluster, DEADLINE, Mode, Sql, major, node_libraries, program, python_libraries, until,
};
use postgres::Client;
use scene::quick;

fn example(name: &str) -> String {
    format!("{}/examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A subscriber, and the lines that it has printed.
struct Subscriber {
    process: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Subscriber {
    fn start(mut command: Command, cluster: &Cluster) -> Self {
        let mut process = command
            .arg(cluster.url("app"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let output = BufReader::new(process.stdout.take().expect("it is piped"));
        let kept = Arc::clone(&lines);
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                kept.lock().expect("no panic").push(line);
            }
        });
        Self { process, lines }
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("no panic").clone()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Writes event `n`, among others that nobody has subscribed to.
fn emit(db: &mut Client, n: i64) {
    db.run(&format!(
        "select outbox.emit('reservation.placed', jsonb_build_object('n', {n})), outbox.emit('reservation.seat.taken', '{{}}'),
                outbox.emit('order.placed', '{{}}')"
    ));
}

/// Runs a subscriber through lost connections and a restart of the server. `line` is how it prints event `n`.
fn gets_everything(command: Command, line: fn(i64) -> String) {
    let mut cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.create_sink('keeper', 'pull')");
    for n in 1..=3 {
        emit(&mut db, n);
    }
    let subscriber = Subscriber::start(command, &cluster);
    // Until it has heard of one: from then on, of all.
    let mut n = 3;
    let start = Instant::now();
    while subscriber.lines().is_empty() {
        n += 1;
        emit(&mut db, n);
        thread::sleep(Duration::from_millis(100));
        assert!(start.elapsed() < DEADLINE, "it prints nothing");
    }
    let first = (4..=n)
        .find(|&n| subscriber.lines()[0] == line(n))
        .unwrap_or_else(|| panic!("{:?}", subscriber.lines()));

    // A transaction that takes its time, and others that overtake it.
    let mut slow = cluster.connect();
    slow.run("begin");
    n += 1;
    emit(&mut slow, n);
    let slow_one = n;
    for _ in 0..3 {
        n += 1;
        emit(&mut db, n);
    }
    slow.run("commit");
    // Connections are lost, and events are written meanwhile.
    for _ in 0..2 {
        db.run("select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()");
        for _ in 0..5 {
            n += 1;
            emit(&mut db, n);
        }
        let latest = line(n);
        until("it to catch up", || {
            subscriber.lines().contains(&latest).then_some(())
        });
    }
    drop(db);
    cluster.stop(Mode::Fast);
    cluster.start_again();
    let mut db = cluster.connect();
    for _ in 0..1_500 {
        n += 1;
        emit(&mut db, n);
    }
    let latest = line(n);
    until("it to catch up", || {
        subscriber.lines().contains(&latest).then_some(())
    });
    let lines = subscriber.lines();
    let times = |n| {
        let line = line(n);
        lines.iter().filter(|one| **one == line).count()
    };
    let wrong: Vec<(i64, usize)> = (1..=n)
        .map(|n| (n, times(n)))
        .filter(|&(n, times)| times != usize::from(n >= first))
        .collect();
    assert_eq!(wrong, [], "numbers, and how often they came");
    assert!(first < slow_one, "the slow one was among them");
    assert_eq!(lines.len() as i64, n - first + 1, "and nothing else");
}

fn plain(n: i64) -> String {
    format!("reservation.placed {n}")
}

#[test]
fn with_psql() {
    let mut command = Command::new("sh");
    command.arg(example("subscribe.sh"));
    let psql = program(major(), "psql");
    let folder = psql.parent().unwrap_or(Path::new("/")).display();
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{folder}:{path}"));
    gets_everything(command, |n| format!("reservation.placed {{\"n\": {n}}}"));
}

#[test]
fn with_python() {
    let mut command = Command::new("/usr/bin/python3");
    command.arg(example("subscribe.py"));
    command.env("PYTHONPATH", python_libraries());
    gets_everything(command, plain);
}

#[test]
fn with_node() {
    let mut command = Command::new("node");
    command.arg(example("subscribe.js"));
    command.env("NODE_PATH", node_libraries());
    gets_everything(command, plain);
}

#[test]
fn with_rust() {
    gets_everything(Command::new(env!("CARGO_BIN_EXE_subscribe")), plain);
}

#[test]
fn the_readme_shows_them() {
    let readme = include_str!("../../README.md");
    for name in [
        "subscribe.sh",
        "subscribe.py",
        "subscribe.js",
        "subscribe.rs",
    ] {
        let code = std::fs::read_to_string(example(name)).expect("an example");
        assert!(readme.contains(&format!("\n{code}```\n")), "{name}");
    }
}

#[test]
fn topics_are_patterns() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    let topics = [
        "order",
        "order.placed",
        "order.placed.late",
        "a+b.c",
        "axb.c",
        "",
        "Order.placed",
        "order.placed\n",
    ];
    for topic in topics.iter().filter(|topic| !topic.is_empty()) {
        db.execute("select outbox.emit($1)", &[topic])
            .expect("an event");
    }
    for (patterns, wanted) in [
        ("{order.*}", &["order.placed", "order.placed\n"][..]),
        (
            "{order.>}",
            &["order.placed", "order.placed.late", "order.placed\n"],
        ),
        ("{order}", &["order"]),
        ("{a+b.*}", &["a+b.c"]),
        (
            "{*.placed,order}",
            &["order", "order.placed", "Order.placed"],
        ),
        ("{none.*}", &[]),
        ("{}", &topics[..]),
    ] {
        let rows = db
            .query(
                "select topic from outbox.read(topics => $1::text::text[]) order by seq",
                &[&patterns],
            )
            .expect("events");
        let read: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let wanted: Vec<&str> = wanted
            .iter()
            .copied()
            .filter(|topic| !topic.is_empty())
            .collect();
        assert_eq!(read, wanted, "{patterns}");
    }
    for pattern in ["a..b", "a.>.b", "a.b*", ""] {
        let refusal = db.refused(&format!("select outbox.read(topics => array['{pattern}'])"));
        assert_eq!(refusal.sqlstate, "22023", "{pattern}");
        assert!(refusal.detail.is_some() && refusal.hint.is_some());
    }
    assert_eq!(
        db.refused("select outbox.read(topics => array[null]::text[])")
            .sqlstate,
        "22023"
    );
    db.run("select outbox.audit('member.removed', 'team'), outbox.audit('login', 'session')");
    let audited: Vec<String> =
        db.all("select topic from outbox.read(stream => 'audit', topics => '{member.*}')");
    assert_eq!(audited, ["member.removed"]);
}
