-- Backfill: rows that were there before become events, chunk by chunk, ordered against what changes meanwhile.

create sequence outbox.backfills_id_seq;
create table outbox.backfills (
    id         bigint primary key default outbox.next_number('outbox.backfills_id_seq'),
    relation   regclass not null,
    sink       text,
    for_sink   int check ((for_sink is null) = (sink is null)),
    condition  text,
    chunk_size int not null check (chunk_size between 1 and 100000),
    owner      regrole not null,
    key        text[] not null,
    position   text[],
    state      text not null default 'running' check (state in ('running', 'done', 'stopped')),
    chunks     bigint not null default 0,
    rows       bigint not null default 0,
    error      text,
    started_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);
alter sequence outbox.backfills_id_seq owned by outbox.backfills.id;
comment on table outbox.backfills is 'a row per outbox.backfill, with how far it has come: the dispatcher carries on from here, also after a crash';
comment on column outbox.backfills.sink is 'the sink that gets the events; null for all of the stream. for_sink is its number in outbox.sinks';
comment on column outbox.backfills.key is 'the primary key, in whose order rows are taken';
comment on column outbox.backfills.position is 'the key of the last row that was taken';
comment on column outbox.backfills.error is 'why the last chunk was not taken; while the state is running it is tried again';
create trigger outbox_change after insert or update of state on outbox.backfills for each statement execute function outbox.change();

create view outbox.backfill_status as
    select b.id, b.relation, b.sink, b.state, b.chunks, b.rows, greatest(r.reltuples, 0)::bigint as rows_estimated, b.started_at, b.updated_at, b.error
      from outbox.backfills b left join pg_catalog.pg_class r on r.oid = b.relation;
comment on view outbox.backfill_status is 'how far backfills have come; rows_estimated is of the whole table, partitions not counted';

create function outbox.backfill_chunk(id bigint) returns text
    language c volatile strict as 'MODULE_PATHNAME', 'backfill_chunk_wrapper';
comment on function outbox.backfill_chunk(bigint) is
    'takes the next chunk of a backfill now: says taken, done, or waiting while the stream''s sinks are behind';

-- Ends those that cannot go on: whose table or sink is gone, or has another stream. What somebody else holds is left for later.
create function outbox.end_backfills() returns void
    language sql set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        update outbox.backfills b set state = 'stopped', error = p.problem, updated_at = now()
          from (select r.id, case
                    when c.relation is null then 'its table is not captured any more'
                    when r.for_sink is not null and s.id is null then format('sink "%s" was dropped', r.sink)
                    when s.stream <> c.stream then format('sink "%s" does not read stream "%s", into which the table is captured now', s.id, c.stream)
                    end as problem
                  from outbox.backfills r
                  left join outbox.captures c on c.relation = r.relation
                  left join outbox.sinks s on s.number = r.for_sink
                 where r.state = 'running' for no key update of r skip locked) p
         where p.id = b.id and p.problem is not null and b.state = 'running';
    end;

-- What a type is based on, as a cast names it: to cast to a domain would run its checks, which are its owner's code.
create function outbox.base_type(type oid) returns text
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    return (with recursive bases (oid, base, depth) as (
                select t.oid, t.typbasetype, 0 from pg_type t where t.oid = type
                union all
                select t.oid, t.typbasetype, b.depth + 1 from bases b join pg_type t on t.oid = b.base
            )
            select format_type(b.oid, -1) from bases b order by b.depth desc limit 1);

create function outbox.start_backfill(caller oid, relation regclass, sink text, condition text, chunk_size int) returns bigint
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    key text[] := outbox.primary_key(relation);
    c outbox.captures;
    target outbox.sinks;
    made bigint;
begin
    perform outbox.check_may_capture(caller, relation);
    select * into c from outbox.captures o where o.relation = start_backfill.relation and o.mapping is null;
    if not found then
        perform outbox.no_such_capture(relation);
    end if;
    if exists (select from pg_class r join pg_roles a on a.oid = caller
                where r.oid = relation and r.relrowsecurity and not a.rolsuper and not a.rolbypassrls
                  and (r.relforcerowsecurity or not pg_has_role(caller, r.relowner, 'usage'))) then
        raise exception 'permission denied to backfill table %', relation
            using errcode = '42501', detail = 'Its row security may hide rows from you, and a backfill reads all of them.',
                  hint = 'The table''s owner, or a role with BYPASSRLS, may do it.';
    end if;
    if sink is not null then
        select * into target from outbox.sinks s where s.id = start_backfill.sink;
        if not found then
            perform outbox.no_such_sink(sink);
        elsif target.stream <> c.stream then
            raise exception 'sink "%" does not read the stream of table %', sink, relation
                using errcode = '22023', detail = format('It reads "%s", and the table is captured into "%s".', target.stream, c.stream);
        end if;
    end if;
    if chunk_size is null or chunk_size not between 1 and 100000 then
        raise exception 'chunk_size must be between 1 and 100000' using errcode = '22023', detail = format('It is %s.', coalesce(chunk_size::text, 'null'));
    elsif key = '{}' then
        raise exception 'table % cannot be backfilled', relation using errcode = '22023', detail = 'It has no primary key, in whose order rows are taken.';
    elsif exists (select from pg_attribute a join pg_type t on t.oid = a.atttypid left join pg_type b on b.oid = t.typbasetype
                   where a.attrelid = relation and a.attname = any (key) and coalesce(b.oid, t.oid) >= 16384 and coalesce(b.typtype, t.typtype) <> 'e') then
        raise exception 'table % cannot be backfilled', relation using errcode = '22023', detail = 'The type of its key is not built in.';
    elsif exists (select from outbox.backfills b where b.relation = start_backfill.relation and b.state = 'running') then
        raise exception 'table % is being backfilled already', relation using errcode = '42710', hint = 'It can be stopped: select outbox.stop_backfill(id).';
    end if;
    insert into outbox.backfills (relation, sink, for_sink, condition, chunk_size, owner, key)
    values (relation, sink, target.number, nullif(condition, ''), chunk_size, caller, key) returning id into made;
    return made;
end $$;

create function outbox.backfill(relation regclass, sink text default null, condition text default null, chunk_size int default 1000) returns bigint
    language c volatile as 'MODULE_PATHNAME', 'backfill_wrapper';
comment on function outbox.backfill(regclass, text, text, int) is
    'has the dispatcher write the rows of a captured table as events of topic <prefix>.<schema>.<table>.snapshot, chunk_size at a time, to '
    'one sink or to all that read the stream; condition is one over new. Returns the id in outbox.backfill_status. Errors: 42704 if the table is '
    'not captured or there is no such sink, 22023 for a bad argument or a sink of another stream, 42710 if one runs';

create function outbox.stop_backfill(id bigint) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
begin
    update outbox.backfills b set state = 'stopped', updated_at = now() where b.id = stop_backfill.id and b.state = 'running';
    if not found then
        raise exception 'backfill % does not run', coalesce(id::text, 'null') using errcode = '42704', hint = 'Those that run are in outbox.backfill_status.';
    end if;
end $$;
comment on function outbox.stop_backfill(bigint) is 'ends a backfill where it is. Error 42704 if it does not run';
