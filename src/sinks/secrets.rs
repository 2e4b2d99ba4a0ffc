//! Values that must never be seen, and where they come from.

use std::fmt;
use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The active values of one named secret, the preferred first. Prints no value, whatever it is printed with.
#[derive(Clone, Default)]
pub(crate) struct Secrets {
    values: Arc<[String]>,
    /// Why there is none, if more is to be said than that none was set.
    why_none: Option<Arc<str>>,
}

impl Secrets {
    /// An empty value is no secret and is left out.
    pub(crate) fn new(values: impl IntoIterator<Item = String>) -> Self {
        Self {
            values: values
                .into_iter()
                .filter(|value| !value.is_empty())
                .collect(),
            why_none: None,
        }
    }

    fn none(why: &str) -> Self {
        Self {
            values: Arc::default(),
            why_none: Some(why.into()),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// What is wrong when there is none, of a secret of that name that is there `to` do something.
    pub(super) fn why_none(&self, name: &str, to: &str) -> String {
        let why = self.why_none.as_ref();
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        format!("secret \"{name}\" has no active value to {to} with{why}")
    }

    /// The values themselves. To be used for signing and logging in, and for nothing that is kept or shown.
    pub(crate) fn expose(&self) -> impl Iterator<Item = &str> {
        self.values.iter().map(String::as_str)
    }
}

impl fmt::Display for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} redacted]", self.values.len())
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({self})")
    }
}

/// Where the values of a secret are. Prints no value.
#[derive(Debug)]
pub(crate) enum SecretSource {
    /// In the table.
    Stored(Secrets),
    File(SecretFile),
    /// A variable of the server's environment, which cannot change while it runs.
    Variable(String),
}

impl SecretSource {
    pub(crate) fn file(path: &str) -> Self {
        Self::File(SecretFile {
            path: path.into(),
            known: None,
        })
    }

    /// The values that are active now. Of a file that has not changed, this costs one look at it.
    pub(crate) fn now(&mut self) -> Secrets {
        match self {
            Self::Stored(secrets) => secrets.clone(),
            Self::File(file) => file.now(),
            Self::Variable(name) => match std::env::var(&name) {
                Ok(value) if !value.is_empty() => Secrets::new([value]),
                Ok(_) => Secrets::none(&format!("variable {name} of the server is empty")),
                Err(std::env::VarError::NotUnicode(_)) => {
                    Secrets::none(&format!("variable {name} of the server is not UTF-8"))
                }
                Err(std::env::VarError::NotPresent) => {
                    Secrets::none(&format!("the server has no variable {name}"))
                }
            },
        }
    }
}

/// A file of the server's with a value on each line.
#[derive(Debug)]
pub(crate) struct SecretFile {
    path: PathBuf,
    /// As it was read last.
    known: Option<(Stamp, Secrets)>,
}

/// What tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            seconds: metadata.ctime(),
            nanoseconds: metadata.ctime_nsec(),
        }
    }
}

const LARGEST_FILE: u64 = 64 * 1024;

impl SecretFile {
    fn now(&mut self) -> Secrets {
        let stamp = std::fs::metadata(&self.path).ok().map(|it| Stamp::of(&it));
        if let (Some(stamp), Some((known, secrets))) = (stamp, &self.known)
            && stamp == *known
        {
            return secrets.clone();
        }
        self.known = None;
        match read(&self.path) {
            Ok(text) => {
                let lines = text.lines().map(|line| line.trim_end_matches('\r'));
                let secrets = Secrets::new(lines.map(str::to_owned));
                if secrets.is_empty() {
                    return Secrets::none(&format!("file {} is empty", self.path.display()));
                }
                // The stamp was taken before: if the file has changed since, it is read again.
                self.known = stamp.map(|stamp| (stamp, secrets.clone()));
                secrets
            }
            Err(why) => Secrets::none(&format!("cannot use file {}: {why}", self.path.display())),
        }
    }
}

/// What it holds is in no error.
fn read(path: &Path) -> Result<String, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    // To open a pipe or a device might block for ever.
    if !metadata.is_file() {
        return Err("it is no file".to_owned());
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(LARGEST_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err("it is too large".to_owned());
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_shown() {
        let secrets = Secrets::new(["hunter2".to_owned(), String::new(), "swordfish".to_owned()]);
        assert_eq!(format!("{secrets}"), "[2 redacted]");
        assert_eq!(format!("{secrets:?}"), "Secrets([2 redacted])");
        assert_eq!(
            secrets.expose().collect::<Vec<_>>(),
            ["hunter2", "swordfish"]
        );
    }

    #[test]
    fn an_empty_value_is_none() {
        assert!(Secrets::new([String::new()]).is_empty());
        assert!(Secrets::default().is_empty());
        assert_eq!(
            Secrets::default().why_none("hook", "sign"),
            "secret \"hook\" has no active value to sign with"
        );
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let path = std::env::temp_dir().join(format!("pg_outbox-secret-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut source = SecretSource::file(path.to_str().unwrap());
        let values = |source: &mut SecretSource| {
            let secrets = source.now();
            secrets.expose().map(str::to_owned).collect::<Vec<_>>()
        };
        let why = source.now().why_none("hook", "sign");
        assert!(
            why.ends_with(": No such file or directory (os error 2)"),
            "{why}"
        );
        std::fs::write(&path, "one\r\n\ntwo\n").unwrap();
        assert_eq!(values(&mut source), ["one", "two"]);
        std::fs::write(&path, "six").unwrap();
        assert_eq!(values(&mut source), ["six"]);
        assert_eq!(values(&mut source), ["six"]);
        for (content, ending) in [
            (&b"\n"[..], "is empty"),
            (b"\xff\xfe", "it is not UTF-8"),
            (&vec![b'x'; LARGEST_FILE as usize + 1], "it is too large"),
        ] {
            std::fs::write(&path, content).unwrap();
            let why = source.now().why_none("hook", "sign");
            assert!(why.ends_with(ending), "{why}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(values(&mut source).is_empty());
        let why = SecretSource::file("/dev/zero")
            .now()
            .why_none("hook", "sign");
        assert!(why.ends_with("it is no file"), "{why}");
    }

    #[test]
    fn variables_are_those_of_the_process() {
        let mut path = SecretSource::Variable("PATH".to_owned());
        assert!(!path.now().is_empty());
        let mut missing = SecretSource::Variable("OUTBOX_NO_SUCH".to_owned());
        assert_eq!(
            missing.now().why_none("hook", "sign"),
            "secret \"hook\" has no active value to sign with: the server has no variable OUTBOX_NO_SUCH"
        );
    }
}
