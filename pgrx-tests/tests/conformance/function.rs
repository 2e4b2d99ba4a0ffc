//! A function in the database.

use outbox_tests::Sql;
use postgres::Client;
use serde_json::{Value, json};

use crate::destination::{Destination, Repeats};

pub struct Function;

impl Destination for Function {
    const KIND: &'static str = "function";
    const REPEATS: Repeats = Repeats::Impossible;
    const ONE_ORDER: bool = true;

    fn start() -> Self {
        Self
    }

    fn prepare(&mut self, db: &mut Client) {
        db.run(
            "create table arrived (n bigint generated always as identity, id text);
             create table mood (down boolean, welcomes boolean);
             insert into mood values (false, false);
             create function take(events outbox.event[]) returns table (seq bigint, result text, error text)
             language plpgsql as $$
             begin
                 if (select down from public.mood) then
                     raise exception 'out of order';
                 end if;
                 insert into public.arrived (id)
                 select e.id from unnest(events) with ordinality e
                  where e.topic <> 'test.poison' and (e.topic <> 'test.later' or (select welcomes from public.mood))
                  order by ordinality;
                 return query
                 select e.seq, case e.topic when 'test.poison' then 'permanent' end, 'not wanted'
                   from unnest(events) e
                  where e.topic = 'test.poison' or (e.topic = 'test.later' and not (select welcomes from public.mood));
             end $$",
        );
    }

    fn config(&self) -> Value {
        json!({"function": "public.take"})
    }

    fn bad_configs(&self) -> Vec<Value> {
        vec![
            json!({"function": 7}),
            json!({"function": ""}),
            json!({"function": "public.take", "timeout_ms": 0}),
        ]
    }

    fn arrived(&mut self, db: &mut Client) -> Vec<String> {
        db.all("select id from arrived order by n")
    }

    fn go_down(&mut self, db: &mut Client) {
        db.run("update mood set down = true");
    }

    fn come_up(&mut self, db: &mut Client) {
        db.run("update mood set down = false");
    }

    fn poison_topic(&self) -> String {
        "test.poison".to_owned()
    }

    fn unwelcome_topic(&self) -> String {
        "test.later".to_owned()
    }

    fn welcome(&mut self, db: &mut Client) {
        db.run("update mood set welcomes = true");
    }
}
