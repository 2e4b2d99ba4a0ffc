//! One tenant sees and manages its own, and nothing of another's.

use outbox_tests::{Receiver, Sql};

use super::{emit, started, until_states, webhook};

#[test]
fn a_role_of_a_tenant_sees_and_manages_that_tenants_alone() {
    let (cluster, mut db) = started();
    let receiver = Receiver::start();
    db.run("create role ada login; create role bob login; create role nobody login; create role team; create role member login in role team");
    db.run("select outbox.grant_tenant('ada', 'acme'), outbox.grant_tenant('bob', 'globex'), outbox.grant_tenant('team', 'acme')");
    let theirs = webhook(&mut db, "globex", &receiver, "");
    let mut ada = cluster.connect_as("ada");
    let own = webhook(&mut ada, "acme", &receiver, "");
    emit(&mut db, "acme", "a", 1..=2);
    emit(&mut db, "globex", "a", 3..=5);
    until_states(&mut db, &["delivered 5"]);
    for (table, count) in [
        ("webhooks", 1),
        ("webhook_deliveries", 2),
        ("webhook_attempts", 2),
    ] {
        for role in ["ada", "member"] {
            let mut session = cluster.connect_as(role);
            let seen: Vec<String> =
                session.all(&format!("select distinct tenant from outbox.{table}"));
            assert_eq!(seen, ["acme"], "{table}");
            let rows: i64 = session.one(&format!("select count(*) from outbox.{table}"));
            assert_eq!(rows, count, "{table}");
        }
    }
    let other: i64 =
        db.one("select id from outbox.webhook_deliveries where tenant = 'globex' limit 1");
    // Another tenant's do not exist.
    for call in [
        format!("alter_webhook('{theirs}', description => 'x')"),
        format!("disable_webhook('{theirs}')"),
        format!("enable_webhook('{theirs}')"),
        format!("delete_webhook('{theirs}')"),
        format!("rotate_webhook_secret('{theirs}')"),
        format!("test_webhook('{theirs}')"),
        format!("redeliver_webhook({other})"),
        format!("redeliver_webhook('{theirs}', '-infinity')"),
    ] {
        let refusal = ada.refused(&format!("select outbox.{call}"));
        assert_eq!(refusal.sqlstate, "42704", "{call}: {}", refusal.message);
    }
    let refusal = ada.refused("select outbox.create_webhook('globex', 'https://example.com')");
    assert_eq!(refusal.sqlstate, "42501");
    for sql in [
        "table outbox.webhook_secrets",
        "table outbox.tenant_grants",
        "table outbox.events",
        "insert into outbox.webhooks (id, tenant, url) values ('x', 'acme', 'x')",
        "update outbox.webhooks set url = 'http://10.0.0.1/'",
        "update outbox.webhook_deliveries set state = 'pending'",
        "delete from outbox.webhook_deliveries",
        "select outbox.grant_tenant('ada', 'globex')",
        "select outbox.emit('a', tenant => 'globex')",
        "select outbox.read()",
        "table outbox.status",
    ] {
        assert_eq!(ada.refused(sql).sqlstate, "42501", "{sql}");
    }
    let mine: i64 = ada.one("select min(id) from outbox.webhook_deliveries");
    ada.run(&format!(
        "select outbox.alter_webhook('{own}', description => 'mine'); select outbox.rotate_webhook_secret('{own}');
         select outbox.redeliver_webhook({mine}); select outbox.disable_webhook('{own}'); select outbox.enable_webhook('{own}')"
    ));
    assert_eq!(
        ada.one::<i32>(&format!("select status from outbox.test_webhook('{own}')")),
        200
    );
    cluster
        .connect_as("member")
        .run(&format!("select outbox.delete_webhook('{own}')"));

    let mut nobody = cluster.connect_as("nobody");
    assert_eq!(
        nobody
            .refused("select outbox.create_webhook('acme', 'https://example.com')")
            .sqlstate,
        "42501"
    );
    // Whoever operates sees all.
    db.run("select outbox.grant('nobody', 'operate')");
    assert_eq!(nobody.one::<i64>("select count(*) from outbox.webhooks"), 1);
    nobody.run(&format!("select outbox.disable_webhook('{theirs}')"));

    db.run("select outbox.revoke_tenant('ada', 'acme'), outbox.revoke_tenant('bob', 'globex')");
    assert_eq!(ada.refused("table outbox.webhooks").sqlstate, "42501");
    db.run("drop role ada; drop role bob");
    assert_eq!(
        db.refused("select outbox.grant_tenant('gone', 'acme')")
            .sqlstate,
        "42704"
    );
    assert_eq!(
        db.refused("select outbox.grant_tenant('team', '')")
            .sqlstate,
        "22023"
    );
}
