//! Reads GGUF model files (versions 2 and 3) through a memory map.
//!
//! Nothing in a file is believed: every length and offset is checked before it is used, and nothing is allocated by a size
//! that the file merely claims. Strings and arrays stay in the map and are decoded when asked for. What the tensors mean is
//! the model's business, not this module's.

mod cursor;
mod error;
#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
mod value;

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hasher;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Advice, Mmap};
use twox_hash::XxHash3_64;

use self::cursor::Cursor;
pub use self::error::{GgufError, Problem};
use self::value::Raw;
pub use self::value::{Array, FromValue, Value};
use super::quant::Quant;

/// Most dimensions of a tensor, as in ggml.
const MAX_DIMS: usize = 4;

/// Alignment of tensor data unless the file says otherwise, in bytes.
const DEFAULT_ALIGNMENT: usize = 32;

/// Pieces of each tensor that a fingerprint covers, and bytes of one: a page.
const SAMPLES: usize = 8;
const SAMPLE: usize = 4096;

/// An open model file: its metadata and its table of tensors.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Arc<Mmap>,
    metadata: HashMap<String, Raw>,
    tensors: HashMap<String, Entry>,
}

/// A line of the tensor table.
#[derive(Debug)]
struct Entry {
    dims: Vec<usize>,
    /// ggml's number of the format.
    format: u32,
    /// Where the data begins, from the start of the file.
    start: usize,
}

/// A tensor's data, still in its file's format. Keeps the map alive.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Lengths of the dimensions, the contiguous one first: a matrix is `[columns, rows]`.
    pub dims: Vec<usize>,
    /// The format of the data.
    pub quant: Quant,
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl Tensor {
    /// The data: `dims[1..]` rows of [`Quant::row_bytes`] bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

impl Gguf {
    /// Opens and checks a file. Tensor data is not read; if another process truncates the file while it is mapped, reading
    /// the data later ends this process with a bus error, as with every memory map.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        let path = path.as_ref();
        let fail = |problem| GgufError { path: path.to_path_buf(), problem };
        let file = File::open(path).map_err(|e| fail(Problem::Io(e)))?;
        if !file.metadata().map_err(|e| fail(Problem::Io(e)))?.is_file() {
            return Err(fail(Problem::NotAFile));
        }
        // SAFETY: the map is read-only and private to this process; see above for what a truncation does.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| fail(Problem::Io(e)))?;
        let (metadata, tensors) = parse(&map).map_err(fail)?;
        // A hint only: without it the first pass over the weights waits for the disk page by page.
        map.advise(Advice::WillNeed).ok();
        Ok(Gguf { path: path.to_path_buf(), map: Arc::new(map), metadata, tensors })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells models apart: a hash of the file's head (all metadata, and the table of tensors), its length, and eight pages of
    /// every tensor, spread from its first to its last byte. Equal files have equal fingerprints; files that differ only
    /// between those pages may, too. Reads 32 KiB of each tensor.
    pub fn fingerprint(&self) -> u64 {
        let mut starts: Vec<usize> = self.tensors.values().map(|entry| entry.start).collect();
        starts.sort_unstable();
        let mut hash = XxHash3_64::new();
        hash.write(&self.map.len().to_le_bytes());
        hash.write(&self.map[..starts.first().copied().unwrap_or(self.map.len())]);
        let ends = starts.iter().skip(1).copied().chain([self.map.len()]);
        for (start, end) in starts.iter().zip(ends) {
            let tensor = &self.map[*start..end];
            let last = tensor.len().saturating_sub(SAMPLE);
            if last < SAMPLES * SAMPLE {
                hash.write(tensor);
                continue;
            }
            for piece in 0..SAMPLES {
                let at = last * piece / (SAMPLES - 1);
                hash.write(&tensor[at..at + SAMPLE]);
            }
        }
        hash.finish()
    }

    /// All metadata keys, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    /// A metadata value as it is in the file.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        self.metadata.get(key).map(|raw| raw.value(&self.map))
    }

    /// A metadata value as a `T`: an integer of any width that fits, a float, `bool`, `&str`, or a `Vec` of these. `None` if
    /// there is no such key, an error if it is something else.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let found = value.kind();
        match T::from_value(value) {
            Some(v) => Ok(Some(v)),
            None => Err(self.error(Problem::WrongType { key: key.into(), expected: T::EXPECTED, found })),
        }
    }

    /// As [`Gguf::get`], for a key that has to be there.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.get(key)?.ok_or_else(|| self.error(Problem::MissingKey(key.into())))
    }

    /// Whether there is a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor of the given dimensions; an error if it is missing, shaped otherwise, or in a format we do not read.
    pub fn tensor(&self, name: &str, dims: &[usize]) -> Result<Tensor, GgufError> {
        let entry = self.entry(name)?;
        if entry.dims != dims {
            return Err(self.error(Problem::Shape {
                tensor: name.into(),
                found: entry.dims.clone(),
                expected: dims.to_vec(),
            }));
        }
        let unsupported = || self.error(Problem::Format { tensor: name.into(), format: entry.format });
        let quant = Quant::from_ggml(entry.format).ok_or_else(unsupported)?;
        // `parse` has found that this fits the file.
        let len = tensor_bytes(quant, &entry.dims).ok_or_else(unsupported)?;
        let range = entry.start..entry.start + len;
        Ok(Tensor { dims: entry.dims.clone(), quant, map: self.map.clone(), range })
    }

    /// The dimensions of a tensor, the contiguous one first.
    pub fn dims(&self, name: &str) -> Result<&[usize], GgufError> {
        Ok(&self.entry(name)?.dims)
    }

    fn entry(&self, name: &str) -> Result<&Entry, GgufError> {
        self.tensors.get(name).ok_or_else(|| self.error(Problem::MissingTensor(name.into())))
    }

    fn error(&self, problem: Problem) -> GgufError {
        GgufError { path: self.path.clone(), problem }
    }
}

type Contents = (HashMap<String, Raw>, HashMap<String, Entry>);

fn parse(bytes: &[u8]) -> Result<Contents, Problem> {
    let mut cursor = Cursor::new(bytes);
    let magic = cursor.take(4, "the magic number").map_err(|_| Problem::NotGguf)?;
    if magic != b"GGUF" {
        return Err(Problem::NotGguf);
    }
    match cursor.u32("the version")? {
        2 | 3 => {}
        v if v.swap_bytes() <= 3 && v != 0 => return Err(Problem::BigEndian),
        v => return Err(Problem::Version(v)),
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let key_count = cursor.u64("the metadata count")?;

    let mut metadata = HashMap::new();
    for _ in 0..key_count {
        let key = cursor.name("a metadata key")?;
        let raw = Raw::read(&mut cursor, &key)?;
        if metadata.insert(key.clone(), raw).is_some() {
            return Err(Problem::Duplicate(key));
        }
    }
    let alignment = match metadata.get("general.alignment").map(|raw| raw.value(bytes)) {
        None => DEFAULT_ALIGNMENT,
        Some(value) => usize::from_value(value)
            .filter(|a| a.is_power_of_two())
            .ok_or_else(|| Problem::Malformed("general.alignment is not a power of two".into()))?,
    };
    let tensors = parse_tensors(&mut cursor, tensor_count, alignment)?;
    Ok((metadata, tensors))
}

fn parse_tensors(cursor: &mut Cursor<'_>, count: u64, alignment: usize) -> Result<HashMap<String, Entry>, Problem> {
    let mut tensors = HashMap::new();
    for _ in 0..count {
        let name = cursor.name("a tensor name")?;
        let what = || format!("the table entry of tensor {name:?}");
        let n = cursor.u32(&what())? as usize;
        if n == 0 || n > MAX_DIMS {
            return Err(Problem::Malformed(format!("tensor {name:?} claims {n} dimensions")));
        }
        let mut dims = Vec::with_capacity(n);
        for _ in 0..n {
            let dim = cursor.u64(&what())?;
            dims.push(usize::try_from(dim).map_err(|_| Problem::Malformed(format!("tensor {name:?} is too large")))?);
        }
        // A vector and a matrix of one row are the same thing; files differ in which they write.
        while dims.len() > 1 && dims.last() == Some(&1) {
            dims.pop();
        }
        let format = cursor.u32(&what())?;
        let offset = cursor.u64(&what())?;
        let start = usize::try_from(offset)
            .ok()
            .filter(|o| o.is_multiple_of(alignment))
            .ok_or_else(|| Problem::Malformed(format!("the offset of tensor {name:?} is not aligned")))?;
        if tensors.insert(name.clone(), Entry { dims, format, start }).is_some() {
            return Err(Problem::Duplicate(name));
        }
    }
    let data = cursor.position().checked_next_multiple_of(alignment);
    for (name, entry) in &mut tensors {
        let end = place(entry, data)
            .ok_or_else(|| Problem::Malformed(format!("tensor {name:?} has impossible dimensions {:?}", entry.dims)))?;
        if end > cursor.len() {
            return Err(Problem::Truncated { what: format!("the data of tensor {name:?}"), len: cursor.len() });
        }
    }
    Ok(tensors)
}

/// Turns an entry's offset into a position in the file; returns where its data ends. Of a format we do not know only the
/// start is checked.
fn place(entry: &mut Entry, data: Option<usize>) -> Option<usize> {
    entry.start = entry.start.checked_add(data?)?;
    let len = match Quant::from_ggml(entry.format) {
        Some(quant) => tensor_bytes(quant, &entry.dims)?,
        None => 0,
    };
    entry.start.checked_add(len)
}

fn tensor_bytes(quant: Quant, dims: &[usize]) -> Option<usize> {
    let rows = dims[1..].iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
    quant.row_bytes(dims[0])?.checked_mul(rows)
}
