//! msgpack to events. Every layout is read by the same two rules: maps by name, arrays by place, and the optional end of an
//! array, to which versions add in no fixed order, by type.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{BlockRemoved, BlockStored, EngineEvent, EventBatch, ExtraKey, Place, TokenIds};

/// Most elements that room is made for before they are there.
const RESERVE: usize = 4096;

impl<'de> Deserialize<'de> for EventBatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BatchVisitor;
        impl<'de> Visitor<'de> for BatchVisitor {
            type Value = EventBatch;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a batch of engine events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EventBatch, A::Error> {
                seq.next_element::<IgnoredAny>()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let events = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                let dp_rank = seq.next_element::<Option<u32>>()?.flatten();
                skip_rest(seq)?;
                Ok(EventBatch { events, dp_rank })
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EventBatch, A::Error> {
                let (mut events, mut dp_rank) = (None, None);
                while let Some(Name(name)) = map.next_key()? {
                    match &*name {
                        "events" => events = Some(map.next_value()?),
                        "data_parallel_rank" | "dp_rank" => dp_rank = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                let events = events.ok_or_else(|| A::Error::missing_field("events"))?;
                Ok(EventBatch { events, dp_rank })
            }
        }
        deserializer.deserialize_any(BatchVisitor)
    }
}

impl<'de> Deserialize<'de> for EngineEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EventVisitor)
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = EngineEvent;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an engine event: an array that begins with its type, or a map with one")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EngineEvent, A::Error> {
        let Name(kind) = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
        let event = match &*kind {
            "BlockStored" => EngineEvent::Stored(stored_from_array(&mut seq)?),
            "BlockRemoved" => EngineEvent::Removed(removed_from_array(&mut seq)?),
            "AllBlocksCleared" => EngineEvent::Cleared,
            _ => EngineEvent::Unknown,
        };
        skip_rest(seq)?;
        Ok(event)
    }

    /// The fields of all kinds are read into one, since the type need not come first.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EngineEvent, A::Error> {
        let (mut kind, mut stored) = (None, BlockStored::default());
        while let Some(Name(name)) = map.next_key()? {
            match &*name {
                "type" => kind = Some(map.next_value::<Name>()?.0),
                "block_hashes" => stored.block_hashes = hashes(map.next_value()?),
                "parent_block_hash" => stored.parent_block_hash = map.next_value::<Option<Hash>>()?.map(|hash| hash.0),
                "token_ids" => stored.token_ids = map.next_value()?,
                "block_size" => stored.block_size = map.next_value()?,
                "lora_id" => stored.lora_id = map.next_value()?,
                "lora_name" => stored.lora_name = map.next_value()?,
                "extra_keys" => stored.extra_keys = extra_keys(map.next_value()?),
                "medium" => stored.place.medium = map.next_value()?,
                "group_idx" => stored.place.group = map.next_value()?,
                "kv_cache_spec_kind" => stored.place.kind = map.next_value()?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let kind = kind.ok_or_else(|| A::Error::missing_field("type"))?;
        Ok(match &*kind {
            "BlockStored" => EngineEvent::Stored(stored),
            "BlockRemoved" => {
                EngineEvent::Removed(BlockRemoved { block_hashes: stored.block_hashes, place: stored.place })
            }
            "AllBlocksCleared" => EngineEvent::Cleared,
            _ => EngineEvent::Unknown,
        })
    }
}

fn stored_from_array<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<BlockStored, A::Error> {
    let missing = |at| A::Error::invalid_length(at, &"hashes, parent, tokens and block size");
    let mut stored = BlockStored {
        block_hashes: hashes(seq.next_element()?.ok_or_else(|| missing(1))?),
        parent_block_hash: seq.next_element::<Option<Hash>>()?.ok_or_else(|| missing(2))?.map(|hash| hash.0),
        token_ids: seq.next_element()?.ok_or_else(|| missing(3))?,
        block_size: seq.next_element()?.ok_or_else(|| missing(4))?,
        ..BlockStored::default()
    };
    // The end of the array is where engines and versions differ.
    stored.lora_id = seq.next_element::<Option<i64>>()?.flatten();
    stored.place.medium = seq.next_element::<Option<String>>()?.flatten();
    stored.lora_name = seq.next_element::<Option<String>>()?.flatten();
    stored.extra_keys = extra_keys(seq.next_element::<Keys>()?.flatten());
    place_by_type(seq, &mut stored.place)?;
    Ok(stored)
}

fn removed_from_array<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<BlockRemoved, A::Error> {
    let first = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &"block hashes"))?;
    let mut removed = BlockRemoved { block_hashes: hashes(first), ..BlockRemoved::default() };
    removed.place.medium = seq.next_element::<Option<String>>()?.flatten();
    place_by_type(seq, &mut removed.place)?;
    Ok(removed)
}

/// The first number is the group's, the first text its kind; lists and further numbers say nothing of the place.
fn place_by_type<'de, A: SeqAccess<'de>>(seq: &mut A, place: &mut Place) -> Result<(), A::Error> {
    while let Some(element) = seq.next_element()? {
        match element {
            Loose::Number(number) if place.group.is_none() => place.group = u32::try_from(number).ok(),
            Loose::Text(text) if place.kind.is_none() => place.kind = Some(text),
            _ => {}
        }
    }
    Ok(())
}

fn skip_rest<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<(), A::Error> {
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

/// A name, borrowed where the reader can.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);

/// A number of either sign, or bytes.
struct Hash(u64);

fn hashes(hashes: Vec<Hash>) -> Vec<u64> {
    hashes.into_iter().map(|hash| hash.0).collect()
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HashVisitor;
        impl Visitor<'_> for HashVisitor {
            type Value = Hash;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a block hash: a 64-bit number, or at least 8 bytes")
            }

            fn visit_u64<E: Error>(self, hash: u64) -> Result<Hash, E> {
                Ok(Hash(hash))
            }

            fn visit_i64<E: Error>(self, hash: i64) -> Result<Hash, E> {
                Ok(Hash(hash as u64))
            }

            fn visit_bytes<E: Error>(self, hash: &[u8]) -> Result<Hash, E> {
                // The same bits that an engine keeps of a long hash when it publishes numbers.
                let last = hash.last_chunk::<8>().ok_or_else(|| E::invalid_length(hash.len(), &self))?;
                Ok(Hash(u64::from_be_bytes(*last)))
            }
        }
        deserializer.deserialize_any(HashVisitor)
    }
}

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokensVisitor;
        impl<'de> Visitor<'de> for TokensVisitor {
            type Value = TokenIds;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("token ids, or pairs of them")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TokenIds, A::Error> {
                let mut tokens = Vec::with_capacity(seq.size_hint().unwrap_or(0).min(RESERVE));
                let mut last = None;
                while let Some(element) = seq.next_element()? {
                    match element {
                        Element::Token(token) if last.is_none() => tokens.push(token),
                        Element::Pair(first, second) if last.is_some() || tokens.is_empty() => {
                            tokens.push(first);
                            last = Some(second);
                        }
                        _ => return Err(A::Error::custom("token ids and pairs of them are mixed")),
                    }
                }
                Ok(match last {
                    Some(last) => {
                        tokens.push(last);
                        TokenIds::Bigrams(tokens)
                    }
                    None => TokenIds::Tokens(tokens),
                })
            }
        }
        deserializer.deserialize_seq(TokensVisitor)
    }
}

enum Element {
    Token(u32),
    Pair(u32, u32),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a token id or a pair of them")
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<Element, E> {
                let token = u32::try_from(token).map_err(|_| E::custom("a token id of over 32 bits"))?;
                Ok(Element::Token(token))
            }

            /// Engines put negative ids in places of media; their bits are as good as any.
            fn visit_i64<E: Error>(self, token: i64) -> Result<Element, E> {
                let token = i32::try_from(token).map_err(|_| E::custom("a token id of over 32 bits"))?;
                Ok(Element::Token(token as u32))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut next = |at| seq.next_element()?.ok_or_else(|| A::Error::invalid_length(at, &"two token ids"));
                let pair = Element::Pair(next(0)?, next(1)?);
                skip_rest(seq)?;
                Ok(pair)
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

/// `extra_keys`: nothing, or for each block nothing or a list.
type Keys = Option<Vec<Option<Vec<Loose>>>>;

fn extra_keys(keys: Keys) -> Vec<Vec<ExtraKey>> {
    let key = |loose| match loose {
        Loose::Text(name) => ExtraKey::Name(name),
        Loose::Begins(name) => ExtraKey::Media(name),
        _ => ExtraKey::Other,
    };
    let block = |keys: Option<Vec<Loose>>| keys.unwrap_or_default().into_iter().map(key).collect();
    keys.unwrap_or_default().into_iter().map(block).collect()
}

/// Any value, as far as it is of use.
enum Loose {
    Number(i64),
    Text(String),
    /// A list that begins with a text.
    Begins(String),
    Other,
}

impl<'de> Deserialize<'de> for Loose {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LooseVisitor;
        impl<'de> Visitor<'de> for LooseVisitor {
            type Value = Loose;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_bool<E: Error>(self, _: bool) -> Result<Loose, E> {
                Ok(Loose::Other)
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Loose, E> {
                Ok(Loose::Number(number))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Loose, E> {
                Ok(i64::try_from(number).map_or(Loose::Other, Loose::Number))
            }

            fn visit_f64<E: Error>(self, _: f64) -> Result<Loose, E> {
                Ok(Loose::Other)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Loose, E> {
                Ok(Loose::Text(text.to_owned()))
            }

            fn visit_bytes<E: Error>(self, _: &[u8]) -> Result<Loose, E> {
                Ok(Loose::Other)
            }

            fn visit_unit<E: Error>(self) -> Result<Loose, E> {
                Ok(Loose::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Loose, A::Error> {
                let first = seq.next_element()?;
                skip_rest(seq)?;
                Ok(match first {
                    Some(Loose::Text(text)) => Loose::Begins(text),
                    _ => Loose::Other,
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Loose, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Loose::Other)
            }
        }
        deserializer.deserialize_any(LooseVisitor)
    }
}
