-- Cursors: where a reader of a stream stands. Forward only.

-- Tables that belong to the dump do not refer to each other: a parallel pg_restore fills them in any order.
create table outbox.cursors (
    name         text primary key,
    stream       text not null,
    txid         xid8 not null,
    seq          bigint not null,
    updated_at   timestamptz not null default clock_timestamp(),
    -- The rest is for sinks, which read in commit order (src/dispatch/window.rs).
    window_no    bigint,
    done         pg_snapshot,
    upto         pg_snapshot,
    at_group     bigint,
    at_seq       bigint,
    at_grouping  text check (at_grouping in ('event', 'transaction')),
    floor        bigint,
    ceiling      bigint,
    next_floor   bigint,
    ahead        bigint[],
    handed_group bigint,
    handed_seq   bigint,
    handed_last_txid xid8,
    handed_last_seq  bigint,
    handed_events    bigint,
    sample_seq   bigint,
    sample_xid   xid8,
    delivered    bigint not null default 0,
    delivered_at timestamptz
) with (fillfactor = 40);
comment on table outbox.cursors is
    'where each reader stands: (txid, seq) is no greater than anything it has not seen; a sink''s cursor is named sink:<id>';
comment on column outbox.cursors.window_no is 'how many windows the sink has opened; the order of saves is (window_no, at_group, at_seq)';
comment on column outbox.cursors.done is 'everything visible in this snapshot has been delivered';
comment on column outbox.cursors.upto is 'the open window: what is visible in this snapshot and not in done';
comment on column outbox.cursors.at_group is 'within the window, what is delivered: up to (at_group, at_seq); at_group is the last seq of a transaction, or at_seq';
comment on column outbox.cursors.at_grouping is 'how the open window is read, to its end; a sink whose grouping is altered is read so from its next window on';
comment on column outbox.cursors.ahead is
    'sinks: the seqs of events behind this place that are through already; written with what went through, so that nobody hands them over again';
comment on column outbox.cursors.floor is 'no event of the window that began after done lies at or below this seq';
comment on column outbox.cursors.ceiling is 'no event of the window lies above this seq';
comment on column outbox.cursors.next_floor is 'the floor of the window that follows';
comment on column outbox.cursors.sample_seq is 'pull sinks: the sequence''s value at a moment when the next transaction id was sample_xid';
comment on column outbox.cursors.handed_seq is 'pull sinks: the batch handed out and not yet acknowledged ends at (handed_group, handed_seq)';

-- These are written by the extension's functions, which have a search_path of their own. Whoever writes into them otherwise restores
-- a dump: pg_dump's scripts run without one. Until such a session ends, nothing is delivered (src/store/rebase.rs).
create function outbox.mark_restore() returns trigger
    language c as 'MODULE_PATHNAME', 'mark_restore_wrapper';
comment on function outbox.mark_restore() is 'trigger: the session restores a dump, and what is in the database is not complete until it ends';
create trigger outbox_restore before insert on outbox.clusters for each statement
    when (current_setting('search_path') = '') execute function outbox.mark_restore();
create trigger outbox_restore before insert on outbox.cursors for each statement
    when (current_setting('search_path') = '') execute function outbox.mark_restore();
alter table outbox.clusters enable always trigger outbox_restore;
alter table outbox.cursors enable always trigger outbox_restore;

-- Positions of another cluster's transaction ids mean nothing here: re-base first. Costs one look at a table of one row.
create function outbox.rebase_if_moved() returns void
    language c volatile as 'MODULE_PATHNAME', 'rebase_if_moved_wrapper';
comment on function outbox.rebase_if_moved() is 'after a logical restore or a move to another cluster: re-bases positions, so that what is undelivered stays so';

-- The relation of a stream and where retention stands in it.
create function outbox.stream_named(name text) returns outbox.streams
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
declare
    found_stream outbox.streams;
begin
    select * into found_stream from outbox.streams s where s.name = stream_named.name;
    if not found then
        raise exception 'stream % does not exist', coalesce('"' || name || '"', 'null')
            using errcode = '42704', hint = 'Streams are made by outbox.create_stream and listed in outbox.streams.';
    end if;
    return found_stream;
end $$;

-- The transaction id that this server gives out next, whatever the snapshot at hand says.
create function outbox.next_xid() returns xid8
    language c volatile as 'MODULE_PATHNAME', 'next_xid_wrapper';
comment on function outbox.next_xid() is 'the transaction id that is given out next';

-- Refuses a position that this database has not given out, where events could be passed over by it: it comes from a future that was lost,
-- as in a recovery to an earlier point or a failover that did not have the last commits, or from another database.
--
-- Such a position may lie ahead of all numbers; and once the numbers have passed it, it is the position of no event, though older ones
-- are still held and retention has not come so far. Where both histories have given out the very same pair, nothing can tell them apart.
create function outbox.check_position(s outbox.streams, txid xid8, seq bigint) returns void
    language plpgsql
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    next_xid xid8 := outbox.next_xid();
    -- Below, everything is visible or will never be.
    settled boolean := check_position.txid < pg_snapshot_xmin(pg_current_snapshot());
    last_seq bigint;
    is_there boolean;
    older boolean;
    is_gone boolean;
    problem text;
begin
    -- A standby may not have come as far as the primary that has given it out.
    if pg_is_in_recovery() then
        return;
    end if;
    if check_position.txid >= next_xid then
        problem := format('No transaction of this server has come to it: the next one will be %s.', next_xid);
    elsif check_position.seq = 0 then
        -- Before all of a transaction.
        return;
    else
        execute format('select exists (select from %s e where e.txid = $1 and e.seq = $2)', s.relation)
           into is_there using check_position.txid, check_position.seq;
        if is_there then
            return;
        end if;
        -- The audit trail loses its oldest records in the order of their numbers. Looked at after the above: retention may be at work.
        execute format('select exists (select from %s e where (e.txid, e.seq) < ($1, $2) and ($3 or e.seq < $2)),
                               (select case when q.is_called then q.last_value else 0 end from %s q),
                               (select ($1, $2) <= (k.gone_txid, k.gone_seq) from outbox.streams k where k.name = $4)',
                       s.relation, s.sequence)
           into older, last_seq, is_gone using check_position.txid, check_position.seq, s.shape <> 'audit', s.name;
        if settled and not older then
            return;
        elsif check_position.seq > last_seq then
            problem := format('The last number that the stream has given out is %s.', last_seq);
        elsif not settled or is_gone then
            return;
        else
            raise exception 'position %:% is not known in stream "%"', check_position.txid, check_position.seq, s.name
                using errcode = '22023', detail = 'Older events are held, but it is the position of none, and retention has not come so far.',
                      hint = outbox.what_of_a_lost_position();
        end if;
    end if;
    raise exception 'position %:% lies ahead of stream "%"', check_position.txid, check_position.seq, s.name
        using errcode = '22023', detail = problem, hint = outbox.what_of_a_lost_position();
end $$;
comment on function outbox.check_position(outbox.streams, xid8, bigint) is
    'raises 22023 for a position that the stream has not given out, if a reader that goes on from there could pass events over';

create function outbox.what_of_a_lost_position() returns text
    language sql immutable set search_path = pg_catalog, pg_temp
    return 'It is of another database, or of a future that this one has lost in a recovery or a failover. Read again from an older position, '
           'from the beginning (null), or from now on: outbox.tail().';

-- What outbox.read selects from the table e of a stream.
create function outbox.read_columns(shape text) returns text
    language sql immutable set search_path = pg_catalog, pg_temp
    return case shape
        when 'audit' then $sql$e.txid, e.seq, e.id, e.action, e.resource_type, e.resource_id, e.tenant, e."time",
               outbox.audit_record(e.id, e.tenant, e."time", e.action, e.resource_type, e.resource_id, e.admission, e.details), null::jsonb$sql$
        else $sql$e.txid, e.seq, coalesce(e.id, outbox.event_id(e.id, $4, e.txid, e.seq, e."time")), e.topic, e.source, e.subject, e.tenant, e."time",
               e.payload, e.headers$sql$ end;

-- Which events of the table e of a stream are for everybody.
create function outbox.for_everybody(shape text) returns text
    language sql immutable set search_path = pg_catalog, pg_temp
    return case shape when 'audit' then 'true' else 'e.for_sink is null' end;

-- A regular expression for topics that match one of the patterns; null for none given.
create function outbox.topics_regex(topics text[]) returns text
    language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
    topic text;
    segments text[];
    problem text;
    alternatives text[] := '{}';
begin
    if coalesce(cardinality(topics), 0) = 0 then
        return null;
    end if;
    foreach topic in array topics loop
        segments := string_to_array(topic, '.');
        problem := case
            when topic is null then 'It is null.'
            when topic = '' then 'It is empty.'
            when '' = any (segments) then 'It has an empty segment.'
            when '>' = any (trim_array(segments, 1)) then '">" stands for the rest and can only be the last segment.'
            when exists (select from unnest(segments) s where s ~ '[*>]' and length(s) > 1) then '"*" and ">" stand for whole segments.' end;
        if problem is not null then
            raise exception 'topic pattern % is not allowed', coalesce(quote_literal(left(topic, 60)), 'null')
                using errcode = '22023', detail = problem, hint = '"*" stands for one segment and ">" for the rest, as in order.* and outbox.public.>';
        end if;
        alternatives := alternatives || (
            select string_agg(case s when '*' then '[^.]*' when '>' then '.*' else regexp_replace(s, '([][(){}.*+?^$|\\])', '\\\1', 'g') end,
                              '\.' order by n)
              from unnest(segments) with ordinality as u (s, n));
    end loop;
    return '^(' || array_to_string(alternatives, '|') || ')$';
end $$;

create function outbox.read(after text default null, max_events int default 100, stream text default 'outbox', topics text[] default null)
    returns table (
        txid xid8, seq bigint, id text, topic text, source text, subject text, tenant text, "time" timestamptz,
        payload jsonb, headers jsonb, "position" text)
    language plpgsql security definer
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s outbox.streams := outbox.stream_named(stream);
    matching text := outbox.topics_regex(topics);
    a record;
begin
    if max_events is null or max_events < 1 then
        raise exception 'max_events must be at least 1' using errcode = '22023', detail = format('It is %s.', coalesce(max_events::text, 'null'));
    end if;
    perform outbox.rebase_if_moved();
    a := outbox.parse_position(coalesce(after, '0:0'));
    perform outbox.check_position(s, a.txid, a.seq);
    -- Horizon and rows in one statement, so in one snapshot: nothing can commit behind the last row returned.
    return query execute format($sql$
        select %s, e.txid::text || ':' || e.seq::text
          from %s e
         where (e.txid, e.seq) > ($1, $2) and e.txid < pg_snapshot_xmin(pg_current_snapshot()) and %s and ($5 is null or %s ~ $5)
         order by e.txid, e.seq limit $3$sql$,
        outbox.read_columns(s.shape), s.relation, outbox.for_everybody(s.shape), case s.shape when 'audit' then 'e.action' else 'e.topic' end)
    using coalesce(a.txid, '0'::xid8), coalesce(a.seq, 0), max_events, s.name, matching;
end $$;
comment on function outbox.read(text, int, text, text[]) is
    'the next events after a position, in pair order (txid, seq), of all topics or of those that match a pattern; nothing can ever commit '
    'behind the last one returned. Waits for every open transaction that began to write earlier. A reader of few topics that gets less than it '
    'asked for may go on behind what outbox.tail said before. Errors: 22023 for max_events, a pattern, a position that cannot be read or that '
    'this database has not given out, 42704 for an unknown stream';

create function outbox.tail(stream text default 'outbox') returns text
    language plpgsql security definer
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s outbox.streams := outbox.stream_named(stream);
    last text;
begin
    perform outbox.rebase_if_moved();
    execute format($sql$
        select e.txid::text || ':' || e.seq::text from %s e
         where e.txid < pg_snapshot_xmin(pg_current_snapshot()) and %s order by e.txid desc, e.seq desc limit 1$sql$,
        s.relation, outbox.for_everybody(s.shape)) into last;
    return last;
end $$;
comment on function outbox.tail(text) is 'the last position that outbox.read could return now; null in an empty stream. Error 42704 for an unknown stream';

-- A name that a client may use for a cursor of its own.
create function outbox.check_cursor_name(name text) returns void
    language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if coalesce(name, '') = '' or length(name) > 200 then
        raise exception 'cursor name % is not allowed', coalesce(quote_literal(left(name, 60)), 'null')
            using errcode = '22023', detail = 'A cursor name has 1 to 200 characters.';
    elsif name like 'webhooks:%' then
        raise exception 'cursor "%" belongs to webhooks', name
            using errcode = '22023', detail = 'It is moved by their deliveries alone.', hint = 'It goes with the last webhook of its stream.';
    elsif name like 'sink:%' then
        raise exception 'cursor "%" belongs to a sink', name
            using errcode = '22023', detail = 'A sink''s cursor is moved by its deliveries alone.', hint = 'Use outbox.ack for a pull sink, outbox.drop_sink to give a sink up.';
    end if;
end $$;

create function outbox.save_cursor(name text, "position" text, stream text default 'outbox') returns boolean
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    s outbox.streams := outbox.stream_named(stream);
    p record;
    moved boolean;
begin
    perform outbox.check_cursor_name(name);
    if "position" is null then
        raise exception 'cursor "%" needs a position', name using errcode = '22023', detail = 'The position is null.';
    end if;
    p := outbox.parse_position("position");
    perform outbox.check_position(s, p.txid, p.seq);
    -- One upsert that compares in its WHERE: a late save by an old holder moves nothing back, concurrent saves end at the greatest.
    insert into outbox.cursors as c (name, stream, txid, seq) values (save_cursor.name, s.name, p.txid, p.seq)
        on conflict on constraint cursors_pkey do update
           set txid = excluded.txid, seq = excluded.seq, updated_at = clock_timestamp()
         where c.stream = excluded.stream and (c.txid, c.seq) < (excluded.txid, excluded.seq)
    returning true into moved;
    if moved is null and exists (select from outbox.cursors c where c.name = save_cursor.name and c.stream <> s.name) then
        raise exception 'cursor "%" belongs to another stream than "%"', name, s.name
            using errcode = '22023', hint = 'Use another name, or drop it first: select outbox.drop_cursor(name).';
    end if;
    return coalesce(moved, false);
end $$;
comment on function outbox.save_cursor(text, text, text) is
    'saves a reader''s position, forward only; true when it moved. The slowest cursor of a stream holds retention back. '
    'Errors: 22023 for a name, a position that cannot be read or that this database has not given out, 42704 for an unknown stream';

create function outbox.cursor(name text) returns text
    language sql stable security definer set search_path = pg_catalog, outbox, pg_temp
    return (select outbox.format_position(c.txid, c.seq) from outbox.cursors c where c.name = cursor.name);
comment on function outbox.cursor(text) is 'the saved position of a cursor, null if there is none';

create function outbox.drop_cursor(name text) returns boolean
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
begin
    perform outbox.check_cursor_name(name);
    delete from outbox.cursors c where c.name = drop_cursor.name;
    return found;
end $$;
comment on function outbox.drop_cursor(text) is 'forgets a cursor, so that retention no longer waits for it; true if there was one';
