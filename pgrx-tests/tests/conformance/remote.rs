//! A table in another PostgreSQL.

use outbox_tests::{Cluster, Gate, Sql};
use postgres::Client;
use serde_json::{Value, json};

use crate::destination::{Destination, Repeats};

const SECRET: &str = "login-password-4711";

pub struct Remote {
    gate: Gate,
    server: Cluster,
}

impl Destination for Remote {
    const KIND: &'static str = "postgres";
    const REPEATS: Repeats = Repeats::Recognised;
    const ONE_ORDER: bool = true;

    fn start() -> Self {
        let server = Cluster::builder().preload(false).extension(false).start();
        server.connect().run(
            "create table arrived (
                 n bigint generated always as identity, id text, topic text constraint welcome check (topic <> 'test.poison'),
                 payload jsonb constraint small check (length(payload::text) < 65536));
             create function not_yet() returns trigger language plpgsql as $$
             begin
                 raise exception 'not yet: %', new.payload using errcode = 'object_not_in_prerequisite_state';
             end $$;
             create trigger not_yet before insert on arrived for each row when (new.topic = 'test.later') execute function not_yet()",
        );
        Self {
            gate: Gate::to(server.port()),
            server,
        }
    }

    fn prepare(&mut self, db: &mut Client) {
        let port = self.gate.port();
        db.run(&format!(
            "select outbox.set_secret('conformance', array['postgresql://postgres:{SECRET}@127.0.0.1:{port}/app'])"
        ));
    }

    fn config(&self) -> Value {
        json!({"secret": "conformance", "table": "arrived", "timeout_ms": 1000})
    }

    fn bad_configs(&self) -> Vec<Value> {
        vec![
            json!({"secret": "s"}),
            json!({"table": "t"}),
            json!({"secret": "s", "table": "a.b.c"}),
            json!({"secret": "s", "table": "t", "statement": "select $1"}),
            json!({"secret": "s", "statement": "commit"}),
            json!({"secret": "s", "table": "t", "dsn": "host=db"}),
            json!({"dsn": format!("host=db password={SECRET}"), "table": "t"}),
            json!({"dsn": "host=db sslmode=never", "table": "t"}),
            json!({"secret": "s", "table": "t", "checkpoint": "a b"}),
            json!({"secret": "s", "table": "t", "remember_hours": 0}),
            json!({"secret": "s", "table": "t", "redact": ["a..b"]}),
        ]
    }

    fn secrets(&self) -> Vec<&'static str> {
        vec![SECRET]
    }

    fn arrived(&mut self, _db: &mut Client) -> Vec<String> {
        self.server
            .connect()
            .all("select id from arrived order by n")
    }

    fn go_down(&mut self, _db: &mut Client) {
        self.gate.close();
    }

    fn come_up(&mut self, _db: &mut Client) {
        self.gate.open();
    }

    fn hang(&mut self) {
        self.gate.stick(true);
    }

    fn resume(&mut self) {
        self.gate.stick(false);
    }

    fn poison_topic(&self) -> String {
        "test.poison".to_owned()
    }

    fn unwelcome_topic(&self) -> String {
        "test.later".to_owned()
    }

    fn welcome(&mut self, _db: &mut Client) {
        self.server.connect().run("drop trigger not_yet on arrived");
    }
}
