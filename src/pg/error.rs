//! Errors, both ways: raising them for users, catching them in workers.

use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgLogLevel, PgSqlErrorCode};

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
        let mut report =
            pgrx::pg_sys::panic::ErrorReport::new(self.code, self.message, "pg_outbox");
        if let Some(detail) = self.detail {
            report = report.set_detail(detail);
        }
        if let Some(hint) = self.hint {
            report = report.set_hint(hint);
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

impl PgError {
    pub(crate) fn from_caught(error: &CaughtError) -> Self {
        match error {
            CaughtError::PostgresError(report)
            | CaughtError::ErrorReport(report)
            | CaughtError::RustPanic {
                ereport: report, ..
            } => Self {
                code: report.sql_error_code(),
                message: report.message().to_owned(),
            },
        }
    }

    /// The message with its SQLSTATE, as states and dead letters keep it. The detail stays out: it may quote a row's values.
    pub(crate) fn summary(&self) -> String {
        format!("{} (SQLSTATE {})", self.message, sqlstate(self.code))
    }
}

/// The five characters of an error code.
pub(crate) fn sqlstate(code: PgSqlErrorCode) -> String {
    let mut packed = code as i32;
    (0..5)
        .map(|_| {
            let character = char::from((((packed & 0x3f) as u8) + b'0').min(b'z'));
            packed >>= 6;
            character
        })
        .collect()
}
