//! The client properties that a sink may set, and why others may not be.

/// May be set: they change how fast, how far and as whom, not what is guaranteed. Sorted.
const OPEN: &[&str] = &[
    "batch.num.messages",
    "batch.size",
    "broker.address.family",
    "broker.address.ttl",
    "client.dns.lookup",
    "client.id",
    "client.rack",
    "compression.codec",
    "compression.level",
    "compression.type",
    "connections.max.idle.ms",
    "linger.ms",
    "max.in.flight.requests.per.connection",
    "message.max.bytes",
    "metadata.max.age.ms",
    "partitioner",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "security.protocol",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.nagle.disable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.curves.list",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.sigalgs.list",
    "sticky.partitioning.linger.ms",
    "topic.metadata.propagation.max.ms",
    "topic.metadata.refresh.fast.interval.ms",
    "topic.metadata.refresh.interval.ms",
];

/// Have a key of their own.
const ELSEWHERE: &[(&str, &str)] = &[
    ("bootstrap.servers", "brokers"),
    ("delivery.timeout.ms", "timeout_ms"),
    ("message.timeout.ms", "timeout_ms"),
    ("metadata.broker.list", "brokers"),
    ("ssl.ca.location", "ca_file"),
];

/// Are passwords or keys, which a secret holds.
const SECRET: &[&str] = &["sasl.password", "ssl.key.password", "ssl.key.pem"];

/// Hold up what a sink guarantees.
const GUARANTEES: &[&str] = &[
    "acks",
    "delivery.report.only.error",
    "enable.gapless.guarantee",
    "enable.idempotence",
    "message.send.max.retries",
    "queuing.strategy",
    "request.required.acks",
    "retries",
    "transactional.id",
];

/// Name files of the server's.
const FILES: &[&str] = &["ssl.certificate.location", "ssl.key.location"];

/// Why `name` may not be set, and what to do instead.
pub(super) struct Refused {
    pub(super) why: String,
    pub(super) hint: Option<String>,
}

/// Whether the property may be set.
pub(super) fn check(name: &str) -> Result<(), Refused> {
    let refused = |why: &str, hint: String| {
        Err(Refused {
            why: why.to_owned(),
            hint: Some(hint),
        })
    };
    if OPEN.contains(&name) {
        return Ok(());
    }
    if let Some((_, key)) = ELSEWHERE.iter().find(|(known, _)| *known == name) {
        return refused(
            "has a key of its own",
            format!("Set \"{key}\" in the config."),
        );
    }
    if SECRET.contains(&name) {
        return refused(
            "is a secret",
            format!(
                "Store it with outbox.set_secret, name it by \"secret\", and set \"secret_property\" to \"{name}\"."
            ),
        );
    }
    if GUARANTEES.contains(&name) {
        return refused(
            "is set by the sink itself",
            "What a sink guarantees rests on it.".to_owned(),
        );
    }
    let near = crate::sinks::fields::nearest(name, OPEN);
    Err(Refused {
        why: "is no property that can be set".to_owned(),
        hint: near.map(|near| format!("Perhaps \"{near}\" is meant.")),
    })
}

/// Whether the property names a file that the server is to read.
pub(super) fn is_file(name: &str) -> bool {
    FILES.contains(&name)
}

#[cfg(test)]
mod tests {
    use rdkafka::ClientConfig;
    use rdkafka::error::KafkaError;
    use rdkafka::types::RDKafkaConfRes;

    use super::*;

    #[test]
    fn what_runs_code_or_weakens_the_sink_cannot_be_set() {
        for name in [
            "plugin.library.paths",
            "ssl.engine.location",
            "ssl.providers",
            "sasl.kerberos.kinit.cmd",
            "enable.ssl.certificate.verification",
            "acks",
            "enable.idempotence",
            "transactional.id",
            "log.queue",
            "nonsense",
        ] {
            assert!(check(name).is_err(), "{name}");
        }
    }

    #[test]
    fn the_client_knows_what_can_be_set() {
        for name in OPEN {
            let mut client = ClientConfig::new();
            client.set(*name, "no such value");
            if let Err(KafkaError::ClientConfig(result, ..)) = client.create_native_config() {
                assert_eq!(result, RDKafkaConfRes::RD_KAFKA_CONF_INVALID, "{name}");
            }
        }
        assert!(OPEN.is_sorted());
    }
}
