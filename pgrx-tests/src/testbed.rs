//! Where `setup.sh` put the servers, and where clusters may live.
//!
//! Owns the folders `templates/` and `run/` below the link `target/testbed`. See `setup.sh` for why that is elsewhere.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The major version that is tested: `OUTBOX_PG` in the environment, or 15.
pub fn major() -> u32 {
    std::env::var("OUTBOX_PG").map_or(15, |value| {
        value
            .parse()
            .unwrap_or_else(|_| panic!("OUTBOX_PG={value} is no major version"))
    })
}

/// The folder that `target/testbed` leads to.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let link = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/testbed");
        fs::canonicalize(&link).unwrap_or_else(|error| {
            panic!("{}: {error}; run pgrx-tests/setup.sh first", link.display())
        })
    });
    &ROOT
}

/// A program of the server of that major version.
pub fn program(major: u32, name: &str) -> PathBuf {
    let path = root().join(format!("servers/{major}/bin/{name}"));
    assert!(
        path.exists(),
        "{} is missing; run pgrx-tests/setup.sh {major} first",
        path.display()
    );
    path
}

/// Whether the extension is installed into the server of that major version.
pub fn is_installed(major: u32) -> bool {
    let config = root().join(format!("servers/{major}/bin/pg_config"));
    let said = Command::new(config).arg("--sharedir").output();
    said.is_ok_and(|said| {
        let folder = String::from_utf8_lossy(&said.stdout);
        Path::new(folder.trim())
            .join("extension/pg_outbox.control")
            .exists()
    })
}

/// Where `setup.sh` put libraries for Python that are not ours: a `PYTHONPATH`.
pub fn python_libraries() -> PathBuf {
    let path = root().join("python");
    assert!(
        path.exists(),
        "{} is missing; run pgrx-tests/setup.sh first",
        path.display()
    );
    path
}

/// Where `setup.sh`, or Debian, put libraries for Node: a `NODE_PATH`.
pub fn node_libraries() -> String {
    let ours = root().join("node/node_modules");
    format!("{}:/usr/share/nodejs", ours.display())
}

/// A new, empty folder for one cluster or receiver, that the server's user may enter. `setup.sh` sweeps up what
/// processes that were killed left behind, by the process id in the path.
pub(crate) fn new_folder(name: &str) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = root().join(format!("run/{}/{name}{number}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path
}

/// Removes a folder made by [`new_folder`], and the process's own once it is the last.
pub(crate) fn remove_folder(path: &Path) {
    let _ = fs::remove_dir_all(path);
    let _ = path.parent().map(fs::remove_dir);
}

/// Servers refuse to run as root: then user `postgres` runs them.
pub(crate) fn server_user() -> Option<&'static str> {
    rustix::process::getuid().is_root().then_some("postgres")
}

/// Gives a file or folder to the user who runs the servers.
pub(crate) fn give_to_server(path: &Path) {
    static IDS: LazyLock<Option<(u32, u32)>> = LazyLock::new(|| {
        let id = |flag| {
            let out = Command::new("id")
                .args([flag, server_user()?])
                .output()
                .expect("id runs");
            let text = String::from_utf8_lossy(&out.stdout);
            Some(text.trim().parse().expect("the user postgres exists"))
        };
        Some((id("-u")?, id("-g")?))
    });
    if let Some((uid, gid)) = *IDS {
        let owned = fs::metadata(path).is_ok_and(|meta| meta.uid() == uid);
        if !owned {
            chown(path, Some(uid), Some(gid))
                .unwrap_or_else(|error| panic!("chown {}: {error}", path.display()));
        }
    }
}
