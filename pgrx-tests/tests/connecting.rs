//! Kind http: to connect has a time-out of its own, shorter than that of the whole request.

mod scene;

use std::net::{Ipv4Addr, SocketAddr};

use outbox_tests::Sql;
use scene::{assert_clear, emit, quick, quoted, until_status};
use serde_json::json;
use socket2::{Domain, Socket, Type};

/// A port that takes no connections: somebody listens, and the queue of those who want in is full for ever.
fn full() -> (SocketAddr, Vec<Socket>) {
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let listener = socket();
    listener
        .bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())
        .expect("there is a free port");
    listener.listen(0).expect("a bound socket listens");
    let address = listener.local_addr().ok().and_then(|it| it.as_socket());
    let address = address.expect("a bound listener has an address");
    let mut sockets = vec![listener];
    for _ in 0..4 {
        let waiting = socket();
        waiting
            .set_nonblocking(true)
            .expect("a socket can be told so");
        // The first of them get in; whether they do is of no interest.
        let _ = waiting.connect(&address.into());
        sockets.push(waiting);
    }
    (address, sockets)
}

#[test]
fn an_endpoint_that_cannot_be_connected_to_is_told_from_one_that_does_not_answer() {
    let (address, _sockets) = full();
    let cluster = quick().start();
    let mut db = cluster.connect();
    let config = json!({"url": format!("http://{address}/hook"), "timeout_ms": 100_000});
    db.run(&format!(
        "select outbox.create_sink('w', 'http', config => {})",
        quoted(&config.to_string())
    ));
    emit(&mut db, 1..=1);
    let seen = until_status(&mut db, "w", "in trouble", |status| {
        status.last_error.is_some()
    });
    let error = seen.last_error.expect("it says why");
    assert_clear(&error);
    assert_eq!(
        error,
        format!("cannot connect to http://{address}: timed out")
    );
    assert_eq!((seen.delivered, seen.dead_letters), (0, 0));
}
