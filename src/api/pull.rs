//! outbox.poll and outbox.ack.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::envelope::Position;
use crate::pg::call::{Arguments, TupleStore};
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::{Arg, Spi, connected};
use crate::store::sinks::{self, SinkRow};
use crate::store::{histories, rebase};
use crate::worker::pull;

#[pg_extern(sql = false)]
fn poll(call: pg_sys::FunctionCallInfo) {
    let args = Arguments::of(call);
    let max_events = usize::try_from(args.i32(1).unwrap_or(0)).unwrap_or(0);
    if max_events == 0 {
        Complaint::bad_argument("max_events must be at least 1").raise();
    }
    let store = TupleStore::of(call);
    let caller = security::current_role();
    as_extension(|| {
        connected(|spi| {
            rebase::settle(spi).or_raise();
            let sink = pull_sink(spi, args.text(0).as_deref(), caller).or_raise();
            pull::poll(spi, &sink, max_events, &store).or_raise();
        });
    });
}

#[pg_extern(sql = false)]
fn ack(call: pg_sys::FunctionCallInfo) -> bool {
    let args = Arguments::of(call);
    let caller = security::current_role();
    let position = args.text(1).map(|text| {
        text.parse::<Position>().map_err(|error| {
            Complaint::bad_argument(error.to_string())
                .hint("Take it from the column position of outbox.poll.")
        })
    });
    let position = position.transpose().or_raise();
    as_extension(|| {
        connected(|spi| {
            let sink = pull_sink(spi, args.text(0).as_deref(), caller).or_raise();
            if let Some(position) = position {
                histories::check(spi, &sink.stream, position);
            }
            pull::ack(spi, &sink, position).or_raise()
        })
    })
}

/// With a role, whether it may pull from a sink: it may read all, or this one was granted. The function is looked up once, when the
/// statement is planned.
const MAY_PULL: &str =
    "select has_function_privilege($1, 'outbox.read(text, int, text, text[])'::regprocedure, 'execute')
         or exists (select from outbox.sink_grants g where g.sink = $2 and pg_has_role($1, g.role, 'usage'))";

/// The sink, if it is one to pull from and the caller may.
fn pull_sink(spi: &Spi, id: Option<&str>, caller: pg_sys::Oid) -> Result<SinkRow, Complaint> {
    let id = id.unwrap_or_default();
    let sink = sinks::named(spi, id).ok_or_else(|| super::sinks::unknown(id))?;
    let allowed = spi
        .write(MAY_PULL, &[Arg::Oid(Some(caller)), Arg::Text(Some(id))])
        .first(|row| row.bool(0).unwrap_or(false))
        .unwrap_or(false);
    if !allowed {
        return Err(
            Complaint::denied(format!("permission denied for sink \"{id}\""))
                .hint("select outbox.grant(role, 'read', array[sink]) allows it."),
        );
    }
    if sink.kind != "pull" {
        return Err(Complaint::bad_argument(format!(
            "sink \"{id}\" is of kind {}, not pull",
            sink.kind
        ))
        .detail("Its events are delivered to it; there is nothing to poll."));
    }
    Ok(sink)
}
