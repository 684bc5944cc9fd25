"""`KvPublisher` as its subscribers see it: layout, order, gaps, replay, close; and as its engine does: errors, never a wait."""

import errno
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq
from subscriber import DEADLINE_S, REPLAY_END, Message, Subscriber, replay

from armature_kv import KvIndexer, KvPublisher

SIZE = 4


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    with KvPublisher("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", block_size=SIZE, dp_rank=3) as made:
        yield made


@pytest.fixture
def subscribe() -> Iterator[Callable[[KvPublisher], Subscriber]]:
    made: list[Subscriber] = []

    def subscribe(publisher: KvPublisher) -> Subscriber:
        subscriber = Subscriber(publisher.endpoint)
        made.append(subscriber)
        reach(publisher, lambda: subscriber.receive(0.02) is not None)
        drain(subscriber, publisher)
        return subscriber

    yield subscribe
    for subscriber in made:
        subscriber.close()


def reach(publisher: KvPublisher, reached: Callable[[], bool]) -> None:
    """Publishes until the subscription, which takes its time, is seen to work."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, "nothing arrives"
        publisher.removed([1])


def drain(subscriber: Subscriber, publisher: KvPublisher) -> None:
    """Reads the rest of what `reach` sent."""
    publisher.removed([2])
    while (message := subscriber.receive()) is not None:
        if message.events[0]["block_hashes"] == [2]:
            return
    raise AssertionError("messages are lost")


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_layout_is_vllms(publisher: KvPublisher, subscribe: Callable[[KvPublisher], Subscriber]) -> None:
    subscriber = subscribe(publisher)
    before, start = time.time(), subscriber.next
    assert publisher.stored(range(8), [2**64 - 5, 12], parent_hash=-1, lora_name="sql", medium="CPU")
    assert publisher.stored(np.arange(4, dtype=np.uint32), np.array([13]))
    assert publisher.removed([12, b"\xff" * 40])
    assert publisher.cleared()
    messages = subscriber.until(start + 3)
    assert [message.sequence for message in messages] == list(range(start, start + 4))
    assert {message.dp_rank for message in messages} == {3}
    assert all(before - 1 <= message.timestamp <= time.time() + 1 for message in messages)
    assert [message.events for message in messages] == [
        [
            {
                "type": "BlockStored",
                "block_hashes": [2**64 - 5, 12],
                "parent_block_hash": 2**64 - 1,
                "token_ids": list(range(8)),
                "block_size": SIZE,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": "sql",
            }
        ],
        [
            {
                "type": "BlockStored",
                "block_hashes": [13],
                "parent_block_hash": None,
                "token_ids": [0, 1, 2, 3],
                "block_size": SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        ],
        [{"type": "BlockRemoved", "block_hashes": [12, 2**64 - 1], "medium": "GPU"}],
        [{"type": "AllBlocksCleared"}],
    ]
    assert list(messages[0].events[0])[0] == "type"


def test_another_process_gets_events_live_and_by_replay(publisher: KvPublisher) -> None:
    for at in range(20):
        publisher.stored([at] * SIZE, [at])
    last = 3_000
    script = pathlib.Path(__file__).with_name("subscriber.py")
    replay_endpoint = publisher.replay_endpoint
    assert replay_endpoint is not None
    arguments = [sys.executable, str(script), publisher.endpoint, replay_endpoint, str(last)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready, lines = threading.Event(), process.stdout

        def read() -> None:
            if lines.readline():
                ready.set()

        reader = threading.Thread(target=read)
        reader.start()
        reach(publisher, lambda: ready.wait(0.02))
        reader.join(timeout=DEADLINE_S)
        wait_for(lambda: publisher.queued == 0)
        for at in range(publisher.published, last + 1):
            publisher.removed([at])
        output, _ = process.communicate(timeout=60)
    live, missed = json.loads(output)
    assert live == list(range(live[0], last + 1))
    assert [message["sequence"] for message in missed] == list(range(last + 1))
    assert missed[7]["events"][0]["token_ids"] == [7] * SIZE


def test_events_of_several_threads_are_numbered_without_a_gap(
    publisher: KvPublisher, subscribe: Callable[[KvPublisher], Subscriber]
) -> None:
    subscriber = subscribe(publisher)
    start = subscriber.next
    threads = [
        threading.Thread(target=lambda base: [publisher.removed([base + at]) for at in range(500)], args=(thread * 1000,))
        for thread in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    messages = subscriber.until(start + 1999)
    assert [message.sequence for message in messages] == list(range(start, start + 2000))
    removed = [message.events[0]["block_hashes"][0] for message in messages]
    for base in range(0, 4000, 1000):
        assert [block for block in removed if block // 1000 * 1000 == base] == list(range(base, base + 500))


def test_a_full_queue_drops_and_the_gap_shows(subscribe: Callable[[KvPublisher], Subscriber]) -> None:
    with KvPublisher("tcp://127.0.0.1:0", block_size=SIZE, max_queued_events=1) as publisher:
        subscriber = subscribe(publisher)
        start, dropped = subscriber.next, publisher.dropped
        taken: list[bool] = []
        deadline = time.monotonic() + DEADLINE_S
        # Until the very last one is lost, which no later event would show.
        while not taken or taken[-1] or taken.count(False) < 10:
            assert time.monotonic() < deadline
            taken.append(publisher.removed([len(taken)]))
        messages: list[Message] = []
        while True:
            message = subscriber.receive()
            assert message is not None, "the lost tail does not show"
            messages.append(message)
            # An empty message stands for what was lost before it, and takes a number of its own.
            empty = [message for message in messages if not message.events]
            if message.sequence == start + len(taken) + len(empty) - 1:
                break
    assert messages[-1].events == []
    assert publisher.dropped - dropped == taken.count(False)
    arrived = [event["block_hashes"][0] for message in messages for event in message.events]
    assert arrived == [number for number, kept in enumerate(taken) if kept]
    numbers = {message.sequence for message in messages}
    assert len(set(range(start, messages[-1].sequence)) - numbers) == taken.count(False)


def test_replay_has_the_newest_messages_and_an_end() -> None:
    with KvPublisher(
        "tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", block_size=SIZE, max_replay_events=5
    ) as publisher:
        endpoint = publisher.replay_endpoint
        assert endpoint is not None
        assert replay(endpoint, 0) == []
        for at in range(10):
            publisher.removed([at])
        wait_for(lambda: publisher.published == 10)
        assert [message.sequence for message in replay(endpoint, 0)] == [5, 6, 7, 8, 9]
        assert [message.sequence for message in replay(endpoint, 8)] == [8, 9]
        assert replay(endpoint, 10) == []


def test_replay_answers_a_req_socket_and_survives_nonsense(publisher: KvPublisher) -> None:
    publisher.removed([5])
    wait_for(lambda: publisher.published == 1)
    endpoint = publisher.replay_endpoint
    assert endpoint is not None
    rude: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as rude:
        rude.set(zmq.LINGER, 0)
        rude.connect(endpoint)
        for nonsense in ([b""], [b"", b"1234567"], [b"", b"123456789"], [b"x" * 100_000]):
            rude.send_multipart(nonsense)
        # Without the delimiter it is answered without one.
        rude.send((0).to_bytes(8, "big"))
        assert rude.poll(int(DEADLINE_S * 1000))
        sequence, payload = rude.recv_multipart()
        assert Message.of(sequence, payload).events[0]["block_hashes"] == [5]
    request: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.REQ) as request:
        request.set(zmq.LINGER, 0)
        request.connect(endpoint)
        request.send((7).to_bytes(8, "big"))
        assert request.poll(int(DEADLINE_S * 1000))
        sequence, payload = request.recv_multipart()
        assert (int.from_bytes(sequence, "big"), payload) == (REPLAY_END, b"")


def test_close_sends_what_is_queued(subscribe: Callable[[KvPublisher], Subscriber]) -> None:
    publisher = KvPublisher("tcp://127.0.0.1:0", block_size=SIZE)
    subscriber = subscribe(publisher)
    start = subscriber.next
    for at in range(5_000):
        publisher.stored([at] * 16 * SIZE, range(at * 16, at * 16 + 16))
    publisher.close()
    assert publisher.closed
    assert publisher.dropped == 0
    assert [message.sequence for message in subscriber.until(start + 4_999)] == list(range(start, start + 5_000))


def test_a_closed_publisher_refuses_events_and_frees_its_ports() -> None:
    with KvPublisher("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0") as publisher:
        assert not publisher.closed
    publisher.close()
    calls: list[Callable[[], bool]] = [
        lambda: publisher.removed([1]),
        publisher.cleared,
        lambda: publisher.stored([0] * 16, [1]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="the publisher is closed"):
            call()
    assert "closed" in repr(publisher)
    with KvPublisher(publisher.endpoint, replay_endpoint=publisher.replay_endpoint) as again:
        assert again.endpoint == publisher.endpoint


def test_a_forgotten_publisher_ends_by_itself() -> None:
    publisher = KvPublisher("tcp://127.0.0.1:0")
    endpoint = publisher.endpoint
    del publisher

    def free() -> bool:
        try:
            KvPublisher(endpoint).close()
        except OSError:
            return False
        return True

    wait_for(free)


def test_a_port_in_use_is_an_os_error_that_names_it(publisher: KvPublisher) -> None:
    with pytest.raises(OSError, match=f"cannot bind {publisher.endpoint}") as caught:
        KvPublisher(publisher.endpoint)
    assert caught.value.errno == errno.EADDRINUSE


def test_every_interface_and_ipv6_can_be_named() -> None:
    with KvPublisher("tcp://*:0") as publisher:
        assert publisher.endpoint.startswith("tcp://0.0.0.0:")
        assert publisher.replay_endpoint is None
    try:
        with KvPublisher("tcp://[::1]:0") as publisher:
            assert publisher.endpoint.startswith("tcp://[::1]:")
    except OSError as error:
        # A machine without IPv6 says so, and does not call the address malformed.
        assert error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://:1", "tcp://*", "tcp://*:x", "tcp://*:65536", "ipc:///a/b", "127.0.0.1:5557"]
)
def test_malformed_endpoints_are_value_errors(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is not of the form tcp://HOST:PORT"):
        KvPublisher(endpoint)
    with pytest.raises(ValueError, match="is not of the form tcp://HOST:PORT"):
        KvPublisher("tcp://127.0.0.1:0", replay_endpoint=endpoint)


def test_bad_events_are_value_errors_and_take_no_number(publisher: KvPublisher) -> None:
    bad: list[Callable[[], object]] = [
        lambda: publisher.stored([-1] * SIZE, [1]),
        lambda: publisher.stored([2**32] * SIZE, [1]),
        lambda: publisher.stored([1] * (SIZE - 1), [1]),
        lambda: publisher.stored([1] * SIZE * 2, [1, 1]),
        lambda: publisher.stored([1] * SIZE, [1], parent_hash=1),
        lambda: publisher.stored([1] * SIZE, [2**64]),
        lambda: publisher.stored([1] * SIZE, [1], medium="TAPE"),
        lambda: publisher.removed([b"short"]),
        lambda: publisher.removed([1], medium="gpu"),
        lambda: KvPublisher("tcp://127.0.0.1:0", block_size=0),
        lambda: KvPublisher("tcp://127.0.0.1:0", max_queued_events=0),
        lambda: KvPublisher("tcp://127.0.0.1:0", max_replay_events=-1),
        lambda: KvPublisher("tcp://127.0.0.1:0", dp_rank=2**32),
    ]
    for call in bad:
        with pytest.raises(ValueError, match=r"\w"):
            call()
    # Events without blocks are none.
    assert publisher.stored([], [])
    assert publisher.removed([])
    assert publisher.published == publisher.queued == 0


def test_a_subscriber_that_does_not_read_holds_nobody_up(
    publisher: KvPublisher, subscribe: Callable[[KvPublisher], Subscriber]
) -> None:
    reading = subscribe(publisher)
    # A raw connection that subscribes to everything and then never reads.
    host, port = publisher.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stalled:
        stalled.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL" + b"\0" * 16 + b"\0" + b"\0" * 31)
        stalled.sendall(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB" + b"\0\x01\x01")
        start = reading.next
        for at in range(5_000):
            assert publisher.stored(range(64 * SIZE), range(at * 64, at * 64 + 64))
        messages = reading.until(start + 4_999)
    assert len(messages) == 5_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(publisher: KvPublisher) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            publisher.removed([1])
        except RuntimeError as error:
            code = 0 if "belongs to the parent process" in str(error) else 2
        publisher.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert publisher.removed([1])
    wait_for(lambda: publisher.published == 1)


def test_an_index_follows_an_engine(publisher: KvPublisher, subscribe: Callable[[KvPublisher], Subscriber]) -> None:
    subscriber, indexer = subscribe(publisher), KvIndexer(SIZE)
    start = subscriber.next
    publisher.stored(range(16), [1, 2, 3, 4])
    publisher.stored(range(16, 20), [5], parent_hash=4)
    publisher.removed([4])
    for message in subscriber.until(start + 2):
        for event in message.events:
            if event["type"] == "BlockStored":
                indexer.apply_stored(
                    7, event["token_ids"], event["block_hashes"], event["parent_block_hash"], dp_rank=message.dp_rank
                )
            else:
                indexer.apply_removed(7, event["block_hashes"], dp_rank=message.dp_rank)
    assert indexer.find_matches(range(20)) == {7: 3}
