//! Secrets that are in no table: in a file of the server's, or in its environment.

mod scene;

use std::fs;

use outbox_tests::{Receiver, Sql};
use scene::unseen::{assert_unseen, talkative};
use scene::{emit, http_sink, ids, quick, until_idle, until_status};
use serde_json::json;

#[test]
fn a_file_is_read_when_it_is_needed() {
    let cluster = talkative();
    let mut db = cluster.connect();
    let file = cluster.socket_folder().join("hook.secret");
    let path = file.display();
    db.run(&format!(
        "select outbox.set_secret_source('hook', 'file', '{path}')"
    ));
    let receiver = Receiver::start();
    http_sink(&mut db, "w", &receiver, json!({"secret": "hook"}), "");
    emit(&mut db, 1..=1);
    let missing = format!(
        "not sent: secret \"hook\" has no active value to sign with: cannot use file {path}: No such file or directory (os error 2)"
    );
    let failing = until_status(&mut db, "w", "some attempts", |status| status.attempts >= 6);
    assert_eq!(failing.last_error, Some(missing));
    assert_eq!(failing.dead_letters, 0);
    assert_eq!(receiver.requests().len(), 0);

    // Its last line may lack its end, and a rotation is seen by the next delivery.
    for (n, content, signs, signs_not) in [
        (
            1,
            "value-of-the-file-1",
            &["value-of-the-file-1"][..],
            "value-of-the-file-2",
        ),
        (
            2,
            "value-of-the-file-2\nvalue-of-the-file-1\n",
            &["value-of-the-file-2", "value-of-the-file-1"],
            "value-of-the-file-3",
        ),
        (
            3,
            "value-of-the-file-3\r\n",
            &["value-of-the-file-3"],
            "value-of-the-file-1",
        ),
    ] {
        fs::write(&file, content).unwrap();
        if n > 1 {
            emit(&mut db, n..=n);
        }
        receiver.wait_for(n as usize);
        let request = receiver.requests().pop().unwrap();
        assert!(
            signs.iter().all(|value| request.is_signed_with(value)),
            "{content:?}"
        );
        assert!(!request.is_signed_with(signs_not));
    }
    // Gone again: nothing is sent unsigned.
    fs::remove_file(&file).unwrap();
    emit(&mut db, 4..=4);
    until_status(&mut db, "w", "an error", |status| {
        status.last_error.is_some()
    });
    assert_eq!(receiver.ids(), ids(1..=3));
    // The table takes over.
    db.run("select outbox.set_secret('hook', array['value-of-the-table'])");
    receiver.wait_for(4);
    until_idle(&mut db, "w");
    assert!(
        receiver
            .requests()
            .pop()
            .unwrap()
            .is_signed_with("value-of-the-table")
    );
    assert_unseen(&cluster, &["value-of-"]);
}

#[test]
fn a_variable_of_the_server() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    // The server has the environment of the tests.
    let name = "PATH";
    let value = std::env::var(name).unwrap();
    db.run(&format!(
        "select outbox.set_secret_source('hook', 'env', '{name}')"
    ));
    db.run("select outbox.set_secret_source('none', 'env', 'OUTBOX_NO_SUCH')");
    let receiver = Receiver::start();
    http_sink(&mut db, "w", &receiver, json!({"secret": "hook"}), "");
    http_sink(&mut db, "none", &receiver, json!({"secret": "none"}), "");
    emit(&mut db, 1..=1);
    receiver.wait_for(1);
    assert!(receiver.requests()[0].is_signed_with(&value));
    let failing = until_status(&mut db, "none", "an error", |status| {
        status.last_error.is_some()
    });
    assert_eq!(
        failing.last_error.as_deref(),
        Some(
            "not sent: secret \"none\" has no active value to sign with: the server has no variable OUTBOX_NO_SUCH"
        )
    );
    assert_eq!(receiver.count(), 1);
}

#[test]
fn not_everybody_has_the_server_read() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("create role keeper login; select outbox.grant('keeper', 'secrets'); create role nobody login");
    let file = "select outbox.set_secret_source('hook', 'file', '/etc/hostname')";
    let variable = "select outbox.set_secret_source('hook', 'env', 'PATH')";
    let mut keeper = cluster.connect_as("keeper");
    assert_eq!(keeper.refused(file).sqlstate, "42501");
    assert_eq!(keeper.refused(variable).sqlstate, "42501");
    assert_eq!(cluster.connect_as("nobody").refused(file).sqlstate, "42501");
    db.run("grant pg_read_server_files to keeper");
    keeper.run(file);
    assert_eq!(keeper.refused(variable).sqlstate, "42501");
    db.run(variable);
    for call in [
        "select outbox.set_secret_source('hook', 'file', 'relative')",
        "select outbox.set_secret_source('hook', 'file', null)",
        "select outbox.set_secret_source('hook', 'env', '')",
        "select outbox.set_secret_source('hook', 'env', 'A=B')",
        "select outbox.set_secret_source('hook', 'table', 'x')",
        "select outbox.set_secret_source('no name', 'env', 'PATH')",
    ] {
        assert_eq!(db.refused(call).sqlstate, "22023", "{call}");
    }
}
