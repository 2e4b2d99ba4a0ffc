//! Events of one row come in the order in which the row has changed, also where statements nest.

use outbox_tests::Sql;
use postgres::Client;

use super::{after, quiet, short, taken};

/// A table with a counter per row, captured with both versions: each event must begin where the one before has ended.
fn table(db: &mut Client) {
    db.run("create table t (id int primary key, n int not null default 0, parent int)");
    db.run("select outbox.capture('t', payload => 'before_after')");
}

/// Runs statements, and follows each row through what they came to.
#[track_caller]
fn follow(db: &mut Client, sql: &str) -> Vec<String> {
    let mut rows = std::collections::HashMap::<String, serde_json::Value>::new();
    for (id, row) in db
        .query("select id::text, to_jsonb(t) from t", &[])
        .expect("rows")
        .iter()
        .map(|row| (row.get(0), row.get(1)))
    {
        rows.insert(id, row);
    }
    let changes = after(db, sql);
    for change in &changes {
        let key = change.subject.clone().expect("a subject");
        let before = rows.remove(&key).unwrap_or(serde_json::Value::Null);
        assert_eq!(change.payload["before"], before, "{changes:#?}");
        let now = &change.payload["after"];
        if !now.is_null() {
            rows.insert(now["id"].to_string(), now.clone());
        }
    }
    let left: i64 = db.one("select count(*) from t");
    assert_eq!(rows.len(), left as usize);
    for (id, row) in rows {
        let real: serde_json::Value = db.one(&format!("select to_jsonb(t) from t where id = {id}"));
        assert_eq!(row, real);
    }
    changes.iter().map(super::Change::short).collect()
}

#[test]
fn in_one_transaction() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    assert_eq!(
        follow(
            &mut db,
            "begin; insert into t values (1), (2); update t set n = n + 1; update t set n = n + 1 where id = 1; delete from t where id = 1; insert into t values (1, 9); commit"
        ),
        [
            "insert 1", "insert 2", "update 1", "update 2", "update 1", "delete 1", "insert 1"
        ]
    );
    assert_eq!(
        follow(
            &mut db,
            "do $$ begin for i in 1..3 loop update t set n = n + 1 where id = 1; end loop; end $$"
        ),
        ["update 1", "update 1", "update 1"]
    );
}

#[test]
fn where_triggers_change_the_row_again() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    db.run(
        "create function again() returns trigger language plpgsql as $$
         begin update t set n = n + 10 where id = new.id and n < 10; return null; end $$;
         create trigger a_again after insert or update on t for each row execute function again()",
    );
    assert_eq!(
        follow(&mut db, "insert into t values (1), (2)"),
        ["insert 1", "insert 2", "update 1", "update 2"]
    );
    assert_eq!(
        follow(&mut db, "update t set n = 1"),
        ["update 1", "update 2", "update 1", "update 2"]
    );
    // One that is through before, by its name.
    db.run(
        "drop trigger a_again on t;
         create function all_again() returns trigger language plpgsql as $$
         begin update t set n = 100 where n < 100; return null; end $$;
         create trigger a_again after insert on t for each statement execute function all_again()",
    );
    assert_eq!(
        follow(&mut db, "insert into t values (3)"),
        ["insert 3", "update 1", "update 2", "update 3"]
    );
}

#[test]
fn where_what_triggers_did_is_undone() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    db.run(
        "create function again() returns trigger language plpgsql as $$
         begin
             begin
                 update t set n = 77 where id = new.id;
                 perform 1 / 0;
             exception when division_by_zero then null;
             end;
             update t set n = 10 where id = new.id and n < 10;
             return null;
         end $$;
         create trigger again after insert on t for each row execute function again()",
    );
    assert_eq!(
        follow(&mut db, "insert into t values (1), (2)"),
        ["insert 1", "insert 2", "update 1", "update 2"]
    );
    db.refused("begin; insert into t values (3); insert into t values (3)");
    db.run("rollback");
    assert_eq!(
        follow(
            &mut db,
            "begin; savepoint s; insert into t values (3); rollback to s; insert into t values (3, 20); commit"
        ),
        ["insert 3"]
    );
}

#[test]
fn where_triggers_make_room() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    db.run("insert into t values (1, 1)");
    taken(&mut db);
    db.run(
        "create function replace() returns trigger language plpgsql as $$
         begin delete from t where id = new.id; return new; end $$;
         create trigger replace before insert on t for each row execute function replace()",
    );
    assert_eq!(
        follow(&mut db, "insert into t values (1, 2)"),
        ["delete 1", "insert 1"]
    );
    db.run("copy t from program 'echo 1,7,'  with (format csv)");
    assert_eq!(
        super::taken(&mut db)
            .iter()
            .map(super::Change::short)
            .collect::<Vec<_>>(),
        ["delete 1", "insert 1"]
    );
    // One that closes the last version when the next comes.
    db.run(
        "drop trigger replace on t;
         create function close() returns trigger language plpgsql as $$
         begin update t set n = -1 where parent = new.parent and n = 0; return new; end $$;
         create trigger close before insert on t for each row execute function close()",
    );
    assert_eq!(
        follow(&mut db, "insert into t values (5, 0, 50), (6, 0, 50)"),
        ["insert 5", "insert 6", "update 5"]
    );
}

#[test]
fn where_a_row_is_taken_out_at_once() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    db.run(
        "create function take() returns trigger language plpgsql as $$
         begin delete from t where id = new.id; return null; end $$;
         create trigger take after insert on t for each row execute function take()",
    );
    assert_eq!(
        follow(&mut db, "insert into t values (1), (2)"),
        ["insert 1", "insert 2", "delete 1", "delete 2"]
    );
}

#[test]
fn where_foreign_keys_lead_back_to_the_table() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    db.run(
        "alter table t add foreign key (parent) references t on delete cascade on update cascade",
    );
    db.run("insert into t values (1, 0, 1), (2, 0, 1), (3, 0, 2)");
    taken(&mut db);
    let told = follow(&mut db, "update t set id = 11 where id = 1");
    assert_eq!(
        told.first().map(String::as_str),
        Some("update 1"),
        "{told:?}"
    );
    let mut told = follow(&mut db, "delete from t where id = 11");
    told.sort();
    assert_eq!(told, ["delete 11", "delete 2", "delete 3"]);
}

#[test]
fn what_else_was_written_meanwhile_is_kept() {
    let (_cluster, mut db) = quiet();
    table(&mut db);
    db.run(
        "create function again() returns trigger language plpgsql as $$
         begin
             perform outbox.emit('seen', subject => new.id::text, id => 'seen-' || new.id);
             update t set n = 10 where id = new.id;
             return null;
         end $$;
         create trigger again after insert on t for each row execute function again()",
    );
    assert_eq!(
        short(
            &mut db,
            "select outbox.emit('first', subject => '0'); insert into t values (1)"
        )
        .len(),
        4
    );
    db.run("select outbox.emit('first', subject => '0'); insert into t values (2)");
    let ids: Vec<String> = db.all("select topic || ' ' || subject from outbox.events order by seq");
    assert_eq!(ids.len(), 4);
    assert_eq!(ids[0], "first 0");
    assert!(
        ids[1].ends_with("insert 2") || ids[1] == "seen 2",
        "{ids:?}"
    );
    assert_eq!(
        db.one::<i64>("select count(*) from outbox.events where id = 'seen-2'"),
        1
    );
}
