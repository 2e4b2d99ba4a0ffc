//! Everywhere that somebody could look, and a server that tells as much as it can.

use outbox_tests::{Cluster, Sql};
use postgres::Client;

use super::quick;

/// A server that logs as much of statements as it can, but for `log_statement`: that one is logged before it can be known what
/// an EXECUTE or a function of somebody else will call.
pub fn talkative() -> Cluster {
    quick()
        .setting("log_min_duration_statement", "0")
        .setting("log_min_error_statement", "debug5")
        .setting("log_min_messages", "debug1")
        .setting("log_error_verbosity", "verbose")
        .setting("log_parameter_max_length", "-1")
        .setting("log_parameter_max_length_on_error", "-1")
        .setting("track_activity_query_size", "65536")
        .start()
}

/// Everything that somebody who may not read `outbox.secrets` could look into, as text, by the name of the place. What an
/// operator wrote into `outbox.sinks.config` stands there, and only there.
fn places(db: &mut Client) -> Vec<(String, String)> {
    let relations: Vec<String> = db.all(
        "select c.relname from pg_class c where c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'v') and c.relname <> 'secrets'",
    );
    let mut places: Vec<(String, String)> = relations
        .into_iter()
        .map(|relation| {
            let row = if relation == "sinks" {
                "(to_jsonb(r) - 'config')::text"
            } else {
                "r::text"
            };
            let rows: Vec<String> = db.all(&format!("select {row} from outbox.{relation} r"));
            (relation, rows.join("\n"))
        })
        .collect();
    let activity: Vec<String> =
        db.all("select concat_ws(' ', application_name, query, wait_event) from pg_stat_activity where pid <> pg_backend_pid()");
    places.push(("pg_stat_activity".to_owned(), activity.join("\n")));
    places
}

/// That none of these is in the log or in any other place.
#[track_caller]
pub fn assert_unseen(cluster: &Cluster, values: &[&str]) {
    let mut db = cluster.connect();
    let mut places = places(&mut db);
    places.push(("the log".to_owned(), cluster.log()));
    for (place, text) in places {
        for value in values {
            if let Some(at) = text.find(value) {
                let line = text[..at].rfind('\n').map_or(0, |end| end + 1);
                let end = text[at..].find('\n').map_or(text.len(), |end| at + end);
                panic!("{value} is in {place}: {}", &text[line..end]);
            }
        }
    }
}
