//! What each privilege allows, and that it allows no more: with login roles that are nobody special.

#[path = "../scene/mod.rs"]
mod scene;

mod each_privilege;
mod granting;
mod open;
mod whole_schema;

use std::collections::BTreeSet;

use outbox_tests::{Cluster, Sql};
use postgres::Client;
use scene::quick;

/// A cluster whose dispatcher is stopped, with these login roles.
fn with_roles(roles: &[&str]) -> (Cluster, Client) {
    let cluster = quick().start();
    let mut db = cluster.connect();
    db.run("select outbox.stop()");
    for role in roles {
        db.run(&format!("create role {role} login"));
    }
    (cluster, db)
}

/// Everything in schema outbox that a role may do, as one text each.
fn abilities(db: &mut Client, role: &str) -> BTreeSet<String> {
    let all: Vec<String> = db.all(&format!(
        "select 'usage on the schema' where has_schema_privilege('{role}', 'outbox', 'usage')
         union all
         select 'create in the schema' where has_schema_privilege('{role}', 'outbox', 'create')
         union all
         select 'execute ' || p.oid::regprocedure from pg_proc p
          where p.pronamespace = 'outbox'::regnamespace and has_function_privilege('{role}', p.oid, 'execute')
         union all
         select 'usage on type ' || t.oid::regtype from pg_type t
          where t.typnamespace = 'outbox'::regnamespace and t.typcategory <> 'A' and has_type_privilege('{role}', t.oid, 'usage')
            and t.typrelid not in (select c.oid from pg_class c where c.relkind <> 'c')
         union all
         select what || ' on table ' || c.oid::regclass
           from pg_class c, unnest(array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger']) what
          where c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'v', 'm', 'p', 'f')
            and has_table_privilege('{role}', c.oid, what)
         union all
         select what || ' on column ' || c.oid::regclass || '.' || a.attname
           from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped,
                unnest(array['select', 'insert', 'update', 'references']) what
          where c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'v', 'm', 'p', 'f')
            and has_column_privilege('{role}', c.oid, a.attnum, what) and not has_table_privilege('{role}', c.oid, what)
         union all
         select what || ' on sequence ' || c.oid::regclass
           from pg_class c, unnest(array['usage', 'select', 'update']) what
          where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'S' and has_sequence_privilege('{role}', c.oid, what)"
    ));
    all.into_iter().collect()
}

/// Of these abilities, the functions, by name.
fn functions(abilities: &BTreeSet<String>) -> BTreeSet<&str> {
    let executes = abilities
        .iter()
        .filter_map(|one| one.strip_prefix("execute outbox."));
    executes
        .map(|signature| signature.split('(').next().expect("split gives a piece"))
        .collect()
}

#[track_caller]
fn denied(db: &mut Client, statements: &[&str]) {
    for sql in statements {
        let refusal = db.refused(sql);
        assert_eq!(refusal.sqlstate, "42501", "{sql}: {}", refusal.message);
    }
}
