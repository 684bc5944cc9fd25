//! What Python hands in: token ids, hashes, block sizes and media, checked, with errors that name the argument and the place.
//!
//! Integers out of range are a `ValueError`, things that are no integers a `TypeError`.

use std::collections::HashSet;

use kv_hashing::{BlockHash, BlockSize, HashSpace};
use kv_index::{Tier, WorkerId, WorkerRank};
use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySequence, PyString};

/// From here on the GIL is released while hashing: 16 Ki tokens take about 6 µs, many times what a release costs.
const LONG: usize = 16 << 10;

/// Reads token ids: a sequence of integers, or a buffer of them (numpy, `array`, `memoryview`).
///
/// A buffer of 32-bit unsigned integers costs one copy of memory, 4 bytes a token. It is not read in place: whoever else has
/// it may write to it at any time.
pub(crate) fn tokens(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u32>> {
    let Some(buffer) = integers(value, name)? else {
        return sequence(value, name, token);
    };
    if let Ok(exact) = buffer.as_typed::<u32>() {
        return exact.to_vec(value.py());
    }
    let wide = widened(value.py(), &buffer)?.ok_or_else(|| not_integers(value, name))?;
    let refused = |at, wide: i128| Refused::Range(wide.to_string(), TOKEN).at(format_args!("{name}[{at}]"));
    let narrow = |(at, wide): (usize, i128)| u32::try_from(wide).map_err(|_| refused(at, wide));
    wide.into_iter().enumerate().map(narrow).collect()
}

/// The local hashes of the full blocks; without the GIL where that pays.
pub(crate) fn block_hashes(py: Python<'_>, tokens: &[u32], size: BlockSize, space: HashSpace) -> Vec<BlockHash> {
    if tokens.len() < LONG { space.blocks(tokens, size) } else { py.detach(|| space.blocks(tokens, size)) }
}

/// Reads hashes: integers of 64 bits, signed or not, or bytes, of which the last eight count (big endian), as vLLM does.
pub(crate) fn hashes(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    let Some(buffer) = integers(value, name)? else {
        return sequence(value, name, hash);
    };
    let wide = widened(value.py(), &buffer)?.ok_or_else(|| not_integers(value, name))?;
    Ok(wide.into_iter().map(|hash| hash as u64).collect())
}

/// Reads one hash; see [`hashes`].
pub(crate) fn one_hash(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    hash(value).map_err(|error| error.at(name))
}

/// Reads any integer; one beyond 128 bits as the next best, so that the check of its range finds it, and not Python's
/// `OverflowError`.
pub(crate) fn integer(value: &Bound<'_, PyAny>) -> PyResult<i128> {
    match value.extract::<i128>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Ok(if value.lt(0)? { i128::MIN } else { i128::MAX })
        }
        read => read,
    }
}

/// Checks a block size, in tokens.
pub(crate) fn block_size(tokens: i128) -> PyResult<BlockSize> {
    let size = u32::try_from(tokens).ok().and_then(BlockSize::new);
    size.ok_or_else(|| PyValueError::new_err(format!("block_size must be in 1..2^32 tokens, got {tokens}")))
}

/// Checks a worker's id and a rank of it.
pub(crate) fn rank(worker: i128, dp_rank: i128) -> PyResult<WorkerRank> {
    Ok(WorkerRank { worker: self::worker(worker)?, dp_rank: self::dp_rank(dp_rank)? })
}

/// Checks a worker's id.
pub(crate) fn worker(id: i128) -> PyResult<WorkerId> {
    let checked = u64::try_from(id).map(WorkerId);
    checked.map_err(|_| PyValueError::new_err(format!("worker must be in 0..2^64, got {id}")))
}

/// Checks a data-parallel rank.
pub(crate) fn dp_rank(rank: i128) -> PyResult<u32> {
    u32::try_from(rank).map_err(|_| PyValueError::new_err(format!("dp_rank must be in 0..2^32, got {rank}")))
}

/// Checks a bound of a number of events.
pub(crate) fn events(limit: i128, name: &str) -> PyResult<usize> {
    let checked = u32::try_from(limit).ok().filter(|limit| *limit > 0);
    let out_of_range = || PyValueError::new_err(format!("{name} must be in 1..2^32, got {limit}"));
    checked.map(|limit| limit as usize).ok_or_else(out_of_range)
}

/// Checks a stored run: one hash for each full block, and none that is its own ancestor, which consumers refuse.
pub(crate) fn run_of_blocks(tokens: usize, hashes: &[u64], parent: Option<u64>, size: BlockSize) -> PyResult<()> {
    if tokens != hashes.len().saturating_mul(size.get()) {
        let (blocks, size) = (hashes.len(), size.get());
        let message =
            format!("{blocks} block_hashes of {size} tokens each need {} token_ids, got {tokens}", blocks * size);
        return Err(PyValueError::new_err(message));
    }
    let mut seen: HashSet<u64> = parent.into_iter().collect();
    match hashes.iter().find(|hash| !seen.insert(**hash)) {
        Some(twice) => {
            Err(PyValueError::new_err(format!("block {twice} comes twice in one run (or is its own parent)")))
        }
        None => Ok(()),
    }
}

/// Storage media by the names that engines use, and the tier that each counts as.
const MEDIA: [(&str, Tier); 13] = [
    ("GPU", Tier::Device),
    ("DEVICE", Tier::Device),
    ("CPU", Tier::Host),
    ("CPU_PINNED", Tier::Host),
    ("CPU_TIER1", Tier::Host),
    ("CPU_TIER2", Tier::Disk),
    ("DISK", Tier::Disk),
    ("NVME", Tier::Disk),
    ("STORAGE", Tier::Disk),
    ("EXTERNAL", Tier::Shared),
    ("NETWORK", Tier::Shared),
    ("REMOTE", Tier::Shared),
    ("SHARED", Tier::Shared),
];

/// Reads a medium; without one it is the device. A consumer would drop blocks of an unknown one without a word.
pub(crate) fn medium(name: Option<&str>) -> PyResult<(&'static str, Tier)> {
    let name = name.unwrap_or(MEDIA[0].0);
    MEDIA.iter().find(|(known, _)| *known == name).copied().ok_or_else(|| {
        let known = MEDIA.map(|(known, _)| known).join(", ");
        PyValueError::new_err(format!("medium {name:?} is unknown; known are {known}"))
    })
}

/// An integer or hash that cannot be taken; both say what was found and what was wanted.
enum Refused {
    /// It has the wrong type.
    Type(String, &'static str),
    /// It is an integer or bytes, but not in range.
    Range(String, &'static str),
}

impl Refused {
    /// The error to raise; `place` is the argument, or an element of it.
    fn at(self, place: impl std::fmt::Display) -> PyErr {
        match self {
            Self::Type(found, wanted) => PyTypeError::new_err(format!("{place} is a {found}, not {wanted}")),
            Self::Range(found, wanted) => PyValueError::new_err(format!("{place} is {found}, not {wanted}")),
        }
    }
}

const TOKEN: &str = "a token id in 0..2^32";
const HASH: &str = "a hash of 64 bits (an integer in -2^63..2^64, or at least 8 bytes)";

fn token(item: &Bound<'_, PyAny>) -> Result<u32, Refused> {
    item.extract::<u32>().map_err(|error| refused(item, &error, TOKEN))
}

fn hash(item: &Bound<'_, PyAny>) -> Result<u64, Refused> {
    if let Ok(bytes) = item.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        let last = bytes.last_chunk::<8>().copied().map(u64::from_be_bytes);
        return last.ok_or_else(|| Refused::Range(format!("{} bytes", bytes.len()), HASH));
    }
    let signed = || item.extract::<i64>().map(|signed| signed as u64);
    item.extract::<u64>().or_else(|_| signed()).map_err(|error| refused(item, &error, HASH))
}

fn refused(item: &Bound<'_, PyAny>, error: &PyErr, wanted: &'static str) -> Refused {
    if !error.is_instance_of::<PyOverflowError>(item.py()) {
        return Refused::Type(type_name(item), wanted);
    }
    // An integer may have any length; an error message should not.
    let found = item.str().map(|digits| digits.to_string()).ok().filter(|digits| digits.len() <= 40);
    Refused::Range(found.unwrap_or_else(|| "an integer of more than 40 digits".into()), wanted)
}

fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "value".into(), |name| name.to_string())
}

fn not_integers(value: &Bound<'_, PyAny>, name: &str) -> PyErr {
    PyTypeError::new_err(format!("{name} is a {}, not a sequence or buffer of integers", type_name(value)))
}

/// The buffer of `value`, when it has one of one dimension; lists and tuples have none. Bytes are text, not integers.
fn integers(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<PyUntypedBuffer>> {
    let Ok(buffer) = PyUntypedBuffer::get(value) else { return Ok(None) };
    if buffer.dimensions() != 1 {
        let found = buffer.dimensions();
        return Err(PyValueError::new_err(format!("{name} must have one dimension, it has {found}")));
    }
    if buffer.item_size() == 1 {
        return Err(not_integers(value, name));
    }
    Ok(Some(buffer))
}

/// The elements of a buffer of integers of any width; `None` for any other.
fn widened(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Option<Vec<i128>>> {
    fn of<T: Element + Into<i128>>(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Option<Vec<i128>>> {
        let Ok(typed) = buffer.as_typed::<T>() else { return Ok(None) };
        Ok(Some(typed.to_vec(py)?.into_iter().map(Into::into).collect()))
    }
    for of_width in [of::<i64>, of::<u64>, of::<i32>, of::<u32>, of::<i16>, of::<u16>] {
        if let Some(found) = of_width(py, buffer)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn sequence<T>(
    value: &Bound<'_, PyAny>,
    name: &str,
    read: impl Fn(&Bound<'_, PyAny>) -> Result<T, Refused>,
) -> PyResult<Vec<T>> {
    if value.is_instance_of::<PyString>() {
        return Err(not_integers(value, name));
    }
    let sequence = value.cast::<PySequence>().map_err(|_| not_integers(value, name))?;
    let mut items = Vec::with_capacity(sequence.len()?);
    for (at, item) in value.try_iter()?.enumerate() {
        items.push(read(&item?).map_err(|refused| refused.at(format_args!("{name}[{at}]")))?);
    }
    Ok(items)
}
