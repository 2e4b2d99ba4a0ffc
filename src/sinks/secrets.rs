//! Values that must never be seen.

use std::fmt;
use std::sync::Arc;

/// The active values of one named secret, the preferred first. Prints no value, whatever it is printed with.
#[derive(Clone, Default)]
pub(crate) struct Secrets(Arc<[String]>);

impl Secrets {
    /// An empty value is no secret and is left out.
    pub(crate) fn new(values: impl IntoIterator<Item = String>) -> Self {
        Self(
            values
                .into_iter()
                .filter(|value| !value.is_empty())
                .collect(),
        )
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The values themselves. To be used for signing and logging in, and for nothing that is kept or shown.
    pub(crate) fn expose(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} redacted]", self.0.len())
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({self})")
    }
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
    }
}
