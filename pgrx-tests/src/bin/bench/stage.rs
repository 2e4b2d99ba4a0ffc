//! The cluster that a figure is measured on, and the events in it.

use outbox_tests::{Cluster, Sql};
use postgres::Client;

/// What every cluster here runs with: commits reach the disk.
pub(crate) const SETTINGS: [(&str, &str); 6] = [
    ("fsync", "on"),
    ("synchronous_commit", "on"),
    ("shared_buffers", "1GB"),
    ("max_wal_size", "8GB"),
    ("checkpoint_timeout", "15min"),
    ("wal_compression", "off"),
];

/// A fresh cluster, with a connection to it.
pub(crate) struct Stage {
    pub(crate) cluster: Cluster,
    pub(crate) db: Client,
}

impl Stage {
    /// A fresh cluster, with these settings on top.
    pub(crate) fn new(settings: &[(&str, &str)]) -> Self {
        let mut builder = Cluster::builder();
        for (name, value) in SETTINGS.iter().chain(settings) {
            builder = builder.setting(name, value);
        }
        let cluster = builder.start();
        let mut db = cluster.connect();
        db.run(&format!(
            "create function payload(n bigint) returns jsonb language sql immutable as $${PAYLOAD}$$"
        ));
        Self { cluster, db }
    }

    /// Commits events of 200 bytes, a hundred to a transaction, and leaves them as autovacuum and a checkpoint would.
    pub(crate) fn fill(&mut self, events: u64) {
        self.fill_and(events, "");
    }

    /// The same; `also` runs in every transaction, for the events numbered from `low` to `high`.
    pub(crate) fn fill_and(&mut self, events: u64, also: &str) {
        // Committing in between is allowed only to a statement that was sent by itself.
        self.db.run("set synchronous_commit = off");
        self.db.run(&format!(
            "do $do$
             declare high bigint;
             begin
                 for low in 1..{events} by 100 loop
                     high := least(low + 99, {events});
                     insert into outbox.events (topic, source, subject, payload)
                     select 'order.placed', 'shop', (n % 10000)::text, payload(n) from generate_series(low, high) n;
                     {also}
                     commit;
                 end loop;
             end $do$"
        ));
        self.db.run("reset synchronous_commit");
        self.settle();
    }

    /// As after a while: vacuumed, and nothing left to write.
    pub(crate) fn settle(&mut self) {
        self.db.run("vacuum (analyze)");
        self.db.run("checkpoint");
    }

    /// A snapshot that keeps every dead row from being vacuumed, for as long as the connection is kept.
    #[must_use]
    pub(crate) fn hold_snapshot(&self) -> Client {
        let mut holder = self.cluster.connect();
        holder.run("begin isolation level repeatable read");
        holder.one::<i64>("select count(*) from outbox.streams");
        holder
    }
}

/// Another cluster with the same settings, and a table for what arrives.
pub(crate) fn elsewhere() -> Cluster {
    let mut builder = Cluster::builder().preload(false).extension(false);
    for (name, value) in SETTINGS {
        builder = builder.setting(name, value);
    }
    let cluster = builder.start();
    cluster.connect().run(
        "create table arrived (id text, topic text, source text, subject text, \"time\" timestamptz, payload jsonb)",
    );
    cluster
}

/// 200 bytes as text, of the kind that applications send.
const PAYLOAD: &str = r#"select jsonb_build_object('order', n, 'customer', 'C-' || n % 10000, 'state', 'placed', 'currency', 'EUR',
    'total', round(n % 100000 / 7.0, 2), 'express', n % 3 = 0,
    'items', jsonb_build_array(jsonb_build_object('sku', 'A-' || n % 977, 'n', n % 5), jsonb_build_object('sku', 'B-' || n % 89, 'n', 1)),
    'note', 'leave it at the door')"#;

/// The version of the server that is measured.
pub(crate) fn server_version() -> String {
    let cluster = Cluster::builder().preload(false).extension(false).start();
    cluster.connect_to("postgres").one("show server_version")
}
