-- What waits of webhooks, and why: rows of outbox.status under names that no sink can have.

-- Beside a row for each stream whose events become deliveries, one for all deliveries. Of those at most a thousand are looked at, the
-- oldest; of how many there are beyond that, what the last vacuum or analyze has counted is told.
create function outbox.webhook_status() returns table (
        sink text, kind text, stream text, state text, lag_events bigint, lag_seconds double precision, delivered bigint,
        dead_letters bigint, attempts int, last_error text, last_delivery_at timestamptz, next_attempt_at timestamptz,
        lease_pid int, waiting_for text)
    language plpgsql stable security definer
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    holders record;
    at_end constant bigint := 9223372036854775807;
    f record;
    waiting record;
begin
    if not exists (select from outbox.cursors c where c.name = 'webhooks:' || c.stream) then
        return;
    end if;
    holders := outbox.holders();
    lease_pid := holders.dispatcher;
    for f in
        select c.*, st.relation, st.sequence, st.pruned_seq
          from outbox.cursors c join outbox.streams st on st.name = c.stream where c.name = 'webhooks:' || c.stream order by c.name
    loop
        execute outbox.undelivered_sql(f.relation, f.at_seq < at_end, false, f.upto)
           into waiting using greatest(f.floor, f.pruned_seq), f.ceiling, f.at_group, f.at_seq, f.done, f.upto;
        sink := f.name;
        kind := 'fan-out';
        stream := f.stream;
        lag_events := waiting.events;
        if lag_events > 1000 then
            execute format('select case when is_called then last_value else 0 end - $1 from %s', f.sequence)
               into lag_events using case when f.at_seq < at_end then f.at_seq else f.ceiling end;
            lag_events := greatest(lag_events, waiting.events);
        end if;
        lag_seconds := greatest(0, extract(epoch from clock_timestamp()) - extract(epoch from waiting.oldest));
        delivered := f.delivered;
        dead_letters := 0;
        attempts := 0;
        last_delivery_at := f.delivered_at;
        state := case when lease_pid is null then 'stopped' when lag_events = 0 then 'idle' else 'flowing' end;
        waiting_for := case
            when holders.standstill is not null then holders.standstill
            when lease_pid is null and lag_events > 0 then outbox.no_dispatcher()
            when lag_events > 0 then 'the dispatcher'
            else holders.unfinished end;
        return next;
    end loop;

    sink := 'webhooks:*';
    kind := 'webhooks';
    stream := null;
    select count(*) as looked_at, count(w.id) as pending, min(o.created_at) filter (where w.id is not null) as oldest,
           count(distinct w.id) filter (where not w.enabled) as disabled,
           count(distinct w.id) filter (where w.enabled and w.failing_since is not null) as failing,
           count(*) filter (where w.enabled) as wanted,
           min(o.next_attempt_at) filter (where w.enabled) as next_at,
           (array_agg(o.id order by o.id) filter (where w.enabled and o.attempts > o.earlier))[1] as failed
      from (select d.id, d.webhook, d.created_at, d.next_attempt_at, d.attempts, d.earlier
              from outbox.webhook_deliveries d where d.state = 'pending' order by d.id limit 1001) o
      left join outbox.webhooks w on w.id = o.webhook
      into waiting;
    lag_events := case when waiting.looked_at > 1000 then greatest(waiting.pending, outbox.counted('outbox.webhook_deliveries_waiting'))
                       else waiting.pending end;
    lag_seconds := greatest(0, extract(epoch from clock_timestamp() - waiting.oldest));
    select t.delivered, t.last_delivery_at into delivered, last_delivery_at from outbox.webhook_totals t;
    delivered := coalesce(delivered, 0);
    dead_letters := (select count(*) from (select from outbox.webhook_deliveries d where d.state = 'dead' order by d.webhook, d.created_at limit 1001) x);
    if dead_letters > 1000 then
        dead_letters := greatest(dead_letters, outbox.counted('outbox.webhook_deliveries_dead'));
    end if;
    select d.attempts - d.earlier, a.error into attempts, last_error
      from outbox.webhook_deliveries d left join outbox.webhook_attempts a on a.delivery = d.id and a.attempt = d.attempts
     where d.id = waiting.failed;
    attempts := coalesce(attempts, 0);
    next_attempt_at := case when waiting.next_at > clock_timestamp() then waiting.next_at end;
    state := case
        when lease_pid is null then 'stopped'
        when lag_events = 0 then 'idle'
        when waiting.wanted = 0 and waiting.disabled > 0 then 'paused'
        when next_attempt_at is not null then 'retrying'
        else 'flowing' end;
    waiting_for := case
        when holders.standstill is not null then holders.standstill
        when lag_events = 0 then null
        when lease_pid is null then outbox.no_dispatcher()
        when waiting.pending = 0 then 'the removal of deleted webhooks'
        when waiting.wanted = 0 then format('outbox.enable_webhook or delete_webhook; endpoints that are disabled: %s', waiting.disabled)
        when waiting.failing > 0 then
            format('endpoints that fail: %s%s', waiting.failing, coalesce(', until ' || to_char(next_attempt_at, 'YYYY-MM-DD HH24:MI:SS OF'), ''))
        else 'endpoints' end;
    return next;
end $$;
comment on function outbox.webhook_status() is 'the rows of the view outbox.status that tell of webhooks; none where there are none';

create function outbox.counted(index regclass) returns bigint
    language sql stable set search_path = pg_catalog, pg_temp
    return (select greatest(c.reltuples, 0)::bigint from pg_class c where c.oid = counted.index);
comment on function outbox.counted(regclass) is 'how many entries an index had when it was vacuumed or analyzed last';
