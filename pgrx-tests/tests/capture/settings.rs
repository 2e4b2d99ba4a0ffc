//! What can be said of a capture, said later.

use outbox_tests::Sql;

use super::{quiet, short};

#[test]
fn every_capture_can_be_altered_in_every_way() {
    let (_cluster, mut db) = quiet();
    db.run("set jit = off; select outbox.create_stream('other')");
    let captures = [
        "payload => 'full'",
        "condition => 'new.id > 0'",
        "replicated => true",
        "replicated => true, condition => 'new.id > 0'",
        "operations => '{insert}'",
        "operations => '{insert,update,delete,truncate}', replicated => true",
        "tenant_column => 'v', key => '{v}', topic => 'x', columns => '{v}', redact => '{w}'",
        "stream => 'other', payload => 'before_after'",
    ];
    let alterations = [
        "operations => '{insert}'",
        "operations => '{insert,update,delete,truncate}'",
        "payload => 'keys'",
        "columns => '{v}'",
        "columns => '{}'",
        "redact => '{w}'",
        "redact => '{}'",
        "key => '{v}'",
        "key => '{}'",
        "tenant_column => 'v'",
        "tenant_column => ''",
        "condition => 'new.id > 0'",
        "condition => ''",
        "topic => 'y'",
        "topic => ''",
        "stream => 'other'",
        "replicated => true",
        "replicated => false",
    ];
    for (table, written) in [
        ("plain", "plain"),
        ("divided", "divided_1"),
        ("parent", "child"),
    ] {
        // The others make no difference to a table's parts.
        let captures = captures
            .iter()
            .filter(|capture| table == "plain" || capture.starts_with("replicated"));
        for capture in captures {
            db.run(
                "drop table if exists plain, divided, parent, child;
                 create table plain (id int primary key, v text, w int);
                 create table divided (id int primary key, v text, w int) partition by range (id);
                 create table divided_1 partition of divided for values from (0) to (10);
                 create table parent (id int primary key, v text, w int); create table child (primary key (id)) inherits (parent)",
            );
            db.run(&format!("select outbox.capture('{table}', {capture})"));
            for alteration in alterations {
                db.run(&format!(
                    "begin; select outbox.alter_capture('{table}', {alteration}); insert into {written} values (2, 'a', 1)"
                ));
                assert_eq!(
                    db.one::<i64>(
                        "select (select count(*) from outbox.events) + (select count(*) from outbox.other) + 10 * (select count(*) from outbox.check_captures())"
                    ),
                    1,
                    "{table}, {capture}, {alteration}"
                );
                db.run("rollback");
            }
            // What follows the table's changes still does.
            db.run(&format!(
                "alter table {table} add more int; alter table {table} rename more to less"
            ));
        }
    }
    db.run("drop table plain");
    db.run("create table plain (id int primary key); select outbox.capture('plain', replicated => true)");
    assert_eq!(short(&mut db, "insert into plain values (1)"), ["insert 1"]);
}
