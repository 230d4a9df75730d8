"""An SQS queue as a source for `worker.py`: SQS redelivers messages, and a second queue takes the dead letters."""

from __future__ import annotations

import json
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from worker import Message


class SqsQueue:
    """A queue, used through a boto3 client. A message that is not deleted within its visibility timeout is redelivered.

    Let the queue's redrive policy allow more deliveries than the worker, which stores the error with a dead letter.
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
        self._client.send_message(QueueUrl=self._dead, MessageBody=body)  # sent again if the process dies now
        self.ack(message)
