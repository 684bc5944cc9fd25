//! Whole, broken and foreign files.

use proptest::prelude::*;

use super::fixture::GgufBuilder;
use super::*;

fn sample() -> GgufBuilder {
    GgufBuilder::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.eps", 0.5)
        .strings("tokenizer.ggml.tokens", &["<s>", "é", ""])
        .i32s("tokenizer.ggml.token_type", &[3, 1, -1])
        .raw("flag", 7, &[1])
        .f32_tensor("a", &[2, 3], &[1., 2., 3., 4., 5., 6.])
        .tensor("b", &[32], 2, vec![7; 18])
        .tensor("exotic", &[256], 16, vec![0; 66])
}

fn open(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(path)
}

fn problem(bytes: &[u8]) -> String {
    open(bytes).expect_err("the file is broken").to_string()
}

#[test]
fn reads_back_what_was_written() {
    let gguf = open(&sample().bytes()).unwrap();
    assert_eq!(gguf.require::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(gguf.require::<usize>("llama.block_count").unwrap(), 2);
    assert_eq!(gguf.require::<f32>("llama.eps").unwrap(), 0.5);
    assert!(gguf.require::<bool>("flag").unwrap());
    assert_eq!(gguf.require::<Vec<&str>>("tokenizer.ggml.tokens").unwrap(), ["<s>", "é", ""]);
    assert_eq!(gguf.require::<Vec<i32>>("tokenizer.ggml.token_type").unwrap(), [3, 1, -1]);
    assert_eq!(gguf.get::<u32>("absent").unwrap(), None);
    assert_eq!(gguf.keys().count(), 6);

    let a = gguf.tensor("a", &[2, 3]).unwrap();
    assert_eq!((a.quant, a.bytes().len()), (Quant::F32, 24));
    assert_eq!(a.bytes()[4..8], 2f32.to_le_bytes());
    assert_eq!(gguf.tensor("b", &[32]).unwrap().bytes(), [7; 18]);
}

#[test]
fn says_which_key_or_tensor_is_wrong() {
    let gguf = open(&sample().bytes()).unwrap();
    let text = |e: GgufError| e.to_string().split_once("model.gguf: ").map(|(_, what)| what.to_owned()).unwrap();
    assert_eq!(text(gguf.require::<u32>("absent").unwrap_err()), "has no metadata key \"absent\"");
    assert_eq!(
        text(gguf.get::<u32>("general.architecture").unwrap_err()),
        "metadata key \"general.architecture\" is a string, not an unsigned 32-bit integer"
    );
    assert!(gguf.get::<Vec<u32>>("tokenizer.ggml.token_type").is_err(), "-1 does not fit");
    assert_eq!(text(gguf.tensor("c", &[1]).unwrap_err()), "has no tensor \"c\"");
    assert_eq!(text(gguf.tensor("a", &[3, 2]).unwrap_err()), "tensor \"a\" has dimensions [2, 3], not [3, 2]");
    let exotic = text(gguf.tensor("exotic", &[256]).unwrap_err());
    assert!(exotic.starts_with("tensor \"exotic\" is stored as IQ2_XXS; supported: F32, "), "{exotic}");
}

#[test]
fn refuses_foreign_and_broken_files() {
    assert!(problem(b"").ends_with("is not a GGUF file"));
    assert!(problem(b"PK\x03\x04 a zip archive").ends_with("is not a GGUF file"));
    let with = |at: usize, bytes: &[u8]| {
        let mut file = sample().bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        problem(&file)
    };
    assert!(with(4, &[0, 0, 0, 3]).contains("big-endian"));
    assert!(with(4, &[1, 0, 0, 0]).contains("version 1;"));
    // Counts and lengths at the limit: refused at once, without an allocation of that size.
    assert!(with(8, &[0xff; 8]).contains("broken"), "what follows the table is no tensor");
    assert!(with(16, &[0xff; 8]).contains("truncated"));
    assert!(with(24, &[0xff; 8]).contains("truncated"));
    assert!(problem(&sample().array("x", 0, u64::MAX, &[]).bytes()).contains("truncated: metadata key \"x\""));
    assert!(problem(&sample().array("x", 9, 1, &[]).bytes()).contains("unknown type 9"));
    assert!(problem(&sample().u32("flag", 1).bytes()).contains("\"flag\" occurs twice"));
    assert!(problem(&sample().u32("general.alignment", 0).bytes()).contains("power of two"));
    let huge = sample().tensor("huge", &[usize::MAX / 2, 3, 3], 0, vec![]);
    assert!(problem(&huge.bytes()).contains("impossible dimensions"));
    assert!(problem(&sample().tensor("odd", &[33], 2, vec![]).bytes()).contains("impossible dimensions"));
    assert!(problem(&sample().tensor("none", &[], 0, vec![]).bytes()).contains("0 dimensions"));

    let missing = Gguf::open("/nonexistent/model.gguf").unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent/model.gguf: cannot be read: "), "{missing}");
    let dir = tempfile::tempdir().unwrap();
    assert!(Gguf::open(dir.path()).unwrap_err().to_string().ends_with("is not a regular file"));
}

#[test]
fn a_truncation_anywhere_is_an_error() {
    let file = sample().bytes();
    // The last tensor is of a format whose size we do not know, and padding follows it: only cuts before it must be seen.
    let data_end = file.len() - 96;
    for len in 0..data_end {
        assert!(parse(&file[..len]).is_err(), "cut at {len}");
    }
}

proptest! {
    #[test]
    fn flipped_bytes_never_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut file = sample().bytes();
        for (at, byte) in flips {
            let at = at.index(file.len());
            file[at] = byte;
        }
        if let Ok(gguf) = open(&file) {
            for key in gguf.keys().map(str::to_owned).collect::<Vec<_>>() {
                gguf.get::<Vec<&str>>(&key).ok();
                gguf.get::<u64>(&key).ok();
            }
            for (name, entry) in &gguf.tensors {
                if let Ok(tensor) = gguf.tensor(name, &entry.dims) {
                    prop_assert!(tensor.bytes().len() <= file.len());
                }
            }
        }
    }
}

#[test]
fn fingerprints_tell_files_apart_wherever_they_differ_by_a_page() {
    let size = 40 * SAMPLES * SAMPLE;
    let file =
        |data: Vec<u8>| GgufBuilder::default().tensor("large", &[size / 4], 0, data).tensor("b", &[32], 2, vec![7; 18]);
    let fingerprint = |file: GgufBuilder| open(&file.bytes()).expect("valid").fingerprint();
    let same = fingerprint(file(vec![0; size]));
    assert_eq!(fingerprint(file(vec![0; size])), same);
    for at in [0, size / 2, size - 1] {
        let mut data = vec![0; size];
        // As wide as two neighbouring samples are apart.
        let from = at.min(size - size / SAMPLES);
        data[from..from + size / SAMPLES].fill(1);
        assert_ne!(fingerprint(file(data)), same, "at {at}");
    }
    let mut last = vec![0; size];
    last[size - 1] = 1;
    assert_ne!(fingerprint(file(last)), same);
}
