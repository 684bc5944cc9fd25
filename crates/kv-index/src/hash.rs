//! A hasher for tables whose keys are hashes already.

use std::hash::{BuildHasher, Hasher};

/// Hasher of keys that are 64-bit hashes already: one multiplication, because engines may also send small numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct HashBuilder;

impl BuildHasher for HashBuilder {
    type Hasher = FoldHasher;

    fn build_hasher(&self) -> FoldHasher {
        FoldHasher(0)
    }
}

/// State of [`HashBuilder`].
#[derive(Debug)]
pub struct FoldHasher(u64);

impl Hasher for FoldHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        // An odd constant close to 2^64 over the golden ratio; both halves of the product are folded together.
        let product = u128::from(self.0 ^ value) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }
}
