# Usage: subscribe.py CONNECTION. Needs psycopg 3.
import select
import sys
import time

import psycopg

TOPICS = ["reservation.*"]


class Subscription:
    after = None  # the position up to which everything has been handled

    def tail(self, db):
        """The last position that can be read now."""
        return db.execute("select coalesce(outbox.tail(), '0:0')").fetchone()[0]

    def catch_up(self, db):
        """Handles what has come since."""
        while True:
            end = self.tail(db)  # asked for first: up to there, nothing can be missed
            events = db.execute(
                "select position, topic, payload from outbox.read(%s, 1000, topics => %s)", (self.after, TOPICS)
            ).fetchall()
            for position, topic, payload in events:
                print(topic, payload and payload["n"], flush=True)
                self.after = position
            if not events:
                self.after = end if end != "0:0" else self.after
                return

    def run(self, db):
        db.execute("listen outbox")  # before the first look, so that nothing falls in between
        self.after = self.after or self.tail(db)  # from now on; after a reconnect, from where it was
        while True:
            self.catch_up(db)
            select.select([db], [], [], 30)


subscription = Subscription()
while True:
    try:
        with psycopg.connect(sys.argv[1], autocommit=True) as db:
            subscription.run(db)
    except psycopg.OperationalError as error:
        print("reconnecting:", error, file=sys.stderr)
        time.sleep(1)
