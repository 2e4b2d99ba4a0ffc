//! The statements that a capture comes to for one operation on one table. Text in, text out.

use pgrx::pg_sys;

use crate::pg::exact::is_plain;
use crate::pg::firing::{CHANGE, Cell, Operation, SAME, Side};
use crate::store::captures::{Capture, Column, Payload};

/// The statement that writes the events, and the shape of the rows that it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Statement {
    pub(super) sql: String,
    /// The same where the session has said neither tenant nor headers: the defaults of these columns need not be worked out row by row.
    pub(super) sql_without_session: String,
    /// The same in two steps, where somebody's code belongs to the stream's table: what gives the events, and what inserts them when they
    /// are lent to it. Only the second runs that code.
    pub(super) gather: String,
    pub(super) insert_gathered: String,
    /// Decides which rows become events; it is run on its own, as its owner.
    pub(super) condition: Option<String>,
    /// For updates: the columns that pairs of versions have.
    pub(super) cells: Vec<Cell>,
    /// For updates: one that leaves all of these alone is no change.
    pub(super) compared: Vec<i16>,
    /// For updates that say only what has changed: the names of `compared`, but for those of the key.
    pub(super) names: Option<Vec<Option<String>>>,
}

/// The columns that events show, in the order of the table: those asked for, without the redacted ones, and the key.
pub(super) fn captured(capture: &Capture) -> Vec<&Column> {
    let shown = |column: &&Column| {
        let wanted = capture
            .columns
            .as_ref()
            .is_none_or(|wanted| wanted.contains(&column.name));
        (wanted && !capture.redact.contains(&column.name)) || capture.key.contains(&column.name)
    };
    capture.table_columns.iter().filter(shown).collect()
}

pub(super) fn named<'a>(capture: &'a Capture, name: &str) -> Option<&'a Column> {
    capture
        .table_columns
        .iter()
        .find(|column| column.name == name)
}

/// What identifies a row: the columns of the key, in its order, or all that are shown.
pub(super) fn identity(capture: &Capture) -> Vec<&Column> {
    if capture.key.is_empty() {
        captured(capture)
    } else {
        capture
            .key
            .iter()
            .filter_map(|name| named(capture, name))
            .collect()
    }
}

/// The topic of an operation's events.
pub(super) fn topic(capture: &Capture, operation: Operation, prefix: &str) -> String {
    let name = operation.name();
    match &capture.topic {
        None => format!("{prefix}.{}.{}.{name}", capture.schema, capture.table),
        Some(topic) => topic
            .replace("{schema}", &capture.schema)
            .replace("{table}", &capture.table)
            .replace("{operation}", name),
    }
}

/// Members of headers.
pub(super) type Attributes = serde_json::Map<String, serde_json::Value>;

/// What is said of events beside what a capture says of them anyway.
#[derive(Default)]
pub(super) struct Stamp {
    pub(super) attributes: Attributes,
    /// The number of the sink that alone is to get them.
    pub(super) for_sink: Option<i32>,
}

/// A statement that writes an event of this operation about no row.
pub(super) fn marker(
    capture: &Capture,
    operation: Operation,
    prefix: &str,
    stamp: &Stamp,
) -> String {
    let values = [
        topic(capture, operation, prefix),
        capture.source.clone(),
        serde_json::Value::Object(stamp.attributes.clone()).to_string(),
    ];
    let [topic, source, headers] = values.map(|value| literal(&value));
    let for_sink = stamp
        .for_sink
        .map_or_else(|| "null".to_owned(), |number| number.to_string());
    format!(
        "insert into {} (topic, source, headers, for_sink) values ({topic}, {source}, {headers}::pg_catalog.jsonb, {for_sink})",
        capture.stream
    )
}

/// Members that every event of this operation has in its headers.
pub(super) fn attributes(capture: &Capture, operation: Operation) -> Attributes {
    let mut members = Attributes::new();
    let says = |topic: &String| topic.contains("{operation}");
    if capture.topic.as_ref().is_some_and(|topic| !says(topic)) {
        members.insert("operation".to_owned(), operation.name().into());
    }
    if let Some(partition) = capture
        .partition
        .as_ref()
        .filter(|_| capture.partitions.is_empty())
    {
        members.insert("partition".to_owned(), partition.as_str().into());
    }
    members
}

pub(super) fn of(
    capture: &Capture,
    operation: Operation,
    prefix: &str,
    stamp: &Stamp,
) -> Statement {
    let mut builder = Builder {
        cells: Vec::new(),
        laterals: Vec::new(),
    };
    let (mut columns, mut values) = builder.adopted(capture);
    let is_adopted = !columns.is_empty();
    if !is_adopted {
        columns.extend(["topic", "source"]);
        values.extend([
            literal(&topic(capture, operation, prefix)),
            literal(&capture.source),
        ]);
    }
    if operation != Operation::Truncate && !is_adopted {
        columns.push("subject");
        values.push(builder.subject(capture, operation));
        let tenant = capture.tenant_column.as_deref();
        if let Some(tenant) = tenant.and_then(|name| named(capture, name)) {
            columns.push("tenant");
            values.push(builder.text(now(operation), tenant));
        }
        columns.push("payload");
        values.push(builder.payload(capture, operation));
    }
    let mut attributes = attributes(capture, operation);
    attributes.extend(stamp.attributes.clone());
    let partition = match is_adopted {
        true => None,
        false => builder.partition(capture, operation),
    };
    if !is_adopted && (!attributes.is_empty() || partition.is_some()) {
        columns.push("headers");
        let members = literal(&serde_json::Value::Object(attributes).to_string());
        let of_session =
            "nullif(pg_catalog.current_setting('outbox.headers', true), '')::pg_catalog.jsonb";
        let mut headers = format!(
            "coalesce({of_session}, '{{}}'::pg_catalog.jsonb) operator(pg_catalog.||) {members}::pg_catalog.jsonb"
        );
        if let Some(partition) = partition {
            headers.push_str(&format!(" operator(pg_catalog.||) {partition}"));
        }
        values.push(headers);
    }
    if let Some(number) = stamp.for_sink {
        columns.push("for_sink");
        values.push(number.to_string());
    }
    let from = match operation {
        Operation::Truncate => String::new(),
        _ => format!(" from {CHANGE} c{}", builder.laterals.concat()),
    };
    let insert = |columns: &[&str], values: &[String]| {
        format!(
            "insert into {} ({}) select {}{from}",
            capture.stream,
            columns.join(", "),
            values.join(", "),
        )
    };
    let sql = insert(&columns, &values);
    let named = columns.iter().zip(&values);
    let named = named.map(|(column, value)| format!("{value} as {column}"));
    let gather = format!("select {}{from}", named.collect::<Vec<_>>().join(", "));
    let insert_gathered = format!(
        "insert into {} ({1}) select {1} from {CHANGE}",
        capture.stream,
        columns.join(", ")
    );
    for column in ["tenant", "headers"] {
        if !columns.contains(&column) {
            columns.push(column);
            values.push("null".to_owned());
        }
    }
    let sql_without_session = insert(&columns, &values);
    let condition = match operation {
        Operation::Truncate => None,
        _ => capture.condition.as_deref(),
    };
    let condition = condition.map(|condition| builder.condition(capture, operation, condition));
    let compared = captured(capture);
    let says_names = operation == Operation::Update && capture.payload == Payload::Changed;
    Statement {
        sql,
        sql_without_session,
        gather,
        insert_gathered,
        condition,
        compared: compared.iter().map(|column| column.number).collect(),
        names: says_names.then(|| {
            let names = compared
                .iter()
                .map(|column| (!capture.key.contains(&column.name)).then(|| column.name.clone()));
            names.collect()
        }),
        cells: builder.cells,
    }
}

/// The version that an event is about, and the one by which the row was known.
pub(super) fn now(operation: Operation) -> Side {
    match operation {
        Operation::Delete | Operation::Truncate => Side::Old,
        Operation::Insert | Operation::Update | Operation::Snapshot => Side::New,
    }
}

pub(super) fn known_by(operation: Operation) -> Side {
    match operation {
        Operation::Insert | Operation::Snapshot => Side::New,
        _ => Side::Old,
    }
}

/// The columns of an event that an application may give, and how they stand in statements.
const EVENT_COLUMNS: [(&str, &str); 8] = [
    ("id", "id"),
    ("topic", "topic"),
    ("source", "source"),
    ("subject", "subject"),
    ("tenant", "tenant"),
    ("time", "\"time\""),
    ("payload", "payload"),
    ("headers", "headers"),
];

/// A subject longer than this is a digest.
const LONGEST_SUBJECT: usize = 1000;

struct Builder {
    cells: Vec<Cell>,
    laterals: Vec<String>,
}

impl Builder {
    fn cell(&mut self, side: Side, column: &Column) -> String {
        let cell = Cell {
            side,
            number: column.number,
        };
        if !self.cells.contains(&cell) {
            self.cells.push(cell);
        }
        format!("c.{}", cell.name())
    }

    /// A column's value as text.
    fn text(&mut self, side: Side, column: &Column) -> String {
        let cell = self.cell(side, column);
        match column.type_oid {
            pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID
            | pg_sys::NUMERICOID
            | pg_sys::UUIDOID
            | pg_sys::TEXTOID
            | pg_sys::VARCHAROID => format!("{cell}::pg_catalog.text"),
            _ => format!("outbox.printed({cell})"),
        }
    }

    fn subject(&mut self, capture: &Capture, operation: Operation) -> String {
        let side = known_by(operation);
        let columns = identity(capture);
        let texts = columns
            .iter()
            .map(|column| self.text(side, column))
            .collect::<Vec<_>>();
        let joined = match texts.as_slice() {
            [one] => one.clone(),
            several => several
                .iter()
                .map(|text| format!("coalesce({text}, '')"))
                .collect::<Vec<_>>()
                .join(" operator(pg_catalog.||) ':' operator(pg_catalog.||) "),
        };
        if !capture.key.is_empty() {
            return joined;
        }
        self.laterals.push(format!(
            " cross join lateral (select {joined} as whole offset 0) s"
        ));
        format!(
            "case when pg_catalog.octet_length(s.whole) operator(pg_catalog.>) {LONGEST_SUBJECT}
                  then 'md5:' operator(pg_catalog.||) pg_catalog.md5(s.whole) else s.whole end"
        )
    }

    /// A row of these columns, under a name of its own, which `to_jsonb` makes an object of.
    fn object(&mut self, name: &str, columns: &[(Side, &Column)]) -> String {
        let fields = columns.iter().map(|&(side, column)| {
            let cell = self.cell(side, column);
            let value = if is_plain(column.type_oid) {
                cell
            } else {
                format!("outbox.exact({cell})")
            };
            format!("{value} as {}", identifier(&column.name))
        });
        let fields = fields.collect::<Vec<_>>().join(", ");
        self.laterals
            .push(format!(" cross join lateral (select {fields}) {name}"));
        // With the star it is the row, also if a column bears its name.
        format!("pg_catalog.to_jsonb({name}.*)")
    }

    fn version(&mut self, name: &str, side: Side, columns: &[&Column]) -> String {
        let columns = columns
            .iter()
            .map(|&column| (side, column))
            .collect::<Vec<_>>();
        self.object(name, &columns)
    }

    fn payload(&mut self, capture: &Capture, operation: Operation) -> String {
        let shown = captured(capture);
        let side = now(operation);
        match capture.payload {
            Payload::Keys => self.version("r", side, &identity(capture)),
            Payload::Full => self.version("r", side, &shown),
            Payload::Changed => match operation {
                Operation::Insert | Operation::Snapshot => self.version("r", side, &shown),
                Operation::Update => {
                    let columns = shown.into_iter().map(|column| {
                        let of_key = capture.key.contains(&column.name);
                        (if of_key { Side::New } else { Side::Changed }, column)
                    });
                    let object = self.object("r", &columns.collect::<Vec<_>>());
                    format!("{object} operator(pg_catalog.-) c.{SAME}")
                }
                _ => self.version("r", side, &identity(capture)),
            },
            Payload::BeforeAfter => {
                let before = match operation {
                    Operation::Insert | Operation::Snapshot => "null".to_owned(),
                    _ => self.version("b", Side::Old, &shown),
                };
                let after = match operation {
                    Operation::Delete => "null".to_owned(),
                    _ => self.version("a", Side::New, &shown),
                };
                format!("pg_catalog.jsonb_build_object('before', {before}, 'after', {after})")
            }
        }
    }

    /// Columns of an event and their values, where the table is an outbox itself; none where it is not.
    fn adopted(&mut self, capture: &Capture) -> (Vec<&'static str>, Vec<String>) {
        let chosen = capture.mapping.iter().filter_map(|(event_column, name)| {
            let column = named(capture, name)?;
            let value = match event_column.as_str() {
                "payload" | "headers" => {
                    let cell = self.cell(Side::New, column);
                    match column.type_oid {
                        pg_sys::JSONBOID => cell,
                        pg_sys::TEXTOID | pg_sys::VARCHAROID => format!("outbox.read_json({cell})"),
                        _ => format!("outbox.exact({cell})"),
                    }
                }
                "time" => {
                    // A type that somebody has made may have a cast that he has made.
                    let value = if is_plain(column.type_oid) {
                        self.cell(Side::New, column)
                    } else {
                        self.text(Side::New, column)
                    };
                    format!(
                        "coalesce({value}::pg_catalog.timestamptz, pg_catalog.clock_timestamp())"
                    )
                }
                _ => self.text(Side::New, column),
            };
            let event_column = EVENT_COLUMNS.iter().find(|it| it.0 == event_column)?.1;
            Some((event_column, value))
        });
        chosen.unzip()
    }

    /// Names the partition that each row is in, or has come to.
    fn partition(&mut self, capture: &Capture, operation: Operation) -> Option<String> {
        if capture.partitions.is_empty() || operation == Operation::Truncate {
            return None;
        }
        let side = now(operation);
        // Constraints name columns as the table does.
        let fields = capture.table_columns.iter().map(|column| {
            let cell = self.cell(side, column);
            format!("{cell} as {}", identifier(&column.name))
        });
        let fields = fields.collect::<Vec<_>>().join(", ");
        let cases = capture.partitions.iter().map(|partition| {
            format!(
                "when {} then {}",
                partition.constraint,
                literal(&partition.name)
            )
        });
        let cases = cases.collect::<Vec<_>>().join(" ");
        self.laterals.push(format!(
            " cross join lateral (select case {cases} end as name from (select {fields}) v) w"
        ));
        Some("pg_catalog.jsonb_build_object('partition', w.name)".to_owned())
    }

    /// The statement that gives the places of the rows that a condition holds for.
    fn condition(&mut self, capture: &Capture, operation: Operation, condition: &str) -> String {
        let mut version = |side, name, from| {
            let fields = capture.table_columns.iter().map(|column| {
                let cell = self.cell(side, column);
                let value = cell.replacen("c.", from, 1);
                format!("{value} as {}", identifier(&column.name))
            });
            let fields = fields.collect::<Vec<_>>().join(", ");
            match from {
                "p." => format!(" cross join lateral (select {fields}) {name}"),
                // A row of the right types, all null.
                _ => format!(
                    " left join (select {fields} from {CHANGE} x where false) {name} on true"
                ),
            }
        };
        let (old, new) = match operation {
            Operation::Insert | Operation::Snapshot => {
                let new = version(Side::New, "new", "p.");
                (version(Side::New, "old", "x."), new)
            }
            Operation::Delete => {
                let old = version(Side::Old, "old", "p.");
                (old, version(Side::Old, "new", "x."))
            }
            _ => {
                let old = version(Side::Old, "old", "p.");
                (old, version(Side::New, "new", "p."))
            }
        };
        // The line breaks end a comment that the condition may end with.
        format!(
            "select p.place from (select pg_catalog.row_number() over () as place, c.* from {CHANGE} c) p{old}{new} where (\n{condition}\n)"
        )
    }
}

/// A text as an SQL literal, whatever the session says of backslashes.
pub(super) fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!("E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

pub(super) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
