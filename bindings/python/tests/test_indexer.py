"""`KvIndexer`: stored, removed, cleared, ranks, tiers, adapters, dump and load, threads, and a model on random histories."""

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from armature_kv import Applied, KvIndexer, block_hashes, sequence_hashes

SIZE = 4


def prompt(*blocks: int) -> list[int]:
    """One block of equal tokens for each number."""
    return [block for block in blocks for _ in range(SIZE)]


@pytest.fixture
def indexer() -> KvIndexer:
    return KvIndexer(block_size=SIZE)


def test_a_match_ends_at_the_first_block_that_a_worker_lacks(indexer: KvIndexer) -> None:
    assert indexer.apply_stored(1, prompt(1, 2, 3), [11, 12, 13]).added == 3
    indexer.apply_stored(2, prompt(1, 2), [901, 902])
    indexer.apply_stored(3, prompt(7), [1])
    assert indexer.find_matches(prompt(1, 2, 3, 4)) == {1: 3, 2: 2}
    assert indexer.find_matches(prompt(1, 9)) == {1: 1, 2: 1}
    assert indexer.find_matches(prompt(9)) == {}
    assert indexer.find_matches(prompt(1)[:-1]) == {}
    assert indexer.find_matches_for_hashes(block_hashes(prompt(1, 2, 3), SIZE)) == {1: 3, 2: 2}
    assert len(indexer) == 4
    assert indexer.workers() == [1, 2, 3]


def test_a_run_continues_its_parent(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1), [11])
    assert indexer.apply_stored(1, prompt(2), [12], parent_hash=11).added == 1
    assert indexer.find_matches(prompt(1, 2)) == {1: 2}


def test_a_run_without_its_parent_is_refused(indexer: KvIndexer) -> None:
    lost = indexer.apply_stored(1, prompt(2), [12], 11)
    assert (lost.added, lost.orphans) == (0, 1)
    assert len(indexer) == 0
    assert indexer.workers() == []


def test_sequence_hashes_name_their_prefix_themselves(indexer: KvIndexer) -> None:
    first, second = sequence_hashes(prompt(1, 2), SIZE)
    assert indexer.apply_stored(1, prompt(2), [second], first).added == 1
    assert indexer.find_matches(prompt(1, 2)) == {}
    indexer.apply_stored(1, prompt(1), [first])
    assert indexer.find_matches(prompt(1, 2)) == {1: 2}


def test_removed_blocks_cut_the_prefix(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1, 2, 3), [11, 12, 13])
    gone = indexer.apply_removed(1, [12, 99])
    assert (gone.removed, gone.unknown) == (1, 1)
    assert indexer.find_matches(prompt(1, 2, 3)) == {1: 1}
    assert indexer.apply_removed(1, [12]).unknown == 1


def test_cleared_empties_one_rank_and_remove_all_of_them(indexer: KvIndexer) -> None:
    for rank in (0, 1):
        indexer.apply_stored(1, prompt(1, 2), [11, 12], dp_rank=rank)
    indexer.apply_stored(2, prompt(1), [11])
    assert indexer.apply_cleared(1).removed == 2
    assert indexer.find_matches(prompt(1, 2)) == {1: 2, 2: 1}
    assert indexer.remove_worker(1) == 2
    assert indexer.remove_worker(1) == 0
    assert indexer.find_matches(prompt(1, 2)) == {2: 1}


def test_ranks_and_tiers_are_told_apart(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1), [11], dp_rank=1)
    indexer.apply_stored(1, prompt(1, 2), [11, 12], dp_rank=1, medium="CPU")
    indexer.apply_stored(1, prompt(3), [13], 12, dp_rank=1, medium="NVME")
    indexer.apply_stored(1, prompt(1), [11])
    overlaps = indexer.find_matches_by_rank(prompt(1, 2, 3))
    assert set(overlaps) == {(1, 0), (1, 1)}
    best = overlaps[1, 1]
    assert (best.device, best.host, best.disk, best.shared, best.total) == (1, 1, 1, 0, 3)
    assert repr(best) == "Overlap(device=1, host=1, disk=1, shared=0)"
    assert indexer.find_matches(prompt(1, 2, 3)) == {1: 3}


def test_adapters_and_namespaces_do_not_mix(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1), [11], lora_name="a")
    indexer.apply_stored(2, prompt(1), [11], cache_namespace="a")
    assert indexer.find_matches(prompt(1)) == {}
    assert indexer.find_matches(prompt(1), lora_name="a") == {1: 1}
    assert indexer.find_matches(prompt(1), cache_namespace="a") == {2: 1}


def test_hashes_may_be_signed_or_bytes_or_arrays(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1, 2), [-1, 2**63])
    digest = b"\x00" * 24 + (2**63).to_bytes(8, "big")
    assert indexer.apply_removed(1, [2**64 - 1, digest]).removed == 2
    indexer.apply_stored(1, np.array(prompt(1), dtype=np.uint32), np.array([2**64 - 1], dtype=np.uint64))
    assert indexer.apply_removed(1, np.array([-1])).removed == 1


@pytest.mark.parametrize(
    ("tokens", "hashes", "parent", "message"),
    [
        (prompt(1)[:-1], [11], None, "1 block_hashes of 4 tokens each need 4 token_ids, got 3"),
        (prompt(1, 2), [11], None, "need 4 token_ids, got 8"),
        (prompt(1), [], None, "need 0 token_ids, got 4"),
        (prompt(1, 2), [11, 11], None, "block 11 comes twice in one run"),
        (prompt(1), [11], 11, "block 11 comes twice in one run"),
        (prompt(1), [2**64], None, r"block_hashes\[0\] is 18446744073709551616, not a hash of 64 bits"),
        (prompt(1), [-(2**63) - 1], None, r"block_hashes\[0\] is -9223372036854775809, not a hash"),
        (prompt(1), [b"1234567"], None, r"block_hashes\[0\] is 7 bytes, not a hash"),
        (prompt(1), [11], 2**64, "parent_hash is 18446744073709551616, not a hash"),
        ([-1] * SIZE, [11], None, r"token_ids\[0\] is -1"),
    ],
)
def test_impossible_runs_are_value_errors(
    indexer: KvIndexer, tokens: list[int], hashes: list[int], parent: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        indexer.apply_stored(1, tokens, hashes, parent)
    assert len(indexer) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda indexer: indexer.apply_removed(1, [11], medium="TAPE"), 'medium "TAPE" is unknown; known are GPU'),
        (lambda _: KvIndexer(0), r"block_size must be in 1..2\^32 tokens, got 0"),
        (lambda _: KvIndexer(10**50), "block_size must be in"),
        (lambda indexer: indexer.apply_stored(-1, prompt(1), [11]), r"worker must be in 0..2\^64, got -1"),
        (lambda indexer: indexer.remove_worker(2**64), "worker must be in"),
        (lambda indexer: indexer.apply_cleared(1, dp_rank=-1), r"dp_rank must be in 0..2\^32, got -1"),
        (lambda indexer: indexer.apply_removed(1, [11], dp_rank=-(10**50)), "dp_rank must be in"),
    ],
)
def test_other_arguments_out_of_range_are_value_errors(
    indexer: KvIndexer, call: Callable[[KvIndexer], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(indexer)


def test_a_dump_loads_to_the_same_answers(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1, 2, 3), [11, 12, 13])
    indexer.apply_stored(1, prompt(5), [15], 12)
    indexer.apply_stored(1, prompt(4), [14], 13, medium="CPU")
    indexer.apply_stored(2, prompt(1), [-5], dp_rank=3, lora_name="a")
    indexer.apply_stored(2, prompt(8), [8])
    indexer.apply_removed(2, [8])
    copy = KvIndexer(SIZE)
    copy.apply_stored(9, prompt(9), [9])
    copy.load(indexer.dump())
    assert len(copy) == len(indexer) == 6
    assert copy.workers() == [1, 2]
    for tokens in (prompt(1, 2, 3, 4), prompt(1, 2, 5), prompt(8), prompt(9)):
        assert copy.find_matches_by_rank(tokens) == indexer.find_matches_by_rank(tokens)
    assert copy.find_matches(prompt(1), lora_name="a") == {2: 1}
    # Engine hashes are still known: removals and parents work.
    assert copy.apply_removed(1, [15]).removed == 1
    assert copy.apply_stored(1, prompt(6), [16], 13).added == 1


def test_what_is_no_dump_changes_nothing(indexer: KvIndexer) -> None:
    indexer.apply_stored(1, prompt(1), [11])
    dump = indexer.dump()
    for end in range(len(dump)):
        with pytest.raises(ValueError, match="malformed dump"):
            indexer.load(dump[:end])
    with pytest.raises(ValueError, match="the dump has blocks of 4 tokens, this index has blocks of 16"):
        KvIndexer(16).load(dump)
    assert indexer.find_matches(prompt(1)) == {1: 1}


def test_threads_apply_and_match_at_once(indexer: KvIndexer) -> None:
    """Each worker's events from a thread of its own, with readers beside them that only ever see whole events."""
    workers, rounds, failures = 4, 200, []
    done = threading.Event()

    def write(worker: int) -> None:
        for at in range(rounds):
            indexer.apply_stored(worker, prompt(1, worker + 10, 1000 + at), [1, 2, 3 + at])
            if at % 2:
                indexer.apply_removed(worker, [3 + at])

    def read() -> None:
        while not done.is_set():
            for worker, blocks in indexer.find_matches(prompt(1, 11)).items():
                if blocks != (2 if worker == 1 else 1):
                    failures.append((worker, blocks))

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(workers)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join(timeout=60)
    done.set()
    for thread in readers:
        thread.join(timeout=60)
    assert not failures
    # The first block is shared, the second is each worker's own, and half of the third ones are left.
    assert len(indexer) == 1 + workers + workers * rounds // 2


def test_random_histories_agree_with_an_obvious_model(indexer: KvIndexer) -> None:
    rng = random.Random(4)
    held: dict[int, set[tuple[int, ...]]] = {worker: set() for worker in range(3)}

    def engine_hash(path: tuple[int, ...]) -> int:
        return sum((number + 1) * 10**at for at, number in enumerate(path))

    def expected(path: tuple[int, ...]) -> dict[int, int]:
        depths = {}
        for worker, paths in held.items():
            depth = 0
            while depth < len(path) and path[: depth + 1] in paths:
                depth += 1
            if depth:
                depths[worker] = depth
        return depths

    for _ in range(2000):
        worker = rng.randrange(3)
        path = tuple(rng.randrange(3) for _ in range(rng.randint(1, 4)))
        roll = rng.random()
        if roll < 0.5:
            hashes = [engine_hash(path[: end + 1]) for end in range(len(path))]
            indexer.apply_stored(worker, prompt(*path), hashes)
            held[worker].update(path[: end + 1] for end in range(len(path)))
        elif roll < 0.98:
            applied = indexer.apply_removed(worker, [engine_hash(path)])
            assert applied.removed == (path in held[worker])
            held[worker].discard(path)
        elif roll < 0.99:
            indexer.apply_cleared(worker)
            held[worker].clear()
        else:
            indexer.remove_worker(worker)
            held[worker].clear()
        query = tuple(rng.randrange(3) for _ in range(4))
        assert indexer.find_matches(prompt(*query)) == expected(query)
        assert len(indexer) == len(set().union(*held.values()))


def test_results_show_and_compare(indexer: KvIndexer) -> None:
    applied = indexer.apply_stored(1, prompt(1), [11])
    assert isinstance(applied, Applied)
    assert repr(applied) == "Applied(added=1, removed=0, orphans=0, unknown=0, refused=0)"
    assert applied == indexer.apply_stored(2, prompt(1), [11])
    assert applied != indexer.apply_stored(2, prompt(1), [11])
