//! Values computed by the peer (dynamo-kv-router 1.6.1) for tokens 1..=40 in blocks of 16.

use kv_hashing::{BlockSize, HashSpace, media_hash, sequence_hashes};
use proptest::prelude::*;

fn tokens() -> Vec<u32> {
    (1..=40).collect()
}

fn size() -> BlockSize {
    BlockSize::new(16).expect("16 is not zero")
}

fn check(space: HashSpace, local: [u64; 2], second: u64) {
    let blocks = space.blocks(&tokens(), size());
    assert_eq!(blocks.iter().map(|b| b.0).collect::<Vec<_>>(), local);
    let sequence: Vec<u64> = sequence_hashes(&blocks).iter().map(|s| s.0).collect();
    assert_eq!(sequence, [local[0], second]);
}

#[test]
fn plain_tokens() {
    check(HashSpace::default(), [16863443419780771464, 2287610619914608821], 12466389667045779788);
}

#[test]
fn the_adapter_is_part_of_the_hash() {
    check(HashSpace::new(Some("my-lora"), None), [4148081000444450790, 2866551892415683476], 7850293543387417466);
}

#[test]
fn the_namespace_is_part_of_the_hash() {
    check(HashSpace::new(None, Some("tenant-a")), [8175209796170318505, 13248293275458056256], 1199464708288223189);
}

#[test]
fn eagle_windows() {
    let blocks = HashSpace::default().blocks_eagle(&tokens(), size());
    assert_eq!(blocks.iter().map(|b| b.0).collect::<Vec<_>>(), [6752489653130089168, 14523356675115067678]);
    assert_eq!(sequence_hashes(&blocks)[1].0, 9179783426037465070);
}

#[test]
fn media_inside_a_block() {
    let space = HashSpace::default();
    assert_eq!(space.block(&tokens()[..16], &[7]).0, 5771247725381875071);
    assert_eq!(space.block(&tokens()[16..32], &[]).0, 2287610619914608821);
}

#[test]
fn empty_names_are_absent() {
    assert_eq!(HashSpace::new(Some(""), Some("")), HashSpace::default());
}

#[test]
fn a_media_identifier_of_64_hex_digits_is_a_number() {
    let id = format!("00000000000000ff{}", "0".repeat(48));
    assert_eq!(media_hash(&id), 255);
    assert_ne!(media_hash("image-1"), media_hash("image-2"));
}

proptest! {
    #[test]
    fn a_shared_prefix_shares_exactly_its_full_blocks(prefix in 0usize..80, a in any::<Vec<u32>>(), b in any::<Vec<u32>>()) {
        let shared: Vec<u32> = (0..prefix as u32).collect();
        let hash = |tail: &[u32]| {
            let all: Vec<u32> = shared.iter().chain(tail).copied().collect();
            sequence_hashes(&HashSpace::default().blocks(&all, size()))
        };
        let (x, y) = (hash(&a), hash(&b));
        for i in 0..size().full_blocks(prefix) {
            prop_assert_eq!(x[i], y[i]);
        }
    }

    #[test]
    fn the_order_of_media_does_not_matter(mut media in prop::collection::vec(any::<u64>(), 0..90)) {
        let space = HashSpace::default();
        let before = space.block(&tokens(), &media);
        media.reverse();
        prop_assert_eq!(before, space.block(&tokens(), &media));
    }
}
