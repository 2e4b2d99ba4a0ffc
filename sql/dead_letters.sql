-- Events that could not be delivered although their sink was up.

create table outbox.dead_letters (
    sink         text not null,
    txid         xid8 not null,
    seq          bigint not null,
    event        jsonb not null,
    error        text not null,
    attempts     int not null check (attempts > 0),
    dead_at      timestamptz not null default clock_timestamp(),
    redeliver_at timestamptz,
    primary key (sink, txid, seq)
);
comment on table outbox.dead_letters is 'events set aside after their delivery failed on its own while the sink was up; kept until redelivered or discarded';
comment on column outbox.dead_letters.event is 'the event as delivered, a CloudEvent';
comment on column outbox.dead_letters.attempts is 'deliveries of this event alone that failed';
comment on column outbox.dead_letters.redeliver_at is 'queued again by outbox.redeliver; the row goes once it is through';

create index dead_letters_queued on outbox.dead_letters (sink, txid, seq) where redeliver_at is not null;
create trigger outbox_change after update on outbox.dead_letters for each statement execute function outbox.change();

create function outbox.redeliver(sink text, "position" text default null) returns bigint
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    p record := outbox.parse_position(coalesce("position", '0:0'));
    queued bigint;
begin
    if not exists (select from outbox.sinks s where s.id = redeliver.sink) then
        perform outbox.no_such_sink(sink);
    end if;
    update outbox.dead_letters d set redeliver_at = clock_timestamp()
     where d.sink = redeliver.sink and ("position" is null or (d.txid = p.txid and d.seq = p.seq));
    get diagnostics queued = row_count;
    if queued = 0 and "position" is not null then
        raise exception 'sink "%" has no dead letter at %', sink, "position" using errcode = '42704';
    end if;
    return queued;
end $$;
comment on function outbox.redeliver(text, text) is
    'queues one dead letter of a sink, or all, for delivery; each is removed once it is through. Returns how many. '
    'Errors: 42704 for an unknown sink or position, 22023 for a position that is not readable';

create function outbox.discard(sink text, "position" text) returns void
    language plpgsql security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    p record := outbox.parse_position("position");
begin
    if "position" is null then
        raise exception 'discard needs a position' using errcode = '22023', detail = 'The position is null.';
    end if;
    delete from outbox.dead_letters d where d.sink = discard.sink and d.txid = p.txid and d.seq = p.seq;
    if not found then
        raise exception 'sink % has no dead letter at %', coalesce('"' || sink || '"', 'null'), "position" using errcode = '42704';
    end if;
end $$;
comment on function outbox.discard(text, text) is 'drops a dead letter for good. Errors: 42704 if there is none at the position, 22023 if that is not readable';
