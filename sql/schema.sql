-- The schema. It must not exist beforehand: an extension that moves into somebody else's schema inherits what they planted there.
create schema outbox;
revoke all on schema outbox from public;
comment on schema outbox is 'pg_outbox: a transactional outbox and what carries its events out';
