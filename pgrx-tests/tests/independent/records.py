"""Reads Kafka topics to their end with a client that is not ours, and prints each record, one JSON object a line, with what the
CloudEvents SDK makes of it. Arguments: the brokers, then the topics."""

import json
import sys

from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka_event
from kafka import KafkaConsumer, TopicPartition


def text(value):
    return None if value is None else value.decode()


def event(record):
    if record.value is None:
        # What deletes a key is no event to the SDK.
        return None
    message = KafkaMessage(headers=dict(record.headers), key=record.key, value=record.value)
    event = from_kafka_event(message)
    attributes = event.get_attributes()
    return {
        "attributes": {name: value if isinstance(value, str) else value.isoformat() for name, value in attributes.items()},
        "data": event.get_data(),
    }


brokers, *topics = sys.argv[1:]
consumer = KafkaConsumer(bootstrap_servers=brokers, group_id=None, enable_auto_commit=False)
partitions = [
    TopicPartition(topic, partition) for topic in topics for partition in sorted(consumer.partitions_for_topic(topic))
]
ends = consumer.end_offsets(partitions)
consumer.assign(partitions)
consumer.seek_to_beginning()
while any(consumer.position(partition) < ends[partition] for partition in partitions):
    for records in consumer.poll(timeout_ms=1000).values():
        for record in records:
            print(
                json.dumps(
                    {
                        "topic": record.topic,
                        "partition": record.partition,
                        "offset": record.offset,
                        "key": text(record.key),
                        "value": text(record.value),
                        "headers": [[name, text(value)] for name, value in record.headers],
                        "event": event(record),
                    }
                )
            )
consumer.close()
