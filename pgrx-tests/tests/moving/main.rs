//! What leaves a database, or comes into it, other than by its clients: logical replication, pg_upgrade, and functions whose numbers
//! are other ones elsewhere.

#[path = "../scene/mod.rs"]
mod scene;
#[path = "../workers/mod.rs"]
mod workers;

mod functions;
mod publications;
mod replication;
mod upgrade;
