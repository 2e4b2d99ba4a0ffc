//! outbox.set_secret.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::call::Arguments;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::as_extension;
use crate::pg::spi::connected;
use crate::pg::statement::{self, Holder};
use crate::store::{secrets, sinks};

#[pg_extern(sql = false)]
fn set_secret(call: pg_sys::FunctionCallInfo) {
    // The statement's text may hold the values: it is replaced before anything can fail and be logged with it.
    statement::hide(Holder::SetSecret);
    let args = Arguments::of(call);
    let name = args.text(0);
    let name = checked_name(name.as_deref()).or_raise();
    let values = args.texts(1).map(checked_values).transpose().or_raise();
    as_extension(|| connected(|spi| secrets::set(spi, name, values.as_deref())));
}

fn checked_name(name: Option<&str>) -> Result<&str, Complaint> {
    name.filter(|name| sinks::is_name(name)).ok_or_else(|| {
        Complaint::bad_argument("the secret's name is not allowed")
            .detail("A name is 1 to 100 of letters, digits and . _ @ -")
            .hint("For example: select outbox.set_secret('billing', array['...'])")
    })
}

fn checked_values(values: Vec<Option<String>>) -> Result<Vec<String>, Complaint> {
    values
        .into_iter()
        .map(|value| value.filter(|value| !value.is_empty()))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| {
            Complaint::bad_argument("a value of the secret is null or empty")
                .hint("Leave out what is not active.")
        })
}
