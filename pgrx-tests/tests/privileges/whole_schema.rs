//! What holds for everything in schema outbox, whatever comes to it later.

use std::collections::BTreeSet;

use outbox_tests::Sql;

use super::{abilities, denied, with_roles};

#[test]
fn public_has_nothing() {
    let (cluster, mut db) = with_roles(&["nobody"]);
    db.run("select outbox.create_stream('billing')");
    let open: Vec<String> = db.all(
        "select 'schema ' || n.nspname from pg_namespace n cross join aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
          where n.nspname = 'outbox' and a.grantee = 0
         union all
         select 'function ' || p.oid::regprocedure from pg_proc p cross join aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
          where p.pronamespace = 'outbox'::regnamespace and a.grantee = 0
         union all
         select 'relation ' || c.oid::regclass from pg_class c
                cross join aclexplode(coalesce(c.relacl, acldefault(case c.relkind when 'S' then 's' else 'r' end::\"char\", c.relowner))) a
          where c.relnamespace = 'outbox'::regnamespace and a.grantee = 0
         union all
         select 'column ' || c.oid::regclass || '.' || t.attname from pg_class c join pg_attribute t on t.attrelid = c.oid
                cross join aclexplode(t.attacl) a
          where c.relnamespace = 'outbox'::regnamespace and a.grantee = 0
         union all
         select 'type ' || t.oid::regtype from pg_type t cross join aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) a
          where t.typnamespace = 'outbox'::regnamespace and t.typcategory <> 'A' and a.grantee = 0
            and t.typrelid not in (select c.oid from pg_class c where c.relkind <> 'c')",
    );
    assert_eq!(open, Vec::<String>::new());
    assert_eq!(abilities(&mut db, "nobody"), BTreeSet::new());
    let mut nobody = cluster.connect_as("nobody");
    denied(
        &mut nobody,
        &[
            "select outbox.emit('x')",
            "select outbox.new_id()",
            "select outbox.format_position('1', 1)",
            "select null::outbox.event",
            "select from outbox.status",
            "create table mine (e outbox.event)",
        ],
    );
}

#[test]
fn what_runs_with_other_rights_looks_names_up_where_nobody_can_plant_any() {
    let (_cluster, mut db) = with_roles(&[]);
    let astray: Vec<String> = db.all(
        "select p.oid::regprocedure::text from pg_proc p
          where p.pronamespace = 'outbox'::regnamespace and p.prosecdef
            and not coalesce(p.proconfig @> array['search_path=pg_catalog, outbox, pg_temp'], false)",
    );
    assert_eq!(astray, Vec::<String>::new());
    // What it calls in turn runs with the same rights. A body that was read when it was made looks nothing up any more.
    let astray: Vec<String> = db.all(
        "select p.oid::regprocedure::text from pg_proc p join pg_language l on l.oid = p.prolang
          where p.pronamespace = 'outbox'::regnamespace and l.lanname not in ('c', 'internal') and p.prosqlbody is null
            and not exists (select from unnest(p.proconfig) c where c ~ '^search_path=pg_catalog,( outbox,)? pg_temp$')",
    );
    assert_eq!(astray, Vec::<String>::new());
}

#[test]
fn everything_belongs_to_who_made_the_extension() {
    let (cluster, mut db) = with_roles(&["operator"]);
    db.run("select outbox.grant('operator', 'operate')");
    cluster
        .connect_as("operator")
        .run("select outbox.create_stream('billing')");
    let owners: Vec<String> = db.all(
        "select distinct o::regrole::text from (
             select relowner from pg_class where relnamespace = 'outbox'::regnamespace union all
             select proowner from pg_proc where pronamespace = 'outbox'::regnamespace union all
             select typowner from pg_type where typnamespace = 'outbox'::regnamespace union all
             select nspowner from pg_namespace where nspname = 'outbox') x (o)",
    );
    assert_eq!(owners, ["postgres"]);
}
