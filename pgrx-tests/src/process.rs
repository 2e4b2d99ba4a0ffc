//! Starting server programs: as the right user, and so that no server outlives the process that started it.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, Mutex};

use rustix::process::{Pid, Signal, kill_process};

use crate::testbed::{program, root, server_user};

/// A server program of that major version, as the user who runs the servers. The kernel sends it SIGQUIT when its parent
/// thread ends.
pub(crate) fn server_program(major: u32, name: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "QUIT"]);
    if let Some(user) = server_user() {
        command.args(["--reuid", user, "--regid", user, "--init-groups", "--"]);
    }
    command.arg(program(major, name));
    clean(&mut command);
    command
}

/// A client program of that major version, as ourselves.
pub(crate) fn client_program(major: u32, name: &str) -> Command {
    let mut command = Command::new(program(major, name));
    clean(&mut command);
    command
}

/// A broker's program, as ourselves. The kernel kills it when its parent thread ends.
pub(crate) fn broker_program(name: &str) -> Command {
    let program = root().join("brokers").join(name);
    assert!(
        program.exists(),
        "{} is missing; run pgrx-tests/setup.sh first",
        program.display()
    );
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    clean(&mut command);
    command
}

/// Sends a signal to a process; one that is gone already is what was wanted.
pub(crate) fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}

/// What the user has set for other servers must not reach ours, and neither our working folder nor our input.
fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("PG") && !name.starts_with("PGRX") {
            command.env_remove(name.as_ref());
        }
    }
    // As some environments have it: errors are to be clear all the same.
    command.env("RUST_BACKTRACE", "1");
    command.current_dir("/").stdin(Stdio::null());
    command.env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
}

/// Runs a program to its end.
///
/// # Panics
/// If it fails, with what it said.
#[track_caller]
pub(crate) fn finish(mut command: Command) -> Output {
    match command.output() {
        Ok(output) if output.status.success() => output,
        Ok(output) => panic!(
            "{command:?}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => panic!("{command:?}: {error}"),
    }
}

type Order = (Command, Sender<io::Result<Child>>);

/// Spawns a program from a thread that lives as long as the process does. The parent whose death the kernel watches is the
/// *thread* that forked, and a test's thread ends with the test.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: LazyLock<Mutex<Sender<Order>>> = LazyLock::new(|| {
        let (orders, inbox) = channel::<Order>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                for (mut command, answer) in inbox {
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("a thread starts");
        Mutex::new(orders)
    });
    let (answer, result) = channel();
    SPAWNER
        .lock()
        .expect("the spawner's lock is never held over a panic")
        .send((command, answer))
        .expect("the spawner lives as long as the process");
    result.recv().expect("the spawner answers")
}
