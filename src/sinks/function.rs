//! The `config` of kind `function`: which function takes the events. It is called where the cursor is saved, in the same
//! transaction, so there is no client here.

use std::time::Duration;

use serde_json::Value;

use super::ConfigError;
use super::fields::Fields;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FunctionConfig {
    /// As `regprocedure` reads it; whether it exists and fits is for the database to say.
    pub(crate) function: String,
    /// After which a call is cancelled; none: never.
    pub(crate) timeout: Option<Duration>,
}

/// A day, in milliseconds.
const LONGEST_TIMEOUT_MS: u64 = 24 * 3600 * 1000;

impl FunctionConfig {
    pub(super) fn parse(config: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new("function", config, &["function", "timeout_ms"])?;
        Ok(Self {
            function: fields.required_string("function")?.to_owned(),
            timeout: fields
                .integer("timeout_ms", 1, LONGEST_TIMEOUT_MS)?
                .map(Duration::from_millis),
        })
    }
}
