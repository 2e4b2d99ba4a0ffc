# Usage: subscribe.py CONNECTION. Needs psycopg 3.
import select
import sys
import time

import psycopg

TOPICS = ["reservation.*"]


def tail(db):
    """The last position that can be read now."""
    return db.execute("select coalesce(outbox.tail(), '0:0')").fetchone()[0]


def catch_up(db, after):
    """Handles what has come behind a position. Returns the position to go on from."""
    while True:
        end = tail(db)  # asked for first: up to there, nothing can be missed
        events = db.execute(
            "select position, topic, payload from outbox.read(%s, 1000, topics => %s)", (after, TOPICS)
        ).fetchall()
        for after, topic, payload in events:
            print(topic, payload["n"], flush=True)
        if not events:
            return end if end != "0:0" else after


after = None
while True:
    try:
        with psycopg.connect(sys.argv[1], autocommit=True) as db:
            db.execute("listen outbox")  # before the first look, so that nothing falls in between
            after = after or tail(db)  # from now on; after a reconnect, from where it was
            while True:
                after = catch_up(db, after)
                select.select([db], [], [], 30)
    except psycopg.OperationalError as error:
        print("reconnecting:", error, file=sys.stderr)
        time.sleep(1)
