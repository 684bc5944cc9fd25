"""A subscriber as a consumer of vLLM's events writes one, with pyzmq: live messages, and replay of what it missed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import msgpack
import zmq

DEADLINE_S = 20.0
REPLAY_END = 2**64 - 1


@dataclasses.dataclass
class Message:
    """One message: `[timestamp, events, dp_rank]` and its number."""

    sequence: int
    timestamp: float
    events: list[dict[str, Any]]
    dp_rank: int

    @classmethod
    def of(cls, sequence: bytes, payload: bytes) -> Message:
        return cls(int.from_bytes(sequence, "big"), *msgpack.unpackb(payload))


class Subscriber:
    """A SUB socket; every wait has a deadline. `next` is the number after the newest message it got."""

    def __init__(self, endpoint: str, topic: bytes = b"kv-events") -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.subscribe(topic)
        self.socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self.topic = topic
        self.next = 0

    def receive(self, timeout_s: float = DEADLINE_S) -> Message | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        topic, sequence, payload = self.socket.recv_multipart()
        assert topic.startswith(self.topic)
        message = Message.of(sequence, payload)
        self.next = message.sequence + 1
        return message

    def until(self, sequence: int) -> list[Message]:
        """Everything up to this number, which must come."""
        messages: list[Message] = []
        while not messages or messages[-1].sequence < sequence:
            message = self.receive()
            assert message is not None, f"no message after {messages[-1:]}"
            messages.append(message)
        return messages

    def close(self) -> None:
        self.socket.close()


def replay(endpoint: str, start: int) -> list[Message]:
    """What the publisher still has from `start` on."""
    dealer: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        messages: list[Message] = []
        while dealer.poll(int(DEADLINE_S * 1000)):
            delimiter, sequence, payload = dealer.recv_multipart()
            assert delimiter == b""
            if not payload:
                assert int.from_bytes(sequence, "big") == REPLAY_END
                return messages
            messages.append(Message.of(sequence, payload))
    raise AssertionError("the replay has no end")


def main(endpoint: str, replay_endpoint: str, last: int) -> None:
    """Says `ready` at the first message, and at the end what it got live and by replay, as one line of JSON."""
    subscriber = Subscriber(endpoint)
    first = subscriber.receive()
    assert first is not None
    print("ready", flush=True)
    live = [first, *subscriber.until(last)]
    missed = replay(replay_endpoint, 0) if replay_endpoint else []
    print(json.dumps([[message.sequence for message in live], [dataclasses.asdict(message) for message in missed]]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
