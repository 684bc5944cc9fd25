"""Block and sequence hashes: values computed by the peer (dynamo-kv-router 1.6.1), every kind of input, bad input."""

import array
import threading

import numpy as np
import pytest

from armature_kv import block_hashes, sequence_hashes

TOKENS = list(range(1, 41))


@pytest.mark.parametrize(
    ("lora_name", "cache_namespace", "local", "second"),
    [
        (None, None, [16863443419780771464, 2287610619914608821], 12466389667045779788),
        ("my-lora", None, [4148081000444450790, 2866551892415683476], 7850293543387417466),
        (None, "tenant-a", [8175209796170318505, 13248293275458056256], 1199464708288223189),
        ("", "", [16863443419780771464, 2287610619914608821], 12466389667045779788),
    ],
)
def test_golden_values(lora_name: str | None, cache_namespace: str | None, local: list[int], second: int) -> None:
    assert block_hashes(TOKENS, 16, lora_name, cache_namespace) == local
    assert sequence_hashes(TOKENS, 16, lora_name=lora_name, cache_namespace=cache_namespace) == [local[0], second]


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        range(1, 41),
        array.array("I", TOKENS),
        array.array("l", TOKENS),
        memoryview(array.array("I", TOKENS)),
        np.array(TOKENS, dtype=np.uint32),
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint16),
        np.array(TOKENS, dtype=np.int32),
        np.array(TOKENS, dtype=np.uint64),
        np.repeat(np.array(TOKENS, dtype=np.uint32), 2)[::2],
        np.repeat(np.array(TOKENS), 3)[::3],
        [np.int64(token) for token in TOKENS],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_form_of_the_same_tokens_hashes_the_same(tokens: list[int]) -> None:
    assert block_hashes(tokens, 16) == block_hashes(TOKENS, 16)


def test_a_read_only_array_will_do() -> None:
    tokens = np.array(TOKENS, dtype=np.uint32)
    tokens.flags.writeable = False
    assert sequence_hashes(tokens, 16) == sequence_hashes(TOKENS, 16)


def test_only_full_blocks_are_hashed() -> None:
    assert block_hashes([], 16) == []
    assert block_hashes(TOKENS[:15], 16) == []
    assert len(block_hashes(TOKENS[:32], 16)) == 2
    assert len(block_hashes(TOKENS, 1)) == 40
    assert block_hashes(TOKENS, 2**32 - 1) == []


def test_the_largest_token_id_is_one() -> None:
    assert block_hashes([2**32 - 1], 1) == block_hashes(np.array([2**32 - 1], dtype=np.uint32), 1)


def test_long_inputs_hash_like_short_ones_and_from_many_threads() -> None:
    tokens = np.arange(200_000, dtype=np.uint32)
    expected = [block_hashes(list(range(at, at + 64)), 64)[0] for at in range(0, 200_000 - 63, 64)]
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(block_hashes(tokens, 64))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [expected] * 8


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], r"tokens\[1\] is -1, not a token id in 0..2\^32"),
        ([2**32], r"tokens\[0\] is 4294967296, not a token id"),
        ([1, 10**60], r"tokens\[1\] is an integer of more than 40 digits"),
        (np.array([3, -7]), r"tokens\[1\] is -7, not a token id"),
        (np.array([0, 0, 2**40]), r"tokens\[2\] is 1099511627776, not a token id"),
        (np.zeros((2, 16), dtype=np.uint32), "tokens must have one dimension, it has 2"),
    ],
)
def test_integers_out_of_range_are_value_errors(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_hashes(tokens, 16)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, "2"], r"tokens\[1\] is a str, not a token id"),
        ([1.0], r"tokens\[0\] is a float, not a token id"),
        ([None], r"tokens\[0\] is a NoneType"),
        ("abc", "tokens is a str, not a sequence or buffer of integers"),
        (b"abcd", "tokens is a bytes, not a sequence or buffer of integers"),
        (7, "tokens is a int, not a sequence"),
        ({1, 2}, "tokens is a set, not a sequence"),
        (np.zeros(16, dtype=np.float32), "tokens is a ndarray, not a sequence or buffer of integers"),
    ],
)
def test_what_is_no_integer_is_a_type_error(tokens: list[int], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sequence_hashes(tokens, 16)


@pytest.mark.parametrize("block_size", [0, -16, 2**32, 10**30])
def test_block_sizes_are_checked(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"block_size must be in 1..2\^32 tokens, got {block_size}"):
        block_hashes(TOKENS, block_size)
