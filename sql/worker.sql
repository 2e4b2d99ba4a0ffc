-- The dispatcher, by hand.

create function outbox.start() returns boolean
    language c volatile as 'MODULE_PATHNAME', 'start_wrapper';
comment on function outbox.start() is
    'starts this database''s dispatcher if none runs; true when it was started. With the library preloaded the launcher does so by itself. '
    'Errors: 53400 if max_worker_processes leaves no slot for it, 55000 where no dispatcher may run';

create function outbox.stop() returns boolean
    language c volatile as 'MODULE_PATHNAME', 'stop_wrapper';
comment on function outbox.stop() is
    'stops this database''s dispatcher until outbox.start or a restart of the server; true when one was running';

create type outbox.tick_result as (sink text, delivered bigint, outcome text, error text);

create function outbox.tick(sink text default null) returns setof outbox.tick_result
    language c volatile rows 10 as 'MODULE_PATHNAME', 'tick_wrapper';
comment on function outbox.tick(text) is
    'runs one pass of a sink, or of all, in the calling session, without waiting for a back-off: outcome is delivered, idle, failed, '
    'leased (another process delivers to it), paused or pull. Error 42704 for an unknown sink';

create function outbox.prune(stream text default null) returns bigint
    language c volatile as 'MODULE_PATHNAME', 'prune_wrapper';
comment on function outbox.prune(text) is
    'runs retention now, over one stream or all: removes events that every cursor has passed and that are older than '
    'outbox.retention_min_age; returns how many. Error 42704 for an unknown stream';
