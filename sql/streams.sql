-- Events, and the streams that hold them.

create type outbox.event as (
    txid    xid8,
    seq     bigint,
    id      text,
    topic   text,
    source  text,
    subject text,
    tenant  text,
    "time"  timestamptz,
    payload jsonb,
    headers jsonb
);
comment on type outbox.event is 'one event, as function sinks, filters and transforms see it; the columns of outbox.events';

create function outbox.new_id() returns text
    language c volatile strict parallel safe as 'MODULE_PATHNAME', 'new_id_wrapper';
comment on function outbox.new_id() is 'a new event id: evt_ and 32 hexadecimal digits, unique over streams, clusters and restores';

create function outbox.event_id(id text, stream text, txid xid8, seq bigint, "time" timestamptz) returns text
    language sql immutable parallel safe
    return coalesce(id, 'evt_' || md5(concat_ws(':', stream, txid::text, seq::text, extract(epoch from "time")::text)));
comment on function outbox.event_id(text, text, xid8, bigint, timestamptz) is
    'the id of an event: the stored one, or, where an application stored null, one derived from what never changes in the row';

create function outbox.next_seq(sequence regclass) returns bigint
    language c volatile strict as 'MODULE_PATHNAME', 'next_seq_wrapper';
comment on function outbox.next_seq(regclass) is
    'the next number of a stream, always one more than the last that anybody got, whatever the options of the sequence are; lastval() and currval() '
    'of the session know nothing of it. Error 22023 for anything but the sequence of a stream';
create function outbox.next_number(sequence regclass) returns bigint
    language c volatile strict as 'MODULE_PATHNAME', 'next_number_wrapper';
comment on function outbox.next_number(regclass) is 'the same for other sequences of the extension';

-- As an identity column that is always generated would have it: positions are not an application's to choose.
create function outbox.is_drawn(seq bigint) returns boolean
    language c volatile strict as 'MODULE_PATHNAME', 'is_drawn_wrapper';
comment on function outbox.is_drawn(bigint) is 'whether outbox.next_seq has given this number to this session just now; true in a session that restores a dump';
create function outbox.refuse_number() returns trigger
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    raise exception 'cannot insert a non-DEFAULT value into column "seq"'
        using errcode = '428C9', detail = 'The number of an event is drawn when it is written.', hint = 'Leave out the columns txid and seq.';
end $$;

-- Called before each insert statement on a stream: the commit then wakes the dispatcher, once, however many events.
create function outbox.wake() returns trigger
    language c as 'MODULE_PATHNAME', 'wake_wrapper';
comment on function outbox.wake() is 'trigger on every stream: the commit of this transaction wakes the dispatcher';

-- Called for each statement that changes what dispatchers keep in mind: they look at all of it again.
create function outbox.change() returns trigger
    language c as 'MODULE_PATHNAME', 'change_wrapper';
comment on function outbox.change() is 'trigger on sinks, streams, secrets and dead letters: the commit of this transaction has dispatchers look at them again';

-- Rows that logical replication brings into a table of the extension. Their positions are transaction ids and numbers of another cluster,
-- and rows of the other tables say how things stand there. A row of a stream becomes an event of this database, with a position of its own
-- and the id that it has where it comes from; whatever else is done to a stream there, and all that is done to other tables, is not done
-- here. What a restored dump brings, also with session_replication_role = replica, comes from no replication origin; what other triggers of
-- the replicating process write comes from them.
create function outbox.take_replicated() returns trigger
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    stream outbox.streams;
begin
    if pg_trigger_depth() > 1 or not pg_replication_origin_session_is_setup() then
        return case tg_op when 'DELETE' then old else new end;
    elsif tg_op = 'TRUNCATE' then
        raise exception 'table outbox.% is not truncated by logical replication', quote_ident(tg_table_name)
            using errcode = '55000', detail = 'It holds what this database has written itself, too.',
                  hint = 'Leave truncate out of what the publication publishes, and skip this transaction: alter subscription … skip.';
    end if;
    select * into stream from outbox.streams s where s.relation = tg_relid;
    if not found then
        perform outbox.tell_left_out(format('%I.%I', tg_table_schema, tg_table_name));
        return null;
    elsif tg_op <> 'INSERT' then
        return null;
    elsif stream.shape = 'events' then
        -- Of a backfill to one sink over there.
        if new.for_sink is not null then
            return null;
        end if;
        new.id := outbox.event_id(new.id, stream.name, new.txid, new.seq, new."time");
    end if;
    -- In this order, as the defaults.
    new.txid := pg_current_xact_id();
    new.seq := outbox.next_seq(stream.sequence);
    perform outbox.wake_at_commit();
    return new;
end $$;
comment on function outbox.take_replicated() is
    'trigger: makes rows of a stream that logical replication brings events of this database, and leaves rows of other tables out';

create function outbox.wake_at_commit() returns void
    language c volatile as 'MODULE_PATHNAME', 'wake_at_commit_wrapper';
comment on function outbox.wake_at_commit() is 'the commit of this transaction wakes the dispatcher';
create function outbox.tell_left_out("table" text) returns void
    language c volatile strict as 'MODULE_PATHNAME', 'tell_left_out_wrapper';
comment on function outbox.tell_left_out(text) is 'says in the log, once in each session, that replicated rows of a table are left out';

-- Gives a table of the extension what keeps it apart from other databases' rows. The triggers fire for replicas alone, so that they cost
-- nobody else anything.
create function outbox.keep_apart(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    execute format('create trigger outbox_replicated before insert or update or delete on %s for each row execute function outbox.take_replicated()', relation);
    execute format('create trigger outbox_replicated_truncate before truncate on %s for each statement execute function outbox.take_replicated()', relation);
    execute format('alter table %s enable replica trigger outbox_replicated', relation);
    execute format('alter table %s enable replica trigger outbox_replicated_truncate', relation);
end $$;

create table outbox.streams (
    name       text primary key check (name ~ '^[a-z_][a-z0-9_]{0,39}$'),
    relation   regclass not null unique,
    sequence   regclass not null,
    numbering  oid not null,
    builtin    boolean not null default false,
    pruned_seq bigint not null default 0,
    gone_txid  xid8 not null default '0',
    gone_seq   bigint not null default 0,
    shape      text not null default 'events' check (shape in ('events', 'audit')),
    created_at timestamptz not null default now()
);
create trigger outbox_change after insert or delete on outbox.streams for each statement execute function outbox.change();
comment on table outbox.streams is 'a stream is a table of events with its own sinks and retention';
comment on column outbox.streams.shape is 'what the columns of the table are: those of outbox.events, or of outbox.audit_events';
comment on column outbox.streams.numbering is 'the sequence''s file: it has another one once its numbers begin again, as after truncate … restart identity';
comment on column outbox.streams.pruned_seq is 'retention has removed everything up to this seq; reads start behind it';
comment on column outbox.streams.gone_seq is '(gone_txid, gone_seq) is the greatest position of those that retention has removed';

-- Which clusters the positions in this database come from. A dump restored elsewhere adds the old cluster's identifier to the new
-- one's: two different rows are the sign that positions must be re-based before anything is read (src/store/rebase.rs).
create table outbox.clusters (
    system_identifier bigint not null,
    since             timestamptz not null default now(),
    since_xid         xid8 not null default pg_current_xact_id()
);
-- It has no key that two dumps could not have in common; and a publication for all tables forbids deletes from a table without identity.
alter table outbox.clusters replica identity full;
comment on table outbox.clusters is 'system identifiers of the clusters whose transaction ids the stored positions speak of';

create function outbox.guard_numbers(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    execute format('create trigger outbox_numbers before insert on %s for each row when (not outbox.is_drawn(new.seq)) execute function outbox.refuse_number()', relation);
end $$;

-- The table of a stream: also used for the built-in ones, so that all are of one shape.
create function outbox.make_stream_table(name text, relation text) returns void
    language plpgsql set search_path = pg_catalog, outbox, pg_temp as $$
begin
    -- txid stands before seq: defaults are evaluated in this order, and a transaction must have its id before it draws its first
    -- seq, or the floor below which nothing undelivered can lie (src/dispatch/window.rs) would not hold.
    -- Not an identity column: lastval() is the client's, and a sequence's cache would give later writers lower numbers.
    execute format('create sequence outbox.%I', relation || '_seq_seq');
    execute format($sql$
        create table outbox.%1$I (
            txid    xid8 not null default pg_current_xact_id(),
            seq     bigint primary key default outbox.next_seq(%2$L),
            id      text default outbox.new_id(),
            topic   text not null check (topic <> ''),
            source  text,
            subject text,
            tenant  text default nullif(current_setting('outbox.tenant', true), ''),
            "time"  timestamptz not null default clock_timestamp(),
            payload jsonb,
            headers jsonb default nullif(current_setting('outbox.headers', true), '')::jsonb,
            for_sink int
        )$sql$, relation, format('outbox.%I', relation || '_seq_seq'));
    execute format('alter sequence outbox.%I owned by outbox.%I.seq', relation || '_seq_seq', relation);
    execute format('create index %I on outbox.%I (txid, seq)', relation || '_position', relation);
    execute format('create trigger outbox_wake before insert on outbox.%I for each statement execute function outbox.wake()', relation);
    perform outbox.keep_apart(format('outbox.%I', relation)::regclass);
    perform outbox.guard_numbers(format('outbox.%I', relation));
    execute format('comment on table outbox.%I is %L', relation, 'events of the stream ' || name || '; the position of an event is (txid, seq)');
    execute format('comment on column outbox.%I.for_sink is %L', relation,
                   'written by a backfill to one sink: the number of that sink in outbox.sinks. No other reader of the stream gets the event');
    insert into outbox.streams (name, relation, sequence, numbering)
    select name, format('outbox.%I', relation)::regclass, s.sequence, pg_relation_filenode(s.sequence)
      from (select pg_get_serial_sequence(format('outbox.%I', relation), 'seq')::regclass as sequence) s;
end $$;

-- Whether the table of a stream is as make_stream_table makes it, but perhaps for indexes that run nobody's code: then capture may write
-- rows into it without an INSERT statement (src/pg/append/). Columns that were added, other defaults, constraints, triggers, rules and
-- policies are what only a statement heeds. Asked while the table is locked.
create function outbox.is_plain_stream(relation oid) returns boolean
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        select c.relkind = 'r' and not c.relispartition and not c.relhasrules and not c.relrowsecurity and m.amname = 'heap'
               and (select string_agg(format('%s %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
                                             coalesce(pg_get_expr(d.adbin, d.adrelid), nullif(a.attidentity, '')::text, nullif(a.attgenerated, '')::text)),
                                      '; ' order by a.attnum)
                      from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
                     where a.attrelid = c.oid and a.attnum > 0)
                   = format('txid xid8 t pg_current_xact_id(); seq bigint t next_seq(%L::regclass); id text f new_id(); topic text t ; source text f ; subject text f ; '
                     'tenant text f NULLIF(current_setting(''outbox.tenant''::text, true), ''''::text); '
                     'time timestamp with time zone t clock_timestamp(); payload jsonb f ; '
                     'headers jsonb f (NULLIF(current_setting(''outbox.headers''::text, true), ''''::text))::jsonb; for_sink integer f ', s.sequence::text)
               and (select array_agg(pg_get_constraintdef(k.oid)) from pg_constraint k where k.conrelid = c.oid and k.contype in ('c', 'f', 'x'))
                   = array['CHECK ((topic <> ''''::text))']
               and not exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname not in ('outbox_wake', 'outbox_numbers', 'outbox_replicated') and t.tgtype & 4 <> 0)
               -- What is built in is not mentioned there.
               and not exists (select from pg_index i join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = i.indexrelid
                                where i.indrelid = c.oid
                                  and d.refclassid in ('pg_proc'::regclass, 'pg_operator'::regclass, 'pg_opclass'::regclass, 'pg_type'::regclass))
          from pg_class c join pg_am m on m.oid = c.relam join outbox.streams s on s.relation = c.oid
         where c.oid = is_plain_stream.relation;
    end;

-- Functions that belong to a table: of triggers and rules on inserts, defaults, checks, and expressions of indexes. What is built in is not
-- among them.
create function outbox.code_of_stream(relation oid) returns setof regprocedure
    language sql stable set search_path = pg_catalog, outbox, pg_temp
    begin atomic
        with parts (class, oid) as (
            select 'pg_class'::regclass, i.indexrelid from pg_index i where i.indrelid = code_of_stream.relation
            union all
            select 'pg_attrdef'::regclass, d.oid from pg_attrdef d where d.adrelid = code_of_stream.relation
            union all
            select 'pg_constraint'::regclass, k.oid from pg_constraint k
             where k.conrelid = code_of_stream.relation
                or k.contypid in (select a.atttypid from pg_attribute a where a.attrelid = code_of_stream.relation)
            union all
            select 'pg_trigger'::regclass, t.oid from pg_trigger t where t.tgrelid = code_of_stream.relation and t.tgtype & 4 <> 0
            union all
            select 'pg_rewrite'::regclass, r.oid from pg_rewrite r where r.ev_class = code_of_stream.relation
        )
        select distinct f.oid::regprocedure
          from parts p join pg_depend d on d.classid = p.class and d.objid = p.oid
          left join pg_operator o on d.refclassid = 'pg_operator'::regclass and o.oid = d.refobjid
          join pg_proc f on f.oid = case when d.refclassid = 'pg_proc'::regclass then d.refobjid else o.oprcode end;
    end;

-- Captured changes are written into a stream by its owner, whoever makes them: no other role's code is to run with the owner's rights.
create function outbox.check_code_of_stream(relation oid) returns void
    language plpgsql stable set search_path = pg_catalog, outbox, pg_temp as $$
declare
    foreign_code record;
begin
    select f.oid::regprocedure as name, f.proowner::regrole as owner, c.relowner::regrole as runs_as, format('%s.%I', c.relnamespace::regnamespace, c.relname) as place into foreign_code
      from pg_class c cross join outbox.code_of_stream(c.oid) x join pg_proc f on f.oid = x
     where c.oid = relation and not pg_has_role(f.proowner, c.relowner, 'usage') limit 1;
    if found then
        raise exception 'function % of role % would run as role % for events in %', foreign_code.name, foreign_code.owner, foreign_code.runs_as, foreign_code.place
            using errcode = '42501', detail = 'A trigger, default, check or index of the table calls it, and captured changes are written there by the owner of the table.',
                  hint = format('Let a function of role %s do it, or drop what calls it.', foreign_code.runs_as);
    end if;
end $$;

select outbox.make_stream_table('outbox', 'events');
update outbox.streams set builtin = true where name = 'outbox';
insert into outbox.clusters (system_identifier) select system_identifier from pg_control_system();

create function outbox.emit(
    topic   text,
    payload jsonb default null,
    subject text default null,
    source  text default null,
    tenant  text default null,
    headers jsonb default null,
    id      text default null,
    stream  text default 'outbox'
) returns text
    language c volatile as 'MODULE_PATHNAME', 'emit_wrapper';
comment on function outbox.emit(text, jsonb, text, text, text, jsonb, text, text) is
    'writes one event into a stream, in the calling transaction, and returns its id. tenant and headers default to the settings '
    'outbox.tenant and outbox.headers. Errors: 22023 without a topic, 42704 for an unknown stream, 42501 without the privilege emit';

create function outbox.create_stream(name text) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    emitter regrole;
begin
    if name is null or name !~ '^[a-z_][a-z0-9_]{0,39}$' then
        raise exception 'stream name % is not allowed', coalesce(quote_literal(name), 'null')
            using errcode = '22023', detail = 'A stream name is 1 to 40 of a-z, 0-9 and _, and does not begin with a digit.',
                  hint = 'For example: select outbox.create_stream(''billing'')';
    end if;
    if exists (select from outbox.streams s where s.name = create_stream.name and s.shape = 'events') then
        raise exception 'stream "%" exists already', name using errcode = '42710';
    end if;
    if name = 'audit' or to_regclass(format('outbox.%I', name)) is not null then
        raise exception 'stream name "%" is reserved', name
            using errcode = '22023', detail = 'A relation of the extension has this name.', hint = 'Choose another name.';
    end if;
    perform outbox.make_stream_table(name, name);
    -- Whoever may emit may do so into every stream, later ones too.
    for emitter in
        select r.oid from pg_roles r where r.oid <> current_user::regrole and 'emit' in (select outbox.privileges_of(r.oid))
    loop
        execute format('grant %s to %s', outbox.emit_part(format('outbox.%I', name)::regclass), emitter);
    end loop;
end $$;
comment on function outbox.create_stream(text) is
    'makes a stream: table outbox.<name> of the shape of outbox.events. Errors: 22023 for a name that is not allowed, 42710 if it exists';

create function outbox.drop_stream(name text) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    gone outbox.streams;
    sink text;
begin
    select * into gone from outbox.streams s where s.name = drop_stream.name for update;
    if not found then
        raise exception 'stream "%" does not exist', name using errcode = '42704';
    end if;
    if gone.builtin then
        raise exception 'stream "%" is built in', name using errcode = '22023', detail = 'Only streams made by outbox.create_stream can be dropped.';
    end if;
    select s.id into sink from outbox.sinks s where s.stream = drop_stream.name limit 1;
    if found then
        raise exception 'stream "%" has sinks', name
            using errcode = '2BP01', detail = format('Sink "%s" reads it.', sink), hint = 'Drop its sinks first: select outbox.drop_sink(id).';
    end if;
    if exists (select from outbox.captures c where c.stream = drop_stream.name) then
        raise exception 'stream "%" has captures', name
            using errcode = '2BP01', detail = format('Table %s is captured into it.', (select min(c.relation::text) from outbox.captures c where c.stream = drop_stream.name)),
                  hint = 'End its captures first: select outbox.uncapture(relation).';
    end if;
    select w.id into sink from outbox.webhooks w where w.stream = drop_stream.name limit 1;
    if found then
        raise exception 'stream "%" has webhooks', name
            using errcode = '2BP01', detail = format('Webhook "%s" gets its events.', sink), hint = 'Delete them first: select outbox.delete_webhook(id).';
    end if;
    delete from outbox.cursors c where c.stream = drop_stream.name;
    delete from outbox.streams s where s.name = drop_stream.name;
    execute format('drop table %s', gone.relation);
end $$;
comment on function outbox.drop_stream(text) is
    'drops a stream with its events and cursors. Errors: 42704 if there is none, 2BP01 while it has sinks, 22023 for a built-in one';
