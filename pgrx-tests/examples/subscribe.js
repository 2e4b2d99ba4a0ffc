// Usage: node subscribe.js CONNECTION. Needs pg.
const { Client } = require('pg');

const TOPICS = ['reservation.*'];
let after; // the position up to which everything has been handled

/** The last position that can be read now. */
async function tail(db) {
  return (await db.query("select coalesce(outbox.tail(), '0:0') as position")).rows[0].position;
}

/** Handles what has come since. */
async function catchUp(db) {
  for (;;) {
    const end = await tail(db); // asked for first: up to there, nothing can be missed
    const { rows } = await db.query(
      'select position, topic, payload from outbox.read($1, 1000, topics => $2)', [after, TOPICS]);
    for (const event of rows) {
      console.log(event.topic, event.payload?.n);
      after = event.position;
    }
    if (rows.length === 0) {
      if (end !== '0:0') after = end;
      return;
    }
  }
}

async function subscribe(db) {
  let told = false;
  let lost;
  let wake = () => {};
  db.on('notification', () => { told = true; wake(); });
  db.on('error', (error) => { lost = error; wake(); });
  await db.connect();
  await db.query('listen outbox'); // before the first look, so that nothing falls in between
  after ??= await tail(db); // from now on; after a reconnect, from where it was
  for (;;) {
    told = false;
    await catchUp(db);
    if (lost) throw lost;
    if (told) continue;
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, 30_000);
      wake = () => { clearTimeout(timer); resolve(); };
    });
  }
}

(async () => {
  for (;;) {
    const db = new Client({ connectionString: process.argv[2] });
    await subscribe(db).catch((error) => console.error('reconnecting:', error.message));
    await db.end().catch(() => {});
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
})();
