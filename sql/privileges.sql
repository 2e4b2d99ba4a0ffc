-- Who may do what. PUBLIC gets nothing.

create table outbox.sink_grants (
    sink text not null,
    role regrole not null,
    primary key (sink, role)
);
comment on table outbox.sink_grants is 'pull sinks that a role may poll and acknowledge, where it may not do so with all';

-- What the privilege emit is in the table of a stream. Positions are not an application's to choose: a row with a txid or a seq of
-- its own would be read too early or never, and a seq that is drawn later would collide with it.
create function outbox.emit_part(relation regclass) returns text
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    return case when exists (select from outbox.streams s where s.relation = emit_part.relation and s.shape = 'audit')
        -- When a record was written is not for its writer to say.
        then format('insert (id, tenant, action, resource_type, resource_id, admission, details) on table %s', relation)
        else format('insert (id, topic, source, subject, tenant, "time", payload, headers) on table %s', relation) end;

-- What a privilege is made of, as it stands between grant or revoke and the role. "pull" is what read comes to when it is limited
-- to sinks.
create function outbox.privilege_parts(privilege text) returns setof text
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
begin
    return next 'usage on schema outbox';
    if privilege = 'emit' then
        return next 'execute on function outbox.emit(text, jsonb, text, text, text, jsonb, text, text)';
        return next 'execute on function outbox.new_id()';
        return next 'execute on function outbox.next_seq(regclass)';
        return next 'execute on function outbox.is_drawn(bigint)';
        return next 'execute on function outbox.audit(text, text, text, jsonb, jsonb, text, text)';
        return next 'execute on function outbox.record_usage(text, timestamptz, text, numeric, text, interval)';
        return query select outbox.emit_part(s.relation) from outbox.streams s;
    elsif privilege = 'read' then
        return query select 'execute on function outbox.' || f from unnest(array[
            'read(text, int, text, text[])', 'tail(text)', 'save_cursor(text, text, text)', 'cursor(text)', 'drop_cursor(text)',
            'poll(text, int)', 'ack(text, text)', 'format_position(xid8, bigint, text)', 'parse_position(text)']) f;
    elsif privilege = 'pull' then
        return query select 'execute on function outbox.' || f from unnest(array['poll(text, int)', 'ack(text, text)']) f;
    elsif privilege = 'operate' then
        -- With the type one makes functions that take events.
        return next 'usage on type outbox.event';
        return query select 'select on table outbox.' || t from unnest(array[
            'status', 'sinks', 'cursors', 'dead_letters', 'parked', 'streams', 'sink_health', 'captures', 'backfills', 'backfill_status',
            'usage_windows', 'usage_dead_letters', 'usage_recorder', 'published_secrets']) t;
        return next 'usage on type outbox.usage_window';
        return query select 'execute on function outbox.' || f from unnest(array[
            'sink_status()', 'webhook_status()', 'publication_status()', 'tick(text)', 'start()', 'stop()', 'prune(text)',
            'create_sink(text, text, jsonb, text, text, text[], text, text, regprocedure, int, text, text, boolean)',
            'alter_sink(text, jsonb, text[], text, text, regprocedure, int, text, text, boolean)',
            'pause_sink(text)', 'resume_sink(text)', 'drop_sink(text)', 'redeliver(text, text)', 'discard(text, text)',
            'capture(regclass, text[], text, text[], text[], text[], text, text, text, text, boolean)',
            'alter_capture(regclass, text[], text, text[], text[], text[], text, text, text, text, boolean)',
            'adopt_stream(text, regclass, jsonb)', 'backfill(regclass, text, text, int)', 'backfill_chunk(bigint)', 'stop_backfill(bigint)',
            'capture_ddl(boolean, text)', 'uncapture(regclass)', 'pause_capture(regclass)', 'resume_capture(regclass)', 'check_captures()',
            'create_stream(text)', 'drop_stream(text)', 'verify_audit(text)', 'set_usage_recorder(regprocedure)', 'tick_usage()', 'redeliver_usage(text)',
            'format_position(xid8, bigint, text)', 'parse_position(text)']) f;
        return query select outbox.tenant_parts();
        return next 'execute on function outbox.grant_tenant(regrole, text)';
        return next 'execute on function outbox.revoke_tenant(regrole, text)';
    elsif privilege = 'tenant' then
        return query select outbox.tenant_parts();
    elsif privilege = 'secrets' then
        return next 'execute on function outbox.set_secret(text, text[])';
        return next 'execute on function outbox.set_secret_source(text, text, text)';
    end if;
end $$;

-- The privileges that a role has been given itself, not by way of a role that it is a member of.
create function outbox.privileges_of(role regrole) returns setof text
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        select m.privilege
          from (values ('emit', 'outbox.emit(text, jsonb, text, text, text, jsonb, text, text)'::regprocedure),
                       ('read', 'outbox.read(text, int, text, text[])'), ('operate', 'outbox.tick(text)'),
                       ('secrets', 'outbox.set_secret(text, text[])')) m (privilege, mark)
          join pg_proc p on p.oid = m.mark cross join aclexplode(p.proacl) a
         where a.grantee = privileges_of.role and a.privilege_type = 'EXECUTE'
        union
        select 'pull' from outbox.sink_grants g where g.role = privileges_of.role
        union
        select 'tenant' from outbox.tenant_grants g where g.role = privileges_of.role;
    end;

create function outbox.check_grant(role regrole, privilege text, sinks text[]) returns void
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
begin
    if privilege is null or privilege not in ('emit', 'read', 'operate', 'secrets') then
        raise exception 'privilege % is not known', coalesce(quote_literal(left(privilege, 60)), 'null')
            using errcode = '22023', detail = 'It is one of emit, read, operate and secrets.';
    elsif role is null then
        raise exception 'a privilege needs a role' using errcode = '22023', detail = 'The role is null.';
    elsif not exists (select from pg_roles r where r.oid = role) then
        raise exception 'role % does not exist', role using errcode = '42704';
    elsif sinks is not null and privilege <> 'read' then
        raise exception 'only the privilege read can be limited to sinks' using errcode = '22023';
    end if;
end $$;

create function outbox.grant(role regrole, privilege text, sinks text[] default null) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    part text;
    one text;
    kind text;
begin
    perform outbox.check_grant(role, privilege, sinks);
    foreach one in array coalesce(sinks, '{}') loop
        select s.kind into kind from outbox.sinks s where s.id = one;
        if not found then
            perform outbox.no_such_sink(one);
        elsif kind <> 'pull' then
            raise exception 'sink "%" is of kind %, not pull', one, kind
                using errcode = '22023', detail = 'Its events are delivered to it; there is nothing to read.';
        end if;
        insert into outbox.sink_grants (sink, role) values (one, "grant".role) on conflict do nothing;
    end loop;
    for part in select outbox.privilege_parts(case when sinks is null then privilege else 'pull' end) loop
        execute format('grant %s to %s', part, role);
    end loop;
end $$;
comment on function outbox.grant(regrole, text, text[]) is
    'gives a role the privilege emit, read, operate or secrets; read may be limited to named pull sinks. Errors: 22023 for an unknown '
    'privilege or a sink that is not pulled from, 42704 for an unknown role or sink';

create function outbox.revoke(role regrole, privilege text, sinks text[] default null) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    part text;
    rest text[];
begin
    perform outbox.check_grant(role, privilege, sinks);
    if privilege = 'read' then
        delete from outbox.sink_grants g where g.role = revoke.role and (sinks is null or g.sink = any (sinks));
    end if;
    -- What is shared stays with what is left; the schema goes with the last.
    rest := array(select p from outbox.privileges_of(role) p where sinks is not null or p <> privilege);
    for part in
        select outbox.privilege_parts(case when sinks is null then privilege else 'pull' end)
        except select parts from unnest(rest) r, outbox.privilege_parts(r) parts
    loop
        execute format('revoke %s from %s', part, role);
    end loop;
end $$;
comment on function outbox.revoke(regrole, text, text[]) is
    'takes a privilege back that outbox.grant gave; from sinks named, or of read all, also where it was limited to sinks. Errors as outbox.grant';

create function outbox.grant_tenant(role regrole, tenant text) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    part text;
begin
    if role is null or not exists (select from pg_roles r where r.oid = role) then
        raise exception 'role % does not exist', coalesce(role::text, 'null') using errcode = '42704';
    elsif coalesce(tenant, '') = '' then
        raise exception 'a tenant has a name' using errcode = '22023', detail = 'It is null or empty.';
    end if;
    insert into outbox.tenant_grants (role, tenant) values (grant_tenant.role, grant_tenant.tenant) on conflict do nothing;
    for part in select outbox.privilege_parts('tenant') loop
        execute format('grant %s to %s', part, role);
    end loop;
end $$;
comment on function outbox.grant_tenant(regrole, text) is
    'lets a role read and manage the webhooks of a tenant, and of no other. Errors: 42704 for an unknown role, 22023 without a tenant';

create function outbox.revoke_tenant(role regrole, tenant text) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    part text;
    rest text[];
begin
    delete from outbox.tenant_grants g where g.role = revoke_tenant.role and g.tenant = revoke_tenant.tenant;
    rest := array(select outbox.privileges_of(role));
    for part in
        select outbox.privilege_parts('tenant') except select parts from unnest(rest) r, outbox.privilege_parts(r) parts
    loop
        execute format('revoke %s from %s', part, role);
    end loop;
end $$;
comment on function outbox.revoke_tenant(regrole, text) is 'takes back what outbox.grant_tenant gave';
