//! outbox.set_secret and outbox.set_secret_source.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::call::Arguments;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
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

/// What the server reads, and says of it when it fails, is not for everybody to ask for.
#[pg_extern(sql = false)]
fn set_secret_source(call: pg_sys::FunctionCallInfo) {
    let caller = security::current_role();
    let args = Arguments::of(call);
    let name = args.text(0);
    let name = checked_name(name.as_deref()).or_raise();
    let source = args.text(1).unwrap_or_default();
    let location = args.text(2).unwrap_or_default();
    let (fits, allowed, needed) = match source.as_str() {
        secrets::FILE => (
            location.starts_with('/'),
            security::may_read_files(caller),
            "Membership of pg_read_server_files allows it.",
        ),
        secrets::VARIABLE => (
            !location.is_empty() && !location.contains('='),
            security::is_superuser(caller),
            "A superuser may do it.",
        ),
        _ => Complaint::bad_argument("the source of a secret is not known")
            .detail("It is file or env.")
            .raise(),
    };
    if !allowed {
        Complaint::denied(format!("permission denied for a secret from \"{source}\""))
            .detail("It has the server read what only it can see.")
            .hint(needed)
            .raise();
    }
    if !fits {
        Complaint::bad_argument(format!("the place of secret \"{name}\" is not allowed"))
            .detail(match source.as_str() {
                secrets::FILE => "It must be the absolute path of a file.",
                _ => "It must be the name of a variable.",
            })
            .raise();
    }
    as_extension(|| connected(|spi| secrets::set_source(spi, name, &source, &location)));
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
