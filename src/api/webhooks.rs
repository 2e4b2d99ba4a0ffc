//! The functions on webhooks. Each acts with the extension's rights on what is of a tenant that the caller may manage.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::envelope::standard_key;
use crate::pg::call::{Arguments, Text, TupleStore};
use crate::pg::catalog;
use crate::pg::error::{Complaint, OrRaise};
use crate::pg::security::{self, as_extension};
use crate::pg::spi::{Arg, Spi, connected};
use crate::pg::statement::{self, Holder};
use crate::settings;
use crate::sinks::webhook;
use crate::store::webhooks::{self, NewWebhook};
use crate::store::{cursors, rebase, streams};
use crate::worker::webhooks::probe;

/// Runs `body` with the extension's rights; it is handed the role that calls.
fn managed<R>(body: impl FnOnce(&Spi, pg_sys::Oid) -> Result<R, Complaint>) -> R {
    let caller = security::current_role();
    as_extension(|| connected(|spi| body(spi, caller))).or_raise()
}

fn check_tenant(spi: &Spi, caller: pg_sys::Oid, tenant: &str) -> Result<(), Complaint> {
    if webhooks::may_manage(spi, caller, tenant) {
        return Ok(());
    }
    Err(
        Complaint::denied("permission denied for the webhooks of that tenant")
            .hint("select outbox.grant_tenant(role, tenant) allows it."),
    )
}

/// What is another tenant's does not exist, for who may not see it.
fn unknown(id: &str) -> Complaint {
    Complaint::unknown(format!(
        "webhook {:?} does not exist",
        id.chars().take(60).collect::<String>()
    ))
    .hint("Webhooks are made by outbox.create_webhook and listed in outbox.webhooks.")
}

/// The tenant of a webhook that the caller may manage.
fn managed_one(
    spi: &Spi,
    caller: pg_sys::Oid,
    id: &str,
    find: fn(&Spi, &str) -> Option<String>,
) -> Result<String, Complaint> {
    find(spi, id)
        .filter(|tenant| webhooks::may_manage(spi, caller, tenant))
        .ok_or_else(|| unknown(id))
}

/// The same; it is kept from being changed by anybody else.
fn to_change(spi: &Spi, caller: pg_sys::Oid, id: &str) -> Result<String, Complaint> {
    managed_one(spi, caller, id, webhooks::to_change)
}

fn checked_url(url: Option<&str>) -> Result<&str, Complaint> {
    let url = url.unwrap_or_default();
    match webhook::parse(url, &settings::webhooks::rules()) {
        Ok(_) => Ok(url),
        Err(why) => Err(
            Complaint::bad_argument("the URL of a webhook is not allowed")
                .detail(why)
                .hint("For example: https://example.com/hooks"),
        ),
    }
}

/// A value that signs, given or made.
fn checked_secret(secret: Option<String>) -> Result<String, Complaint> {
    match secret {
        Some(secret) if standard_key(&secret).is_some() => Ok(secret),
        Some(_) => Err(Complaint::bad_argument(
            "the secret of a webhook is not of the form whsec_<base64>",
        )
        .hint("Leave it out, and one is made.")),
        None => {
            let random = catalog::random_hex().ok_or_else(|| {
                Complaint::new(
                    pgrx::PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
                    "the server has no randomness for a secret",
                )
            })?;
            Ok(format!("whsec_{}", BASE64_STANDARD.encode(random)))
        }
    }
}

fn id_of(args: Arguments) -> String {
    args.text(0).unwrap_or_default()
}

#[pg_extern(sql = false)]
fn create_webhook(call: pg_sys::FunctionCallInfo) -> Text {
    // The secret is in the statement, and what fails is logged with it.
    statement::hide(Holder::CreateWebhook);
    let args = Arguments::of(call);
    let id = managed(|spi, caller| {
        let tenant = args.text(0).unwrap_or_default();
        if tenant.is_empty() {
            return Err(Complaint::bad_argument("a webhook needs a tenant"));
        }
        check_tenant(spi, caller, &tenant)?;
        let url = args.text(1);
        let url = checked_url(url.as_deref())?;
        let topics = super::sinks::checked_topics(args.texts(2))?;
        let secret = checked_secret(args.text(3))?;
        let name = args.text(5).unwrap_or_else(|| "outbox".to_owned());
        rebase::settle(spi)?;
        let stream = streams::named(spi, &name).filter(|_| streams::hold(spi, &name));
        let stream = stream.ok_or_else(|| streams::unknown(&name))?;
        if name == streams::AUDIT {
            return Err(Complaint::bad_argument(
                "webhooks get no records of the audit trail",
            ));
        }
        while !webhooks::hold_cursor(spi, &name) {
            webhooks::lock_stream(spi, &name);
            // From now on: what is committed already is not for it.
            let (place, pair) = super::sinks::tail(spi, &stream);
            cursors::create_named(spi, &webhooks::cursor_of(&name), &name, &place, pair);
        }
        let random = catalog::random_hex().unwrap_or([b'0'; 32]);
        let id = format!("wh_{}", String::from_utf8_lossy(&random[..24]));
        let description = args.text(4);
        let new = NewWebhook {
            id: &id,
            tenant: &tenant,
            url,
            topics: topics.as_deref(),
            description: description.as_deref(),
            stream: &name,
        };
        webhooks::create(spi, &new);
        webhooks::add_secret(spi, &id, &secret, "0");
        Ok(id)
    });
    Text::new(&id)
}

#[pg_extern(sql = false)]
fn alter_webhook(call: pg_sys::FunctionCallInfo) {
    let args = Arguments::of(call);
    let id = id_of(args);
    managed(|spi, caller| {
        to_change(spi, caller, &id)?;
        let url = args.text(1);
        if url.is_some() {
            checked_url(url.as_deref())?;
        }
        let given = args.texts(2);
        let cleared = given.as_ref().is_some_and(Vec::is_empty);
        let topics = super::sinks::checked_topics(given)?;
        let topics = topics.or(cleared.then(Vec::new));
        let description = args.text(3);
        webhooks::alter(
            spi,
            &id,
            url.as_deref(),
            topics.as_deref(),
            description.as_deref(),
        );
        Ok(())
    });
}

fn set_enabled(call: pg_sys::FunctionCallInfo, enabled: bool) {
    let id = id_of(Arguments::of(call));
    managed(|spi, caller| {
        to_change(spi, caller, &id)?;
        webhooks::set_enabled(spi, &id, enabled);
        Ok(())
    });
}

#[pg_extern(sql = false)]
fn disable_webhook(call: pg_sys::FunctionCallInfo) {
    set_enabled(call, false);
}

#[pg_extern(sql = false)]
fn enable_webhook(call: pg_sys::FunctionCallInfo) {
    set_enabled(call, true);
}

#[pg_extern(sql = false)]
fn delete_webhook(call: pg_sys::FunctionCallInfo) {
    let id = id_of(Arguments::of(call));
    managed(|spi, caller| {
        to_change(spi, caller, &id)?;
        webhooks::delete(spi, &id);
        Ok(())
    });
}

#[pg_extern(sql = false)]
fn rotate_webhook_secret(call: pg_sys::FunctionCallInfo) -> Text {
    statement::hide(Holder::RotateWebhookSecret);
    let args = Arguments::of(call);
    let id = id_of(args);
    let secret = managed(|spi, caller| {
        to_change(spi, caller, &id)?;
        let secret = checked_secret(args.text(1))?;
        let overlap = spi
            .read(
                "select $1::interval::text, $1::interval >= '0'",
                &[Arg::RawInterval(args.raw(2))],
            )
            .first(|row| row.text(0).filter(|_| row.bool(1) == Some(true)))
            .flatten()
            .ok_or_else(|| {
                Complaint::bad_argument("the overlap of two secrets is an interval from 0 on")
            })?;
        webhooks::add_secret(spi, &id, &secret, &overlap);
        Ok(secret)
    });
    Text::new(&secret)
}

#[pg_extern(sql = false)]
fn redeliver_webhook(call: pg_sys::FunctionCallInfo) {
    let delivery = Arguments::of(call).i64(0).unwrap_or(0);
    managed(|spi, caller| {
        let missing = || Complaint::unknown(format!("delivery {delivery} does not exist"));
        let tenant = webhooks::tenant_of_delivery(spi, delivery).ok_or_else(missing)?;
        if !webhooks::may_manage(spi, caller, &tenant) {
            return Err(missing());
        }
        webhooks::redeliver(spi, delivery);
        crate::pg::xact::change_at_commit();
        Ok(())
    });
}

#[pg_extern(sql = false)]
fn redeliver_webhook_since(call: pg_sys::FunctionCallInfo) -> i64 {
    let args = Arguments::of(call);
    let id = id_of(args);
    managed(|spi, caller| {
        managed_one(spi, caller, &id, webhooks::tenant_of)?;
        let since = args
            .time(1)
            .ok_or_else(|| Complaint::bad_argument("redeliver_webhook needs a time"))?;
        let queued = webhooks::redeliver_dead(spi, &id, since);
        crate::pg::xact::change_at_commit();
        Ok(i64::try_from(queued).unwrap_or(i64::MAX))
    })
}

#[pg_extern(sql = false)]
fn test_webhook(call: pg_sys::FunctionCallInfo) {
    let id = id_of(Arguments::of(call));
    let store = TupleStore::of(call);
    managed(|spi, caller| {
        let tenant = managed_one(spi, caller, &id, webhooks::tenant_of)?;
        let (url, secrets) = webhooks::address(spi, &id).ok_or_else(|| unknown(&id))?;
        let outcome = probe::send(&tenant, url, secrets);
        spi.read(
            "select $1, $2, $3",
            &[
                Arg::I32(outcome.status.map(i32::from)),
                Arg::I32(i32::try_from(outcome.duration.as_millis()).ok()),
                Arg::Text(outcome.error().as_deref()),
            ],
        )
        .store(&store);
        Ok(())
    });
}
