//! One suite that a sink passes, whatever its kind: order, redelivery after a crash, partial failure, outage, poison, a hang, an
//! event that is too large, secrets, and the checks of its config.
//!
//! A new kind gets it for a [`Destination`](destination::Destination) of its own and a line below. `function` leaves out
//! what it cannot have: no network that hangs, no limit of size, no secret. The tests' Kafka broker makes every topic that it is
//! asked for, so it takes all that it can take at all.

mod cases;
mod destination;
mod function;
mod http;
mod kafka;
mod nats;
mod remote;
#[path = "../scene/mod.rs"]
mod scene;

/// A module with these cases, each a test, for a destination.
macro_rules! conforms {
    ($name:ident: $destination:ty { $($case:ident)* }) => {
        mod $name {
            $(
                #[test]
                fn $case() {
                    crate::cases::$case::<$destination>();
                }
            )*
        }
    };
    ($name:ident: $destination:ty) => {
        conforms! {
            $name: $destination {
                order redelivery partial_failure outage_and_recovery poison hang too_large secrets config
            }
        }
    };
}

conforms! { http_batch: crate::http::Batch }
conforms! { http_single: crate::http::Single }
conforms! { nats_server: crate::nats::JetStream }
conforms! { kafka_broker: crate::kafka::Broker { order redelivery outage_and_recovery poison hang too_large secrets config } }
conforms! { another_postgres: crate::remote::Remote }
conforms! { function_sink: crate::function::Function { order redelivery partial_failure outage_and_recovery poison config } }

// By key, an event that is never taken is decided on when others go through after it has failed often enough: see the tests of isolation.
conforms! {
    http_batch_by_key: crate::destination::ByKey<crate::http::Batch> {
        order redelivery partial_failure outage_and_recovery poison hang secrets config
    }
}
conforms! {
    http_single_by_key: crate::destination::ByKey<crate::http::Single> {
        order redelivery partial_failure outage_and_recovery poison hang secrets config
    }
}
conforms! {
    function_by_key: crate::destination::ByKey<crate::function::Function> {
        order redelivery partial_failure outage_and_recovery poison
    }
}
conforms! {
    another_postgres_by_key: crate::destination::ByKey<crate::remote::Remote> {
        order redelivery partial_failure outage_and_recovery poison hang too_large secrets config
    }
}
