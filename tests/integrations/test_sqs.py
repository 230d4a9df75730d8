"""The worker of the examples over a queue of SQS: its requests are valid for the service, as botocore describes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from resilience import Retry

EXAMPLES = str(Path(__file__).parents[2] / "examples")
QUEUE = "https://sqs.example/jobs"
DEAD = "https://sqs.example/dead"


@pytest.fixture
def sqs() -> Iterator[Stubber]:
    client = boto3.client("sqs", region_name="eu-central-1", aws_access_key_id="key", aws_secret_access_key="secret")
    with Stubber(client) as stub:
        yield stub
        stub.assert_no_pending_responses()
    client.close()


def delivers(stub: Stubber, number: int, body: str = '{"amount": "5"}') -> None:
    """Expect a request for messages, and answer it with this message, received for the given time."""
    message = {"MessageId": "one", "Body": body, "ReceiptHandle": f"receipt-{number}"}
    message["Attributes"] = {"ApproximateReceiveCount": str(number)}
    request = {"QueueUrl": QUEUE, "WaitTimeSeconds": 1, "MessageSystemAttributeNames": ["ApproximateReceiveCount"]}
    stub.add_response("receive_message", {"Messages": [message]}, request)


def work(stub: Stubber, monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> list[Any]:
    """Run the worker until it has handled a message for each of these outcomes; return the messages."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from _sqs import SqsQueue

    from worker import Worker

    handled: list[Any] = []
    outcomes = iter(answers)

    def handle(message: Any) -> None:
        handled.append(message)
        if len(handled) == len(answers):
            worker.gate.shut()
        if (error := next(outcomes)) is not None:
            raise error

    worker = Worker(SqsQueue(stub.client, QUEUE, DEAD), handle, Retry(1), max_failures=2)
    worker.run()
    for name in ("_sqs", "worker"):
        monkeypatch.delitem(sys.modules, name)
    return handled


def test_a_handled_message_is_deleted(sqs: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the queue was empty or unavailable."""
    sqs.add_response("receive_message", {})
    sqs.add_client_error("receive_message", "ServiceUnavailable", http_status_code=503)
    delivers(sqs, 1)
    sqs.add_response("delete_message", {}, {"QueueUrl": QUEUE, "ReceiptHandle": "receipt-1"})
    [message] = work(sqs, monkeypatch, None)
    assert (message.id, message.body) == ("one", {"amount": "5"})


def test_a_failed_message_comes_again_and_is_finally_dead(sqs: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    delivers(sqs, 1)
    again = {"QueueUrl": QUEUE, "ReceiptHandle": "receipt-1", "VisibilityTimeout": 2}
    sqs.add_response("change_message_visibility", {}, again)
    delivers(sqs, 2)
    sqs.add_response("change_message_visibility", {}, {**again, "ReceiptHandle": "receipt-2", "VisibilityTimeout": 4})
    filed = '{"amount": "5", "id": "one", "error": "ValueError(\'no\')"}'
    sqs.add_response("send_message", {"MessageId": "two"}, {"QueueUrl": DEAD, "MessageBody": filed})
    sqs.add_response("delete_message", {}, {"QueueUrl": QUEUE, "ReceiptHandle": "receipt-2"})
    assert len(work(sqs, monkeypatch, ValueError("no"), ValueError("no"))) == 2


def test_a_message_comes_again_if_the_queue_is_unavailable(sqs: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    delivers(sqs, 1)
    away = ClientError({"Error": {"Code": "ServiceUnavailable"}}, "SendMessage")
    assert len(work(sqs, monkeypatch, away)) == 1
