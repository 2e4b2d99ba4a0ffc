"""Reads requests, one JSON object a line, with libraries that are not ours, and prints what they made of each."""

import base64
import json
import sys

from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook, WebhookVerificationError


def events(content_type, body):
    if not content_type.startswith("application/cloudevents-batch+json"):
        return [from_http_event(HTTPMessage({"content-type": content_type}, body))]
    # The SDK has no batches: each element is an event by itself.
    structured = {"content-type": "application/cloudevents+json"}
    elements = [json.dumps(element).encode() for element in json.loads(body)]
    return [from_http_event(HTTPMessage(structured, element)) for element in elements]


def verified(secret, body, headers):
    try:
        Webhook(secret).verify(body, headers, json_parse=False)
        return True
    except WebhookVerificationError:
        return False


for line in sys.stdin:
    request = json.loads(line)
    headers = request["headers"]
    body = base64.b64decode(request["body"])
    answer = {
        "events": [
            {
                "attributes": {
                    name: value if isinstance(value, (str, int, bool)) else value.isoformat()
                    for name, value in event.get_attributes().items()
                },
                "data": event.get_data(),
            }
            for event in events(headers["content-type"], body)
        ],
        "verified": [verified(secret, body, headers) for secret in request["secrets"]],
    }
    print(json.dumps(answer), flush=True)
