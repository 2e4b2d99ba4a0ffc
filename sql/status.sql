-- What waits, and why.

-- Who a sink may wait for, told once for all of them.
create function outbox.holders(out dispatcher int, out standstill text, out unfinished text)
    language sql stable security definer set search_path = pg_catalog, outbox, pg_temp
begin atomic
    with marks as materialized (
        select l.objid, l.pid from pg_locks l
         where l.locktype = 'advisory' and l.objsubid = 3 and l.classid = 1869968482 and l.objid in (0, 4294967295) and l.granted
           and l.database = (select d.oid from pg_database d where d.datname = current_database())
    ), unfinished as (
        select a.backend_xid::text::xid8 as xid, a.pid, null as gid, a.state as activity, a.xact_start as since
          from pg_stat_activity a
         where a.datname = current_database() and a.backend_xid is not null and a.pid <> pg_backend_pid()
           and a.backend_type <> 'pg_outbox dispatcher'
        union all
        select p.transaction::text::xid8, null, p.gid, 'prepared', p.prepared from pg_prepared_xacts p where p.database = current_database()
         order by since limit 1
    ), restorer as (
        select m.pid from marks m where m.objid > 0 limit 1
    )
    select (select m.pid from marks m where m.objid = 0),
           case when pg_is_in_recovery() then 'the primary, or the promotion of this standby'
                when r.pid is not null then format('the end of the session with pid %s, which restores a dump', r.pid) end,
           case when u.gid is not null then
                    format('prepared transaction %L (%s) of %s', u.gid, u.xid, to_char(u.since, 'YYYY-MM-DD HH24:MI:SS OF'))
                when u.xid is not null then
                    format('transaction %s of pid %s, %s, open since %s', u.xid, u.pid, u.activity, to_char(u.since, 'YYYY-MM-DD HH24:MI:SS OF')) end
      from (values (1)) one left join unfinished u on true left join restorer r on true;
end;
comment on function outbox.holders() is
    'the dispatcher of this database, what keeps everything in it from being delivered, and the oldest transaction that may still bring events';

create function outbox.lacks_slot() returns boolean
    language c stable as 'MODULE_PATHNAME', 'lacks_slot_wrapper';
comment on function outbox.lacks_slot() is 'whether the launcher has found no worker slot for this database''s dispatcher, or has none itself';

-- What a database without a dispatcher waits for.
create function outbox.no_dispatcher() returns text
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    return case
        when not coalesce(current_setting('outbox.enabled', true), 'on')::boolean then 'outbox.enabled, which is off'
        when trim(coalesce(current_setting('outbox.databases', true), '')) <> ''
             and current_database() not in (select trim(d) from string_to_table(current_setting('outbox.databases'), ',') d)
            then 'a place in outbox.databases, which does not name this database'
        when outbox.lacks_slot() then 'a worker slot: max_worker_processes is too low'
        else 'a dispatcher: outbox.start, or shared_preload_libraries' end;

-- One row per sink. The counts look at no more than a thousand events each, whatever the stream holds; beyond that the distance in
-- numbers stands for the count.
create function outbox.sink_status() returns table (
        sink text, kind text, stream text, state text, lag_events bigint, lag_seconds double precision, delivered bigint,
        dead_letters bigint, attempts int, last_error text, last_delivery_at timestamptz, next_attempt_at timestamptz,
        lease_pid int, waiting_for text)
    language plpgsql stable security definer
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    holders record := outbox.holders();
    at_end constant bigint := 9223372036854775807;
    s record;
    undelivered record;
    last_seq bigint;
    again text;
    holder text;
begin
    for s in
        with leases as materialized (
            select l.objid::bigint as number, l.pid from pg_locks l
             where l.locktype = 'advisory' and l.objsubid = 3 and l.classid = 1869968482 and l.granted
               and l.database = (select d.oid from pg_database d where d.datname = current_database())
        )
        select k.id, k.kind, k.stream, k.enabled, c.at_grouping, st.relation, st.sequence, st.pruned_seq, c.done,
               coalesce(c.upto, '3:3:') as upto, coalesce(c.at_seq, at_end) as at_seq, c.at_group, coalesce(c.floor, 0) as floor,
               coalesce(c.ceiling, 0) as ceiling, c.delivered, c.delivered_at, h.state as health, h.attempts, h.last_error,
               h.next_attempt_at, k.xmax as sink_xmax, c.xmax as cursor_xmax, l.pid, p.events as parked, p.oldest as parked_oldest
          from outbox.sinks k
          join outbox.streams st on st.name = k.stream
          left join outbox.cursors c on c.name = 'sink:' || k.id
          left join outbox.sink_health h on h.sink = k.id
          left join leases l on l.number = k.number
          cross join lateral (
              select count(*) as events, min(w."time") as oldest
                from outbox.parked w where w.sink = k.id) p
         order by k.id
    loop
        execute outbox.undelivered_sql(s.relation, s.at_seq < at_end, coalesce(s.at_grouping = 'transaction', false), s.upto)
           into undelivered
          using greatest(s.floor, s.pruned_seq), s.ceiling, s.at_group, s.at_seq, s.done, s.upto;
        execute format('select case when is_called then last_value else 0 end from %s', s.sequence) into last_seq;

        sink := s.id;
        kind := s.kind;
        stream := s.stream;
        lag_events := case when undelivered.events > 1000
                           then greatest(undelivered.events, last_seq - case when s.at_seq < at_end then s.at_seq else s.ceiling end)
                           else undelivered.events end + s.parked;
        -- Not the difference of the two times: an event may be of infinity, from which nothing can be taken away.
        lag_seconds := greatest(0, extract(epoch from clock_timestamp()) - extract(epoch from least(undelivered.oldest, s.parked_oldest)));
        delivered := coalesce(s.delivered, 0);
        dead_letters := (select count(*) from outbox.dead_letters d where d.sink = s.id);
        attempts := coalesce(s.attempts, 0);
        last_error := s.last_error;
        last_delivery_at := s.delivered_at;
        next_attempt_at := s.next_attempt_at;
        lease_pid := s.pid;
        state := case
            when not s.enabled then 'paused'
            when s.kind = 'pull' then case when s.pid is null then 'idle' else 'polled' end
            when s.health in ('retrying', 'down', 'error') then s.health
            when s.pid is null then 'stopped'
            when undelivered.events = 0 then 'idle'
            else 'flowing' end;
        again := coalesce(', until ' || to_char(s.next_attempt_at, 'YYYY-MM-DD HH24:MI:SS OF'), '');
        -- Nothing can be saved as long as somebody is about to change or drop the sink.
        holder := (select format('the end of transaction %s of pid %s, %s, open since %s, which holds the sink',
                                 a.backend_xid, a.pid, a.state, to_char(a.xact_start, 'YYYY-MM-DD HH24:MI:SS OF'))
                     from pg_stat_activity a
                    where a.backend_xid in (s.sink_xmax, s.cursor_xmax) and a.datname = current_database()
                      and a.pid <> pg_backend_pid() and a.backend_type <> 'pg_outbox dispatcher' limit 1);
        waiting_for := case
            when state = 'paused' then 'outbox.resume_sink'
            when holders.standstill is not null then holders.standstill
            when s.kind = 'pull' and undelivered.events > 0 then
                case when s.pid is null then 'a consumer' else 'outbox.ack by the session with pid ' || s.pid end
            when s.kind <> 'pull' and s.pid is null and holders.dispatcher is null and (undelivered.events > 0 or state <> 'stopped') then
                outbox.no_dispatcher()
            when state = 'retrying' and s.parked > 0 then format('the destination, to take %s parked events%s', s.parked, again)
            when state in ('retrying', 'down') then 'the destination' || again
            when state = 'error' then 'outbox.alter_sink' || replace(again, ', until', ', or until')
            when state = 'flowing' and holder is not null then holder
            when state = 'flowing' then case when s.kind = 'function' then 'its function' else 'the destination' end || again
            else holders.unfinished
            end;
        return next;
    end loop;
end $$;
comment on function outbox.sink_status() is 'the rows of the view outbox.status';

-- The statement that counts what a sink has not had, up to a thousand and one of each sort, and finds the oldest of it. Of a window
-- that is not through, what is left: by seq, and the transactions that were running when the window before it ended, by their ids.
-- And what is newer than the window: what has an id that it could not see, or did not see yet. Parameters: $1 floor, $2 ceiling,
-- $3 at_group, $4 at_seq, $5 done, $6 upto, as in outbox.cursors.
create function outbox.undelivered_sql(relation regclass, in_window boolean, by_transaction boolean, upto pg_snapshot) returns text
    language sql stable set search_path = pg_catalog, pg_temp
    return 'select count(*) as events, min(u."time") as oldest from (' || replace(concat_ws(' union all ',
        case when in_window and not by_transaction then $sql$
            (select e."time" from %s e
              where e.seq > greatest($1, $4) and e.seq <= $2 and e.txid >= pg_snapshot_xmax($5) and pg_visible_in_snapshot(e.txid, $6)
              order by e.seq limit 1001)
            union all
            (select x."time" from pg_snapshot_xip($5) as l (xid), lateral
                (select e."time" from %s e where e.txid = l.xid and e.seq > $4 order by e.txid, e.seq limit 1001) x
              where pg_visible_in_snapshot(l.xid, $6))$sql$ end,
        -- A transaction that is not through has its last event at or behind the mark.
        case when in_window and by_transaction then $sql$
            (select x."time" from (
                (select e.txid from %s e
                  where e.seq >= greatest($1 + 1, $3) and e.seq <= $2 and e.txid >= pg_snapshot_xmax($5) and pg_visible_in_snapshot(e.txid, $6)
                  order by e.seq limit 1001)
                union
                select l.xid from pg_snapshot_xip($5) as l (xid) where pg_visible_in_snapshot(l.xid, $6)) t, lateral
                (select n.seq as last from %s n where (n.txid, n.seq) >= (t.txid, 0) and (n.txid, n.seq) <= (t.txid, 9223372036854775807)
                  order by n.txid desc, n.seq desc limit 1) z, lateral
                (select e."time" from %s e
                  where (e.txid, e.seq) > (t.txid, case when z.last = $3 then $4 else 0 end) and (e.txid, e.seq) <= (t.txid, z.last)
                  order by e.txid, e.seq limit 1001) x
              where z.last >= $3 limit 1001)$sql$ end,
        case when pg_snapshot_xmax(upto)::text::numeric > 3 then $sql$
            (select e."time" from %s e where e.txid >= pg_snapshot_xmax($6) order by e.txid, e.seq limit 1001)
            union all
            (select x."time" from pg_snapshot_xip($6) as l (xid), lateral
                (select e."time" from %s e where e.txid = l.xid order by e.txid, e.seq limit 1001) x)$sql$
        -- It has seen nothing yet: by seq, behind what retention has removed.
        else $sql$(select e."time" from %s e where e.seq > $1 order by e.seq limit 1001)$sql$ end
        ), '%s', relation::text) || ') u';

create view outbox.status as select * from outbox.sink_status() union all select * from outbox.webhook_status()
    union all select * from outbox.publication_status();
comment on view outbox.status is
    'a row per sink: its state (idle, flowing, retrying, down, error, paused, stopped; polled for a pull sink in use), what waits, and for what. '
    'And where tenants have webhooks, whose names no sink can have: webhooks:<stream> for writing their deliveries, webhooks:* for making them. '
    'And for each row of outbox.published_secrets one of state error: publication:<name>';
comment on column outbox.status.lag_events is 'events not delivered yet, parked ones included; beyond 1000 an estimate by their numbers';
comment on column outbox.status.lag_seconds is 'age of the oldest of them';
comment on column outbox.status.waiting_for is 'what the sink waits for: a destination, a consumer, an open transaction that may still bring it events';
