"""Uses of the stub file for mypy, never run: what should be accepted, and what must be refused.

A refusal is marked `type: ignore`; with `--strict` mypy complains about a mark that nothing needs.
"""

import array

import numpy as np

from armature_kv import KvIndexer, KvPublisher, block_hashes, sequence_hashes


def accepted() -> tuple[list[int], bool, int, dict[int, int], int]:
    hashes: list[int] = block_hashes(np.arange(32, dtype=np.uint32), 16, lora_name="a")
    hashes = sequence_hashes(array.array("I", [1, 2]), 16, cache_namespace=None)
    hashes = block_hashes(memoryview(b""), 16)
    with KvPublisher("tcp://127.0.0.1:0", dp_rank=1) as publisher:
        taken: bool = publisher.stored(list(range(16)), [b"12345678"], parent_hash=None, medium="GPU")
    indexer = KvIndexer(block_size=16)
    orphans: int = indexer.apply_stored(1, (1, 2), [3], dp_rank=0).orphans
    overlap: int = indexer.find_matches_by_rank(range(16))[1, 0].total
    return hashes, taken, orphans, indexer.find_matches(range(16)), overlap


def refused(indexer: KvIndexer) -> None:
    block_hashes("text", 16)  # type: ignore[arg-type]
    block_hashes([1], "16")  # type: ignore[arg-type]
    KvPublisher(5557)  # type: ignore[arg-type]
    indexer.find_matches([1], "lora")  # type: ignore[call-arg]
    indexer.apply_removed("worker", [1])  # type: ignore[arg-type]
    indexer.apply_cleared(1).adopted  # type: ignore[attr-defined]
