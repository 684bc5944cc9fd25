"""KV block hashes, a KV event publisher and a prefix index for Python engines."""

from ._native import Applied, KvIndexer, KvPublisher, Overlap, block_hashes, sequence_hashes

__all__ = ["Applied", "KvIndexer", "KvPublisher", "Overlap", "block_hashes", "sequence_hashes"]
