-- Last: what belongs to the dump, what belongs to nobody, and word to the launcher.

-- Streams have it from make_stream_table.
select outbox.keep_apart(c.oid::regclass) from pg_class c
 where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'r'
   and not exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname = 'outbox_replicated');

revoke all on all functions in schema outbox from public;
revoke all on all tables in schema outbox from public;
do $$
declare
    one regtype;
begin
    -- Not the row types of tables and views: pg_dump warns of each that its initial privileges are unsupported.
    for one in
        select t.oid from pg_type t left join pg_class c on c.oid = t.typrelid
         where t.typnamespace = 'outbox'::regnamespace and t.typcategory <> 'A' and coalesce(c.relkind, 'c') = 'c'
    loop
        execute format('revoke all on type %s from public', one);
    end loop;
end $$;

select pg_catalog.pg_extension_config_dump('outbox.events', '');
select pg_catalog.pg_extension_config_dump(pg_get_serial_sequence('outbox.events', 'seq'), '');
select pg_catalog.pg_extension_config_dump('outbox.streams', 'where not builtin');
select pg_catalog.pg_extension_config_dump('outbox.clusters', '');
select pg_catalog.pg_extension_config_dump('outbox.cursors', '');
select pg_catalog.pg_extension_config_dump('outbox.sinks', '');
select pg_catalog.pg_extension_config_dump(pg_get_serial_sequence('outbox.sinks', 'number'), '');
select pg_catalog.pg_extension_config_dump('outbox.sink_health', '');
select pg_catalog.pg_extension_config_dump('outbox.parked', '');
select pg_catalog.pg_extension_config_dump(pg_get_serial_sequence('outbox.parked', 'number'), '');
select pg_catalog.pg_extension_config_dump('outbox.dead_letters', '');
select pg_catalog.pg_extension_config_dump('outbox.captures', '');
select pg_catalog.pg_extension_config_dump('outbox.ddl_captures', '');
select pg_catalog.pg_extension_config_dump('outbox.backfills', '');
select pg_catalog.pg_extension_config_dump(pg_get_serial_sequence('outbox.backfills', 'id'), '');
select pg_catalog.pg_extension_config_dump('outbox.audit_events', '');
select pg_catalog.pg_extension_config_dump(pg_get_serial_sequence('outbox.audit_events', 'seq'), '');
select pg_catalog.pg_extension_config_dump('outbox.audit_chain', 'where n > 0');
select pg_catalog.pg_extension_config_dump('outbox.usage_windows', '');
select pg_catalog.pg_extension_config_dump('outbox.usage_dead_letters', '');
select pg_catalog.pg_extension_config_dump('outbox.usage_recorder', '');
select pg_catalog.pg_extension_config_dump('outbox.webhooks', '');
select pg_catalog.pg_extension_config_dump('outbox.webhook_secrets', '');
select pg_catalog.pg_extension_config_dump('outbox.webhook_deliveries', '');
select pg_catalog.pg_extension_config_dump(pg_get_serial_sequence('outbox.webhook_deliveries', 'id'), '');
select pg_catalog.pg_extension_config_dump('outbox.webhook_attempts', '');
select pg_catalog.pg_extension_config_dump('outbox.webhook_totals', '');
select pg_catalog.pg_extension_config_dump('outbox.webhook_removals', '');
select pg_catalog.pg_extension_config_dump('outbox.tenant_grants', 'where role in (select oid from pg_catalog.pg_roles)');
-- A role that is gone would be written as a number, and that may be somebody else's where the dump is restored.
select pg_catalog.pg_extension_config_dump('outbox.sink_grants', 'where role in (select oid from pg_catalog.pg_roles)');

create function outbox.announce() returns void
    language c volatile as 'MODULE_PATHNAME', 'announce_wrapper';
comment on function outbox.announce() is 'tells the launcher that this database has the extension';
revoke all on function outbox.announce() from public;
select outbox.announce();
