-- Captured tables change their shape: what can go on does, and what cannot is refused then, never with the next write.

create function outbox.follow_ddl() returns event_trigger
    language c as 'MODULE_PATHNAME', 'follow_ddl_wrapper';
comment on function outbox.follow_ddl() is 'event trigger: looks at what has become of captured tables';
create function outbox.follow_drop() returns event_trigger
    language c as 'MODULE_PATHNAME', 'follow_drop_wrapper';
comment on function outbox.follow_drop() is 'event trigger: looks at what captured tables have lost';

-- Columns without which a capture cannot go on.
create function outbox.needed_columns(c outbox.captures) returns text[]
    language sql immutable set search_path = pg_catalog, outbox, pg_temp
    return array_remove(c.key || c.tenant_column || array(select m.value from jsonb_each_text(c.mapping) m), null);

-- A column of a captured table has another name now: the one that is not there any more was it.
create function outbox.rename_column(c outbox.captures, new_name text) returns outbox.captures
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    gone text[] := array(
        select distinct n from unnest(c.columns || c.redact || outbox.needed_columns(c)) n where n <> all (outbox.columns_of(c.relation)));
begin
    if new_name is not null and cardinality(gone) = 1 then
        c.columns := array_replace(c.columns, gone[1], new_name);
        c.redact := array_replace(c.redact, gone[1], new_name);
        c.key := array_replace(c.key, gone[1], new_name);
        c.tenant_column := case when c.tenant_column = gone[1] then new_name else c.tenant_column end;
        c.mapping := (select jsonb_object_agg(m.key, case when m.value = gone[1] then new_name else m.value end) from jsonb_each_text(c.mapping) m);
    end if;
    -- What was to be kept out has gone by itself.
    c.redact := nullif(array(select n from unnest(c.redact) n where n = any (outbox.columns_of(c.relation))), '{}');
    return c;
end $$;

create function outbox.settle_capture(c outbox.captures, new_name text default null) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    gone text;
    problem text;
begin
    perform outbox.check_alone(c.relation);
    c := outbox.rename_column(c, new_name);
    select quote_ident(n) into gone from unnest(c.columns || outbox.needed_columns(c)) n
     where n <> all (outbox.columns_of(c.relation)) limit 1;
    if found then
        raise exception 'column % of table % is captured', gone, c.relation
            using errcode = '2BP01', detail = 'The capture of the table names it.',
                  hint = 'First change the capture with outbox.alter_capture, or end it with outbox.uncapture.';
    end if;
    update outbox.captures o
       set columns = c.columns, redact = c.redact, key = c.key, tenant_column = c.tenant_column, mapping = c.mapping
     where o.relation = c.relation
       and (o.columns, o.redact, o.key, o.tenant_column, o.mapping) is distinct from (c.columns, c.redact, c.key, c.tenant_column, c.mapping);
    if new_name is not null then
        update outbox.backfills b
           set key = array(select case when n = any (outbox.columns_of(b.relation)) then n else new_name end
                             from unnest(b.key) with ordinality k (n, place) order by place)
         where b.relation = c.relation and b.state = 'running' and not b.key <@ outbox.columns_of(b.relation);
    end if;
    perform outbox.arrange_triggers(c);
    begin
        perform outbox.try_capture(c.relation);
    exception when others then
        get stacked diagnostics problem = message_text;
        raise exception 'the capture of table % would not work any more', c.relation
            using errcode = '2BP01', detail = problem,
                  hint = 'First change the capture with outbox.alter_capture, or end it with outbox.uncapture.';
    end;
end $$;

-- Where word of changed tables goes.
create table outbox.ddl_captures (
    stream text primary key
);
comment on table outbox.ddl_captures is 'streams that get an event when a captured table is created, altered or dropped: see outbox.capture_ddl';

create function outbox.capture_ddl(enabled boolean default true, stream text default 'outbox') returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
begin
    if (outbox.stream_named(stream)).shape <> 'events' then
        raise exception 'stream "%" takes no events', stream using errcode = '22023', detail = 'It holds records of a form of their own.';
    elsif enabled then
        insert into outbox.ddl_captures values (stream) on conflict do nothing;
    else
        delete from outbox.ddl_captures d where d.stream = capture_ddl.stream;
    end if;
end $$;
comment on function outbox.capture_ddl(boolean, text) is
    'from now on an event of topic <prefix>.<schema>.<table>.<kind> tells of each CREATE, ALTER and DROP of captured tables and their partitions; '
    'its payload is schema, table and kind, never the statement. Errors: 42704 for an unknown stream';

create function outbox.tell_ddl(schema text, "table" text, kind text) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    s outbox.streams;
begin
    for s in select t.* from outbox.ddl_captures d join outbox.streams t on t.name = d.stream loop
        execute format('insert into %s (topic, source, payload) values ($1, $2, $3)', s.relation)
          using concat_ws('.', coalesce(current_setting('outbox.topic_prefix', true), 'outbox'), schema, "table", kind), format('%I.%I', schema, "table"),
                jsonb_build_object('schema', schema, 'table', "table", 'kind', kind);
    end loop;
end $$;

create function outbox.settle_after_ddl() returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    c outbox.captures;
    stray regclass;
    renamed text;
begin
    for c in
        select o.* from outbox.captures o join pg_class r on r.oid = o.relation
         where o.condition is not null
            or exists (select from pg_event_trigger_ddl_commands() d
                        where d.classid = 'pg_class'::regclass and o.relation in (select outbox.lineage_of(d.objid))
                           or d.classid = 'pg_namespace'::regclass and d.objid = r.relnamespace)
    loop
        select a.attname into renamed from pg_event_trigger_ddl_commands() d
          join pg_attribute a on a.attrelid = d.objid and a.attnum = d.objsubid
         where d.classid = 'pg_class'::regclass and d.objid = c.relation and d.objsubid > 0;
        perform outbox.settle_capture(c, renamed);
    end loop;
    perform outbox.tell_ddl(d.schema_name, r.relname, lower(split_part(d.command_tag, ' ', 1)))
       from (select distinct x.objid, x.schema_name, x.command_tag from pg_event_trigger_ddl_commands() x where x.classid = 'pg_class'::regclass) d
       join pg_class r on r.oid = d.objid
      where r.relkind in ('r', 'p') and exists (select from outbox.captures o where o.relation in (select outbox.lineage_of(d.objid)));
    -- Code that comes to a stream.
    perform outbox.check_code_of_stream(s.relation) from outbox.streams s
      where exists (select from pg_event_trigger_ddl_commands() d
                      left join pg_index i on d.classid = 'pg_class'::regclass and i.indexrelid = d.objid
                      left join pg_trigger t on d.classid = 'pg_trigger'::regclass and t.oid = d.objid
                      left join pg_rewrite r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid
                     where d.classid = 'pg_proc'::regclass or s.relation = coalesce(i.indrelid, t.tgrelid, r.ev_class, d.objid));
    -- What has left a captured table is captured no more.
    for stray in
        select distinct t.tgrelid from pg_trigger t
         where t.tgfoid = 'outbox.capture_begin'::regproc
           and not exists (select from outbox.captures o where o.relation in (select outbox.lineage_of(t.tgrelid)))
    loop
        perform outbox.drop_triggers(stray);
    end loop;
end $$;

create function outbox.settle_after_drop() returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    c outbox.captures;
begin
    -- Of a table that is gone, only its triggers still say that it was captured.
    perform outbox.tell_ddl(d.schema_name, d.object_name, 'drop')
       from pg_event_trigger_dropped_objects() d
      where d.object_type = 'table' and d.address_names || 'outbox_capture_begin'::text in (
            select t.address_names from pg_event_trigger_dropped_objects() t where t.object_type = 'trigger');
    delete from outbox.backfills b where b.relation in (
        select d.objid from pg_event_trigger_dropped_objects() d where d.classid = 'pg_class'::regclass and d.objsubid = 0);
    delete from outbox.captures o where o.relation in (
        select d.objid from pg_event_trigger_dropped_objects() d where d.classid = 'pg_class'::regclass and d.objsubid = 0);
    for c in
        select o.* from outbox.captures o
         where o.condition is not null and exists (select from pg_event_trigger_dropped_objects() d where not d.is_temporary)
            or exists (select from pg_event_trigger_dropped_objects() d
                        where d.classid = 'pg_class'::regclass and d.objsubid > 0 and d.objid = o.relation)
    loop
        perform outbox.settle_capture(c);
    end loop;
end $$;

-- Functions that sinks and the recorder of usage name may have other names now. It is the number that is followed.
create function outbox.follow_functions() returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    update outbox.sinks s
       set transform = coalesce(outbox.function_name(s.transform_oid), s.transform),
           function = coalesce(outbox.function_name(s.function_oid), s.function)
     where s.home = outbox.home()
       and (s.transform <> outbox.function_name(s.transform_oid) or s.function <> outbox.function_name(s.function_oid));
    update outbox.usage_recorder r set function = outbox.function_name(r.function_oid)
     where r.home = outbox.home() and r.function <> outbox.function_name(r.function_oid);
end $$;

-- A sequence's other options make no difference to a stream.
create function outbox.keep_numbers() returns event_trigger
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    s outbox.streams;
    is_behind boolean;
begin
    for s in select t.* from outbox.streams t join pg_event_trigger_ddl_commands() d on d.classid = 'pg_class'::regclass and d.objid = t.sequence loop
        execute format('select case when q.is_called then q.last_value + 1 else q.last_value end <= (select max(e.seq) from %s e) from %s q', s.relation, s.sequence) into is_behind;
        if is_behind then
            raise exception 'the numbers of stream "%" do not begin again', s.name
                using errcode = '22023', detail = 'Sinks have passed the numbers that its sequence would give to new events.',
                      hint = format('Numbers begin again with: truncate %s restart identity', s.relation);
        end if;
    end loop;
end $$;
create event trigger outbox_numbers on ddl_command_end when tag in ('ALTER SEQUENCE') execute function outbox.keep_numbers();

create event trigger outbox_ddl on ddl_command_end
    when tag in ('CREATE TABLE', 'CREATE TABLE AS', 'CREATE FOREIGN TABLE', 'ALTER TABLE', 'ALTER FOREIGN TABLE', 'ALTER SCHEMA', 'ALTER TYPE', 'ALTER DOMAIN',
                 'ALTER FUNCTION', 'ALTER EXTENSION', 'ALTER PROCEDURE', 'ALTER ROUTINE', 'ALTER AGGREGATE', 'ALTER OPERATOR', 'ALTER VIEW', 'REVOKE',
                 'CREATE INDEX', 'CREATE TRIGGER', 'CREATE RULE')
    execute function outbox.follow_ddl();
create event trigger outbox_drop on sql_drop execute function outbox.follow_drop();
