-- Usage: what was used of something within a window of time, and the function that records it where it is billed.

create table outbox.usage_windows (
    allocation      text not null check (allocation <> ''),
    window_start    timestamptz not null check (isfinite(window_start)),
    window_end      timestamptz not null check (window_end > window_start),
    meter           text not null check (meter <> ''),
    quantity        numeric not null,
    tenant          text,
    idempotency_key text primary key,
    outcome         text check (outcome in ('recorded', 'duplicate', 'reattributed', 'dead-lettered')),
    created_at      timestamptz not null default clock_timestamp(),
    recorded_at     timestamptz
) with (fillfactor = 70);
comment on table outbox.usage_windows is 'what an allocation used of a meter in a window; written by outbox.record_usage';
comment on column outbox.usage_windows.window_end is 'the window is closed from then on: it can be recorded, and takes no more';
comment on column outbox.usage_windows.idempotency_key is 'cmp:<allocation>:<window start in ms>; the same whenever the window is handed over';
comment on column outbox.usage_windows.outcome is 'what the recorder said of it; null until then';
create index usage_windows_unrecorded on outbox.usage_windows (window_end, idempotency_key) where outcome is null;

create table outbox.usage_dead_letters (
    idempotency_key text primary key,
    "window"        jsonb not null,
    code            text,
    message         text not null,
    dead_at         timestamptz not null default clock_timestamp()
);
comment on table outbox.usage_dead_letters is 'windows that the recorder refused: by an error that each of them raised alone, or in so many words';
comment on column outbox.usage_dead_letters.code is 'the SQLSTATE that the recorder raised; null if it said dead-lettered';

-- At most one: two would bill everything twice.
create table outbox.usage_recorder (
    single     boolean primary key default true check (single),
    function   text not null,
    owner      regrole not null,
    last_error text,
    updated_at timestamptz not null default clock_timestamp(),
    -- As in outbox.sinks.
    function_oid oid not null,
    home         text not null
);
comment on table outbox.usage_recorder is 'the function that records windows, and the role that supplied it: it runs with the rights of that role';
comment on column outbox.usage_recorder.last_error is 'why the last pass left windows unrecorded; they are handed over again, with the same keys';
create trigger outbox_change after insert or update of function_oid or delete on outbox.usage_recorder for each statement execute function outbox.change();

create type outbox.usage_window as (
    idempotency_key text,
    allocation      text,
    window_start    timestamptz,
    window_end      timestamptz,
    meter           text,
    quantity        numeric,
    tenant          text
);
comment on type outbox.usage_window is 'a closed window, as the recorder gets it';

create function outbox.record_usage(
    allocation    text,
    window_start  timestamptz,
    meter         text,
    quantity      numeric,
    tenant        text default null,
    window_length interval default '1 hour'
) returns text
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    key text;
    held outbox.usage_windows;
    wanted_tenant text := coalesce(record_usage.tenant, nullif(current_setting('outbox.tenant', true), ''));
begin
    if coalesce(allocation, '') = '' or coalesce(meter, '') = '' or window_start is null or not isfinite(window_start)
        or quantity is null or quantity in ('NaN', 'Infinity', '-Infinity') then
        raise exception 'usage needs an allocation, a window''s start, a meter and a finite quantity'
            using errcode = '22023', hint = 'For example: select outbox.record_usage(''vm-7'', date_trunc(''hour'', now()), ''vcpu_seconds'', 3600)';
    elsif window_length is null or window_start + window_length <= window_start then
        raise exception 'a window of usage must end after its start' using errcode = '22023', detail = format('Its length is %s.', coalesce(window_length::text, 'null'));
    end if;
    key := format('cmp:%s:%s', allocation, floor(extract(epoch from window_start) * 1000)::bigint);
    insert into outbox.usage_windows as w (allocation, window_start, window_end, meter, quantity, tenant, idempotency_key)
    values (allocation, window_start, window_start + window_length, meter, quantity, wanted_tenant, key)
        on conflict on constraint usage_windows_pkey do update set quantity = w.quantity + excluded.quantity
         where w.outcome is null and w.meter = excluded.meter and w.tenant is not distinct from excluded.tenant
           and (w.window_start, w.window_end) = (excluded.window_start, excluded.window_end)
    returning * into held;
    if found then
        return key;
    end if;
    select * into held from outbox.usage_windows w where w.idempotency_key = key;
    if held.outcome is not null then
        raise exception 'usage window % is recorded already', key
            using errcode = '55000', detail = format('Its outcome is %s.', held.outcome), hint = 'Late usage goes into a later window.';
    end if;
    if (held.window_start, held.window_end) <> (window_start, window_start + window_length) then
        raise exception 'usage window % has another start or length', key
            using errcode = '22023', detail = format('It goes from %s to %s.', held.window_start, held.window_end);
    end if;
    raise exception 'usage window % is of another meter or tenant', key
        using errcode = '22023', detail = 'An allocation has one meter and one tenant in a window.';
end $$;
comment on function outbox.record_usage(text, timestamptz, text, numeric, text, interval) is
    'adds to what an allocation used in a window, in the calling transaction, and returns the window''s idempotency key. tenant defaults to the '
    'setting outbox.tenant. Errors: 22023 for a bad argument, or another meter, tenant, start within the millisecond or length than the window''s; 55000 if the window is recorded already';

create function outbox.set_usage_recorder(function regprocedure) returns void
    language c volatile as 'MODULE_PATHNAME', 'set_usage_recorder_wrapper';
comment on function outbox.set_usage_recorder(regprocedure) is
    'registers the function that records closed windows, or none: it takes outbox.usage_window[] and returns nothing, or rows '
    '(idempotency_key text, outcome text) with recorded, duplicate, reattributed or dead-lettered, and perhaps error text. A batch that fails is bisected: '
    'a window that fails alone is dead-lettered for an error of class 22 or 23, or of any other that does not pass by itself if another window goes through; '
    'else it stays unrecorded until the next pass. Errors: 22023 if the function does not fit, 42704 if there is none';

create function outbox.tick_usage() returns table (recorded bigint, dead_lettered bigint, error text)
    language c volatile rows 1 as 'MODULE_PATHNAME', 'tick_usage_wrapper';
comment on function outbox.tick_usage() is 'hands closed, unrecorded windows to the recorder now: up to 1,000, in batches of up to 200';

create function outbox.redeliver_usage(idempotency_key text default null) returns bigint
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    queued bigint;
begin
    with letters as (
        delete from outbox.usage_dead_letters d
         where redeliver_usage.idempotency_key is null or d.idempotency_key = redeliver_usage.idempotency_key
        returning d.idempotency_key
    )
    update outbox.usage_windows w set outcome = null, recorded_at = null
      from letters l where w.idempotency_key = l.idempotency_key and w.outcome = 'dead-lettered';
    get diagnostics queued = row_count;
    if queued = 0 and redeliver_usage.idempotency_key is not null then
        raise exception 'no usage window % is dead-lettered', redeliver_usage.idempotency_key
            using errcode = '42704', hint = 'They are listed in outbox.usage_dead_letters.';
    end if;
    return queued;
end $$;
comment on function outbox.redeliver_usage(text) is
    'hands a dead-lettered window, or all of them, to the recorder once more, with the next pass and the same key. Returns how many. '
    'Error 42704 if there is none with that key';
