-- The audit trail: who did what, as a stream of its own that is only ever added to, and a chain of hashes over it.

create sequence outbox.audit_events_seq_seq;
create table outbox.audit_events (
    txid          xid8 not null default pg_current_xact_id(),
    seq           bigint primary key default outbox.next_seq('outbox.audit_events_seq_seq'),
    id            text not null default 'aud_' || substr(outbox.new_id(), 5),
    tenant        text default nullif(current_setting('outbox.tenant', true), ''),
    "time"        timestamptz not null default clock_timestamp() check (isfinite("time")),
    action        text not null check (action <> ''),
    resource_type text not null check (resource_type <> ''),
    resource_id   text,
    admission     jsonb,
    details       jsonb
);
alter sequence outbox.audit_events_seq_seq owned by outbox.audit_events.seq;
comment on table outbox.audit_events is 'records of the stream audit: who did what to which resource; append-only for everyone but retention';
comment on column outbox.audit_events.admission is 'why it was allowed: the decision, policy or role, as the application says';
create index audit_events_position on outbox.audit_events (txid, seq);
select outbox.guard_numbers('outbox.audit_events');
create trigger outbox_wake before insert on outbox.audit_events for each statement execute function outbox.wake();
insert into outbox.streams (name, relation, sequence, numbering, builtin, shape)
select 'audit', 'outbox.audit_events', s.sequence, pg_relation_filenode(s.sequence), true, 'audit'
  from (select pg_get_serial_sequence('outbox.audit_events', 'seq')::regclass as sequence) s;

-- One link per sealed record, in the order of sealing. The first link bears no record: it stands for all that retention has removed.
create table outbox.audit_chain (
    n    bigint primary key,
    seq  bigint unique,
    hash bytea not null
);
comment on table outbox.audit_chain is 'a link for each record: the sha256 of the link before it and of what the record says';
insert into outbox.audit_chain (n, hash) values (0, '');

create table outbox.audit_seal (
    single    boolean primary key default true check (single),
    upto      pg_snapshot not null default '3:3:',
    target    pg_snapshot,
    at_txid   xid8 not null default '0',
    at_seq    bigint not null default 0,
    sealed_at timestamptz not null default clock_timestamp()
);
comment on table outbox.audit_seal is 'everything visible in snapshot upto has been sealed';
comment on column outbox.audit_seal.target is 'what is being sealed: what is visible in this snapshot and not in upto, up to (at_txid, at_seq) so far; null if nothing is';
insert into outbox.audit_seal default values;

create function outbox.append_only() returns trigger
    language c as 'MODULE_PATHNAME', 'append_only_wrapper';
comment on function outbox.append_only() is 'trigger: refuses to change the audit trail, to everyone but retention';
create trigger outbox_append_only before update or delete or truncate on outbox.audit_events
    for each statement execute function outbox.append_only();
create trigger outbox_append_only before update or delete or truncate on outbox.audit_chain
    for each statement execute function outbox.append_only();
alter table outbox.audit_events enable always trigger outbox_append_only;
alter table outbox.audit_chain enable always trigger outbox_append_only;

create function outbox.audit_record(
        id text, tenant text, "time" timestamptz, action text, resource_type text, resource_id text, admission jsonb, details jsonb) returns jsonb
    language sql stable parallel safe
    return jsonb_build_object('id', id, 'tenantId', tenant, 'time', floor(extract(epoch from "time") * 1000)::bigint, 'action', action,
                              'resource', jsonb_build_object('type', resource_type, 'id', resource_id))
        || case when admission is null then '{}' else jsonb_build_object('admission', admission) end
        || case when details is null then '{}' else jsonb_build_object('details', details) end;
comment on function outbox.audit_record(text, text, timestamptz, text, text, text, jsonb, jsonb) is
    'a record as delivered: {id, tenantId, time (epoch ms), action, resource: {type, id}, admission?, details?}';

create function outbox.audit(
    action        text,
    resource_type text,
    resource_id   text default null,
    details       jsonb default null,
    admission     jsonb default null,
    tenant        text default null,
    id            text default null
) returns text
    language plpgsql volatile set search_path = pg_catalog, outbox, pg_temp as $$
begin
    if coalesce(action, '') = '' or coalesce(resource_type, '') = '' then
        raise exception 'an audit record needs an action and a resource type'
            using errcode = '22023', detail = format('The %s is null or empty.', case when coalesce(action, '') = '' then 'action' else 'resource type' end),
                  hint = 'For example: select outbox.audit(''member.removed'', ''team'', ''42'', ''{"by": "ada"}'')';
    end if;
    id := coalesce(id, 'aud_' || substr(outbox.new_id(), 5));
    -- The rights are the caller's own, so nothing is read back: writing the audit trail does not include reading it.
    insert into outbox.audit_events (id, tenant, action, resource_type, resource_id, admission, details)
    values (id, coalesce(tenant, nullif(current_setting('outbox.tenant', true), '')), action, resource_type, resource_id, admission, details);
    return id;
end $$;
comment on function outbox.audit(text, text, text, jsonb, jsonb, text, text) is
    'writes one record of the audit trail, in the calling transaction, and returns its id. tenant defaults to the setting outbox.tenant. '
    'Errors: 22023 without action or resource_type, 42501 without the privilege emit';

-- What a link says: the link before it, and all of the record but its transaction id, which a move to another cluster changes.
create function outbox.audit_hash(previous bytea, entry outbox.audit_events) returns bytea
    language sql immutable set search_path = pg_catalog, pg_temp
    return sha256(previous || convert_to(
        jsonb_build_array(entry.seq, entry.id, entry.tenant, extract(epoch from entry."time"), entry.action, entry.resource_type,
                          entry.resource_id, entry.admission, entry.details)::text,
        case getdatabaseencoding() when 'SQL_ASCII' then 'SQL_ASCII' else 'UTF8' end));

create function outbox.seal_audit(max_records int default 5000) returns bigint
    language plpgsql security definer
    set search_path = pg_catalog, outbox, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    seen pg_snapshot := pg_current_snapshot();
    seal outbox.audit_seal;
    link outbox.audit_chain;
    entry outbox.audit_events;
    looked_at bigint := 0;
    sealed bigint := 0;
begin
    -- What this transaction has written itself is not committed yet, and the snapshot does not tell.
    if pg_current_xact_id_if_assigned() is not null then
        return 0;
    end if;
    select * into seal from outbox.audit_seal s for update skip locked;
    if not found then
        return 0;
    end if;
    if seal.target is null then
        seal := row(true, seal.upto, seen, '0', 0, seal.sealed_at);
    end if;
    select * into link from outbox.audit_chain c order by c.n desc limit 1;
    -- In the order of the index, so that a step costs what it seals, however much there is; transactions that were running when the
    -- window began have the lowest ids of it.
    for entry in
        select e.* from (
            (select a.* from outbox.audit_events a
              where a.txid >= pg_snapshot_xmax(seal.upto) and (a.txid, a.seq) > (seal.at_txid, seal.at_seq)
                and pg_visible_in_snapshot(a.txid, seal.target)
              order by a.txid, a.seq limit max_records)
            union all
            (select l.* from pg_snapshot_xip(seal.upto) as late (xid), lateral
                (select a.* from outbox.audit_events a
                  where a.txid = late.xid and (a.txid, a.seq) > (seal.at_txid, seal.at_seq) order by a.txid, a.seq limit max_records) l
              where pg_visible_in_snapshot(late.xid, seal.target))) e
         order by e.txid, e.seq limit max_records
    loop
        looked_at := looked_at + 1;
        seal.at_txid := entry.txid;
        seal.at_seq := entry.seq;
        -- After a move to another cluster it begins anew, at what is sealed already.
        continue when exists (select from outbox.audit_chain c where c.seq = entry.seq);
        link.n := link.n + 1;
        link.hash := outbox.audit_hash(link.hash, entry);
        insert into outbox.audit_chain (n, seq, hash) values (link.n, entry.seq, link.hash);
        sealed := sealed + 1;
    end loop;
    update outbox.audit_seal s
       set upto = case when looked_at < max_records then seal.target else s.upto end,
           target = case when looked_at < max_records then null else seal.target end,
           at_txid = seal.at_txid, at_seq = seal.at_seq, sealed_at = clock_timestamp();
    return sealed;
end $$;
comment on function outbox.seal_audit(int) is
    'links committed records to the chain; the dispatcher does so all the time. Looks at no more than max_records and returns how many it has '
    'sealed; there are more while audit_seal.target is not null. Seals nothing in a transaction that has written';

create function outbox.verify_audit(noted text default null, out intact boolean, out records bigint, out problem text, out seq bigint, out id text, out head text)
    language plpgsql stable security definer set search_path = pg_catalog, outbox, pg_temp as $$
declare
    noted_n bigint;
    noted_hash bytea;
    before outbox.audit_chain;
    link record;
begin
    if noted !~ '^[0-9]{1,18}:([0-9a-f]{2})+$' then
        raise exception 'that is no head of the chain' using errcode = '22023', detail = 'A head is <number>:<hash in hexadecimal digits>.',
            hint = 'Hand in what verify_audit gave as head, or leave it out.';
    end if;
    noted_n := split_part(noted, ':', 1)::bigint;
    noted_hash := decode(split_part(noted, ':', 2), 'hex');
    intact := false;
    records := 0;
    select * into before from outbox.audit_chain c where c.seq is null order by c.n desc limit 1;
    if not found then
        problem := 'the beginning of the chain is missing';
        return;
    end if;
    for link in
        select c.n, c.seq, c.hash, e from outbox.audit_chain c left join outbox.audit_events e on e.seq = c.seq where c.n > before.n order by c.n
    loop
        seq := link.seq;
        id := (link.e).id;
        if link.n <> before.n + 1 then
            problem := format('link %s of the chain is missing', before.n + 1);
            return;
        elsif (link.e).seq is null then
            problem := 'the record is missing';
            return;
        elsif outbox.audit_hash(before.hash, link.e) <> link.hash then
            problem := 'the record was altered';
            return;
        elsif link.n = noted_n and link.hash <> noted_hash then
            problem := 'the chain was rewritten since its head was noted';
            return;
        end if;
        records := records + 1;
        before := row(link.n, link.seq, link.hash);
    end loop;
    head := before.n || ':' || encode(before.hash, 'hex');
    seq := null;
    id := null;
    if noted_n > before.n then
        problem := 'records at the end are missing since the head was noted';
        return;
    end if;
    select e.seq, e.id into seq, id from outbox.audit_events e, outbox.audit_seal s
     where pg_visible_in_snapshot(e.txid, s.upto) and not exists (select from outbox.audit_chain c where c.seq = e.seq) order by e.seq limit 1;
    if found then
        problem := 'the record was put in later';
        return;
    end if;
    intact := true;
end $$;
comment on function outbox.verify_audit(text) is
    'recomputes the chain of hashes: intact or not, how many sealed records were checked, and the first one that was altered, is missing or '
    'was put in later. head is the last link as <n>:<hash>: note it elsewhere and hand it in as noted, and a chain that was rewritten or cut off is found, too';
