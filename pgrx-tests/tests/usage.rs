//! Usage: windows that add up, and a recorder that gets each closed one until it has an outcome.

mod scene;

use outbox_tests::{Cluster, Sql, until};
use postgres::Client;
use scene::quick;

fn still() -> Cluster {
    Cluster::builder().preload(false).start()
}

/// A recorder that keeps a ledger and refuses what the table `refused` names.
const RECORDER: &str = "
    create table ledger (idempotency_key text primary key, quantity numeric, tenant text);
    create table refused (allocation text, sqlstate text);
    create table calls (n bigint generated always as identity, windows int);
    create sequence attempts;
    create function record(windows outbox.usage_window[]) returns table (idempotency_key text, outcome text) language plpgsql as $$
    declare bad record;
    begin
        perform nextval('public.attempts');
        select r.* into bad from public.refused r join unnest(windows) w using (allocation) limit 1;
        if found then
            raise exception 'allocation % is refused', bad.allocation using errcode = bad.sqlstate;
        end if;
        insert into public.calls (windows) values (cardinality(windows));
        return query
            with done as (
                insert into public.ledger as l select w.idempotency_key, w.quantity, w.tenant from unnest(windows) w on conflict do nothing
                returning l.idempotency_key, l.tenant)
            select w.idempotency_key,
                   case when d.idempotency_key is null then 'duplicate' when w.tenant = 'moved' then 'reattributed' else 'recorded' end
              from unnest(windows) w left join done d on d.idempotency_key = w.idempotency_key;
    end $$;
    select outbox.set_usage_recorder('record(outbox.usage_window[])')";

/// Closed windows of an hour, one for each allocation a1, a2 and so on.
#[track_caller]
fn use_something(db: &mut Client, first: i64, last: i64) {
    db.run(&format!(
        "select outbox.record_usage('a' || n, date_trunc('hour', now()) - interval '2 hours', 'vcpu_seconds', n)
           from generate_series({first}, {last}) n"
    ));
}

#[track_caller]
fn pass(db: &mut Client) -> (i64, i64, Option<String>) {
    let row = db
        .query_one("select * from outbox.tick_usage()", &[])
        .expect("a pass");
    (row.get(0), row.get(1), row.get(2))
}

#[track_caller]
fn outcomes(db: &mut Client) -> Vec<String> {
    db.all(
        "select coalesce(outcome, 'open') || ' ' || count(*) from outbox.usage_windows group by outcome order by 1",
    )
}

#[test]
fn windows_add_up_until_they_are_recorded() {
    let cluster = still();
    let mut db = cluster.connect();
    let key: String = db.one(
        "select outbox.record_usage('vm-7', '2026-01-02 03:00:00.5+00', 'vcpu_seconds', 1.25, tenant => 'acme')",
    );
    assert_eq!(key, "cmp:vm-7:1767322800500");
    db.run("set outbox.tenant = 'acme'");
    db.run("select outbox.record_usage('vm-7', '2026-01-02 03:00:00.5+00', 'vcpu_seconds', 0.75)");
    // A write that is undone has used nothing.
    db.run("begin; select outbox.record_usage('vm-7', '2026-01-02 03:00:00.5+00', 'vcpu_seconds', 9); rollback");
    let window: String = db.one(
        "select concat_ws(' ', allocation, meter, quantity, tenant, window_end - window_start) from outbox.usage_windows",
    );
    assert_eq!(window, "vm-7 vcpu_seconds 2.00 acme 01:00:00");
    for (arguments, sqlstate) in [
        ("'vm-7', '2026-01-02 03:00:00.5+00', 'gb_hours', 1", "22023"),
        (
            "'vm-7', '2026-01-02 03:00:00.5+00', 'vcpu_seconds', 1, tenant => 'globex'",
            "22023",
        ),
        (
            "'vm-7', '2026-01-02 03:00:00.5+00', 'vcpu_seconds', 1, window_length => '1 day'",
            "22023",
        ),
        (
            "'vm-7', '2026-01-02 03:00:00.5004+00', 'vcpu_seconds', 1",
            "22023",
        ),
        (
            "'vm-7', '2026-01-02 03:00:00.5004+00', 'vcpu_seconds', 1, window_length => '00:59:59.9996'",
            "22023",
        ),
        ("'', now(), 'm', 1", "22023"),
        ("'a', null, 'm', 1", "22023"),
        ("'a', 'infinity', 'm', 1", "22023"),
        ("'a', now(), 'm', 'NaN'", "22023"),
        ("'a', now(), 'm', null", "22023"),
        ("'a', now(), 'm', 1, window_length => '0'", "22023"),
    ] {
        let refusal = db.refused(&format!("select outbox.record_usage({arguments})"));
        assert_eq!(
            refusal.sqlstate, sqlstate,
            "{arguments}: {}",
            refusal.message
        );
    }
    db.run(RECORDER);
    assert_eq!(pass(&mut db), (1, 0, None));
    let late = db.refused(
        "select outbox.record_usage('vm-7', '2026-01-02 03:00:00.5+00', 'vcpu_seconds', 1)",
    );
    assert_eq!(late.sqlstate, "55000");
    let hint = db.refused("select outbox.create_sink('u', 'usage')").hint;
    assert!(hint.is_some_and(|hint| hint.contains("outbox.record_usage")));
}

#[test]
fn a_pass_takes_a_thousand_closed_windows_in_batches_of_two_hundred() {
    let cluster = still();
    let mut db = cluster.connect();
    use_something(&mut db, 1, 1150);
    db.run("select outbox.record_usage('open', now(), 'vcpu_seconds', 1)");
    assert_eq!(pass(&mut db), (0, 0, None), "nobody records");
    db.run(RECORDER);
    assert_eq!(pass(&mut db), (1000, 0, None));
    assert_eq!(
        db.all::<i32>("select windows from calls order by n"),
        [200; 5]
    );
    assert_eq!(pass(&mut db), (150, 0, None));
    assert_eq!(outcomes(&mut db), ["open 1", "recorded 1150"]);
    assert_eq!(
        db.one::<i64>("select sum(quantity)::bigint from ledger"),
        1150 * 1151 / 2
    );
}

#[test]
fn outcomes_are_the_recorders_words() {
    let cluster = still();
    let mut db = cluster.connect();
    use_something(&mut db, 1, 3);
    db.run("select outbox.record_usage('m', now() - interval '1 day', 'vcpu_seconds', 1, tenant => 'moved')");
    db.run(RECORDER);
    db.run("insert into ledger select idempotency_key from outbox.usage_windows where allocation = 'a2'");
    assert_eq!(pass(&mut db), (4, 0, None));
    assert_eq!(
        outcomes(&mut db),
        ["duplicate 1", "reattributed 1", "recorded 2"]
    );
}

#[test]
fn an_error_of_a_window_is_bisected_down_to_it_and_any_other_waits() {
    let cluster = still();
    let mut db = cluster.connect();
    use_something(&mut db, 1, 300);
    db.run(RECORDER);
    db.run("insert into refused values ('a77', '22003'), ('a150', '23514')");
    assert_eq!(pass(&mut db), (298, 2, None));
    let letters: Vec<String> = db.all(
        "select w.allocation || ' ' || l.code || ' ' || (l.\"window\" ->> 'quantity') || ' ' || l.message
           from outbox.usage_dead_letters l join outbox.usage_windows w using (idempotency_key) order by 1",
    );
    assert_eq!(
        letters,
        [
            "a150 23514 150 allocation a150 is refused (SQLSTATE 23514)",
            "a77 22003 77 allocation a77 is refused (SQLSTATE 22003)"
        ]
    );
    // What passes by itself is wrong with no window, and keeps none of the others.
    use_something(&mut db, 301, 304);
    db.run("insert into refused values ('a302', '08006')");
    let (recorded, dead, error) = pass(&mut db);
    assert_eq!((recorded, dead), (3, 0));
    assert!(error.expect("an outage").contains("08006"));
    let said: String = db.one("select last_error from outbox.usage_recorder");
    assert!(said.contains("08006"));
    // It is over: the same windows, with the same keys.
    db.run("delete from refused");
    assert_eq!(pass(&mut db), (1, 0, None));
    assert_eq!(outcomes(&mut db), ["dead-lettered 2", "recorded 302"]);
    assert_eq!(db.one::<i64>("select count(*) from ledger"), 302);
    let said: Option<String> = db.one("select last_error from outbox.usage_recorder");
    assert_eq!(said, None);

    // Once the recorder is mended they are recorded like any other, with the keys that they had.
    let dead: Vec<String> =
        db.all("select idempotency_key from outbox.usage_dead_letters order by 1");
    let missing = db.refused("select outbox.redeliver_usage('cmp:none:0')");
    assert_eq!(missing.sqlstate, "42704");
    assert_eq!(
        db.one::<i64>(&format!("select outbox.redeliver_usage('{}')", dead[0])),
        1
    );
    assert_eq!(pass(&mut db), (1, 0, None));
    assert_eq!(db.one::<i64>("select outbox.redeliver_usage()"), 1);
    assert_eq!(pass(&mut db), (1, 0, None));
    assert_eq!(outcomes(&mut db), ["recorded 304"]);
}

#[test]
fn the_recorder_runs_as_the_role_that_supplied_it_and_may_say_nonsense() {
    let cluster = still();
    let mut db = cluster.connect();
    db.run("create role biller login; create schema biller authorization biller; select outbox.grant('biller', 'operate')");
    use_something(&mut db, 1, 2);
    let mut biller = cluster.connect_as("biller");
    biller.run(
        "create table biller.seen (who text, n int);
         create function biller.record(outbox.usage_window[]) returns void language sql as
             $$ insert into biller.seen values (current_user, cardinality($1)) $$;
         create function biller.nonsense(outbox.usage_window[]) returns table (idempotency_key text, outcome text) language sql as
             $$ insert into biller.seen values ('nonsense', 0); select idempotency_key, 'fine' from unnest($1) $$;
         create function biller.other(outbox.event[]) returns void language sql as 'select'",
    );
    assert_eq!(
        biller
            .refused("select outbox.set_usage_recorder('biller.other(outbox.event[])')")
            .sqlstate,
        "22023"
    );
    assert_eq!(
        biller
            .refused("select outbox.set_usage_recorder(4000000::oid::regprocedure)")
            .sqlstate,
        "42704"
    );
    biller.run("select outbox.set_usage_recorder('biller.nonsense(outbox.usage_window[])')");
    let (recorded, dead, error) = pass(&mut db);
    assert_eq!((recorded, dead), (0, 0));
    assert!(error.expect("an error").contains("\"fine\""));
    assert_eq!(outcomes(&mut db), ["open 2"]);
    biller.run("select outbox.set_usage_recorder('biller.record(outbox.usage_window[])')");
    assert_eq!(pass(&mut db), (2, 0, None));
    assert_eq!(
        biller.all::<String>("select who || n from biller.seen"),
        ["biller2"]
    );
}

#[test]
fn the_dispatcher_records_by_itself() {
    let cluster = quick().start();
    let mut db = cluster.connect();
    use_something(&mut db, 1, 450);
    db.run("select outbox.record_usage('closing', now() - interval '1 hour' + interval '1 second', 'vcpu_seconds', 1)");
    db.run(RECORDER);
    until("all windows to be recorded", || {
        (outcomes(&mut db) == ["recorded 451"]).then_some(())
    });
    cluster.restore("restored", &cluster.dump("app"));
    let mut restored = cluster.connect_to("restored");
    assert_eq!(outcomes(&mut restored), ["recorded 451"]);
}

#[test]
fn whatever_a_window_raises_others_are_recorded() {
    let cluster = still();
    let mut db = cluster.connect();
    db.run(RECORDER);
    let codes = [
        "P0001", "P0002", "P0004", "21000", "42P01", "54000", "38000", "39P01", "0A000", "22023",
        "23505",
    ];
    use_something(&mut db, 1, 500);
    for (n, code) in codes.iter().enumerate() {
        db.run(&format!(
            "insert into refused values ('a{}', '{code}')",
            17 + 43 * n
        ));
    }
    let dead = i64::try_from(codes.len()).expect("few");
    assert_eq!(pass(&mut db), (500 - dead, dead, None));
    let letters: Vec<String> = db.all("select code from outbox.usage_dead_letters order by code");
    let mut expected = codes;
    expected.sort_unstable();
    assert_eq!(letters, expected);
}

#[test]
fn a_recorder_that_takes_nothing_costs_no_window() {
    let cluster = still();
    let mut db = cluster.connect();
    use_something(&mut db, 1, 150);
    db.run(RECORDER);
    db.run("insert into refused select 'a' || n, 'P0001' from generate_series(1, 150) n");
    let (recorded, dead, error) = pass(&mut db);
    assert_eq!((recorded, dead), (0, 0));
    assert!(error.expect("an error").contains("P0001"));
    let attempts: i64 = db.one("select last_value from attempts");
    assert!(attempts <= 64, "{attempts} calls");
    // A single window has no other that could say whose fault it is.
    db.run("delete from refused where allocation <> 'a1'; delete from outbox.usage_windows where allocation <> 'a1'");
    assert_eq!(pass(&mut db).0, 0);
    assert_eq!(outcomes(&mut db), ["open 1"]);
    use_something(&mut db, 2, 2);
    assert_eq!(pass(&mut db), (1, 1, None));
}

#[test]
fn a_recorder_sets_windows_aside_by_row() {
    let cluster = still();
    let mut db = cluster.connect();
    use_something(&mut db, 1, 3);
    db.run(
        "create function judge(windows outbox.usage_window[]) returns table (idempotency_key text, outcome text, error text) language sql as $$
             select w.idempotency_key, case when w.allocation = 'a2' then 'dead-lettered' end, 'no such customer' from unnest(windows) w $$;
         select outbox.set_usage_recorder('judge(outbox.usage_window[])')",
    );
    assert_eq!(pass(&mut db), (2, 1, None));
    let letters: Vec<String> = db.all(
        "select concat_ws(' ', w.allocation, coalesce(l.code, 'none'), l.message)
           from outbox.usage_dead_letters l join outbox.usage_windows w using (idempotency_key)",
    );
    assert_eq!(letters, ["a2 none no such customer"]);
    assert_eq!(outcomes(&mut db), ["dead-lettered 1", "recorded 2"]);
}
