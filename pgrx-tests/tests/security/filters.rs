//! A filter is one expression, whatever it is made of.

use outbox_tests::{Receiver, Sql};
use postgres::Client;

use super::scene::{quick, quoted, until_idle, until_status};
use super::{http_sink, with_operators};

/// Texts that close the bracket they are put into, or are something else than one expression.
const NO_EXPRESSIONS: &[&str] = &[
    "true) or (",
    "true) or (true",
    "select true",
    "values (true)",
    "true)",
    "(true",
    "",
    "true; select true",
    "true) union all select 1 where (true",
    "true) union all select 1.5 where (true",
    "true) union all select event.outbox_ordinal from public.secret event where (true",
    "true) limit 1 --",
    "true) limit (1",
    "true) order by (1",
    "true) group by (event.outbox_ordinal",
    "true) for update of event nowait --",
    "true), (true",
    "true) from public.secret where (true",
    "true) as x --",
    "true) offset 0) t union all select 1, null, null from (select where (true",
    "true) intersect select (1",
    "true) window w as (partition by 1",
    "true /*",
    "'",
    "$$",
    "\"",
    "\\",
    "true\u{1}",
    "true into x",
    "distinct true",
    "* from public.secret",
    "topic, topic",
    "$2",
    "count(*) > 0",
    "unnest(array[true])",
    "row_number() over () > 0",
    "topic",
    "1",
    "no_such_column",
    "no_such_function(topic)",
    "outbox.events.topic = 'a'",
];

/// Texts that look odd and are expressions.
const EXPRESSIONS: &[&str] = &[
    "true --",
    "true -- )",
    "/* ) union all select ( */ true",
    "topic <> ')'",
    "topic <> $x$) union all select ($x$",
    "topic <> E'\\')'",
    "not exists (select)  or true",
    "(select true)",
    "case when topic = 'x' then false else true end",
    "array[topic] <@ array['a', 'b']",
    "event.topic is not null and $1 is not null",
    "\"time\" < clock_timestamp() + interval '1 hour'",
    "payload is null or (payload ->> 'n')::numeric >= 0",
];

#[track_caller]
fn refused(db: &mut Client, sql: &str) {
    let refusal = db.refused(sql);
    assert_eq!(refusal.sqlstate, "22023", "{sql}: {}", refusal.message);
    assert_eq!(
        refusal.message,
        "the filter is not an SQL boolean expression over the columns of an event"
    );
}

#[test]
fn nothing_but_one_expression_is_taken() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let receiver = Receiver::start();
    let mut op = cluster.connect_as("op");
    op.run("create function op.shape(outbox.event) returns jsonb language sql return $1.payload");
    http_sink(&mut op, "plain", &receiver, "");
    for text in NO_EXPRESSIONS {
        let filter = quoted(text);
        if !text.is_empty() {
            let create = format!("select outbox.create_sink('new', 'pull', filter => {filter})");
            refused(&mut op, &create);
            refused(
                &mut op,
                &create.replace("filter", "transform => 'op.shape(outbox.event)', filter"),
            );
            refused(
                &mut op,
                &format!("select outbox.alter_sink('plain', filter => {filter})"),
            );
        }
        // Settings that change what a text means change nothing here.
        op.run("set standard_conforming_strings = off; set backslash_quote = on; set escape_string_warning = off");
        if !text.is_empty() && !text.contains('\\') {
            refused(
                &mut op,
                &format!("select outbox.alter_sink('plain', filter => {filter})"),
            );
        }
        op.run("reset all");
    }
    for (index, text) in EXPRESSIONS.iter().enumerate() {
        let filter = quoted(text);
        op.run(&format!(
            "select outbox.create_sink('taken{index}', 'pull', filter => {filter})"
        ));
        op.run(&format!("select outbox.create_sink('shaped{index}', 'pull', filter => {filter}, transform => 'op.shape(outbox.event)')"));
    }
    db.run("select outbox.emit('a', '{\"n\": 1}')");
    for (index, text) in EXPRESSIONS.iter().enumerate() {
        for kind in ["taken", "shaped"] {
            let topics: Vec<String> =
                db.all(&format!("select topic from outbox.poll('{kind}{index}')"));
            assert_eq!(topics, ["a"], "{text}");
        }
    }
}

#[test]
fn a_text_means_the_same_where_it_is_checked_and_where_it_is_run() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let mut op = cluster.connect_as("op");
    // One string to a session with backslashes as escapes; to all others it ends before the bracket.
    let two_faced = "topic = 'a\\' --\n) union all select 1 where (true --'";
    op.run("set standard_conforming_strings = off; set backslash_quote = on");
    op.execute(
        "select outbox.create_sink('s', 'pull', filter => $1)",
        &[&two_faced],
    )
    .expect_err("it is refused");
    op.run("reset all");
    // And null = null is not true for those who set it so.
    op.run("set transform_null_equals = on; select outbox.create_sink('null', 'pull', filter => 'subject = null')");
    db.run("select outbox.emit('a')");
    db.run("set transform_null_equals = on");
    assert_eq!(
        db.all::<String>("select topic from outbox.poll('null')"),
        Vec::<String>::new()
    );
}

#[test]
fn one_that_got_into_the_table_in_another_way_is_not_run() {
    let cluster = quick().start();
    let mut db = with_operators(&cluster);
    let (good, evil) = (Receiver::start(), Receiver::start());
    let mut op = cluster.connect_as("op");
    http_sink(&mut op, "bad", &evil, ", filter => 'false'");
    http_sink(&mut op, "good", &good, "");
    until_idle(&mut db, "bad");
    db.execute(
        "update outbox.sinks set version = version + 1, filter = $1 where id = 'bad'",
        &[&"true) union all select 1 where (true"],
    )
    .expect("a superuser may");
    db.run("select outbox.emit('a')");
    let now = until_status(&mut db, "bad", "an error", |now| now.last_error.is_some());
    assert_eq!(now.state, "error");
    let told = now.last_error.unwrap_or_default();
    assert!(told.starts_with("filter: syntax error"), "{told}");
    assert_eq!(until_idle(&mut db, "good").delivered, 1);
    assert_eq!(evil.count(), 0);
    op.run("select outbox.alter_sink('bad', filter => 'true')");
    evil.wait_for(1);
}
