-- Webhooks of tenants: endpoints that an application's own customers register, and what is delivered to them.

create table outbox.webhooks (
    id              text primary key,
    tenant          text not null check (tenant <> ''),
    url             text not null,
    topics          text[],
    description     text,
    stream          text not null default 'outbox',
    enabled         boolean not null default true,
    disabled_reason text,
    disabled_at     timestamptz,
    failing_since   timestamptz,
    -- Events visible in this snapshot are older than the webhook.
    since           pg_snapshot default pg_current_snapshot(),
    created_at      timestamptz not null default now(),
    updated_at      timestamptz not null default now()
);
comment on table outbox.webhooks is 'endpoints of tenants; made and changed by outbox.create_webhook, outbox.alter_webhook and so on';
comment on column outbox.webhooks.failing_since is 'since when every attempt has failed; null if the latest one went through';
create index webhooks_tenant on outbox.webhooks (tenant, id);
create trigger outbox_change after insert or update of url, topics, enabled or delete on outbox.webhooks
    for each statement execute function outbox.change();

create table outbox.webhook_secrets (
    webhook    text not null,
    value      text not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz,
    primary key (webhook, value)
);
comment on table outbox.webhook_secrets is 'values that sign; several during a rotation. Readable by superusers alone';
create trigger outbox_change after insert or update or delete on outbox.webhook_secrets for each statement execute function outbox.change();

create sequence outbox.webhook_deliveries_id_seq;
create table outbox.webhook_deliveries (
    id              bigint primary key default outbox.next_number('outbox.webhook_deliveries_id_seq'),
    webhook         text not null,
    tenant          text not null,
    event_id        text not null,
    topic           text not null,
    event           jsonb not null,
    state           text not null default 'pending' check (state in ('pending', 'delivered', 'dead')),
    attempts        int not null default 0,
    -- Of rounds before this one: outbox.redeliver_webhook begins anew.
    earlier         int not null default 0,
    next_attempt_at timestamptz default clock_timestamp(),
    created_at      timestamptz not null default clock_timestamp(),
    finished_at     timestamptz
) with (fillfactor = 70);
comment on table outbox.webhook_deliveries is 'a row per event and webhook; delivered and dead ones go after outbox.webhook_retention';
comment on column outbox.webhook_deliveries.event is 'the body, a CloudEvent';
create index webhook_deliveries_pending on outbox.webhook_deliveries (webhook, next_attempt_at, id) where state = 'pending';
create index webhook_deliveries_finished on outbox.webhook_deliveries (finished_at) where state <> 'pending';
create index webhook_deliveries_webhook on outbox.webhook_deliveries (webhook, id);
create index webhook_deliveries_waiting on outbox.webhook_deliveries (id) where state = 'pending';
create index webhook_deliveries_dead on outbox.webhook_deliveries (webhook, created_at) where state = 'dead';

create table outbox.webhook_totals (
    single           boolean primary key default true check (single),
    delivered        bigint not null,
    last_delivery_at timestamptz not null
) with (fillfactor = 40);
comment on table outbox.webhook_totals is 'deliveries that went through, ever, of all webhooks; no row before the first';

create table outbox.webhook_removals (
    webhook    text primary key,
    stream     text not null,
    removed_at timestamptz not null default clock_timestamp()
);
alter sequence outbox.webhook_deliveries_id_seq owned by outbox.webhook_deliveries.id;
comment on table outbox.webhook_removals is 'webhooks that are deleted while the dispatcher still removes their deliveries, in small steps';
-- As with cursors: what is to be removed is not complete while a dump is restored.
create trigger outbox_restore before insert on outbox.webhook_removals for each statement
    when (current_setting('search_path') = '') execute function outbox.mark_restore();
create trigger outbox_restore before insert on outbox.webhook_deliveries for each statement
    when (current_setting('search_path') = '') execute function outbox.mark_restore();
alter table outbox.webhook_removals enable always trigger outbox_restore;
alter table outbox.webhook_deliveries enable always trigger outbox_restore;

create table outbox.webhook_attempts (
    delivery    bigint not null,
    attempt     int not null,
    tenant      text not null,
    at          timestamptz not null default clock_timestamp(),
    status      int,
    duration_ms int not null,
    error       text,
    primary key (delivery, attempt)
);
comment on table outbox.webhook_attempts is 'each attempt at a delivery: the status of the answer, if there was one, how long it took, and a short reason if it failed';

-- One tenant sees only its own.
create table outbox.tenant_grants (
    role   regrole not null,
    tenant text not null,
    primary key (role, tenant)
);
comment on table outbox.tenant_grants is 'roles that read and manage the webhooks of a tenant';

create function outbox.is_role_of(role name, tenant text) returns boolean
    language sql stable security definer set search_path = pg_catalog, outbox, pg_temp
    return exists (select from outbox.tenant_grants g where g.tenant = is_role_of.tenant and pg_has_role(is_role_of.role, g.role, 'usage'))
        or has_function_privilege(is_role_of.role, 'outbox.tick(text)', 'execute');
comment on function outbox.is_role_of(name, text) is 'whether a role reads and manages the webhooks of a tenant: it was granted, or it operates';

alter table outbox.webhooks enable row level security;
alter table outbox.webhook_deliveries enable row level security;
alter table outbox.webhook_attempts enable row level security;
create policy tenant on outbox.webhooks for select using (outbox.is_role_of(current_user, tenant));
create policy tenant on outbox.webhook_deliveries for select using (outbox.is_role_of(current_user, tenant));
create policy tenant on outbox.webhook_attempts for select using (outbox.is_role_of(current_user, tenant));

create function outbox.create_webhook(
    tenant      text,
    url         text,
    topics      text[] default null,
    secret      text default null,
    description text default null,
    stream      text default 'outbox'
) returns text
    language c volatile as 'MODULE_PATHNAME', 'create_webhook_wrapper';
comment on function outbox.create_webhook(text, text, text[], text, text, text) is
    'registers an endpoint of a tenant, which gets the tenant''s events from now on, and returns its id. secret is of the form whsec_<base64>; if '
    'none is given, one is made, which outbox.rotate_webhook_secret can replace. Errors: 22023 for a URL, pattern or secret, 42704 for an unknown stream, 42501';

create function outbox.alter_webhook(id text, url text default null, topics text[] default null, description text default null) returns void
    language c volatile as 'MODULE_PATHNAME', 'alter_webhook_wrapper';
comment on function outbox.alter_webhook(text, text, text[], text) is
    'changes a webhook; what is null stays, an empty topics is taken away. Errors: 22023, 42704 if there is none, 42501';

create function outbox.disable_webhook(id text) returns void
    language c volatile as 'MODULE_PATHNAME', 'disable_webhook_wrapper';
comment on function outbox.disable_webhook(text) is
    'stops deliveries to an endpoint: what is pending stays so, and events from now on are not for it. Errors: 42704, 42501';

create function outbox.enable_webhook(id text) returns void
    language c volatile as 'MODULE_PATHNAME', 'enable_webhook_wrapper';
comment on function outbox.enable_webhook(text) is 'takes deliveries up again, also after failures have disabled it. Errors: 42704, 42501';

create function outbox.delete_webhook(id text) returns void
    language c volatile as 'MODULE_PATHNAME', 'delete_webhook_wrapper';
comment on function outbox.delete_webhook(text) is
    'removes a webhook: no attempt begins any more; the dispatcher removes its deliveries, in small steps. Errors: 42704, 42501';

create function outbox.rotate_webhook_secret(id text, secret text default null, overlap interval default '24 hours') returns text
    language c volatile as 'MODULE_PATHNAME', 'rotate_webhook_secret_wrapper';
comment on function outbox.rotate_webhook_secret(text, text, interval) is
    'a new secret, given or made, which is returned; requests are signed with the old ones as well for as long as overlap says. Errors: 22023, 42704, 42501';

create function outbox.redeliver_webhook(delivery bigint) returns void
    language c volatile as 'MODULE_PATHNAME', 'redeliver_webhook_wrapper';
comment on function outbox.redeliver_webhook(bigint) is 'delivers once more, whatever became of it, with a new round of attempts. Errors: 42704, 42501';

create function outbox.redeliver_webhook(webhook text, since timestamptz) returns bigint
    language c volatile as 'MODULE_PATHNAME', 'redeliver_webhook_since_wrapper';
comment on function outbox.redeliver_webhook(text, timestamptz) is 'delivers all dead deliveries of an endpoint once more that were made since then; returns how many. Errors: 42704, 42501';

create function outbox.test_webhook(id text) returns table (status int, duration_ms int, error text)
    language c volatile rows 1 as 'MODULE_PATHNAME', 'test_webhook_wrapper';
comment on function outbox.test_webhook(text) is
    'sends an event of type outbox.test now, also if the webhook is disabled, and returns what came of it; error is null if it went through. Errors: 42704, 42501';

-- What a role of a tenant gets; the rows and arguments are checked against its tenants.
create function outbox.tenant_parts() returns setof text
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
begin
    return next 'usage on schema outbox';
    return query select 'select on table outbox.' || t from unnest(array['webhooks', 'webhook_deliveries', 'webhook_attempts']) t;
    return query select 'execute on function outbox.' || f from unnest(array[
        'is_role_of(name, text)', 'create_webhook(text, text, text[], text, text, text)', 'alter_webhook(text, text, text[], text)',
        'disable_webhook(text)', 'enable_webhook(text)', 'delete_webhook(text)', 'rotate_webhook_secret(text, text, interval)',
        'redeliver_webhook(bigint)', 'redeliver_webhook(text, timestamptz)', 'test_webhook(text)']) f;
end $$;
