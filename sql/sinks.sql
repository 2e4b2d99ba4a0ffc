-- Sinks: what is delivered where, and how each is doing.

-- A function that a row names is kept twice: by its number, which a rename does not change and nobody else's function ever gets, and by its
-- name, which alone means something after a dump is restored or pg_upgrade has run: numbers of functions are other ones there, and columns
-- of type regprocedure keep pg_upgrade from running at all. Which of them counts, home tells: where that is this very database, the number
-- does, and the name follows it (outbox.follow_functions). Anywhere else the name is looked up once (src/store/functions.rs).
create function outbox.home() returns text
    language sql stable set search_path = pg_catalog, pg_temp
    return (select c.system_identifier || '.' || d.oid from pg_control_system() c, pg_database d where d.datname = current_database());
comment on function outbox.home() is 'this database, as no other is called: <system identifier of the cluster>.<oid>';

create function outbox.function_name(function oid) returns text
    language sql stable set search_path = pg_catalog, pg_temp
    return (pg_identify_object('pg_proc'::regclass, function, 0)).identity;
comment on function outbox.function_name(oid) is 'a function as regprocedure reads it under any search_path; null if it does not exist';

create function outbox.function_of(name text, number oid, home text) returns oid
    language sql stable set search_path = pg_catalog, pg_temp
    return case when name is null then null when home = outbox.home() then number else coalesce(to_regprocedure(name)::oid, '0') end;
comment on function outbox.function_of(text, oid, text) is 'the function that a row names, in this database; 0 if it does not exist';

create sequence outbox.sinks_number_seq;
create table outbox.sinks (
    id         text primary key check (id ~ '^[A-Za-z0-9._@-]{1,100}$'),
    kind       text not null,
    config     jsonb not null default '{}' check (jsonb_typeof(config) = 'object'),
    stream     text not null,
    start      text not null,
    topics     text[],
    tenant     text,
    filter     text,
    transform  text,
    function   text,
    batch_size int check (batch_size between 1 and 100000),
    "grouping" text not null check ("grouping" in ('event', 'transaction')),
    isolation  text not null check (isolation in ('batch', 'key')),
    enabled    boolean not null default true,
    owner      regrole not null,
    number     int not null default outbox.next_number('outbox.sinks_number_seq') unique,
    life       uuid not null default gen_random_uuid(),
    version    bigint not null default 1,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    transform_oid oid,
    function_oid  oid,
    home          text not null
);
alter sequence outbox.sinks_number_seq owned by outbox.sinks.number;
comment on table outbox.sinks is 'a row per sink; made and changed by outbox.create_sink, outbox.alter_sink and so on';
comment on column outbox.sinks.owner is 'the role that supplied the function, filter and transform: they run as this role';
comment on column outbox.sinks.function is 'kind function: config.function as it was resolved when it was set, with its schema and argument types';
comment on column outbox.sinks.home is 'the database in which transform_oid and function_oid are those of transform and function: outbox.home()';
comment on column outbox.sinks.number is 'the key of the sink''s lease, an advisory lock';
comment on column outbox.sinks.life is 'by which destinations that keep a checkpoint of their own know the sink: stays in a dump, and is new when it is made anew';
comment on column outbox.sinks.version is 'grows with each change: a running dispatcher reloads the sink with its next pass';

create trigger outbox_change after insert or update or delete on outbox.sinks for each statement execute function outbox.change();

-- How a sink that is not simply flowing is doing. Written on failures and on recovery, never on the way of a good delivery.
create table outbox.sink_health (
    sink            text primary key,
    state           text not null,
    attempts        int not null default 0,
    last_error      text,
    next_attempt_at timestamptz,
    checkpoint      jsonb,
    updated_at      timestamptz not null default clock_timestamp()
) with (fillfactor = 40);
comment on table outbox.sink_health is 'state of sinks that fail: what outbox.status shows, and what a new holder of the lease carries on with';
comment on column outbox.sink_health.checkpoint is 'the dispatch engine''s memory of attempts and back-off';

create table outbox.secrets (
    name       text primary key check (name ~ '^[A-Za-z0-9._@-]{1,100}$'),
    "values"   text[] not null,
    source     text check (source in ('file', 'env')),
    location   text check ((location is null) = (source is null)),
    -- The transaction that set it: a secret that is forgotten and set again is another one.
    version    bigint not null default pg_current_xact_id()::text::bigint,
    updated_at timestamptz not null default now()
);
comment on table outbox.secrets is 'values by which sinks sign and log in; readable by superusers alone, and left out of dumps';
comment on column outbox.secrets.source is 'where the values are instead: file or env, the server''s environment; location is the path or the variable';
comment on column outbox.secrets.version is 'differs after each change: a running dispatcher reads the values again before its next delivery';

create trigger outbox_change after insert or update or delete on outbox.secrets for each statement execute function outbox.change();

create function outbox.create_sink(
    id         text,
    kind       text,
    config     jsonb default '{}',
    stream     text default 'outbox',
    start      text default 'origin',
    topics     text[] default null,
    tenant     text default null,
    filter     text default null,
    transform  regprocedure default null,
    batch_size int default null,
    "grouping" text default 'event',
    isolation  text default 'batch',
    enabled    boolean default true
) returns void
    language c volatile as 'MODULE_PATHNAME', 'create_sink_wrapper';
comment on function outbox.create_sink(text, text, jsonb, text, text, text[], text, text, regprocedure, int, text, text, boolean) is
    'makes a sink; everything is checked now. Errors: 22023 for a bad argument, 42710 if the id is taken, 42704 for an unknown stream or function';

create function outbox.alter_sink(
    id         text,
    config     jsonb default null,
    topics     text[] default null,
    tenant     text default null,
    filter     text default null,
    transform  regprocedure default null,
    batch_size int default null,
    "grouping" text default null,
    isolation  text default null,
    enabled    boolean default null
) returns void
    language c volatile as 'MODULE_PATHNAME', 'alter_sink_wrapper';
comment on function outbox.alter_sink(text, jsonb, text[], text, text, regprocedure, int, text, text, boolean) is
    'changes a sink; what is null stays, an empty topics, tenant or filter is taken away. Takes effect with the next pass, but for grouping: '
    'what was committed when the sink last began to read on is delivered to its end as it was begun. Errors as create_sink';

-- Raises the error that every function on a sink raises when there is none.
create function outbox.no_such_sink(id text) returns void
    language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    raise exception 'sink % does not exist', coalesce('"' || id || '"', 'null')
        using errcode = '42704', hint = 'Sinks are made by outbox.create_sink and listed in outbox.status.';
end $$;

create function outbox.set_sink_enabled(id text, enabled boolean) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    update outbox.sinks s set enabled = set_sink_enabled.enabled, version = s.version + 1, updated_at = now()
     where s.id = set_sink_enabled.id;
    if not found then
        perform outbox.no_such_sink(id);
    end if;
end $$;

create function outbox.pause_sink(id text) returns void
    language sql security definer set search_path = pg_catalog, outbox, pg_temp
    begin atomic select outbox.set_sink_enabled(pause_sink.id, false); end;
comment on function outbox.pause_sink(text) is 'stops deliveries to a sink; its cursor stays and holds retention back. Error 42704 if there is none';

create function outbox.resume_sink(id text) returns void
    language sql security definer set search_path = pg_catalog, outbox, pg_temp
    begin atomic select outbox.set_sink_enabled(resume_sink.id, true); end;
comment on function outbox.resume_sink(text) is 'goes on where pause_sink stopped, and tries a failing sink again now. Error 42704 if there is none';

create function outbox.drop_sink(id text) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
begin
    delete from outbox.sinks s where s.id = drop_sink.id;
    if not found then
        perform outbox.no_such_sink(id);
    end if;
    delete from outbox.cursors c where c.name = 'sink:' || drop_sink.id;
    delete from outbox.sink_health h where h.sink = drop_sink.id;
    delete from outbox.parked p where p.sink = drop_sink.id;
    delete from outbox.sink_grants g where g.sink = drop_sink.id;
    perform outbox.end_backfills();
end $$;
comment on function outbox.drop_sink(text) is
    'gives a sink up, with its cursor, so that retention no longer waits for it; its dead letters stay. Error 42704 if there is none';

create function outbox.set_secret(name text, "values" text[]) returns void
    language c volatile as 'MODULE_PATHNAME', 'set_secret_wrapper';
comment on function outbox.set_secret(text, text[]) is
    'sets the active values of a named secret; several during a rotation, an empty array for none, null to forget it. Takes effect '
    'with the next delivery. Error 22023 for a bad name or an empty value';

create function outbox.set_secret_source(name text, source text, location text) returns void
    language c volatile as 'MODULE_PATHNAME', 'set_secret_source_wrapper';
comment on function outbox.set_secret_source(text, text, text) is
    'has the values of a named secret read where they are used: source file, location an absolute path, a value a line; or source env, '
    'location a variable of the server''s environment. A changed file takes effect with the next delivery. Errors: 22023 for an argument, '
    '42501 if the caller may not have the server read it';

create function outbox.poll(sink text, max_events int default 100)
    returns table (
        txid xid8, seq bigint, id text, topic text, source text, subject text, tenant text, "time" timestamptz,
        payload jsonb, headers jsonb, "position" text)
    language c volatile rows 100 as 'MODULE_PATHNAME', 'poll_wrapper';
comment on function outbox.poll(text, int) is
    'the next batch of a pull sink, in commit order; the same one again until outbox.ack. While one session holds a batch, another '
    'one gets no rows. Errors: 42704 for an unknown sink, 22023 if it is of another kind, 42501 without the privilege read';

create function outbox.ack(sink text, "position" text default null) returns boolean
    language c volatile as 'MODULE_PATHNAME', 'ack_wrapper';
comment on function outbox.ack(text, text) is
    'acknowledges the batch that poll handed out, up to and including a position, or all of it; true when the cursor moved. '
    'Errors as poll, and 22023 for a position that is not of the batch, or that this database has not given out';
