//! What is bounded: attempts at once, answers, and what is kept of them; and the settings that say so.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use outbox_tests::{Cluster, Receiver, Reply, Sql};

use super::{builder, emit, started, until_states, webhook};

/// How many requests are being answered, and the most so far.
#[derive(Default)]
struct Crowd {
    now: AtomicI64,
    most: AtomicI64,
}

impl Crowd {
    fn during<R>(&self, body: impl FnOnce() -> R) -> R {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        let result = body();
        self.now.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn most(&self) -> i64 {
        self.most.load(Ordering::SeqCst)
    }
}

#[test]
fn attempts_are_bounded_per_endpoint_and_in_all() {
    let cluster = builder()
        .setting("outbox.webhook_endpoint_concurrency", "2")
        .setting("outbox.webhook_concurrency", "6")
        .start();
    let mut db = cluster.connect();
    let all = Arc::new(Crowd::default());
    // Some are so slow that they give their places to others, as long as there are any.
    let endpoints: Vec<(Receiver, Arc<Crowd>)> = [700, 700, 700, 20, 20]
        .into_iter()
        .map(|pause| {
            let (receiver, all, own) = (
                Receiver::start(),
                Arc::clone(&all),
                Arc::new(Crowd::default()),
            );
            let crowd = Arc::clone(&own);
            receiver.reply_with(move |_| {
                all.during(|| {
                    crowd.during(|| {
                        std::thread::sleep(Duration::from_millis(pause));
                        Reply::ok()
                    })
                })
            });
            (receiver, own)
        })
        .collect();
    for (receiver, _) in &endpoints {
        webhook(&mut db, "acme", receiver, "");
    }
    emit(&mut db, "acme", "a", 1..=8);
    until_states(&mut db, &["delivered 40"]);
    for (receiver, crowd) in &endpoints {
        assert_eq!(receiver.requests().len(), 8);
        assert!(crowd.most() <= 2, "{}", crowd.most());
    }
    assert!(all.most() <= 6, "{}", all.most());
}

#[test]
fn nothing_of_an_answer_is_kept_but_its_status_and_no_answer_takes_for_ever() {
    let cluster = builder()
        .setting("outbox.webhook_timeout", "5s")
        .setting("outbox.webhook_attempts", "1")
        .start();
    let mut db = cluster.connect();
    let reply = |reply: Reply| {
        let receiver = Receiver::start();
        receiver.reply_always(reply);
        receiver
    };
    let receivers = [
        ("private", reply(Reply::status(500).body("private things"))),
        ("huge", reply(Reply::huge_body(1 << 40))),
        ("hang", reply(Reply::hang())),
        ("slow", reply(Reply::ok().trickle(Duration::from_secs(1)))),
    ];
    for (tenant, receiver) in &receivers {
        webhook(&mut db, tenant, receiver, "");
        emit(&mut db, tenant, "a", 1..=1);
    }
    until_states(&mut db, &["dead 3", "delivered 1"]);
    let said: Vec<String> = db.all(
        "select concat_ws(' ', tenant, status, error) from outbox.webhook_attempts order by tenant",
    );
    assert_eq!(said.len(), 4);
    assert!(said[0].starts_with("hang no answer from "), "{}", said[0]);
    assert_eq!(said[1], "huge 200");
    assert_eq!(said[2], "private 500 HTTP 500 Internal Server Error");
    assert!(said[3].starts_with("slow no answer from "), "{}", said[3]);
    assert!(!cluster.log().contains("private things"));
}

#[test]
fn finished_deliveries_are_pruned_in_small_steps() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    let id = webhook(&mut db, "acme", &receiver, "");
    db.run(&format!(
        "insert into outbox.webhook_deliveries (webhook, tenant, event_id, topic, event, state, finished_at)
         select '{id}', 'acme', 'n' || n, 'a', '{{}}', (array['delivered', 'dead'])[n % 2 + 1],
                now() - case when n > 10 then interval '91 days' else '89 days' end
           from generate_series(1, 5010) n;
         create table steps (rows bigint);
         create function note_step() returns trigger language plpgsql as
            $$ begin insert into public.steps select count(*) from gone having count(*) > 0; return null; end $$;
         create trigger note_step after delete on outbox.webhook_deliveries referencing old table as gone
            for each statement execute function note_step();
         select outbox.prune()"
    ));
    until_states(&mut db, &["dead 5", "delivered 5"]);
    let steps: Vec<i64> = db.all("select rows from steps");
    assert!(steps.iter().all(|&rows| rows <= 2_000), "{steps:?}");
    assert_eq!(steps.iter().sum::<i64>(), 5_000);
}

#[test]
fn settings_are_what_the_documentation_says_and_nonsense_is_refused() {
    let cluster = Cluster::builder().start();
    let mut db = cluster.connect();
    for (setting, value) in [
        ("allow_private_networks", "off"),
        ("webhook_http", "off"),
        ("webhook_ports", "80, 443, 8080, 8443"),
        ("webhook_timeout", "15s"),
        ("webhook_waits", "60, 300, 1800, 7200, 21600, 43200, 86400"),
        ("webhook_attempts", "8"),
        ("webhook_disable_after", "5d"),
        ("webhook_retention", "90d"),
    ] {
        let shown: String = db.one(&format!("select current_setting('outbox.{setting}')"));
        assert_eq!(shown, value, "{setting}");
    }
    // A list that cannot be read must not come to mean that everything is allowed, or that nothing is waited for.
    for (setting, value) in [
        ("webhook_ports", "https"),
        ("webhook_ports", "443, x"),
        ("webhook_waits", "1min, 5min"),
        ("webhook_waits", ""),
    ] {
        let refusal = db.refused(&format!("alter system set outbox.{setting} = '{value}'"));
        assert_eq!(refusal.sqlstate, "22023", "{setting} {value}");
    }
    db.run("alter system set outbox.webhook_ports = '8443'");
    db.run("alter system set outbox.webhook_waits = '0.5, 10'");
}
