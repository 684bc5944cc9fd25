//! `block_hashes` and `sequence_hashes`.

use kv_hashing::{BlockHash, HashSpace, sequence_hashes as chained};
use pyo3::prelude::*;

use crate::arguments;

/// Local hashes of the full blocks of `tokens`; a last partial block has none.
#[pyfunction]
#[pyo3(signature = (tokens, block_size, lora_name=None, cache_namespace=None))]
pub(crate) fn block_hashes(
    tokens: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = arguments::integer)] block_size: i128,
    lora_name: Option<&str>,
    cache_namespace: Option<&str>,
) -> PyResult<Vec<u64>> {
    let blocks = blocks(tokens, block_size, lora_name, cache_namespace)?;
    Ok(blocks.into_iter().map(|block| block.0).collect())
}

/// Sequence hashes of the prefixes that end with each full block of `tokens`.
#[pyfunction]
#[pyo3(signature = (tokens, block_size, lora_name=None, cache_namespace=None))]
pub(crate) fn sequence_hashes(
    tokens: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = arguments::integer)] block_size: i128,
    lora_name: Option<&str>,
    cache_namespace: Option<&str>,
) -> PyResult<Vec<u64>> {
    let blocks = blocks(tokens, block_size, lora_name, cache_namespace)?;
    Ok(chained(&blocks).into_iter().map(|sequence| sequence.0).collect())
}

fn blocks(
    tokens: &Bound<'_, PyAny>,
    block_size: i128,
    lora_name: Option<&str>,
    cache_namespace: Option<&str>,
) -> PyResult<Vec<BlockHash>> {
    let (size, space) = (arguments::block_size(block_size)?, HashSpace::new(lora_name, cache_namespace));
    Ok(arguments::block_hashes(tokens.py(), &arguments::tokens(tokens, "tokens")?, size, space))
}
