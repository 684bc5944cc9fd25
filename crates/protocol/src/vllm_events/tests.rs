//! Frames of several versions, and what they mean.

use kv_hashing::{BlockSize, HashSpace, media_hash};
use serde_json::{Value, json};

use super::*;
use crate::kv_event::{KvCacheEventData, Removed, StorageTier};

/// A batch as vLLM 0.32 publishes it: events as maps, hashes of PYTHONHASHSEED=0.
const VLLM_MAP: &str = "93cb41dac308b0f5459f918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf55f6bd1b6235\
8847b1706172656e745f626c6f636b5f68617368cf0b5df1ca3a56263aa9746f6b656e5f69647394cd0e18cd0229cd03542aaa626c6f636b5f73697a6504\
a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f636163\
68655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";

fn unhex(text: &str) -> Vec<u8> {
    let digit = |byte: u8| (byte as char).to_digit(16).expect("a digit") as u8;
    text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn batch(value: Value) -> EventBatch {
    decode_batch(&rmp_serde::to_vec(&value).expect("serializable")).expect("a batch")
}

fn event(value: Value) -> EngineEvent {
    let mut batch = batch(json!([1.5, [value], 0]));
    assert_eq!(batch.events.len(), 1);
    batch.events.remove(0)
}

fn translator() -> Translator {
    Translator::new(BlockSize::new(4).expect("not zero"))
}

/// Parent, and engine and local hashes of the blocks.
fn stored(translated: Translated) -> (Option<u64>, Vec<(u64, u64)>) {
    let KvCacheEventData::Stored(stored) = translated.data else { panic!("not stored: {translated:?}") };
    (stored.parent_hash, stored.blocks.iter().map(|block| (block.block_hash, block.tokens_hash)).collect())
}

fn local(space: HashSpace, tokens: &[u32]) -> u64 {
    space.block(tokens, &[]).0
}

#[test]
fn a_frame_of_vllm_is_read() {
    let batch = decode_batch(&unhex(VLLM_MAP)).expect("a batch");
    let place = Place { medium: Some("GPU".into()), group: Some(0), kind: Some("full_attention".into()) };
    let expected = BlockStored {
        block_hashes: vec![6194346262804138055],
        parent_block_hash: Some(819076558115710522),
        token_ids: TokenIds::Tokens(vec![3608, 553, 852, 42]),
        block_size: 4,
        extra_keys: vec![vec![]],
        place,
        ..BlockStored::default()
    };
    assert_eq!(batch, EventBatch { events: vec![EngineEvent::Stored(expected)], dp_rank: Some(0) });
    let translated = translator().translate(&batch.events[0]).expect("usable").expect("of the main cache");
    let hash = local(HashSpace::default(), &[3608, 553, 852, 42]);
    assert_eq!(stored(translated), (Some(819076558115710522), vec![(6194346262804138055, hash)]));
}

#[test]
fn arrays_and_maps_of_every_length_say_the_same() {
    let head = json!(["BlockStored", [7, 8], null, [1, 2, 3, 4, 5, 6, 7, 8], 4]);
    let tails = [
        json!([]),
        json!([null]),
        json!([null, "GPU"]),
        json!([null, "GPU", null]),
        json!([null, "GPU", null, null]),
        json!([null, "GPU", null, [null, null], null, 0, "full_attention"]),
        json!([null, "GPU", null, [null, null], [{"a": 1}, []], 0, "full_attention", 4096, {"later": [1]}]),
        json!([null, "GPU", null, [[], []], "full_attention", 0, null]),
    ];
    let array = |tail: &Value| {
        let parts = [&head, tail].map(|part| part.as_array().expect("an array").clone());
        event(Value::Array(parts.concat()))
    };
    let map = event(json!({"block_hashes": [7, 8], "parent_block_hash": null, "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "later": {"x": [1, 2]}, "block_size": 4, "lora_id": null, "medium": "GPU", "type": "BlockStored"}));
    let meaning = |event: &EngineEvent| stored(translator().translate(event).expect("usable").expect("main"));
    for tail in &tails {
        assert_eq!(meaning(&array(tail)), meaning(&map), "{tail}");
    }
    assert_eq!(event(json!(["AllBlocksCleared"])), EngineEvent::Cleared);
    assert_eq!(event(json!({"type": "AllBlocksCleared", "later": 1})), EngineEvent::Cleared);
    assert_eq!(event(json!(["BlockMoved", 1, [2]])), EngineEvent::Unknown);
}

#[test]
fn batches_are_arrays_or_maps_and_may_lack_the_rank() {
    let cleared = vec![EngineEvent::Cleared];
    for (value, dp_rank) in [
        (json!([1.0, [["AllBlocksCleared"]]]), None),
        (json!([1.0, [["AllBlocksCleared"]], null, "later"]), None),
        (json!([1.0, [["AllBlocksCleared"]], 3]), Some(3)),
        (json!({"ts": 1.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 3, "x": 0}), Some(3)),
    ] {
        assert_eq!(batch(value), EventBatch { events: cleared.clone(), dp_rank });
    }
    for broken in [json!([]), json!([1.0]), json!({"ts": 1.0}), json!([1.0, [["BlockStored", [1]]]]), json!("x")] {
        assert!(decode_batch(&rmp_serde::to_vec(&broken).expect("serializable")).is_err(), "{broken}");
    }
    assert!(decode_batch(&unhex(VLLM_MAP)[..60]).is_err(), "cut off");
    assert_eq!((decode_sequence(&7_u64.to_be_bytes()), decode_sequence(b"7")), (Some(7), None));
}

#[test]
fn hashes_of_either_sign_and_in_bytes_are_one() {
    // ["BlockRemoved", [-2, 2^64 - 2, 32 bytes that end in it]]
    let mut bytes = unhex(
        "92cb000000000000000091 92 ac426c6f636b52656d6f766564 93 fe cffffffffffffffffe c420".replace(' ', "").as_str(),
    );
    bytes.extend([9; 24]);
    bytes.extend((-2_i64).to_be_bytes());
    let batch = decode_batch(&bytes).expect("a batch");
    let EngineEvent::Removed(removed) = &batch.events[0] else { panic!("{batch:?}") };
    assert_eq!(removed.block_hashes, [u64::MAX - 1; 3]);
    let translated = translator().translate(&batch.events[0]).expect("usable").expect("main");
    assert_eq!(translated.data, KvCacheEventData::Removed(Removed { block_hashes: vec![u64::MAX - 1; 3] }));
}

#[test]
fn media_are_tiers_and_unknown_ones_are_refused() {
    let tier = |medium: &str| {
        let event = event(json!(["BlockRemoved", [1], medium]));
        translator().translate(&event).map(|translated| translated.expect("main").tier)
    };
    for (media, expected) in [
        (&["GPU", "device"][..], StorageTier::Device),
        (&["CPU", "cpu_pinned", "CPU_TIER1"], StorageTier::HostPinned),
        (&["CPU_TIER2", "DISK", "NVME", "STORAGE"], StorageTier::Disk),
        (&["EXTERNAL", "NETWORK", "REMOTE", "SHARED"], StorageTier::External),
    ] {
        for medium in media {
            assert_eq!(tier(medium), Ok(expected));
        }
    }
    assert_eq!(tier("TAPE"), Err(Refused::Medium("TAPE".into())));
    let unsaid = event(json!(["BlockRemoved", [1]]));
    assert_eq!(translator().translate(&unsaid).expect("usable").expect("main").tier, StorageTier::Device);
}

#[test]
fn other_groups_of_layers_are_left_out() {
    let event = |group: Value, kind: Value| {
        event(json!({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": group,
            "kv_cache_spec_kind": kind}))
    };
    let counts = |group, kind| translator().translate(&event(group, kind)).expect("usable").is_some();
    assert!(counts(json!(null), json!(null)) && counts(json!(0), json!(null)) && !counts(json!(1), json!(null)));
    assert!(counts(json!(1), json!("full_attention")) && counts(json!(0), json!("mla_attention")));
    assert!(!counts(json!(0), json!("sliding_window")));
}

#[test]
fn adapters_and_namespaces_separate_equal_tokens() {
    let mut translator = translator();
    let mut hashes = |parent: Value, lora: Value, keys: Value, block: u64| {
        let event = event(json!(["BlockStored", [block], parent, [1, 2, 3, 4], 4, null, "GPU", lora, keys]));
        stored(translator.translate(&event).expect("usable").expect("main")).1[0].1
    };
    let space = |lora, namespace| local(HashSpace::new(lora, namespace), &[1, 2, 3, 4]);
    assert_eq!(hashes(json!(null), json!("a"), json!([["a"]]), 1), space(Some("a"), None));
    assert_eq!(hashes(json!(null), json!(null), json!([["salt"]]), 2), space(None, Some("salt")));
    assert_eq!(hashes(json!(null), json!("a"), json!([["a", "salt"]]), 3), space(Some("a"), Some("salt")));
    // The namespace is told with the first block, and holds for all that follow.
    assert_eq!(hashes(json!(3), json!("a"), json!([["a"]]), 4), space(Some("a"), Some("salt")));
    assert_eq!(hashes(json!(4), json!("a"), json!([["a"]]), 5), space(Some("a"), Some("salt")));
    assert_eq!(hashes(json!(1), json!("a"), json!([["a"]]), 6), space(Some("a"), None));
    let nameless = event(json!(["BlockStored", [9], null, [1, 2, 3, 4], 4, 3]));
    let nameless = stored(self::translator().translate(&nameless).expect("usable").expect("main")).1[0].1;
    assert_ne!(nameless, space(None, None));
}

#[test]
fn blocks_that_go_take_their_namespace_along() {
    let child = event(json!(["BlockStored", [2], 1, [1, 2, 3, 4], 4]));
    let space = |namespace| local(HashSpace::new(None, namespace), &[1, 2, 3, 4]);
    for (last, namespace) in [
        (event(json!(["BlockRemoved", [3]])), Some("salt")),
        (event(json!(["BlockRemoved", [1]])), None),
        (EngineEvent::Cleared, None),
    ] {
        let mut translator = translator();
        let first = event(json!(["BlockStored", [1], null, [1, 2, 3, 4], 4, null, "GPU", null, [["salt"]]]));
        translator.translate(&first).expect("usable");
        translator.translate(&last).expect("usable");
        let child = translator.translate(&child).expect("usable").expect("main");
        assert_eq!(stored(child).1, [(2, space(namespace))], "after {last:?}");
    }
}

#[test]
fn a_namespace_lasts_until_the_last_copy_of_its_block_is_gone() {
    let mut translator = translator();
    let salted =
        |medium: &str| event(json!(["BlockStored", [1], null, [1, 2, 3, 4], 4, null, medium, null, [["salt"]]]));
    let gone = |medium: &str| event(json!(["BlockRemoved", [1], medium]));
    let space = |namespace| local(HashSpace::new(None, namespace), &[1, 2, 3, 4]);
    for (step, namespace) in [
        (salted("GPU"), Some("salt")),
        (salted("CPU"), Some("salt")),
        // Offloaded, evicted, brought back, and forgotten in both places.
        (gone("GPU"), Some("salt")),
        (salted("GPU"), Some("salt")),
        (gone("CPU"), Some("salt")),
        (gone("GPU"), None),
    ] {
        translator.translate(&step).expect("usable");
        let child = event(json!(["BlockStored", [2], 1, [1, 2, 3, 4], 4]));
        let child = translator.translate(&child).expect("usable").expect("main");
        assert_eq!(stored(child).1, [(2, space(namespace))], "after {step:?}");
    }
}

#[test]
fn media_in_a_block_go_into_its_hash() {
    let digest = "5".repeat(64);
    let local = |keys: Value| {
        let event = event(json!(["BlockStored", [7], null, [1, 2, 3, 4], 4, null, "GPU", null, [keys]]));
        stored(translator().translate(&event).expect("usable").expect("main")).1[0].1
    };
    let expected = HashSpace::default().block(&[1, 2, 3, 4], &[media_hash(&digest)]).0;
    assert_eq!(local(json!([digest])), expected);
    assert_eq!(local(json!([[digest, 2]])), expected);
    assert_ne!(local(json!([{"embedding": 1}])), local(json!([])), "what it depends on is unknown");
}

#[test]
fn pairs_of_tokens_are_windows() {
    let pairs: Vec<[u32; 2]> = (1..9).map(|token| [token, token + 1]).collect();
    let event = event(json!(["BlockStored", [7, 8], null, pairs, 4, null]));
    let blocks = stored(translator().translate(&event).expect("usable").expect("main")).1;
    let expected =
        HashSpace::default().blocks_eagle(&(1..10).collect::<Vec<u32>>(), BlockSize::new(4).expect("not zero"));
    assert_eq!(blocks, [(7, expected[0].0), (8, expected[1].0)]);
}

#[test]
fn runs_that_cannot_be_are_refused() {
    let translate = |value: Value| translator().translate(&event(value));
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(translate(json!(["BlockStored", [7], null, tokens, 8])), Err(Refused::BlockSize(8)));
    let shape = Refused::Shape { tokens: 8, blocks: 1 };
    assert_eq!(translate(json!(["BlockStored", [7], null, tokens, 4])), Err(shape));
    assert_eq!(translate(json!(["BlockStored", [7, 7], null, tokens, 4])), Err(Refused::Repeats));
    assert_eq!(translate(json!(["BlockStored", [7, 8], 8, tokens, 4])), Err(Refused::Repeats));
}
