//! Writes small GGUF files for tests.

use std::path::{Path, PathBuf};

/// A file in the making.
#[derive(Clone, Default)]
pub(crate) struct GgufBuilder {
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

impl GgufBuilder {
    pub(crate) fn u32(self, key: &str, v: u32) -> Self {
        self.raw(key, 4, &v.to_le_bytes())
    }

    pub(crate) fn f32(self, key: &str, v: f32) -> Self {
        self.raw(key, 6, &v.to_le_bytes())
    }

    pub(crate) fn str(self, key: &str, v: &str) -> Self {
        self.raw(key, 8, &string(v))
    }

    pub(crate) fn strings(self, key: &str, v: &[&str]) -> Self {
        let body: Vec<u8> = v.iter().flat_map(|s| string(s)).collect();
        self.array(key, 8, v.len() as u64, &body)
    }

    pub(crate) fn i32s(self, key: &str, v: &[i32]) -> Self {
        let body: Vec<u8> = v.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.array(key, 5, v.len() as u64, &body)
    }

    pub(crate) fn array(self, key: &str, element: u32, len: u64, body: &[u8]) -> Self {
        let mut raw = element.to_le_bytes().to_vec();
        raw.extend(len.to_le_bytes());
        raw.extend(body);
        self.raw(key, 9, &raw)
    }

    pub(crate) fn raw(mut self, key: &str, kind: u32, body: &[u8]) -> Self {
        self.keys.extend(string(key));
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(body);
        self.key_count += 1;
        self
    }

    pub(crate) fn tensor(mut self, name: &str, dims: &[usize], format: u32, data: Vec<u8>) -> Self {
        self.tensors.push((name.into(), dims.to_vec(), format, data));
        self
    }

    pub(crate) fn f32_tensor(self, name: &str, dims: &[usize], data: &[f32]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), data.len());
        self.tensor(name, dims, 0, data.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(&self.keys);
        let mut data = Vec::new();
        for (name, dims, format, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|&d| out.extend((d as u64).to_le_bytes()));
            out.extend(format.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }

    pub(crate) fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("model.gguf");
        std::fs::write(&path, self.bytes()).expect("the test's directory is writable");
        path
    }
}

fn string(s: &str) -> Vec<u8> {
    let mut out = (s.len() as u64).to_le_bytes().to_vec();
    out.extend(s.as_bytes());
    out
}
