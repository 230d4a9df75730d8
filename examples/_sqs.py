"""A queue of SQS as a source of the worker beside: SQS redelivers, and files dead letters in a queue of their own."""

from __future__ import annotations

import json
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from worker import Message


class SqsQueue:
    """A queue, by a client of boto3. What is not deleted within the visibility timeout of the queue comes again.

    Let its redrive policy allow more deliveries than the worker does: then the worker says why a message is dead.
    """

    away = (BotoCoreError, ClientError)

    def __init__(self, client: Any, url: str, dead: str) -> None:
        self._client, self._url, self._dead = client, url, dead

    def receive(self) -> Message | None:
        answer = self._client.receive_message(
            QueueUrl=self._url, WaitTimeSeconds=1, MessageSystemAttributeNames=["ApproximateReceiveCount"]
        )
        for it in answer.get("Messages", ()):
            times = int(it["Attributes"]["ApproximateReceiveCount"])
            return Message(it["MessageId"], json.loads(it["Body"]), it["ReceiptHandle"], times)
        return None

    def ack(self, message: Message) -> None:
        self._client.delete_message(QueueUrl=self._url, ReceiptHandle=message.receipt)

    def retry(self, message: Message) -> int:
        self._client.change_message_visibility(
            QueueUrl=self._url, ReceiptHandle=message.receipt, VisibilityTimeout=min(2**message.deliveries, 900)
        )
        return message.deliveries

    def dead_letter(self, message: Message, error: Exception) -> None:
        body = json.dumps({**message.body, "id": message.id, "error": repr(error)})
        self._client.send_message(QueueUrl=self._dead, MessageBody=body)  # twice, if the process dies here
        self.ack(message)
