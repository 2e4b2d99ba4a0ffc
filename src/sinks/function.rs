//! The `config` of kind `function`: which function takes the events. It is called where the cursor is saved, in the same
//! transaction, so there is no client here.

use serde_json::Value;

use super::ConfigError;
use super::fields::Fields;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FunctionConfig {
    /// As `regprocedure` reads it; whether it exists and fits is for the database to say.
    pub(crate) function: String,
}

impl FunctionConfig {
    pub(super) fn parse(config: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new("function", config, &["function"])?;
        Ok(Self {
            function: fields.required_string("function")?.to_owned(),
        })
    }
}
