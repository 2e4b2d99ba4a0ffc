#!/bin/sh
# Usage: subscribe.sh CONNECTION. psql cannot wait for a notification, so it looks once a second.
read_outbox() { psql -XqAt -F ' ' -v ON_ERROR_STOP=1 -v after="$after" "$1"; }
until after=$(psql -XqAt "$1" -c "select coalesce(outbox.tail(), '0:0')"); do sleep 1; done # from now on
while sleep 1; do
    # What cannot be read now, because the server is away, is read from the same position later.
    events=$(echo "select position, topic, payload from outbox.read(:'after', 1000, topics => '{reservation.*}')" | read_outbox "$1") || continue
    [ -n "$events" ] || continue
    echo "$events" | cut -d ' ' -f 2-
    after=$(echo "$events" | tail -n 1 | cut -d ' ' -f 1)
done
