//! A connection to the other server, with what was made ready on it; and a delivery on it, as one transaction.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, SimpleQueryMessage, Statement};

use super::config::{Apply, PostgresConfig};
use super::dsn::Dsn;
use super::refusal::{Blame, Setback};
use super::statement::{self, Insert, Jsonb, NOTED};
use super::tls::Tls;
use crate::envelope::Event;
use crate::sinks::batch::Origin;
use crate::sinks::checkpoint::mark_of;

/// For the connection alone, when the whole delivery may take longer.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);

/// A connection, and what a delivery needs on it.
pub(super) struct Session {
    client: Client,
    /// The connection string that led here.
    pub(super) dsn: String,
    place: String,
    apply: Prepared,
    note: Statement,
    /// When old notes were last looked for, and none was left; never, if that is yet to be done.
    forgotten_at: Option<Instant>,
}

enum Prepared {
    Insert(Insert, Statement),
    Statement(Statement),
}

/// What all deliveries of a sink have in common.
pub(super) struct Target<'a> {
    pub(super) config: &'a PostgresConfig,
    pub(super) origin: &'a Origin,
    pub(super) timeout: Duration,
}

impl Session {
    /// Connects, and prepares what is to be run.
    pub(super) async fn open(dsn: &str, target: &Target<'_>) -> Result<Self, Setback> {
        let parsed = Dsn::parse(dsn)
            .map_err(|why| Setback::of_server(format!("the connection string {why}")))?;
        let place = parsed.place();
        let connect = connect(&parsed, target.config, &place);
        let within = target.timeout.min(LONGEST_CONNECT);
        let client = timeout(within, connect).await.map_err(|_| {
            Setback::of_server(format!("cannot connect to {place} within {within:?}"))
        })??;
        let checkpoint = &target.config.checkpoint;
        let preparing =
            |error: &tokio_postgres::Error, what: &str| Setback::on_preparing(error, what, &place);
        client
            .batch_execute(&format!(
                "set statement_timeout = {}",
                target.timeout.as_millis()
            ))
            .await
            .map_err(|error| preparing(&error, "the session"))?;
        make_checkpoint(&client, checkpoint)
            .await
            .map_err(|error| preparing(&error, &format!("checkpoint table {checkpoint}")))?;
        let note = client
            .prepare_typed(
                &statement::note(checkpoint, target.origin),
                &[Type::INT8_ARRAY, Type::INT8_ARRAY, Type::BYTEA_ARRAY],
            )
            .await
            .map_err(|error| preparing(&error, &format!("checkpoint table {checkpoint}")))?;
        let apply = prepare(&client, &target.config.apply, &place).await?;
        Ok(Self {
            client,
            dsn: dsn.to_owned(),
            place,
            apply,
            note,
            forgotten_at: None,
        })
    }

    /// Applies those of the events that are not yet, all or none.
    pub(super) async fn apply(
        &mut self,
        events: &[Arc<Event>],
        target: &Target<'_>,
    ) -> Result<(), Setback> {
        let lately = |at: Instant| at.elapsed() < statement::FORGET_EVERY;
        if !self.forgotten_at.is_some_and(lately) {
            self.forget(target).await?;
        }
        let noted = self
            .begin(events, target)
            .await
            .map_err(|error| Setback::on_applying(&error, &self.place))?;
        let fresh: Vec<_> = events
            .iter()
            .filter(|event| !noted.contains(&mark_of(event)))
            .map(Arc::clone)
            .collect();
        self.finish(&fresh)
            .await
            .map_err(|error| Setback::on_applying(&error, &self.place))
    }

    /// After a setback that is laid to the events: whether the session can be used on.
    pub(super) async fn roll_back(&self) -> bool {
        self.client.batch_execute("rollback").await.is_ok()
    }

    /// Begins a transaction; what is noted of events with such numbers.
    async fn begin(
        &self,
        events: &[Arc<Event>],
        target: &Target<'_>,
    ) -> Result<HashSet<[u8; 8]>, tokio_postgres::Error> {
        let begin = statement::begin(
            &target.config.checkpoint,
            target.origin,
            &statement::spans(events)
                .iter()
                .map(|(span, _)| *span)
                .collect::<Vec<_>>(),
            target.timeout.as_millis(),
        );
        let mut noted = HashSet::new();
        for message in self.client.simple_query(&begin).await? {
            let SimpleQueryMessage::Row(row) = message else {
                continue;
            };
            if row
                .columns()
                .first()
                .is_some_and(|column| column.name() == NOTED)
                && let Some(digits) = row.get(0)
            {
                noted.extend(marks(digits));
            }
        }
        Ok(noted)
    }

    async fn finish(&self, fresh: &[Arc<Event>]) -> Result<(), tokio_postgres::Error> {
        if fresh.is_empty() {
            return self.client.batch_execute("rollback").await;
        }
        let (mut firsts, mut lasts, mut marks) = (vec![], vec![], vec![]);
        for ((first, last), events) in statement::spans(fresh) {
            firsts.push(first);
            lasts.push(last);
            marks.push(events.into_iter().flat_map(mark_of).collect::<Vec<u8>>());
        }
        let parameters: [&(dyn ToSql + Sync); 3] = [&firsts, &lasts, &marks];
        let note = self.client.execute(&self.note, &parameters);
        // Sent at once, run one after the other.
        match &self.apply {
            Prepared::Insert(insert, statement) => {
                let arrays = insert.parameters(fresh);
                let parameters: Vec<&(dyn ToSql + Sync)> = arrays
                    .iter()
                    .map(|array| array as &(dyn ToSql + Sync))
                    .collect();
                sent(tokio::join!(
                    self.client.execute(statement, &parameters),
                    note
                ))?;
            }
            Prepared::Statement(statement) => {
                let events = Jsonb::of(fresh);
                let parameters: [&(dyn ToSql + Sync); 1] = [&events];
                sent(tokio::join!(
                    self.client.execute(statement, &parameters),
                    note
                ))?;
            }
        }
        self.client.batch_execute("commit").await
    }

    async fn forget(&mut self, target: &Target<'_>) -> Result<(), Setback> {
        let config = target.config;
        let forget = statement::forget(&config.checkpoint, target.origin, config.remember_hours);
        let gone = self.client.execute(&forget, &[]).await.map_err(|error| {
            let what = format!("checkpoint table {}", config.checkpoint);
            Setback::on_preparing(&error, &what, &self.place)
        })?;
        self.forgotten_at = (gone < statement::FORGET_AT_ONCE).then(Instant::now);
        Ok(())
    }
}

async fn connect(dsn: &Dsn, config: &PostgresConfig, place: &str) -> Result<Client, Setback> {
    let tls = match dsn.verify {
        true => Tls::verifying(config.ca_file.as_deref()),
        false if config.ca_file.is_some() => {
            Err("\"ca_file\" is for sslmode=verify-full".to_owned())
        }
        false => Tls::trusting(),
    }
    .map_err(Setback::of_server)?;
    if !config.is_passwordless() {
        if !dsn.has_password() {
            return Err(Setback::of_server(
                "the connection string holds no password, and only a superuser's sink may do without".to_owned(),
            ));
        }
        // A server that lets this process in as it is would let anybody who may create sinks be whoever this process is.
        if dsn.without_password().connect(tls.clone()).await.is_ok() {
            return Err(Setback::of_server(format!(
                "{place} asks for no password, and only a superuser's sink may use such a server"
            )));
        }
    }
    let (client, connection) = dsn
        .config
        .connect(tls)
        .await
        .map_err(|error| Setback::on_connecting(&error, place))?;
    // It ends with the client; what it ends with, the client is told, too.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(client)
}

async fn make_checkpoint(
    client: &Client,
    table: &super::names::TableName,
) -> Result<(), tokio_postgres::Error> {
    let name = table.to_string();
    let exists = client.query_one(statement::EXISTS, &[&name]).await?;
    if exists.get(0) {
        return Ok(());
    }
    client
        .batch_execute(&statement::create_checkpoint(table))
        .await
}

async fn prepare(client: &Client, apply: &Apply, place: &str) -> Result<Prepared, Setback> {
    match apply {
        Apply::Table(table) => {
            let what = format!("table {table}");
            let failed = |error| Setback::on_preparing(&error, &what, place);
            let name = table.to_string();
            let rows = client
                .query(statement::COLUMNS, &[&name])
                .await
                .map_err(failed)?;
            let columns: Vec<(String, String)> =
                rows.iter().map(|row| (row.get(0), row.get(1))).collect();
            if columns.is_empty() {
                return Err(Setback::of_server(format!("there is no table {table}")));
            }
            let insert = Insert::into(table, &columns).map_err(Setback::of_server)?;
            let prepared = client.prepare(&insert.sql).await.map_err(failed)?;
            Ok(Prepared::Insert(insert, prepared))
        }
        Apply::Statement(text) => {
            let prepared = client
                .prepare_typed(text, &[Type::JSONB])
                .await
                .map_err(|error| Setback::on_preparing(&error, "the statement", place))?;
            match prepared.params() {
                [Type::JSONB] => Ok(Prepared::Statement(prepared)),
                _ => Err(Setback {
                    error: "the statement takes more than $1".to_owned(),
                    blame: Blame::Server,
                }),
            }
        }
    }
}

/// Where the first has failed, the second says only that it could not be run.
fn sent(
    (applied, noted): (
        Result<u64, tokio_postgres::Error>,
        Result<u64, tokio_postgres::Error>,
    ),
) -> Result<(), tokio_postgres::Error> {
    applied.and(noted).map(|_| ())
}

/// The marks in a row's hexadecimal digits.
fn marks(digits: &str) -> impl Iterator<Item = [u8; 8]> {
    digits.as_bytes().chunks_exact(16).filter_map(|digits| {
        let digits = std::str::from_utf8(digits).ok()?;
        u64::from_str_radix(digits, 16).ok().map(u64::to_be_bytes)
    })
}
