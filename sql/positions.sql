-- Positions: (txid, seq), written 731:12 or 731.12.

create function outbox.format_position(txid xid8, seq bigint, separator text default ':') returns text
    language c immutable strict parallel safe as 'MODULE_PATHNAME', 'format_position_wrapper';
comment on function outbox.format_position(xid8, bigint, text) is 'a position as text, <txid>:<seq>, or with another separator';

create function outbox.parse_position("position" text, out txid xid8, out seq bigint)
    language plpgsql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
declare
    parts text[] := regexp_match("position", '^([0-9]{1,20})[:.]([0-9]{1,19})$');
begin
    if parts is null or parts[1]::numeric > 18446744073709551615 or parts[2]::numeric > 9223372036854775807 then
        raise exception 'position % is not readable', quote_literal(left("position", 60))
            using errcode = '22023', detail = 'A position is <txid>:<seq> or <txid>.<seq>, both in decimal digits.',
                  hint = 'Take it from the column position of outbox.read, or from outbox.format_position.';
    end if;
    txid := parts[1]::xid8;
    seq := parts[2]::bigint;
end $$;
comment on function outbox.parse_position(text) is 'reads <txid>:<seq> and <txid>.<seq>. Error 22023 for anything else';
