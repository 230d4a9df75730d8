"""The worker of the examples over a queue of SQS: what it asks is what the service knows, as botocore describes it."""

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
    """A message is received for this time."""
    message = {
        "MessageId": "one",
        "Body": body,
        "ReceiptHandle": f"receipt-{number}",
        "Attributes": {"ApproximateReceiveCount": str(number)},
    }
    asked = {"QueueUrl": QUEUE, "WaitTimeSeconds": 1, "MessageSystemAttributeNames": ["ApproximateReceiveCount"]}
    stub.add_response("receive_message", {"Messages": [message]}, asked)


def work(stub: Stubber, monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> list[Any]:
    """Let the worker handle messages until all of these are given; return what it was handed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from _sqs import SqsQueue

    from worker import Worker

    handled: list[Any] = []
    left = iter(answers)

    def handle(message: Any) -> None:
        handled.append(message)
        if len(handled) == len(answers):
            worker.gate.shut()
        if (error := next(left)) is not None:
            raise error

    worker = Worker(SqsQueue(stub.client, QUEUE, DEAD), handle, Retry(1), max_failures=2)
    worker.run()
    for name in ("_sqs", "worker"):
        monkeypatch.delitem(sys.modules, name)
    return handled


def test_what_is_done_is_deleted(sqs: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the queue was empty, or away, before."""
    sqs.add_response("receive_message", {})
    sqs.add_client_error("receive_message", "ServiceUnavailable", http_status_code=503)
    delivers(sqs, 1)
    sqs.add_response("delete_message", {}, {"QueueUrl": QUEUE, "ReceiptHandle": "receipt-1"})
    [message] = work(sqs, monkeypatch, None)
    assert (message.id, message.body) == ("one", {"amount": "5"})


def test_what_fails_comes_again_later_and_is_a_dead_letter_in_the_end(
    sqs: Stubber, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivers(sqs, 1)
    again = {"QueueUrl": QUEUE, "ReceiptHandle": "receipt-1", "VisibilityTimeout": 2}
    sqs.add_response("change_message_visibility", {}, again)
    delivers(sqs, 2)
    sqs.add_response("change_message_visibility", {}, {**again, "ReceiptHandle": "receipt-2", "VisibilityTimeout": 4})
    filed = '{"amount": "5", "id": "one", "error": "ValueError(\'no\')"}'
    sqs.add_response("send_message", {"MessageId": "two"}, {"QueueUrl": DEAD, "MessageBody": filed})
    sqs.add_response("delete_message", {}, {"QueueUrl": QUEUE, "ReceiptHandle": "receipt-2"})
    assert len(work(sqs, monkeypatch, ValueError("no"), ValueError("no"))) == 2


def test_where_the_queue_cannot_be_asked_the_message_is_left_to_come_again(
    sqs: Stubber, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivers(sqs, 1)
    away = ClientError({"Error": {"Code": "ServiceUnavailable"}}, "SendMessage")
    assert len(work(sqs, monkeypatch, away)) == 1
