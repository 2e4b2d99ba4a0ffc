// Usage: node subscribe.js CONNECTION. Needs pg.
const { Client } = require('pg');

const TOPICS = ['reservation.*'];

/** The last position that can be read now. */
async function tail(db) {
  return (await db.query("select coalesce(outbox.tail(), '0:0') as position")).rows[0].position;
}

/** Handles what has come behind a position. Returns the position to go on from. */
async function catchUp(db, after) {
  for (;;) {
    const end = await tail(db); // asked for first: up to there, nothing can be missed
    const { rows } = await db.query(
      'select position, topic, payload from outbox.read($1, 1000, topics => $2)', [after, TOPICS]);
    for (const event of rows) {
      console.log(event.topic, event.payload.n);
      after = event.position;
    }
    if (rows.length === 0) return end !== '0:0' ? end : after;
  }
}

async function subscribe(db, after) {
  let wake = () => {};
  let lost;
  db.on('notification', () => wake());
  db.on('error', (error) => { lost = error; wake(); });
  await db.connect();
  await db.query('listen outbox'); // before the first look, so that nothing falls in between
  after.position ??= await tail(db); // from now on; after a reconnect, from where it was
  while (!lost) {
    const woken = new Promise((resolve) => { wake = resolve; setTimeout(resolve, 30_000).unref(); });
    after.position = await catchUp(db, after.position);
    if (!lost) await woken;
  }
  throw lost;
}

(async () => {
  const after = {};
  for (;;) {
    const db = new Client({ connectionString: process.argv[2] });
    await subscribe(db, after).catch((error) => console.error('reconnecting:', error.message));
    await db.end().catch(() => {});
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
})();
