//! The list that `/kv_cache_events` answers: what happened in the server's cache since it was asked last.
//!
//! Hashes are numbers or, in its newer cache, text; both stand for themselves only.

use kv_index::{EngineHash, Tier};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use super::super::dialect::{Refusal, Told, ToldBlock, ToldEvent};

#[derive(Deserialize)]
struct Event {
    event_id: u64,
    data: Data,
    #[serde(default)]
    window_size: Option<u64>,
    #[serde(default)]
    attention_dp_rank: Option<u32>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Data {
    Created {},
    Stored {
        #[serde(default)]
        parent_hash: Option<Hash>,
        blocks: Vec<Block>,
    },
    Removed {
        block_hashes: Vec<Hash>,
    },
    Updated {
        block_hash: Hash,
        #[serde(default)]
        cache_level: Option<Diff>,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Hash {
    Number(u64),
    Signed(i64),
    Text(String),
}

#[derive(Deserialize)]
struct Block {
    block_hash: Hash,
    tokens: Vec<Token>,
    #[serde(default)]
    cache_level: u32,
    #[serde(default)]
    lora_id: Option<serde_json::Value>,
    #[serde(default)]
    mm_keys: Vec<serde_json::Value>,
    #[serde(default)]
    cache_salt: Option<String>,
}

#[derive(Deserialize)]
struct Token {
    /// Text stands for a piece of an image.
    token_id: serde_json::Value,
    #[serde(default)]
    token_extra_id: u64,
}

#[derive(Deserialize)]
struct Diff {
    new_value: u32,
}

/// Reads the list.
pub(super) fn read(text: &[u8]) -> Result<Vec<Told>, Refusal> {
    let events: Vec<Event> =
        serde_json::from_slice(text).map_err(|error| Refusal::Failed(format!("no list of KV events: {error}")))?;
    let told = |event: Event| Told {
        number: event.event_id,
        dp_rank: event.attention_dp_rank,
        window: event.window_size.unwrap_or(0),
        event: told(event.data),
    };
    Ok(events.into_iter().map(told).collect())
}

fn told(data: Data) -> ToldEvent {
    match data {
        Data::Created {} => ToldEvent::Created,
        Data::Stored { parent_hash, blocks } => ToldEvent::Stored {
            parent: parent_hash.map(hash),
            blocks: blocks
                .into_iter()
                .map(|block| ToldBlock {
                    tier: tier(block.cache_level),
                    tokens: tokens(&block),
                    hash: hash(block.block_hash),
                })
                .collect(),
        },
        Data::Removed { block_hashes } => ToldEvent::Removed(block_hashes.into_iter().map(hash).collect()),
        Data::Updated { block_hash, cache_level: Some(level) } => {
            ToldEvent::Moved { block: hash(block_hash), to: tier(level.new_value) }
        }
        // Of its priority alone.
        Data::Updated { cache_level: None, .. } => ToldEvent::Useless("priority"),
        Data::Other => ToldEvent::Useless("unknown event"),
    }
}

fn hash(hash: Hash) -> EngineHash {
    EngineHash(match hash {
        Hash::Number(number) => number,
        Hash::Signed(number) => number.cast_unsigned(),
        Hash::Text(text) => xxh3_64(text.as_bytes()),
    })
}

/// Its first level is the device.
fn tier(level: u32) -> Tier {
    match level {
        0 => Tier::Device,
        1 => Tier::Host,
        _ => Tier::Disk,
    }
}

fn tokens(block: &Block) -> Option<Vec<u32>> {
    if block.lora_id.is_some() || !block.mm_keys.is_empty() || block.cache_salt.is_some() {
        return None;
    }
    let id = |token: &Token| match token.token_extra_id {
        0 => u32::try_from(token.token_id.as_u64()?).ok(),
        _ => None,
    };
    block.tokens.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(data: &str) -> ToldEvent {
        let list = format!(r#"[{{"event_id":7,"data":{data},"window_size":256}}]"#);
        let mut told = read(list.as_bytes()).expect("a list");
        assert_eq!((told.len(), told[0].number, told[0].window, told[0].dp_rank), (1, 7, 256, None));
        told.remove(0).event
    }

    #[test]
    fn each_event_is_read() {
        assert_eq!(event(r#"{"type":"created","num_blocks_per_cache_level":[101230,0]}"#), ToldEvent::Created);
        let stored = event(
            r#"{"type":"stored","parent_hash":null,"blocks":[{"type":"stored_block","block_hash":4203099703668305365,
            "tokens":[{"type":"unique_token","token_id":1,"token_extra_id":0},{"type":"unique_token","token_id":2,
            "token_extra_id":0}],"cache_level":0,"priority":35,"mm_keys":[]}]}"#,
        );
        let block =
            ToldBlock { hash: EngineHash(4_203_099_703_668_305_365), tier: Tier::Device, tokens: Some(vec![1, 2]) };
        assert_eq!(stored, ToldEvent::Stored { parent: None, blocks: vec![block] });
        let removed = event(r#"{"type":"removed","block_hashes":[5,-1]}"#);
        assert_eq!(removed, ToldEvent::Removed(vec![EngineHash(5), EngineHash(u64::MAX)]));
        let moved =
            r#"{"type":"updated","block_hash":5,"cache_level":{"type":"event_diff","new_value":1,"old_value":0}}"#;
        assert_eq!(event(moved), ToldEvent::Moved { block: EngineHash(5), to: Tier::Host });
        let priority =
            r#"{"type":"updated","block_hash":5,"cache_level":null,"priority":{"new_value":1,"old_value":0}}"#;
        assert_eq!(event(priority), ToldEvent::Useless("priority"));
        assert_eq!(event(r#"{"type":"something new","x":1}"#), ToldEvent::Useless("unknown event"));
    }

    #[test]
    fn what_is_not_told_apart_by_its_tokens_has_none() {
        for more in [
            r#""tokens":[{"token_id":1,"token_extra_id":9}]"#,
            r#""tokens":[{"token_id":"image","token_extra_id":0}]"#,
            r#""tokens":[{"token_id":1}],"cache_salt":"s""#,
            r#""tokens":[{"token_id":1}],"lora_id":3"#,
            r#""tokens":[{"token_id":1}],"mm_keys":[{"hash":"h"}]"#,
        ] {
            let stored =
                event(&format!(r#"{{"type":"stored","parent_hash":"aa","blocks":[{{"block_hash":"bb",{more}}}]}}"#));
            let ToldEvent::Stored { parent: Some(_), blocks } = stored else { panic!("{more}") };
            assert_eq!(blocks[0].tokens, None, "{more}");
        }
        assert!(read(b"{}").is_err() && read(b"").is_err());
        assert_eq!(read(b"[]"), Ok(Vec::new()));
    }
}
