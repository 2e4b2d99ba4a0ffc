//! Where webhooks may lead, and what is refused.

use outbox_tests::{Cluster, Receiver, Reply, Sql};

use super::{builder, started, webhook};
use crate::scene::quick;

#[test]
fn nothing_is_sent_into_private_networks() {
    let cluster = quick()
        .setting("outbox.webhook_http", "on")
        .setting("outbox.webhook_ports", "")
        .start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let port = receiver.url().split(':').nth(2).expect("a port").to_owned();
    for host in [
        "127.0.0.1",
        "2130706433",
        "0x7f.1",
        "0",
        "10.0.0.1",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[fd00:ec2::254]",
        "224.0.0.1",
    ] {
        let refusal = db.refused(&format!(
            "select outbox.create_webhook('acme', 'http://{host}:{port}')"
        ));
        assert_eq!(refusal.sqlstate, "22023", "{host}");
        let detail = refusal.detail.expect("a detail");
        assert!(
            detail.contains("not of the public Internet"),
            "{host}: {detail}"
        );
    }
    // A name is looked up when it is connected to.
    let id: String = db.one(&format!(
        "select outbox.create_webhook('acme', 'http://localhost:{port}')"
    ));
    let said: String = db.one(&format!("select error from outbox.test_webhook('{id}')"));
    assert!(said.contains("not of the public Internet"), "{said}");
    assert_eq!(receiver.connections(), 0);
    // Nor to one that was allowed before, once the rule has changed.
    cluster.set("outbox.allow_private_networks", "on");
    let mut db = cluster.connect();
    let id = webhook(&mut db, "acme", &receiver, "");
    let status: Option<i32> = db.one(&format!("select status from outbox.test_webhook('{id}')"));
    assert_eq!(status, Some(200));
    cluster.set("outbox.allow_private_networks", "off");
    let mut db = cluster.connect();
    let said: String = db.one(&format!("select error from outbox.test_webhook('{id}')"));
    assert!(
        said.starts_with("not sent: its URL is not allowed."),
        "{said}"
    );
    assert_eq!(receiver.connections(), 1);
}

#[test]
fn only_https_and_a_few_ports_unless_allowed() {
    let cluster = Cluster::builder().preload(false).start();
    let mut db = cluster.connect();
    for (url, why) in [
        ("http://example.com/", "https"),
        ("ftp://example.com/", "https"),
        ("https://example.com:22/", "Port 22"),
        ("https://ada:secret@example.com/", "no user"),
        ("nonsense", "no URL"),
        ("", "no URL"),
    ] {
        let refusal = db.refused(&format!("select outbox.create_webhook('acme', '{url}')"));
        assert_eq!(refusal.sqlstate, "22023", "{url}");
        assert!(refusal.detail.expect("a detail").contains(why), "{url}");
    }
    for (arguments, sqlstate) in [
        ("null, 'https://example.com'", "22023"),
        ("'', 'https://example.com'", "22023"),
        ("'acme', null", "22023"),
        ("'acme', 'https://example.com', topics => '{a..b}'", "22023"),
        ("'acme', 'https://example.com', secret => 'plain'", "22023"),
        ("'acme', 'https://example.com', stream => 'none'", "42704"),
        ("'acme', 'https://example.com', stream => 'audit'", "22023"),
    ] {
        let refusal = db.refused(&format!("select outbox.create_webhook({arguments})"));
        assert_eq!(refusal.sqlstate, sqlstate, "{arguments}");
    }
    for call in [
        "alter_webhook('none')",
        "disable_webhook('none')",
        "enable_webhook(null)",
        "delete_webhook('none')",
        "test_webhook('none')",
        "redeliver_webhook(7)",
        "redeliver_webhook('none', now())",
    ] {
        let refusal = db.refused(&format!("select outbox.{call}"));
        assert_eq!(refusal.sqlstate, "42704", "{call}: {}", refusal.message);
    }
}

#[test]
fn a_test_tells_what_comes_of_it() {
    let (_cluster, mut db) = started();
    let receiver = Receiver::start();
    let id = webhook(&mut db, "acme", &receiver, "");
    db.run(&format!("select outbox.disable_webhook('{id}')"));
    let row = db
        .query_one("select * from outbox.test_webhook($1)", &[&id])
        .expect("a test");
    assert_eq!(row.get::<_, Option<i32>>(0), Some(200));
    assert!(row.get::<_, i32>(1) < 10_000);
    assert_eq!(row.get::<_, Option<String>>(2), None);
    let event: serde_json::Value =
        serde_json::from_slice(&receiver.requests()[0].body).expect("JSON");
    assert_eq!(
        (event["type"].as_str(), event["tenant"].as_str()),
        (Some("outbox.test"), Some("acme"))
    );
    receiver.reply_always(Reply::redirect("http://169.254.169.254/"));
    let said: String = db.one(&format!("select error from outbox.test_webhook('{id}')"));
    assert_eq!(said, "HTTP 302 Found: redirects are not followed");
    receiver.stop();
    let said: String = db.one(&format!("select error from outbox.test_webhook('{id}')"));
    assert!(said.starts_with("cannot connect to "), "{said}");
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.webhook_deliveries"),
        0
    );
}

#[test]
fn secrets_and_urls_stay_out_of_the_log() {
    let cluster = builder().setting("log_statement", "all").start();
    let mut db = cluster.connect();
    let receiver = Receiver::start();
    let secret = "whsec_c2VjcmV0c2VjcmV0c2VjcmV0";
    let id = webhook(
        &mut db,
        "acme",
        &receiver,
        &format!(", secret => '{secret}'"),
    );
    db.run(&format!(
        "select outbox.rotate_webhook_secret('{id}', '{secret}')"
    ));
    db.refused(&format!(
        "select outbox.create_webhook('acme', 'nonsense', secret => '{secret}')"
    ));
    db.refused(&format!(
        "select outbox.rotate_webhook_secret('none', '{secret}')"
    ));
    assert!(!cluster.log().contains("c2VjcmV0"));
}
