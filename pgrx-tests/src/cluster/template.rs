//! A data folder made by `initdb` once for each server version, that every cluster starts as a copy of.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::DATABASE;
use crate::process::{client_program, finish, server_program};
use crate::testbed::{give_to_server, root};

/// Copies the template to `data`, which must not exist yet.
pub(super) fn copy_to(major: u32, data: &Path) {
    let mut copy = Command::new("cp");
    copy.args(["-a", "--reflink=auto"])
        .arg(template(major))
        .arg(data);
    finish(copy);
}

/// The path of the template, which is made if it is not there yet. Processes that ask at once wait for one another.
fn template(major: u32) -> PathBuf {
    let version = finish({
        let mut command = client_program(major, "postgres");
        command.arg("--version");
        command
    });
    // "postgres (PostgreSQL) 15.20 (Debian …)"
    let version = String::from_utf8_lossy(&version.stdout);
    let version = version.split_whitespace().nth(2).expect("a version");
    let templates = root().join("templates");
    let path = templates.join(version);

    let lock = templates.join(format!("{version}.lock"));
    let lock = File::create(&lock).unwrap_or_else(|error| panic!("{}: {error}", lock.display()));
    lock.lock().expect("the template's lock can be taken");
    if !path.exists() {
        let new = templates.join(format!("{version}.new"));
        make(major, &new);
        fs::rename(&new, &path).expect("the template can be renamed");
    }
    path
}

/// Makes a data folder as initdb leaves it.
pub(super) fn init(major: u32, path: &Path, arguments: &[&str]) {
    let _ = fs::remove_dir_all(path);
    fs::create_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    give_to_server(path);
    let mut initdb = server_program(major, "initdb");
    initdb.args(["--username=postgres", "--auth=trust", "--encoding=UTF8"]);
    initdb.args(["--locale=C.UTF-8", "--no-sync", "--no-instructions"]);
    finish({
        initdb.args(arguments).arg("-D").arg(path);
        initdb
    });
}

/// Makes a data folder with the database in it.
pub(super) fn make(major: u32, path: &Path) {
    init(major, path, &[]);

    // It talks even when all is well.
    let mut single = server_program(major, "postgres");
    single
        .args(["--single", "-F", "-D"])
        .arg(path)
        .arg("postgres");
    single
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut single = single.spawn().expect("a single-user server starts");
    let mut input = single.stdin.take().expect("its input is piped");
    writeln!(input, "create database {DATABASE}").expect("it reads its input");
    drop(input);
    let output = single.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !said.contains("ERROR"),
        "create database: {said}"
    );
}
