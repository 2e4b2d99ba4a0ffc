//! outbox.set_usage_recorder.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::call::Arguments;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::{Arg, Spi, connected};
use crate::store::usage::{self, Recorder};

#[pg_extern(sql = false)]
fn set_usage_recorder(call: pg_sys::FunctionCallInfo) {
    let owner = security::current_role();
    let function = Arguments::of(call).oid(0);
    as_extension(|| {
        connected(|spi| {
            let recorder = function.map(|function| {
                check(spi, function, owner).or_raise();
                Recorder { function, owner }
            });
            usage::set_recorder(spi, recorder);
        });
    });
}

fn check(spi: &Spi, function: pg_sys::Oid, owner: pg_sys::Oid) -> Result<(), Complaint> {
    let found = spi
        .read(
            "select p.oid::regprocedure::text,
                    p.prokind = 'f' and p.pronargs = 1 and p.provariadic = 0 and p.proargtypes[0] = 'outbox.usage_window[]'::regtype,
                    has_function_privilege($2, p.oid, 'execute') from pg_catalog.pg_proc p where p.oid = $1",
            &[Arg::Oid(Some(function)), Arg::Oid(Some(owner))],
        )
        .first(|row| (row.text(0).unwrap_or_default(), row.bool(1), row.bool(2)));
    const SHAPE: &str = "It must take one argument of type outbox.usage_window[].";
    match found {
        None => Err(Complaint::unknown("the recorder does not exist").detail(SHAPE)),
        Some((_, Some(true), Some(true))) => Ok(()),
        Some((name, Some(true), _)) => Err(Complaint::denied(format!(
            "permission denied for function {name}"
        ))),
        Some((name, ..)) => Err(Complaint::bad_argument(format!(
            "function {name} does not fit as recorder of usage"
        ))
        .detail(SHAPE)),
    }
}
