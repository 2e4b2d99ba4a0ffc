//! Errors, both ways: raising them for users, catching them in workers.

use std::borrow::Cow;

use pgrx::pg_sys::panic::{CaughtError, ErrorReportWithLevel};
use pgrx::{PgLogLevel, PgSqlErrorCode};

use super::encoding;

/// An error as users see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Complaint {
    pub(crate) code: PgSqlErrorCode,
    pub(crate) message: String,
    pub(crate) detail: Option<String>,
    pub(crate) hint: Option<String>,
}

impl Complaint {
    pub(crate) fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: None,
            hint: None,
        }
    }

    /// SQLSTATE 22023.
    pub(crate) fn bad_argument(message: impl Into<String>) -> Self {
        Self::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, message)
    }

    /// SQLSTATE 42704.
    pub(crate) fn unknown(message: impl Into<String>) -> Self {
        Self::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, message)
    }

    /// SQLSTATE 42501.
    pub(crate) fn denied(message: impl Into<String>) -> Self {
        Self::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, message)
    }

    pub(crate) fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Ends the statement with this error.
    pub(crate) fn raise(self) -> ! {
        let message = encoding::for_message(self.message);
        let mut report = pgrx::pg_sys::panic::ErrorReport::new(self.code, message, "pg_outbox");
        if let Some(detail) = self.detail {
            report = report.set_detail(encoding::for_message(detail));
        }
        if let Some(hint) = self.hint {
            report = report.set_hint(encoding::for_message(hint));
        }
        report.report(PgLogLevel::ERROR);
        unreachable!("an error report returns to nobody")
    }
}

/// Gives the value, or ends the statement with the complaint.
pub(crate) trait OrRaise<T> {
    fn or_raise(self) -> T;
}

impl<T> OrRaise<T> for Result<T, Complaint> {
    fn or_raise(self) -> T {
        self.unwrap_or_else(|complaint| complaint.raise())
    }
}

/// An error that Postgres raised and that was caught, with its transaction rolled back.
#[derive(Debug, Clone)]
pub(crate) struct PgError {
    pub(crate) code: PgSqlErrorCode,
    pub(crate) message: String,
}

fn report_of(error: &CaughtError) -> &ErrorReportWithLevel {
    match error {
        CaughtError::PostgresError(report)
        | CaughtError::ErrorReport(report)
        | CaughtError::RustPanic {
            ereport: report, ..
        } => report,
    }
}

/// Whether the server itself has cancelled the statement: for a user or a time-out. Anybody can raise the same SQLSTATE.
pub(crate) fn is_cancel(error: &CaughtError) -> bool {
    let report = report_of(error);
    report.sql_error_code() == PgSqlErrorCode::ERRCODE_QUERY_CANCELED
        && report.function_name() == Some("ProcessInterrupts")
}

impl PgError {
    pub(crate) fn from_caught(error: &CaughtError) -> Self {
        let report = report_of(error);
        Self {
            code: report.sql_error_code(),
            message: report.message().to_owned(),
        }
    }

    pub(crate) fn sqlstate(&self) -> String {
        sqlstate(self.code)
    }

    /// The message with its SQLSTATE, as states, dead letters and the log keep it. Values stay out: the detail may quote a row's,
    /// and what stands between quotes in an error about data (class 22) is the piece of it that does not fit.
    pub(crate) fn summary(&self) -> String {
        let code = sqlstate(self.code);
        let message = if code.starts_with("22") {
            without_quoted(&self.message)
        } else {
            Cow::Borrowed(self.message.as_str())
        };
        format!("{message} (SQLSTATE {code})")
    }
}

/// A text without what stands between its first double quote and its last.
fn without_quoted(text: &str) -> Cow<'_, str> {
    match (text.find('"'), text.rfind('"')) {
        (Some(first), Some(last)) => {
            let rest = if first < last { &text[last..] } else { "" };
            Cow::Owned(format!("{}…{rest}", &text[..=first]))
        }
        _ => Cow::Borrowed(text),
    }
}

/// The five characters of an error code.
fn sqlstate(code: PgSqlErrorCode) -> String {
    let mut packed = code as i32;
    (0..5)
        .map(|_| {
            let character = char::from((((packed & 0x3f) as u8) + b'0').min(b'z'));
            packed >>= 6;
            character
        })
        .collect()
}

/// Where the environment asks for backtraces, pgrx adds one to the detail of each error, and clients would get to see it. Called when the
/// library is loaded.
pub(crate) fn keep_backtraces_back() {
    const SETTING: &str = "RUST_LIB_BACKTRACE";
    if std::env::var_os(SETTING).is_none() {
        // SAFETY: libraries are loaded on the main thread of a process that has no other yet.
        unsafe { std::env::set_var(SETTING, "0") };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(code: PgSqlErrorCode, message: &str) -> String {
        let message = message.to_owned();
        PgError { code, message }.summary()
    }

    #[test]
    fn errors_about_data_do_not_show_it() {
        let code = PgSqlErrorCode::ERRCODE_INVALID_TEXT_REPRESENTATION;
        for (message, shown) in [
            (
                "invalid input syntax for type numeric: \"4711\"",
                "invalid input syntax for type numeric: \"…\"",
            ),
            (
                "invalid input value for enum e: \"a\"b\"",
                "invalid input value for enum e: \"…\"",
            ),
            ("half \"a quote", "half \"…"),
            ("none", "none"),
        ] {
            assert_eq!(summary(code, message), format!("{shown} (SQLSTATE 22P02)"));
        }
    }

    #[test]
    fn errors_about_objects_name_them() {
        let code = PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE;
        let told = summary(code, "relation \"a.b\" does not exist");
        assert_eq!(told, "relation \"a.b\" does not exist (SQLSTATE 42P01)");
    }
}
