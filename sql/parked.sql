-- Events that a sink isolated by key has not taken, and the later ones of their keys behind them (src/worker/parking.rs).

create sequence outbox.parked_number_seq;
create table outbox.parked (
    sink            text not null,
    txid            xid8 not null,
    seq             bigint not null,
    source          text,
    subject         text,
    "time"          timestamptz not null,
    attempts        int not null default 0,
    next_attempt_at timestamptz,
    error           text,
    parked_at       timestamptz not null default clock_timestamp(),
    -- The order in which they were parked, and in which those of a key are delivered: seqs may be seen in another one.
    number          bigint not null default outbox.next_number('outbox.parked_number_seq'),
    primary key (sink, seq)
);
alter sequence outbox.parked_number_seq owned by outbox.parked.number;
comment on table outbox.parked is
    'events that a sink with isolation key goes on without for now: each failing one, and later ones of its (source, subject); retention keeps them';
comment on column outbox.parked.attempts is 'deliveries of this event alone that failed; 0 while an earlier one of its key is in the way';
comment on column outbox.parked.next_attempt_at is 'when it is tried again; null while an earlier one of its key is in the way';

create index parked_order on outbox.parked (sink, number);
