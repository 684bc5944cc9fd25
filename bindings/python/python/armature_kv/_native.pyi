"""The native half of `armature_kv`.

Token ids and hashes may come as a sequence of integers or as a one-dimensional buffer of them (numpy, `array`,
`memoryview`). An integer out of range is a `ValueError` that names the argument and the place; anything that is no integer
is a `TypeError`.
"""

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, final, type_check_only

from typing_extensions import Buffer, Self

__all__ = ["Applied", "KvIndexer", "KvPublisher", "Overlap", "block_hashes", "sequence_hashes"]

@type_check_only
class _Array(Protocol):
    """A numpy array: before Python 3.12 its type does not show that it is a buffer."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

_Tokens: TypeAlias = Sequence[SupportsIndex] | Buffer | _Array
"""Token ids in 0..2^32. A buffer of 32-bit unsigned integers is the fastest: one copy of memory."""

_Hash: TypeAlias = SupportsIndex | bytes
"""A 64-bit hash, signed or unsigned; of bytes (8 or more) the last eight count, big endian, as in vLLM's events."""

_Hashes: TypeAlias = Sequence[_Hash] | Buffer | _Array

def block_hashes(
    tokens: _Tokens, block_size: int, lora_name: str | None = None, cache_namespace: str | None = None
) -> list[int]:
    """The hash of each full block's tokens alone; a last partial block has none. The GIL is released for long inputs.

    The adapter and the namespace (`cache_salt`) of a request separate equal tokens whose KV differs; an empty string
    counts as absent.
    """

def sequence_hashes(
    tokens: _Tokens, block_size: int, lora_name: str | None = None, cache_namespace: str | None = None
) -> list[int]:
    """The hash of each prefix that ends with a full block: it names the block in its context."""

@final
class KvPublisher:
    """Publishes the KV events of one rank of one engine over ZeroMQ, in vLLM's layout.

    Call it where blocks are allocated and evicted. A call checks its arguments, queues the event and returns; it never
    waits for the network. All methods may be called from any thread. A forked child needs a publisher of its own.

    Arguments:
        endpoint: `tcp://HOST:PORT` to listen on; HOST may be `*`, PORT may be 0 (see `endpoint`).
        replay_endpoint: where subscribers ask for messages that they missed; without it they cannot.
        block_size: tokens per block.
        dp_rank: data-parallel rank; each rank has a publisher and an endpoint of its own.
        topic: first part of each message.
        max_queued_events: further events are dropped, counted and seen by subscribers as a gap in the sequence.
        max_replay_events: newest events kept for replay, at most 64 MiB of them.

    Raises:
        ValueError: an argument is out of range.
        OSError: nothing can listen at an endpoint, for example because it is in use.
    """

    def __new__(
        cls,
        endpoint: str = "tcp://*:5557",
        *,
        replay_endpoint: str | None = None,
        block_size: int = 16,
        dp_rank: int = 0,
        topic: str = "kv-events",
        max_queued_events: int = 10_000,
        max_replay_events: int = 10_000,
    ) -> Self: ...
    def stored(
        self,
        token_ids: _Tokens,
        block_hashes: _Hashes,
        parent_hash: _Hash | None = None,
        lora_name: str | None = None,
        medium: str | None = None,
    ) -> bool:
        """A run of blocks, each the child of the one before, became reusable.

        Arguments:
            token_ids: of all blocks of the run: `block_size` for each of `block_hashes`.
            block_hashes: the engine's own ids of the blocks, unique on this rank and medium.
            parent_hash: the block before the first; `None` at the start of a sequence.
            medium: where they are stored, by the engine's name for it (`GPU`, `CPU`, `DISK`, …); `None` is `GPU`.

        Returns:
            False when the queue was full and the event was dropped.
        """

    def removed(self, block_hashes: _Hashes, medium: str | None = None) -> bool:
        """Blocks are gone from a medium. Returns like `stored`."""

    def cleared(self) -> bool:
        """Every block of the rank is gone, in every medium. Returns like `stored`."""

    def close(self) -> None:
        """Sends what is queued, for about a second at most, and stops listening. Closing again does nothing.

        Without it the interpreter's exit loses what is still queued.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that was bound."""

    @property
    def replay_endpoint(self) -> str | None:
        """Where it listens for replay requests."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def published(self) -> int:
        """Events handed to the socket so far."""

    @property
    def dropped(self) -> int:
        """Events lost so far because the queue was full."""

    @property
    def queued(self) -> int:
        """Events in the queue now."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""

@final
class Applied:
    """What an event did to the index, in blocks."""

    @property
    def added(self) -> int:
        """New in their tier."""

    @property
    def removed(self) -> int:
        """Gone from their tier."""

    @property
    def orphans(self) -> int:
        """Refused because their parent is unknown: an event was lost."""

    @property
    def unknown(self) -> int:
        """Removed without having been known."""

    @property
    def refused(self) -> int:
        """Refused because the rank holds as many blocks as it may."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Overlap:
    """How many leading blocks of a prompt a rank holds, each counted in the fastest tier that has it."""

    @property
    def device(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def disk(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def total(self) -> int:
        """In any tier."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class KvIndexer:
    """Which worker holds which prefix, built from their events: the router's own index.

    All methods may be called from any thread; matches run side by side, without the GIL.
    """

    def __new__(cls, block_size: int = 16) -> Self: ...
    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def apply_stored(
        self,
        worker: int,
        token_ids: _Tokens,
        block_hashes: _Hashes,
        parent_hash: _Hash | None = None,
        *,
        dp_rank: int = 0,
        medium: str | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> Applied:
        """A run of blocks became reusable on a worker; arguments as of `KvPublisher.stored`.

        A run whose parent the rank does not hold is refused whole (`Applied.orphans`), unless its hashes are sequence
        hashes, which name their prefix themselves.
        """

    def apply_removed(
        self, worker: int, block_hashes: _Hashes, *, dp_rank: int = 0, medium: str | None = None
    ) -> Applied:
        """Blocks are gone from a medium of a worker."""

    def apply_cleared(self, worker: int, *, dp_rank: int = 0) -> Applied:
        """Every block of a rank is gone, in every medium."""

    def remove_worker(self, worker: int) -> int:
        """Forgets a worker with all its ranks; returns how many blocks it held."""

    def find_matches(
        self, tokens: _Tokens, *, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> dict[int, int]:
        """Leading blocks of a prompt that each worker holds, in any medium; of several ranks the most.

        Workers that hold nothing of it are absent.
        """

    def find_matches_for_hashes(self, block_hashes: _Hashes) -> dict[int, int]:
        """Like `find_matches`, from what `block_hashes` gave for the prompt."""

    def find_matches_by_rank(
        self, tokens: _Tokens, *, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> dict[tuple[int, int], Overlap]:
        """Like `find_matches`, for each (worker, dp_rank) and tier."""

    def workers(self) -> list[int]:
        """Workers that hold anything, in order."""

    def __len__(self) -> int:
        """Distinct prefixes held by anyone."""

    def dump(self) -> bytes:
        """The whole content. A block whose parent is gone has no place in it when it is loaded."""

    def load(self, dump: bytes) -> None:
        """Replaces the content by that of a dump; on a `ValueError` nothing has changed."""
