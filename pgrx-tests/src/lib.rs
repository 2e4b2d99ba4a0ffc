//! Real clusters and real receivers: what the end-to-end tests, the demo and the benches of pg_outbox stand on.
//!
//! Everything here drives the extension from outside, as an application would, and links nothing of it. What fails
//! panics with the reason, for there is nobody to handle it.
//!
//! ```no_run
//! use outbox_tests::{Cluster, Receiver, Reply, Sql};
//!
//! let cluster = Cluster::start();
//! let receiver = Receiver::start();
//! let mut db = cluster.connect();
//! let config = format!(r#"{{"url": "{}"}}"#, receiver.url());
//! db.run(&format!("select outbox.create_sink('demo', 'http', config => '{config}')"));
//! receiver.reply_next([Reply::status(503)]);
//! let id: String = db.one("select outbox.emit('order.placed', '{\"n\": 1}', subject => '7')");
//! assert_eq!(receiver.wait_for(1)[0].id, id);
//! ```
#![forbid(unsafe_code)]

mod bucket;
mod client;
pub mod cluster;
pub mod endpoints;
mod gate;
mod kafka;
mod nats;
mod ports;
mod process;
pub mod receiver;
mod sasl_gate;
mod testbed;
mod tls_gate;
mod wait;

pub use client::{Refusal, Sql};
pub use cluster::{Cluster, Mode, Signal};
pub use gate::Gate;
pub use kafka::{Kafka, Record, records};
pub use nats::{Nats, Stored};
pub use receiver::{Certificate, Event, Receiver, Reply, Request, Tls};
pub use testbed::{is_installed, major, node_libraries, program, python_libraries};
pub use wait::{DEADLINE, until};
