//! Short forms for what tests do with a connection all the time.

use postgres::GenericClient;
use postgres::error::Error;
use postgres::types::FromSqlOwned;

/// What the server said when it refused a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The five characters of the SQLSTATE.
    pub sqlstate: String,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

/// Statements whose failure is the test's failure, on a connection or a transaction.
pub trait Sql {
    /// Runs statements that return nothing of interest.
    ///
    /// # Panics
    /// If the server refuses.
    #[track_caller]
    fn run(&mut self, sql: &str);

    /// The first column of the only row. Cast what has no Rust type, such as `xid8`, to text.
    ///
    /// # Panics
    /// If the server refuses, or there is not just one row.
    #[track_caller]
    fn one<T: FromSqlOwned>(&mut self, sql: &str) -> T;

    /// The first column of every row.
    ///
    /// # Panics
    /// If the server refuses.
    #[track_caller]
    fn all<T: FromSqlOwned>(&mut self, sql: &str) -> Vec<T>;

    /// Why the server refuses these statements.
    ///
    /// # Panics
    /// If it does not, or if the connection is lost.
    #[track_caller]
    fn refused(&mut self, sql: &str) -> Refusal;
}

impl<C: GenericClient> Sql for C {
    fn run(&mut self, sql: &str) {
        if let Err(error) = self.batch_execute(sql) {
            panic!("{}\n  in: {}", told(&error), shortened(sql));
        }
    }

    fn one<T: FromSqlOwned>(&mut self, sql: &str) -> T {
        let mut values = self.all(sql);
        assert_eq!(values.len(), 1, "rows of {}", shortened(sql));
        values.remove(0)
    }

    fn all<T: FromSqlOwned>(&mut self, sql: &str) -> Vec<T> {
        match self.query(sql, &[]) {
            Ok(rows) => rows.iter().map(|row| row.get(0)).collect(),
            Err(error) => panic!("{}\n  in: {}", told(&error), shortened(sql)),
        }
    }

    fn refused(&mut self, sql: &str) -> Refusal {
        let Err(error) = self.batch_execute(sql) else {
            panic!("not refused: {}", shortened(sql));
        };
        let Some(said) = error.as_db_error() else {
            panic!("{error}\n  in: {}", shortened(sql));
        };
        // A client hears of an error before the server has undone the statement and let go of its locks.
        let _ = self.batch_execute("");
        Refusal {
            sqlstate: said.code().code().to_owned(),
            message: said.message().to_owned(),
            detail: said.detail().map(str::to_owned),
            hint: said.hint().map(str::to_owned),
        }
    }
}

fn told(error: &Error) -> String {
    match error.as_db_error() {
        Some(said) => format!(
            "{} {}: {} {} {} {}",
            said.severity(),
            said.code().code(),
            said.message(),
            said.detail().unwrap_or_default(),
            said.hint().unwrap_or_default(),
            said.where_().unwrap_or_default(),
        ),
        None => format!("{error:?}"),
    }
}

/// Statements can hold a payload of 50 MB.
fn shortened(sql: &str) -> String {
    match sql.char_indices().nth(2000) {
        Some((end, _)) => format!("{} …", &sql[..end]),
        None => sql.to_owned(),
    }
}
