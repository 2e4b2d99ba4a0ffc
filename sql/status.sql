-- What waits, and why.

-- One row per sink. The counts look at no more than a thousand events each, whatever the stream holds; beyond that the distance in
-- numbers stands for the count.
create function outbox.sink_status() returns table (
        sink text, kind text, stream text, state text, lag_events bigint, lag_seconds double precision, delivered bigint,
        dead_letters bigint, attempts int, last_error text, last_delivery_at timestamptz, next_attempt_at timestamptz,
        lease_pid int, waiting_for text)
    language plpgsql stable security definer
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s record;
    undelivered record;
    last_seq bigint;
    holder record;
begin
    for s in
        select k.id, k.kind, k.stream, k.enabled, k.number, st.relation, st.sequence, st.pruned_seq, c.done, c.upto, c.at_seq,
               c.at_group, c.floor, c.next_floor, c.delivered, c.delivered_at, h.state as health, h.attempts, h.last_error, h.next_attempt_at,
               k."grouping",
               (select l.pid from pg_locks l
                 where l.locktype = 'advisory' and l.objsubid = 3 and l.classid = 1869968482::oid and l.objid = k.number::bigint::oid
                   and l.database = (select d.oid from pg_database d where d.datname = current_database()) and l.granted limit 1) as pid
          from outbox.sinks k
          join outbox.streams st on st.name = k.stream
          left join outbox.cursors c on c.name = 'sink:' || k.id
          left join outbox.sink_health h on h.sink = k.id
         order by k.id
    loop
        -- What it has not had: behind where it stands, and the exact transactions that were running then.
        execute format($sql$
            select count(*) as events, min(u."time") as oldest, max(u.seq) as upto_seq from (
                (select e."time", e.seq from %1$s e
                  where e.seq > greatest($1, $2) and not pg_visible_in_snapshot(e.txid, $3)
                    and not (pg_visible_in_snapshot(e.txid, $4) and e.seq <= $5)
                  order by e.seq limit 1001)
                union
                (select x."time", x.seq from unnest($6) as l (late), lateral (
                    select e."time", e.seq from %1$s e
                     where e.txid = l.late and not (pg_visible_in_snapshot(e.txid, $4) and e.seq <= $5)
                     order by e.txid, e.seq limit 1001) x)) u$sql$, s.relation)
          into undelivered
         using s.pruned_seq, greatest(s.floor, least(s.at_seq, s.next_floor)), s.done, s.upto, s.at_seq,
               array(select pg_snapshot_xip(s.done) union select pg_snapshot_xip(s.upto));
        execute format('select case when is_called then last_value else 0 end from %s', s.sequence) into last_seq;

        sink := s.id;
        kind := s.kind;
        stream := s.stream;
        lag_events := case when undelivered.events > 1000
                           then greatest(undelivered.events, last_seq - greatest(s.floor, least(s.at_seq, s.next_floor)))
                           else undelivered.events end;
        lag_seconds := greatest(0, extract(epoch from clock_timestamp() - undelivered.oldest));
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

        -- The oldest transaction that could still bring it events, and who runs it.
        select a.pid, a.backend_xid::text as xid, a.state as activity, a.xact_start, null::text as gid into holder
          from pg_stat_activity a
         where a.datname = current_database() and a.backend_xid is not null and a.pid <> pg_backend_pid()
         order by a.xact_start limit 1;
        if holder is null then
            select null::int as pid, p.transaction::text as xid, 'prepared' as activity, p.prepared as xact_start, p.gid into holder
              from pg_prepared_xacts p where p.database = current_database() order by p.prepared limit 1;
        end if;
        waiting_for := case
            when state = 'paused' then 'outbox.resume_sink'
            when state = 'stopped' and undelivered.events > 0 then 'a dispatcher: outbox.start, or shared_preload_libraries'
            when state in ('retrying', 'down') then 'the destination' || coalesce(', until ' || to_char(s.next_attempt_at, 'YYYY-MM-DD HH24:MI:SS OF'), '')
            when state = 'error' then 'outbox.alter_sink, or until ' || to_char(s.next_attempt_at, 'YYYY-MM-DD HH24:MI:SS OF')
            when s.kind = 'pull' and undelivered.events > 0 then
                case when s.pid is null then 'a consumer' else 'outbox.ack by the session with pid ' || s.pid end
            when holder.gid is not null then
                format('prepared transaction %L (%s) of %s', holder.gid, holder.xid, to_char(holder.xact_start, 'YYYY-MM-DD HH24:MI:SS OF'))
            when holder.xid is not null then
                format('transaction %s of pid %s, %s, open since %s', holder.xid, holder.pid, holder.activity,
                       to_char(holder.xact_start, 'YYYY-MM-DD HH24:MI:SS OF'))
            end;
        return next;
    end loop;
end $$;
comment on function outbox.sink_status() is 'the rows of the view outbox.status';

create view outbox.status as select * from outbox.sink_status();
comment on view outbox.status is
    'a row per sink: its state (idle, flowing, retrying, down, error, paused, stopped; polled for a pull sink in use), what waits, and for what';
comment on column outbox.status.lag_events is 'events not delivered yet; beyond 1000 an estimate by their numbers';
comment on column outbox.status.lag_seconds is 'age of the oldest of them';
comment on column outbox.status.waiting_for is 'what the sink waits for: a destination, a consumer, an open transaction that may still bring it events';
