-- Who may do what. PUBLIC gets nothing.

create table outbox.sink_grants (
    sink text not null,
    role regrole not null,
    primary key (sink, role)
);
comment on table outbox.sink_grants is 'pull sinks that a role may poll and acknowledge, where it may not do so with all';

create function outbox.may_pull(role oid, sink text) returns boolean
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    return has_function_privilege(role, 'outbox.read(text, int, text)', 'execute')
        or exists (select from outbox.sink_grants g where g.sink = may_pull.sink and pg_has_role(may_pull.role, g.role, 'usage'));

-- The statements that make up a privilege, with %s for the verb (grant … to, revoke … from) and the role.
create function outbox.privilege_parts(privilege text) returns setof text
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
declare
    parts text[];
    s record;
begin
    if privilege not in ('emit', 'read', 'operate', 'secrets') or privilege is null then
        raise exception 'privilege % is not known', coalesce(quote_literal(left(privilege, 60)), 'null')
            using errcode = '22023', detail = 'It is one of emit, read, operate and secrets.';
    end if;
    return next 'usage on schema outbox';
    if privilege = 'emit' then
        return next 'execute on function outbox.emit(text, jsonb, text, text, text, jsonb, text, text), outbox.new_id()';
        for s in select relation from outbox.streams loop
            return next format('insert on %s', s.relation);
        end loop;
    elsif privilege = 'read' then
        return next 'execute on function outbox.read(text, int, text), outbox.tail(text), outbox.save_cursor(text, text, text), '
            'outbox.cursor(text), outbox.drop_cursor(text), outbox.poll(text, int), outbox.ack(text, text), '
            'outbox.format_position(xid8, bigint, text), outbox.parse_position(text)';
    elsif privilege = 'operate' then
        return next 'select on outbox.status, outbox.sinks, outbox.cursors, outbox.dead_letters, outbox.streams, outbox.sink_health';
        return next 'execute on function outbox.sink_status(), outbox.tick(text), outbox.start(), outbox.stop(), outbox.prune(text), '
            'outbox.create_sink(text, text, jsonb, text, text, text[], text, text, regprocedure, int, text, text, boolean), '
            'outbox.alter_sink(text, jsonb, text[], text, text, regprocedure, int, text, text, boolean), '
            'outbox.pause_sink(text), outbox.resume_sink(text), outbox.drop_sink(text), '
            'outbox.redeliver(text, text), outbox.discard(text, text), outbox.create_stream(text), outbox.drop_stream(text), '
            'outbox.format_position(xid8, bigint, text), outbox.parse_position(text)';
    else
        return next 'execute on function outbox.set_secret(text, text[])';
    end if;
end $$;

create function outbox.grant(role regrole, privilege text, sinks text[] default null) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    part text;
    one text;
begin
    if sinks is not null then
        if privilege is distinct from 'read' then
            raise exception 'only the privilege read can be limited to sinks' using errcode = '22023';
        end if;
        foreach one in array sinks loop
            if not exists (select from outbox.sinks s where s.id = one) then
                perform outbox.no_such_sink(one);
            end if;
            insert into outbox.sink_grants (sink, role) values (one, grant.role) on conflict do nothing;
        end loop;
        execute format('grant usage on schema outbox to %s', role);
        execute format('grant execute on function outbox.poll(text, int), outbox.ack(text, text) to %s', role);
        return;
    end if;
    for part in select outbox.privilege_parts(privilege) loop
        execute format('grant %s to %s', part, role);
    end loop;
end $$;
comment on function outbox.grant(regrole, text, text[]) is
    'gives a role the privilege emit, read, operate or secrets; read may be limited to named pull sinks. Errors: 22023 for an unknown '
    'privilege, 42704 for an unknown role or sink';

create function outbox.revoke(role regrole, privilege text, sinks text[] default null) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    part text;
begin
    if privilege is not distinct from 'read' then
        delete from outbox.sink_grants g where g.role = revoke.role and (sinks is null or g.sink = any (sinks));
        if sinks is not null then
            return;
        end if;
    end if;
    for part in select outbox.privilege_parts(privilege) loop
        -- The schema stays: it gives nothing by itself, and another privilege may need it.
        if part not like 'usage on schema %' then
            execute format('revoke %s from %s', part, role);
        end if;
    end loop;
    -- What two privileges share stays with the one that is left.
    if privilege in ('read', 'operate') then
        for part in
            select p from unnest(array['read', 'operate']) other, lateral outbox.privilege_parts(other) p
             where other <> privilege
               and has_function_privilege(role, case other when 'read' then 'outbox.tail(text)' else 'outbox.start()' end, 'execute')
        loop
            execute format('grant %s to %s', part, role);
        end loop;
    end if;
end $$;
comment on function outbox.revoke(regrole, text, text[]) is 'takes a privilege back that outbox.grant gave. Errors as outbox.grant';
