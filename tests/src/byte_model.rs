//! The smallest model that a router can serve: a tokenizer of bytes.

use serde_json::{Value, json};

/// A directory with a tokenizer of bytes, whose ids they are, and a template that puts the contents one after the other.
pub fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let char_of = |byte: u8| match printable(byte) {
        true => byte as char,
        false => char::from_u32(0x100 + (0..byte).filter(|b| !printable(*b)).count() as u32).expect("a character"),
    };
    let vocabulary: serde_json::Map<String, Value> = (0..=255).map(|b| (char_of(b).to_string(), b.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": byte_level,
        "post_processor": null, "decoder": byte_level, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}});
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    for (name, text) in [
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", json!({"chat_template": template}).to_string()),
    ] {
        std::fs::write(directory.path().join(name), text).expect("a file");
    }
    directory
}
