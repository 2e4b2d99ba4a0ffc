//! A throwaway PostgreSQL cluster that is gone with the value, or with the process.
//!
//! Owns the server process and its folder. Speaks to the server only as any client would.

mod template;
mod upgrade;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use postgres::{Client, NoTls};
pub use rustix::process::Signal;

use crate::client::Sql;
use crate::process::{client_program, finish, send, server_program, spawn};
use crate::testbed::{give_to_server, major, new_folder, remove_folder};
use crate::{ports, wait};

/// The database that every cluster has, with the extension in it unless the builder says otherwise.
pub const DATABASE: &str = "app";

/// What every cluster starts with; the builder's settings come after and win.
const DEFAULTS: &[(&str, &str)] = &[
    ("fsync", "off"),
    ("log_line_prefix", "'%m [%p] %b %d '"),
    ("log_checkpoints", "off"),
    ("max_connections", "100"),
    ("max_prepared_transactions", "20"),
    ("max_worker_processes", "32"),
    ("shared_buffers", "64MB"),
    ("shared_preload_libraries", "pg_outbox"),
];

/// How a server is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Sessions are ended, and a checkpoint is written.
    Fast,
    /// Everything stops where it is; the next start recovers.
    Immediate,
}

/// A cluster to be: which version, and which settings.
#[derive(Debug, Clone)]
pub struct Builder {
    major: u32,
    extension: bool,
    apart: bool,
    settings: Vec<(String, String)>,
}

impl Builder {
    /// Another version than the one that [`major`] names.
    pub fn pg(mut self, major: u32) -> Self {
        self.major = major;
        self
    }

    /// A line of `postgresql.conf`. The value is quoted if it is not yet.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Whether `shared_preload_libraries` names the extension. Default: yes.
    pub fn preload(self, on: bool) -> Self {
        self.setting(
            "shared_preload_libraries",
            if on { "pg_outbox" } else { "" },
        )
    }

    /// Whether the extension is created in [`DATABASE`]. Default: yes.
    pub fn extension(mut self, on: bool) -> Self {
        self.extension = on;
        self
    }

    /// With a system identifier of its own. Otherwise clusters are copies of one another, which share theirs.
    pub fn apart(mut self) -> Self {
        self.apart = true;
        self
    }

    /// Whether commits reach the disk. Default: no, since a test never crashes the machine.
    pub fn fsync(self, on: bool) -> Self {
        self.setting("fsync", if on { "on" } else { "off" })
    }

    /// Starts it, and waits until it answers.
    #[track_caller]
    pub fn start(self) -> Cluster {
        let folder = new_folder("c");
        give_to_server(&folder);
        let data = folder.join("data");
        if self.apart {
            template::make(self.major, &data);
        } else {
            template::copy_to(self.major, &data);
        }

        configure(&data, &self.settings);
        let cluster = Cluster::run(self.major, folder);
        if self.extension {
            cluster.connect().run("create extension pg_outbox");
        }
        cluster
    }
}

/// Writes the defaults and these settings, which win, into a data folder.
fn configure(data: &Path, settings: &[(String, String)]) {
    let mut conf = OpenOptions::new()
        .append(true)
        .open(data.join("postgresql.conf"))
        .expect("initdb has made a postgresql.conf");
    let defaults = DEFAULTS.iter().map(|(name, value)| (*name, *value));
    let own = settings.iter().map(|(name, value)| (&**name, &**value));
    for (name, value) in defaults.chain(own) {
        let value = if value.starts_with('\'') {
            value.to_owned()
        } else {
            format!("'{}'", value.replace('\'', "''"))
        };
        writeln!(conf, "{name} = {value}").expect("postgresql.conf can be written");
    }
}

/// A running, or stopped, cluster with a folder, a port on 127.0.0.1 and a socket of its own.
#[derive(Debug)]
pub struct Cluster {
    major: u32,
    port: u16,
    /// Holds `data/`, `log` and the socket.
    folder: PathBuf,
    server: Option<Child>,
}

impl Cluster {
    /// A cluster with the extension preloaded and created in [`DATABASE`].
    #[track_caller]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A cluster with settings of its own.
    pub fn builder() -> Builder {
        Builder {
            major: major(),
            extension: true,
            apart: false,
            settings: Vec::new(),
        }
    }

    #[track_caller]
    fn run(major: u32, folder: PathBuf) -> Self {
        let mut cluster = Self {
            major,
            port: ports::free(),
            folder,
            server: None,
        };
        cluster.start_again();
        cluster
    }

    /// Starts the server again after [`stop`](Self::stop) or [`kill_postmaster`](Self::kill_postmaster), and waits until
    /// it answers.
    #[track_caller]
    pub fn start_again(&mut self) {
        assert!(self.server.is_none(), "the server runs already");
        // The processes of a killed postmaster hold its shared memory until they notice; and another process may have
        // taken the port since it was chosen. Both are over soon.
        wait::until("the server to start", || {
            self.launch();
            self.wait_ready().then_some(())
        });
    }

    fn launch(&mut self) {
        let log = self.log_path();
        let log = File::options().append(true).create(true).open(&log);
        let log = log.expect("the cluster's log can be written");
        let mut postgres = server_program(self.major, "postgres");
        postgres.arg("-D").arg(self.data());
        postgres.arg("-k").arg(&self.folder);
        postgres.args(["-h", "127.0.0.1", "-p", &self.port.to_string()]);
        postgres.stdout(log.try_clone().expect("a file can be shared"));
        postgres.stderr(log);
        self.server = Some(spawn(postgres).expect("setpriv runs"));
    }

    /// Waits until the server answers. False if it ended instead for a reason that passes.
    #[track_caller]
    fn wait_ready(&mut self) -> bool {
        let ready = wait::until("the server to be ready", || {
            let server = self.server.as_mut()?;
            if server
                .try_wait()
                .expect("the server is our child")
                .is_some()
            {
                return Some(false);
            }
            self.says_ready().then_some(true)
        });
        if !ready {
            self.server = None;
            let log = self.log();
            let end = log.lines().rev().take(20).collect::<Vec<_>>().join("\n");
            let passes = ["shared memory block", "could not bind", "lock file"];
            let passing = passes.iter().any(|reason| end.contains(reason));
            assert!(passing, "the server did not start:\n{log}");
            if end.contains("could not bind") {
                self.port = ports::free();
            }
        }
        ready
    }

    /// What `pg_ctl` looks at, too: the server writes its state to the last line of its pid file. A killed one leaves its
    /// file behind.
    fn says_ready(&self) -> bool {
        fs::read_to_string(self.data().join("postmaster.pid")).is_ok_and(|text| {
            let mut lines = text.lines().map(str::trim);
            let ours = lines.next() == Some(&self.postmaster_pid().to_string());
            ours && matches!(lines.nth(6), Some("ready" | "standby"))
        })
    }

    /// Stops the server and waits for its end. The folder stays, for [`start_again`](Self::start_again).
    #[track_caller]
    pub fn stop(&mut self, mode: Mode) {
        let mut server = self.server.take().expect("the server runs");
        let signal = match mode {
            Mode::Fast => Signal::INT,
            Mode::Immediate => Signal::QUIT,
        };
        send(server.id(), signal);
        wait::until("the server to stop", || {
            server.try_wait().expect("the server is our child")
        });
    }

    /// Kills the postmaster alone, as the kernel does when memory runs out. Its other processes end by themselves.
    #[track_caller]
    pub fn kill_postmaster(&mut self) {
        let mut server = self.server.take().expect("the server runs");
        server.kill().expect("the server is our child");
        server.wait().expect("the server is our child");
    }

    /// Sends a signal to one of the server's processes. `Signal::KILL` makes the server restart all of them: call
    /// [`wait_until_it_answers`](Self::wait_until_it_answers) next.
    pub fn kill_backend(&self, pid: i32, signal: Signal) {
        send(pid.cast_unsigned(), signal);
    }

    /// Waits until connections are accepted again, after a crash of one of the server's processes.
    #[track_caller]
    pub fn wait_until_it_answers(&self) {
        wait::until("the server to accept connections", || {
            self.try_connect("postgres", "postgres").ok()
        });
    }

    /// A connection to [`DATABASE`] as superuser.
    #[track_caller]
    pub fn connect(&self) -> Client {
        self.client("postgres", DATABASE)
    }

    /// A connection to [`DATABASE`] as that role.
    #[track_caller]
    pub fn connect_as(&self, role: &str) -> Client {
        self.client(role, DATABASE)
    }

    /// A connection to that database as superuser.
    #[track_caller]
    pub fn connect_to(&self, database: &str) -> Client {
        self.client("postgres", database)
    }

    /// A connection, or why there is none.
    pub fn try_connect(&self, role: &str, database: &str) -> Result<Client, postgres::Error> {
        self.config(role, database).connect(NoTls)
    }

    /// How to connect, over the socket, for clients of another make.
    pub fn config(&self, role: &str, database: &str) -> postgres::Config {
        let mut config = postgres::Config::new();
        config.host_path(&self.folder).port(self.port);
        config.user(role).dbname(database);
        config.application_name("outbox-tests");
        config
    }

    #[track_caller]
    fn client(&self, role: &str, database: &str) -> Client {
        self.try_connect(role, database)
            .unwrap_or_else(|error| panic!("connect as {role} to {database}: {error}"))
    }

    /// How to connect over TCP, for people and other programs.
    pub fn url(&self, database: &str) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// Creates a database with the extension in it.
    #[track_caller]
    pub fn createdb(&self, name: &str) {
        self.connect_to("postgres")
            .run(&format!("create database {name}"));
        self.connect_to(name).run("create extension pg_outbox");
    }

    /// What `psql` prints for these statements in that database: rows as lines, columns separated by `|`.
    #[track_caller]
    pub fn psql(&self, database: &str, sql: &str) -> String {
        let mut psql = client_program(self.major, "psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql]);
        psql.arg(self.url(database));
        let output = finish(psql);
        String::from_utf8_lossy(&output.stdout)
            .trim_end()
            .to_owned()
    }

    /// The rows of a query as people read them, a block of lines for each.
    #[track_caller]
    pub fn table(&self, database: &str, sql: &str) -> String {
        let mut psql = client_program(self.major, "psql");
        psql.args(["-X", "-q", "-x", "-c", sql])
            .arg(self.url(database));
        String::from_utf8_lossy(&finish(psql).stdout).into_owned()
    }

    /// The command with which people connect.
    pub fn psql_command(&self, database: &str) -> String {
        let psql = crate::testbed::program(self.major, "psql");
        format!("{} {}", psql.display(), self.url(database))
    }

    /// A client program of the server's version, such as `pgbench`, that connects to [`DATABASE`] as superuser over the socket.
    pub fn program(&self, name: &str) -> Command {
        let mut program = client_program(self.major, name);
        program.env("PGHOST", &self.folder);
        program.env("PGPORT", self.port.to_string());
        program
            .env("PGUSER", "postgres")
            .env("PGDATABASE", DATABASE);
        program
    }

    /// What `pg_dump` writes for that database.
    #[track_caller]
    pub fn dump(&self, database: &str) -> String {
        let mut dump = client_program(self.major, "pg_dump");
        dump.arg(self.url(database));
        String::from_utf8(finish(dump).stdout).expect("a dump in UTF-8")
    }

    /// Creates a database and loads what [`dump`](Self::dump) wrote, stopping at the first error.
    #[track_caller]
    pub fn restore(&self, database: &str, dump: &str) {
        self.connect_to("postgres")
            .run(&format!("create database {database} template template0"));
        let file = self.folder.join(format!("{database}.sql"));
        fs::write(&file, dump).expect("the cluster's folder can be written");
        let mut psql = client_program(self.major, "psql");
        psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f"])
            .arg(&file);
        finish({
            psql.arg(self.url(database));
            psql
        });
    }

    /// A copy of the data folder, as a disk snapshot or a backup makes it, not started yet. The server must be stopped.
    #[track_caller]
    pub fn copy(&self) -> Cluster {
        assert!(self.server.is_none(), "the server runs");
        let folder = new_folder("c");
        give_to_server(&folder);
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(self.data()).arg(folder.join("data"));
        finish(copy);
        Self {
            major: self.major,
            port: ports::free(),
            folder,
            server: None,
        }
    }

    /// A standby of this cluster that streams from it.
    #[track_caller]
    pub fn standby(&self) -> Cluster {
        let folder = new_folder("c");
        give_to_server(&folder);
        let mut backup = server_program(self.major, "pg_basebackup");
        backup.args([
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
            "--no-sync",
            "-U",
            "postgres",
        ]);
        backup.arg("-h").arg(&self.folder);
        backup.args(["-p", &self.port.to_string(), "-D"]);
        finish({
            backup.arg(folder.join("data"));
            backup
        });
        Self::run(self.major, folder)
    }

    /// Makes a standby a primary, and waits until it is.
    #[track_caller]
    pub fn promote(&self) {
        let promoted: bool = self
            .connect_to("postgres")
            .one("select pg_catalog.pg_promote(true, 60)");
        assert!(promoted, "pg_promote timed out");
    }

    /// Changes a setting and reloads: `alter system set name = value`.
    #[track_caller]
    pub fn set(&self, name: &str, value: &str) {
        let mut client = self.connect_to("postgres");
        client.run(&format!("alter system set {name} = '{value}'"));
        client.run("select pg_catalog.pg_reload_conf()");
    }

    /// What the server logged so far.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The process id of the postmaster.
    ///
    /// # Panics
    /// If it does not run.
    pub fn postmaster_pid(&self) -> u32 {
        self.server.as_ref().expect("the server runs").id()
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of the socket.
    pub fn socket_folder(&self) -> &Path {
        &self.folder
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("log")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(100)..].join("\n");
            eprintln!(
                "--- the end of the log of the server on port {}\n{end}\n---",
                self.port
            );
        }
        if let Some(mut server) = self.server.take() {
            // The postmaster itself kills what does not stop within five seconds.
            send(server.id(), Signal::QUIT);
            let _ = server.wait();
        }
        remove_folder(&self.folder);
    }
}
