-- Publications that hand out what should not get out of this database.

-- Nothing keeps a table from being published, so what can be done is to say it: when a publication is made or changed, in the log, and in
-- outbox.status.
create view outbox.published_secrets as
    select p.pubname as publication, format('outbox.%I.%I', c.relname, a.attname) as published
      from (values ('outbox.secrets'::regclass, 'values'::name), ('outbox.webhook_secrets', 'value'), ('outbox.sinks', 'config')) s (relation, "column")
      join pg_class c on c.oid = s.relation join pg_attribute a on a.attrelid = c.oid and a.attname = s."column"
      join pg_publication p
        on p.puballtables
        or exists (select from pg_publication_namespace n where n.pnpubid = p.oid and n.pnnspid = c.relnamespace)
        or exists (select from pg_publication_rel r
                    where r.prpubid = p.oid and r.prrelid = c.oid and (r.prattrs is null or a.attnum = any (r.prattrs::int2[])));
comment on view outbox.published_secrets is
    'publications that hand secrets, or configs of sinks, which may hold credentials, to their subscribers in clear; no rows if all is well';

create function outbox.warn_of_publication() returns event_trigger
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    one record;
begin
    for one in
        select s.publication, string_agg(s.published, ', ' order by s.published) as what
          from outbox.published_secrets s join pg_publication p on p.pubname = s.publication
         where p.oid in (
            select d.objid from pg_event_trigger_ddl_commands() d where d.classid = 'pg_publication'::regclass
            union all
            select r.prpubid from pg_event_trigger_ddl_commands() d
              join pg_publication_rel r on d.classid = 'pg_publication_rel'::regclass and r.oid = d.objid
            union all
            select n.pnpubid from pg_event_trigger_ddl_commands() d
              join pg_publication_namespace n on d.classid = 'pg_publication_namespace'::regclass and n.oid = d.objid)
         group by s.publication
    loop
        raise warning 'publication % hands secrets of pg_outbox to its subscribers in clear', quote_ident(one.publication)
            using detail = format('It publishes %s.', one.what),
                  hint = 'Name the tables that are to be published, without those of schema outbox that the detail lists.';
    end loop;
end $$;
comment on function outbox.warn_of_publication() is 'event trigger: says that a publication hands secrets out';
create event trigger outbox_publication on ddl_command_end
    when tag in ('CREATE PUBLICATION', 'ALTER PUBLICATION') execute function outbox.warn_of_publication();

-- A row for each such publication; no sink can have its name.
create function outbox.publication_status() returns table (
        sink text, kind text, stream text, state text, lag_events bigint, lag_seconds double precision, delivered bigint, dead_letters bigint,
        attempts int, last_error text, last_delivery_at timestamptz, next_attempt_at timestamptz, lease_pid int, waiting_for text)
    language sql stable security definer set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        select 'publication:' || s.publication, 'publication', null, 'error', 0, null::double precision, 0, 0, 0,
               'it hands secrets to its subscribers in clear: ' || string_agg(s.published, ', ' order by s.published),
               null::timestamptz, null::timestamptz, null::int, 'tables of its own, instead of those'
          from outbox.published_secrets s group by s.publication;
    end;
comment on function outbox.publication_status() is 'the rows of the view outbox.status that tell of publications; none if all is well';
