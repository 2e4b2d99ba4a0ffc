//! Giving privileges and taking them back.

use std::collections::BTreeSet;

use outbox_tests::Sql;

use super::{abilities, denied, with_roles};

/// A privilege as it is granted: read limited to a sink is one of its own.
const PRIVILEGES: [(&str, &str); 5] = [
    ("emit", "'emit'"),
    ("read", "'read'"),
    ("limited", "'read', array['pulled']"),
    ("operate", "'operate'"),
    ("secrets", "'secrets'"),
];

#[test]
fn a_revoke_takes_what_it_names_and_leaves_the_rest() {
    let (_cluster, mut db) = with_roles(&["granted", "compared"]);
    db.run("select outbox.create_sink('pulled', 'pull'), outbox.create_stream('billing')");
    let subset = |bits: usize| (0..PRIVILEGES.len()).filter(move |index| bits & (1 << index) != 0);
    let mut alone = Vec::new();
    for bits in 0..1 << PRIVILEGES.len() {
        db.run("begin");
        for index in subset(bits) {
            db.run(&format!(
                "select outbox.grant('compared', {})",
                PRIVILEGES[index].1
            ));
        }
        alone.push(abilities(&mut db, "compared"));
        db.run("rollback");
    }
    assert_eq!(alone[0], BTreeSet::new());
    for (one, bits) in (0..alone.len()).flat_map(|bits| subset(bits).map(move |one| (one, bits))) {
        db.run("begin");
        for index in subset(bits) {
            db.run(&format!(
                "select outbox.grant('granted', {})",
                PRIVILEGES[index].1
            ));
        }
        let (name, arguments) = PRIVILEGES[one];
        db.run(&format!("select outbox.revoke('granted', {arguments})"));
        let mut rest = bits & !(1 << one);
        if name == "read" {
            // All reading is taken, also that of single sinks.
            rest &= !(1 << 2);
        }
        let left = abilities(&mut db, "granted");
        assert_eq!(left, alone[rest], "{name} of {bits:05b}");
        db.run("rollback");
    }
}

#[test]
fn a_role_that_has_nothing_left_can_be_dropped() {
    let (_cluster, mut db) = with_roles(&["passing"]);
    db.run("select outbox.create_sink('pulled', 'pull')");
    for (_, arguments) in PRIVILEGES {
        db.run(&format!("select outbox.grant('passing', {arguments})"));
    }
    assert_eq!(db.refused("drop role passing").sqlstate, "2BP01");
    for (_, arguments) in PRIVILEGES {
        db.run(&format!("select outbox.revoke('passing', {arguments})"));
    }
    // Twice is as good as once.
    db.run("select outbox.revoke('passing', 'emit')");
    db.run("drop role passing");
}

#[test]
fn what_a_role_has_by_membership_is_not_made_its_own() {
    let (cluster, mut db) = with_roles(&["team", "member"]);
    db.run("grant team to member");
    db.run("select outbox.grant('team', 'read'), outbox.grant('member', 'operate')");
    db.run("select outbox.revoke('member', 'operate')");
    let mut member = cluster.connect_as("member");
    member.run("select outbox.read()");
    db.run("select outbox.revoke('team', 'read')");
    assert_eq!(abilities(&mut db, "member"), BTreeSet::new());
    denied(&mut member, &["select outbox.read()"]);
}

#[test]
fn later_streams_are_open_to_those_who_may_emit() {
    let (cluster, mut db) = with_roles(&["app", "late", "reader", "operator"]);
    db.run("create role \"Odd 'role' \"\"x\" login");
    for role in ["app", "\"Odd 'role' \"\"x\""] {
        db.execute("select outbox.grant($1::text::regrole, 'emit')", &[&role])
            .expect("granted");
    }
    db.run("select outbox.grant('operator', 'operate'), outbox.grant('reader', 'read')");
    cluster
        .connect_as("operator")
        .run("select outbox.create_stream('billing')");
    for role in ["app", "Odd 'role' \"x"] {
        let mut app = cluster.connect_as(role);
        app.run("select outbox.emit('a', stream => 'billing')");
        app.run("insert into outbox.billing (topic) values ('b')");
        denied(&mut app, &["table outbox.billing"]);
    }
    let mut reader = cluster.connect_as("reader");
    assert_eq!(
        reader
            .all::<String>("select topic from outbox.read(stream => 'billing')")
            .len(),
        4
    );
    denied(
        &mut reader,
        &[
            "table outbox.billing",
            "insert into outbox.billing (topic) values ('x')",
        ],
    );
    // And earlier ones to those who come later.
    db.run("select outbox.grant('late', 'emit')");
    cluster
        .connect_as("late")
        .run("select outbox.emit('c', stream => 'billing')");
    db.run("select outbox.revoke('late', 'emit')");
    denied(
        &mut cluster.connect_as("late"),
        &["insert into outbox.billing (topic) values ('x')"],
    );
    db.run("select outbox.drop_stream('billing')");
}

#[test]
fn a_dump_takes_privileges_along() {
    let (cluster, mut db) = with_roles(&[
        "writer", "consumer", "limited", "operator", "keeper", "gone",
    ]);
    db.run("select outbox.create_sink('pulled', 'pull'), outbox.create_stream('billing')");
    db.run(
        "select outbox.grant('writer', 'emit'), outbox.grant('consumer', 'read'), outbox.grant('operator', 'operate'),
                outbox.grant('keeper', 'secrets'), outbox.grant('limited', 'read', '{pulled}'), outbox.grant('gone', 'read', '{pulled}')",
    );
    db.run("drop owned by gone; drop role gone");
    cluster.restore("restored", &cluster.dump("app"));
    let mut restored = cluster.connect_to("restored");
    for role in ["writer", "consumer", "limited", "operator", "keeper"] {
        let able = abilities(&mut restored, role);
        assert_eq!(able, abilities(&mut db, role), "{role}");
    }
    let grants: Vec<String> = restored.all("select role || ' ' || sink from outbox.sink_grants");
    assert_eq!(grants, ["limited pulled"]);
}

#[test]
fn bad_grants_are_refused() {
    let (_cluster, mut db) = with_roles(&["someone"]);
    db.run(
        "select outbox.create_sink('h', 'http', config => '{\"url\": \"http://127.0.0.1:1/\"}')",
    );
    for (arguments, sqlstate) in [
        ("'someone', 'everything'", "22023"),
        ("'someone', 'EMIT'", "22023"),
        ("'someone', 'pull'", "22023"),
        ("'someone', null", "22023"),
        ("null, 'emit'", "22023"),
        ("'nobody', 'emit'", "42704"),
        ("'public', 'emit'", "42704"),
        ("'4000000'::oid::regrole, 'emit'", "42704"),
        ("'0'::oid::regrole, 'emit'", "42704"),
        ("'someone', 'emit', array['h']", "22023"),
    ] {
        for verb in ["grant", "revoke"] {
            let refusal = db.refused(&format!("select outbox.{verb}({arguments})"));
            assert_eq!(
                refusal.sqlstate, sqlstate,
                "{verb}({arguments}): {}",
                refusal.message
            );
        }
    }
    assert_eq!(
        db.refused("select outbox.grant('someone', 'read', array['none'])")
            .sqlstate,
        "42704"
    );
    assert_eq!(
        db.refused("select outbox.grant('someone', 'read', array[null]::text[])")
            .sqlstate,
        "42704"
    );
    assert_eq!(
        db.refused("select outbox.grant('someone', 'read', array['h'])")
            .sqlstate,
        "22023"
    );
    assert_eq!(abilities(&mut db, "someone"), BTreeSet::new());
}
