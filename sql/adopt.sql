-- A table that an application keeps as its outbox already becomes a stream: what is inserted there is written as an event, too.

-- Columns of an event, and the names under which other outboxes have them, the most usual first.
create function outbox.usual_columns() returns table (event_column text, names text[])
    language sql immutable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        select * from (values
            ('id', '{id,event_id,uuid}'::text[]),
            ('topic', '{topic,type,event_type,eventtype,op,operation,name}'),
            ('source', '{source,aggregatetype,aggregate_type,aggregate,entity_type,entity}'),
            ('subject', '{subject,aggregateid,aggregate_id,entity_id,key}'),
            ('tenant', '{tenant,tenant_id,tenantid}'),
            ('time', '{time,created_at,createdat,occurred_at,timestamp,ts}'),
            ('payload', '{payload,data,body}'),
            ('headers', '{headers,metadata}')) u (event_column, names);
    end;

create function outbox.adopt(caller oid, name text, relation regclass, columns jsonb) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    c outbox.captures;
    there text[] := outbox.columns_of(relation);
    one record;
begin
    perform outbox.check_may_capture(caller, relation);
    if jsonb_typeof(columns) is distinct from 'object' then
        raise exception 'the columns of an adopted stream are no JSON object'
            using errcode = '22023', hint = $x$For example: columns => '{"topic": "type", "subject": "aggregateid"}'$x$;
    end if;
    for one in select k.key, k.value, columns ->> k.key as named from jsonb_each(columns) k loop
        if one.key not in (select u.event_column from outbox.usual_columns() u) then
            raise exception 'an event has no column %', quote_ident(one.key)
                using errcode = '22023', detail = format('It has %s.', (select string_agg(u.event_column, ', ') from outbox.usual_columns() u));
        elsif jsonb_typeof(one.value) not in ('string', 'null') then
            raise exception 'column % of an event is mapped to no name', one.key
                using errcode = '22023', detail = 'It takes the name of a column of the table, or null for none.';
        elsif one.named <> all (there) then
            raise exception 'column % of table % does not exist', quote_ident(one.named), relation
                using errcode = '42704', detail = format('It was to be the %s of events. The table has %s.', one.key, array_to_string(there, ', '));
        end if;
    end loop;
    select jsonb_object_agg(m.event_column, m.chosen) into c.mapping
      from (select u.event_column,
                   case when columns ? u.event_column then columns ->> u.event_column
                        else (select n from unnest(u.names) with ordinality x (n, place) where n = any (there) order by place limit 1) end as chosen
              from outbox.usual_columns() u) m
     where m.chosen is not null;
    if c.mapping -> 'topic' is null then
        raise exception 'table % cannot be adopted as a stream', relation
            using errcode = '22023', detail = format('No column of it is known to be the topic of events. It has %s.', array_to_string(there, ', ')),
                  hint = $x$Name one: columns => '{"topic": "..."}'$x$;
    end if;
    perform outbox.create_stream(name);
    c.relation := relation;
    c.operations := '{insert}';
    c.payload := 'full';
    c.stream := name;
    c.replicated := false;
    c.enabled := true;
    c.owner := caller;
    c.created_at := now();
    c.updated_at := now();
    perform outbox.put_capture(caller, c, true);
end $$;

create function outbox.adopt_stream(name text, relation regclass, columns jsonb default '{}') returns void
    language c volatile as 'MODULE_PATHNAME', 'adopt_stream_wrapper';
comment on function outbox.adopt_stream(text, regclass, jsonb) is
    'makes a stream of what an application inserts into an outbox table of its own, from now on; columns says which of its columns is which of an '
    'event, where the usual names do not tell. outbox.uncapture(relation) ends it. Errors: 22023 for what is missing, 42704 for an unknown column, '
    '42710 if the stream exists or the table is captured';
