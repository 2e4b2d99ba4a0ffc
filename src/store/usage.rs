//! outbox.usage_windows, its dead letters, and the function that is registered to record them.

use pgrx::pg_sys;

use super::functions;
use crate::pg::spi::{Arg, Spi};

/// The function that records windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recorder {
    pub(crate) function: pg_sys::Oid,
    pub(crate) owner: pg_sys::Oid,
}

/// A closed window that is not recorded.
#[derive(Debug, Clone)]
pub(crate) struct UsageWindow {
    pub(crate) key: String,
    /// A value of type outbox.usage_window as a JSON object.
    pub(crate) json: String,
}

pub(crate) fn recorder(spi: &Spi) -> Option<Recorder> {
    spi.read(
        "select outbox.function_of(function, function_oid, home), owner::oid from outbox.usage_recorder",
        &[],
    )
    .first(|row| {
        Some(Recorder {
            function: row.oid(0)?,
            owner: row.oid(1)?,
        })
    })
    .flatten()
}

/// What a recorder returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Says {
    /// Nothing that is looked at.
    Nothing,
    /// Rows (idempotency_key, outcome).
    Outcomes,
    /// Rows (idempotency_key, outcome, error).
    Reasons,
}

pub(crate) fn says(spi: &Spi, function: pg_sys::Oid) -> Says {
    spi.read(
        "select r.rows and r.names @> '{idempotency_key,outcome}', r.rows and r.names @> '{idempotency_key,outcome,error}'
           from pg_catalog.pg_proc p, lateral (
                select p.proretset as rows, coalesce(p.proargnames[1 + p.pronargs :], '{}') as names) r
          where p.oid = $1",
        &[Arg::Oid(Some(function))],
    )
    .first(|row| match (row.bool(0), row.bool(1)) {
        (_, Some(true)) => Says::Reasons,
        (Some(true), _) => Says::Outcomes,
        _ => Says::Nothing,
    })
    .unwrap_or(Says::Nothing)
}

pub(crate) fn set_recorder(spi: &Spi, recorder: Option<Recorder>) {
    match recorder {
        Some(Recorder { function, owner }) => spi.write(
            "insert into outbox.usage_recorder (function, owner, function_oid, home)
             values (outbox.function_name($1), $2::regrole, $1, $3)
             on conflict (single) do update
                set function = excluded.function, owner = excluded.owner, function_oid = excluded.function_oid, home = excluded.home, last_error = null, updated_at = clock_timestamp()",
            &[Arg::Oid(Some(function)), Arg::Oid(Some(owner)), Arg::Text(Some(&functions::home()))],
        ),
        None => spi.write("delete from outbox.usage_recorder", &[]),
    };
}

/// Says why windows are left unrecorded, or that none are; unless somebody is about to register another recorder.
pub(crate) fn tell(spi: &Spi, error: Option<&str>) {
    spi.write(
        "update outbox.usage_recorder set last_error = $1, updated_at = clock_timestamp()
          where single = (select single from outbox.usage_recorder where last_error is distinct from $1 for no key update skip locked)",
        &[Arg::Text(error)],
    );
}

/// Whether the last pass has left windows unrecorded for an error.
pub(crate) fn is_failing(spi: &Spi) -> bool {
    spi.read(
        "select from outbox.usage_recorder where last_error is not null",
        &[],
    )
    .count()
        > 0
}

/// Whether there is a closed window that is not recorded.
pub(crate) fn is_due(spi: &Spi) -> bool {
    spi.read(
        "select from outbox.usage_windows where outcome is null and window_end <= clock_timestamp() order by window_end limit 1",
        &[],
    )
    .count()
        > 0
}

/// The first closed windows that are not recorded, held until the transaction ends; those that somebody else holds are left out.
pub(crate) fn take(spi: &Spi, limit: usize) -> Vec<UsageWindow> {
    spi.write(
        "select w.idempotency_key,
                jsonb_build_object('idempotency_key', w.idempotency_key, 'allocation', w.allocation, 'window_start', w.window_start,
                                   'window_end', w.window_end, 'meter', w.meter, 'quantity', w.quantity, 'tenant', w.tenant)
           from outbox.usage_windows w where w.outcome is null and w.window_end <= clock_timestamp()
          order by w.window_end, w.idempotency_key limit $1 for update skip locked",
        &[Arg::I64(i64::try_from(limit).ok())],
    )
    .map(|row| UsageWindow {
        key: row.text(0).unwrap_or_default(),
        json: row.json(1).unwrap_or_default(),
    })
}

/// Writes what became of windows, given in the same order.
pub(crate) fn settle(spi: &Spi, keys: &[String], outcomes: &[String]) {
    spi.write(
        "update outbox.usage_windows w set outcome = u.outcome, recorded_at = clock_timestamp()
           from unnest($1, $2) as u (key, outcome) where w.idempotency_key = u.key",
        &[Arg::Texts(Some(keys)), Arg::Texts(Some(outcomes))],
    );
}

/// Sets a window aside that was refused; without a code, in so many words.
pub(crate) fn bury(spi: &Spi, window: &UsageWindow, code: Option<&str>, message: &str) {
    spi.write(
        "insert into outbox.usage_dead_letters (idempotency_key, \"window\", code, message) values ($1, $2, $3, $4)
         on conflict (idempotency_key) do update
            set \"window\" = excluded.\"window\", code = excluded.code, message = excluded.message, dead_at = clock_timestamp()",
        &[
            Arg::Text(Some(&window.key)),
            Arg::Json(Some(&window.json)),
            Arg::Text(code),
            Arg::Text(Some(message)),
        ],
    );
    settle(
        spi,
        std::slice::from_ref(&window.key),
        &["dead-lettered".to_owned()],
    );
}
