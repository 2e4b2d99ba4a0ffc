-- Capture: which tables are captured and how, and the triggers that do it.

create table outbox.captures (
    relation      regclass primary key,
    operations    text[] not null,
    payload       text not null check (payload in ('keys', 'changed', 'full', 'before_after')),
    columns       text[],
    redact        text[],
    key           text[],
    tenant_column text,
    condition     text,
    topic         text check (topic <> ''),
    stream        text not null,
    replicated    boolean not null default false,
    mapping       jsonb,
    enabled       boolean not null default true,
    owner         regrole not null,
    created_at    timestamptz not null default now(),
    updated_at    timestamptz not null default now()
);
comment on table outbox.captures is
    'a row per captured table; made and changed by outbox.capture, outbox.alter_capture and so on. Partitions and children belong to their root''s';
comment on column outbox.captures.columns is 'columns that events may show, besides the key; null for all';
comment on column outbox.captures.key is 'columns whose values make the subject; null for the primary key';
comment on column outbox.captures.owner is 'the role that supplied the condition: it runs as this role';
comment on column outbox.captures.replicated is 'whether rows that logical replication applies are captured, too';

comment on column outbox.captures.mapping is 'for a table adopted as a stream: which of its columns makes which of an event';

-- The triggers. What they call is in src/capture/.
create function outbox.capture_begin() returns trigger
    language c as 'MODULE_PATHNAME', 'capture_begin_wrapper';
comment on function outbox.capture_begin() is 'trigger: a statement on a captured table begins';
create function outbox.capture_change() returns trigger
    language c as 'MODULE_PATHNAME', 'capture_change_wrapper';
comment on function outbox.capture_change() is 'trigger: writes an event for each row that a statement has changed';

create function outbox.exact(value "any") returns jsonb
    language c stable strict parallel safe as 'MODULE_PATHNAME', 'exact_wrapper';
comment on function outbox.exact("any") is
    'a value as jsonb, exactly, without asking anybody''s casts: types that are not built in as their text, json that jsonb cannot hold '
    '(\u0000, a number out of range) as a string of its text';
create function outbox.printed(value "any") returns text
    language c stable strict parallel safe as 'MODULE_PATHNAME', 'printed_wrapper';
comment on function outbox.printed("any") is 'a value as its type prints it';

create function outbox.read_json(value text) returns jsonb
    language c stable strict parallel safe as 'MODULE_PATHNAME', 'read_json_wrapper';
comment on function outbox.read_json(text) is 'the jsonb that a text says, or the text as a string where it says none';

create function outbox.forget_relation(relation oid) returns void
    language c volatile strict as 'MODULE_PATHNAME', 'forget_relation_wrapper';
comment on function outbox.forget_relation(oid) is 'has every session look again at how a table is captured, once this transaction commits';
create function outbox.try_capture(relation oid) returns void
    language c volatile strict as 'MODULE_PATHNAME', 'try_capture_wrapper';
comment on function outbox.try_capture(oid) is 'runs the statements of a capture on no rows: raises what is wrong with it';

create function outbox.primary_key(relation regclass) returns text[]
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    return array(
        select a.attname::text
          from pg_index i cross join unnest(i.indkey::int2[]) with ordinality k (number, place)
          join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number
         where i.indrelid = relation and i.indisprimary and k.place <= i.indnkeyatts order by k.place);

-- But for virtual ones, which are generated when they are read: triggers do not see them.
create function outbox.columns_of(relation regclass) returns text[]
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    return array(
        select a.attname::text from pg_attribute a
         where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v' order by a.attnum);

-- A table with its partitions and children.
create function outbox.tree_of(relation regclass) returns setof regclass
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        with recursive tree (oid) as (
            select tree_of.relation::oid union select i.inhrelid from tree t join pg_inherits i on i.inhparent = t.oid
        )
        select t.oid::regclass from tree t;
    end;

create function outbox.lineage_of(relation oid) returns setof oid
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        with recursive lineage (oid) as (
            select lineage_of.relation union select i.inhparent from lineage l join pg_inherits i on i.inhrelid = l.oid
        )
        select l.oid from lineage l;
    end;

-- What triggers a table must have. type is as in pg_trigger: 1 row, 2 before, 4 insert, 8 delete, 16 update, 32 truncate.
create function outbox.wanted_triggers(c outbox.captures, kind "char") returns table (name text, type int, clause text, enabled "char")
    language sql immutable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        with wanted as (
            select o.operation, o.bit, o.tables
              from (values (1, 'insert', 4, 'referencing new table as outbox_new'),
                           (2, 'update', 16, 'referencing old table as outbox_old new table as outbox_new'),
                           (3, 'delete', 8, 'referencing old table as outbox_old'),
                           (4, 'truncate', 32, '')) o (place, operation, bit, tables)
             where o.operation = any (c.operations) order by o.place
        )
        select 'outbox_capture_' || w.operation, w.bit,
               format('after %s on %%s %s for each statement execute function outbox.capture_change()', w.operation, w.tables), 'O'::"char"
          from wanted w
        union all
        select 'outbox_capture_begin', 2 + sum(w.bit)::int,
               format('before %s on %%s for each statement execute function outbox.capture_begin()', string_agg(w.operation, ' or ')), 'O'
          from wanted w
        union all
        -- Logical replication fires row triggers only, and of these only such as are enabled for replicas, which nothing else fires.
        select 'outbox_capture_row', 1 + sum(w.bit)::int,
               format('after %s on %%s for each row execute function outbox.capture_change()', string_agg(w.operation, ' or ')), 'R'
          from wanted w where c.replicated and kind = 'r' and w.operation <> 'truncate' having count(*) > 0;
    end;

-- Gives a captured table, with all that belongs to it, the triggers that it must have. Touches none that is as it should be.
create function outbox.arrange_triggers(c outbox.captures) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    one record;
    part record;
    impatient boolean := current_setting('lock_timeout') = '0';
begin
    if impatient then
        perform set_config('lock_timeout', '5s', true);
    end if;
    for part in select r.oid, r.oid::regclass as name, r.relkind from outbox.tree_of(c.relation) t join pg_class r on r.oid = t loop
        if part.relkind not in ('r', 'p') then
            raise exception 'table % cannot be captured: % is not a plain table', c.relation, part.name
                using errcode = '22023', detail = 'It belongs to the table, and Postgres does not say which of its rows change.';
        end if;
        for one in
            select w.name, w.type, w.clause, w.enabled, t.tgname, t.tgtype
              from outbox.wanted_triggers(c, part.relkind) w
              full join (select * from pg_trigger g where g.tgrelid = part.oid and g.tgname like 'outbox\_capture\_%' and not g.tgisinternal) t
                on t.tgname::text = w.name
        loop
            continue when one.tgtype = one.type;
            if one.tgname is not null then
                execute format('drop trigger %I on %s', one.tgname, part.name);
            end if;
            if one.name is not null then
                execute format('create trigger %I ' || one.clause, one.name, part.name);
                if one.enabled = 'R' then
                    execute format('alter table %s enable replica trigger %I', part.name, one.name);
                end if;
            end if;
        end loop;
        perform outbox.forget_relation(part.oid);
    end loop;
    if impatient then
        perform set_config('lock_timeout', '0', true);
    end if;
end $$;

create function outbox.drop_triggers(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    one record;
begin
    for one in
        select t.tgname, t.tgrelid::regclass as relation from pg_trigger t
         where t.tgrelid = drop_triggers.relation and t.tgname like 'outbox\_capture\_%' and not t.tgisinternal
    loop
        execute format('drop trigger %I on %s', one.tgname, one.relation);
    end loop;
end $$;

create function outbox.check_columns(relation regclass, what text, names text[]) returns void
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
declare
    one text;
begin
    if names = '{}' or array_position(names, null) is not null then
        raise exception '% of a capture names no column', what using errcode = '22023', detail = format('It is %s.', names);
    end if;
    foreach one in array coalesce(names, '{}') loop
        if one <> all (outbox.columns_of(relation)) then
            raise exception 'column % of table % does not exist', quote_ident(one), relation
                using errcode = '42704', detail = format('The capture''s %s names it.', what), hint = 'Names are written as they are, without quotes.';
        elsif cardinality(array_positions(names, one)) > 1 then
            raise exception '% of a capture names column % twice', what, quote_ident(one) using errcode = '22023';
        end if;
    end loop;
end $$;

-- Whether a role may have the changes of a table written down: it could do as much with triggers of its own.
create function outbox.check_may_capture(caller oid, relation regclass) returns void
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
declare
    r pg_class;
begin
    select * into r from pg_class c where c.oid = relation;
    if not found then
        raise exception 'the table to capture does not exist' using errcode = '42704', detail = format('It is %s.', coalesce(relation::text, 'null'));
    elsif not pg_has_role(caller, r.relowner, 'usage')
        and not (has_table_privilege(caller, r.oid, 'trigger') and has_table_privilege(caller, r.oid, 'select')) then
        raise exception 'permission denied to capture table %', relation
            using errcode = '42501', detail = 'It takes the table''s owner, or the privileges TRIGGER and SELECT.';
    end if;
end $$;

-- A partition or child belongs to the capture of its root, and has none of its own.
create function outbox.check_alone(relation regclass) returns void
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
declare
    other regclass;
begin
    select o.relation into other from outbox.captures o
     where o.relation <> check_alone.relation
       and (o.relation in (select outbox.lineage_of(check_alone.relation)) or check_alone.relation::oid in (select outbox.lineage_of(o.relation))) limit 1;
    if found then
        raise exception 'table % is captured with %', relation, other
            using errcode = '42710', detail = 'One is a partition or child of the other.', hint = 'Capture the root alone: its partitions belong to it.';
    end if;
end $$;

create function outbox.no_such_capture(relation regclass) returns void
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
begin
    raise exception 'table % is not captured', coalesce(relation::text, 'null')
        using errcode = '42704', hint = 'Captures are made by outbox.capture and listed in outbox.captures.';
end $$;

-- Granted to the roles that conditions run as, so that none of them is dropped while one does. It does nothing.
create function outbox.owns_condition() returns void
    language sql immutable set search_path = pg_catalog, outbox, pg_temp
    begin atomic end;
comment on function outbox.owns_condition() is 'whoever may call it owns a condition, and cannot be dropped before outbox.uncapture or outbox.alter_capture takes that away';

create function outbox.hold_owner(role regrole) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    if not exists (select from pg_roles r where r.oid = role) then
        return;
    elsif exists (select from outbox.captures c where c.owner = role and c.condition is not null) then
        execute format('grant execute on function outbox.owns_condition() to %s', role);
    else
        execute format('revoke execute on function outbox.owns_condition() from %s', role);
    end if;
end $$;

create function outbox.hold_owners() returns trigger
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    if tg_op <> 'INSERT' then
        perform outbox.hold_owner(old.owner);
    end if;
    if tg_op <> 'DELETE' then
        perform outbox.hold_owner(new.owner);
    end if;
    return null;
end $$;
create trigger outbox_hold_owners after insert or delete or update of owner, condition on outbox.captures
    for each row execute function outbox.hold_owners();

-- Checks everything about a capture but its condition, and puts it into force.
create function outbox.put_capture(caller oid, c outbox.captures, is_new boolean) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    r record;
begin
    perform outbox.check_may_capture(caller, c.relation);
    select k.relkind, k.relpersistence, k.relnamespace::regnamespace::text as schema into r from pg_class k where k.oid = c.relation;
    if r.relkind not in ('r', 'p') or r.relpersistence = 't' or r.schema in ('pg_catalog', 'information_schema', 'outbox') then
        raise exception 'relation % cannot be captured', c.relation
            using errcode = '22023', detail = 'Captured are tables and partitioned tables; no views, no temporary tables, no tables of the system or the extension.';
    end if;
    if c.operations is null or c.operations = '{}'
        or exists (select from unnest(c.operations) o where o is null or o not in ('insert', 'update', 'delete', 'truncate')) then
        raise exception 'operations % are not known', coalesce(c.operations::text, 'null')
            using errcode = '22023', detail = 'They are some of insert, update, delete and truncate.', hint = 'For example: operations => ''{insert,update}''';
    elsif c.payload is null or c.payload not in ('keys', 'changed', 'full', 'before_after') then
        raise exception 'payload % is not known', coalesce(quote_literal(left(c.payload, 60)), 'null')
            using errcode = '22023', detail = 'It is one of keys, changed, full and before_after.';
    elsif c.topic ~ '[[:cntrl:]]' then
        raise exception 'the topic of a capture is not allowed' using errcode = '22023', detail = 'It has control characters.';
    end if;
    perform outbox.check_columns(c.relation, 'columns', c.columns);
    perform outbox.check_columns(c.relation, 'redact', c.redact);
    perform outbox.check_columns(c.relation, 'key', c.key);
    perform outbox.check_columns(c.relation, 'tenant_column', case when c.tenant_column is not null then array[c.tenant_column] end);
    if (outbox.stream_named(c.stream)).shape <> 'events' then
        raise exception 'stream "%" takes no events', c.stream using errcode = '22023', detail = 'It holds records of a form of their own.';
    end if;
    if not exists (select from outbox.streams s where s.name = c.stream and s.relation in (
        select k.oid from pg_class k where k.relnamespace = 'outbox'::regnamespace)) then
        raise exception 'stream "%" is a table of its own', c.stream
            using errcode = '22023', detail = 'Changes are captured into streams that outbox.create_stream has made.';
    end if;
    perform outbox.check_alone(c.relation);
    if is_new then
        begin
            insert into outbox.captures select (c).*;
        exception when unique_violation then
            raise exception 'table % is captured already', c.relation
                using errcode = '42710', hint = 'Change the capture with outbox.alter_capture, or end it with outbox.uncapture.';
        end;
    else
        update outbox.captures o
           set operations = c.operations, payload = c.payload, columns = c.columns, redact = c.redact, key = c.key,
               tenant_column = c.tenant_column, condition = c.condition, topic = c.topic, stream = c.stream,
               replicated = c.replicated, owner = c.owner, updated_at = now()
         where o.relation = c.relation;
    end if;
    perform outbox.arrange_triggers(c);
end $$;

create function outbox.set_capture(
    caller oid, relation regclass, operations text[], payload text, columns text[], redact text[], key text[],
    tenant_column text, condition text, topic text, stream text, replicated boolean) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    c outbox.captures;
begin
    c.relation := relation;
    c.operations := operations;
    c.payload := payload;
    c.columns := columns;
    c.redact := nullif(redact, '{}');
    c.key := key;
    c.tenant_column := nullif(tenant_column, '');
    c.condition := nullif(condition, '');
    c.topic := nullif(topic, '');
    c.stream := stream;
    c.replicated := coalesce(replicated, false);
    c.enabled := true;
    c.owner := caller;
    c.created_at := now();
    c.updated_at := now();
    perform outbox.put_capture(caller, c, true);
end $$;

create function outbox.change_capture(
    caller oid, relation regclass, operations text[], payload text, columns text[], redact text[], key text[],
    tenant_column text, condition text, topic text, stream text, replicated boolean) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
declare
    c outbox.captures;
begin
    select * into c from outbox.captures o where o.relation = change_capture.relation for update;
    if not found then
        perform outbox.no_such_capture(relation);
    end if;
    c.operations := coalesce(operations, c.operations);
    c.payload := coalesce(payload, c.payload);
    c.columns := nullif(coalesce(columns, c.columns), '{}');
    c.redact := nullif(coalesce(redact, c.redact), '{}');
    c.key := nullif(coalesce(key, c.key), '{}');
    c.tenant_column := nullif(coalesce(tenant_column, c.tenant_column), '');
    c.owner := case when condition is not null then caller::regrole else c.owner end;
    c.condition := nullif(coalesce(condition, c.condition), '');
    c.topic := nullif(coalesce(topic, c.topic), '');
    c.stream := coalesce(stream, c.stream);
    c.replicated := coalesce(replicated, c.replicated);
    perform outbox.put_capture(caller, c, false);
end $$;

create function outbox.capture(
    relation      regclass,
    operations    text[] default '{insert,update,delete}',
    payload       text default 'full',
    columns       text[] default null,
    redact        text[] default null,
    key           text[] default null,
    tenant_column text default null,
    condition     text default null,
    topic         text default null,
    stream        text default 'outbox',
    replicated    boolean default false
) returns void
    language c volatile as 'MODULE_PATHNAME', 'capture_wrapper';
comment on function outbox.capture(regclass, text[], text, text[], text[], text[], text, text, text, text, boolean) is
    'captures a table: each changed row becomes an event of topic <prefix>.<schema>.<table>.<operation>, in the statement that changes it. '
    'Errors: 22023 for a bad argument, 42704 for an unknown column or stream, 42710 if it is captured already, 42501 without rights on the table';

create function outbox.alter_capture(
    relation      regclass,
    operations    text[] default null,
    payload       text default null,
    columns       text[] default null,
    redact        text[] default null,
    key           text[] default null,
    tenant_column text default null,
    condition     text default null,
    topic         text default null,
    stream        text default null,
    replicated    boolean default null
) returns void
    language c volatile as 'MODULE_PATHNAME', 'alter_capture_wrapper';
comment on function outbox.alter_capture(regclass, text[], text, text[], text[], text[], text, text, text, text, boolean) is
    'changes a capture; what is null stays, what is empty is taken away. Locks the table only if other triggers are needed. Errors as outbox.capture';

create function outbox.uncapture(relation regclass) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    impatient boolean := current_setting('lock_timeout') = '0';
begin
    delete from outbox.captures c where c.relation = uncapture.relation;
    if not found then
        perform outbox.no_such_capture(relation);
    end if;
    if impatient then
        perform set_config('lock_timeout', '5s', true);
    end if;
    perform outbox.drop_triggers(t) from outbox.tree_of(relation) t;
    perform outbox.end_backfills();
    if impatient then
        perform set_config('lock_timeout', '0', true);
    end if;
end $$;
comment on function outbox.uncapture(regclass) is 'ends the capture of a table. Error 42704 if it is not captured';

create function outbox.set_capture_enabled(relation regclass, enabled boolean) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    update outbox.captures c set enabled = set_capture_enabled.enabled, updated_at = now() where c.relation = set_capture_enabled.relation;
    if not found then
        perform outbox.no_such_capture(relation);
    end if;
    perform outbox.forget_relation(t) from outbox.tree_of(relation) t;
end $$;

create function outbox.pause_capture(relation regclass) returns void
    language sql security definer set search_path = pg_catalog, outbox, pg_temp
    begin atomic select outbox.set_capture_enabled(pause_capture.relation, false); end;
comment on function outbox.pause_capture(regclass) is
    'changes of the table become no events until outbox.resume_capture. Takes no lock on the table. Error 42704 if it is not captured';

create function outbox.resume_capture(relation regclass) returns void
    language sql security definer set search_path = pg_catalog, outbox, pg_temp
    begin atomic select outbox.set_capture_enabled(resume_capture.relation, true); end;
comment on function outbox.resume_capture(regclass) is 'captures a paused table again; what has changed meanwhile is not made up for';

create function outbox.check_captures() returns table (relation regclass, part regclass, problem text)
    language sql stable security definer set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        select c.relation, t, 'trigger ' || w.name || case
                   when g.tgname is null then ' is missing' when g.tgtype <> w.type then ' is another one' else ' is disabled' end
          from outbox.captures c cross join outbox.tree_of(c.relation) t join pg_class r on r.oid = t
         cross join outbox.wanted_triggers(c, r.relkind) w
          left join pg_trigger g on g.tgrelid = t and g.tgname = w.name and not g.tgisinternal
         where g.tgname is null or g.tgtype <> w.type or g.tgenabled not in (w.enabled, 'A')
        union all
        select c.relation, c.relation, 'it is paused' from outbox.captures c where not c.enabled
        union all
        select c.relation, c.relation, 'its stream ' || c.stream || ' does not exist'
          from outbox.captures c where not exists (select from outbox.streams s where s.name = c.stream)
        union all
        select c.relation, c.relation, 'the role that owns its condition does not exist'
          from outbox.captures c where c.condition is not null and not exists (select from pg_roles r where r.oid = c.owner)
         order by 1, 2, 3;
    end;
comment on function outbox.check_captures() is
    'what keeps changes of captured tables from becoming events: a trigger that was dropped or disabled, a pause; no rows if all is well';
