//! What can be wrong with a model file.

use std::path::PathBuf;

use super::super::quant::{Quant, ggml_name};

/// A model file cannot be used; says which file and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct GgufError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a model file.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The system cannot open or map it.
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    /// A directory, a pipe, a device.
    #[error("is not a regular file")]
    NotAFile,
    /// It does not begin with "GGUF".
    #[error("is not a GGUF file")]
    NotGguf,
    /// Written on a big-endian machine.
    #[error("is a big-endian GGUF file; only little-endian ones are read")]
    BigEndian,
    /// A version we do not read.
    #[error("is GGUF version {0}; versions 2 and 3 are read")]
    Version(u32),
    /// It ends too early.
    #[error("is truncated: {what} does not fit in its {len} bytes")]
    Truncated {
        /// What was being read.
        what: String,
        /// Length of the file.
        len: usize,
    },
    /// Something that no GGUF file may contain.
    #[error("is broken: {0}")]
    Malformed(String),
    /// A metadata key or a tensor occurs twice.
    #[error("is broken: {0:?} occurs twice")]
    Duplicate(String),
    /// Metadata that the reader needs.
    #[error("has no metadata key {0:?}")]
    MissingKey(String),
    /// Metadata of another type than the reader needs.
    #[error("metadata key {key:?} is {found}, not {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// A tensor that the reader needs.
    #[error("has no tensor {0:?}")]
    MissingTensor(String),
    /// A tensor of other dimensions than the metadata imply.
    #[error("tensor {tensor:?} has dimensions {found:?}, not {expected:?}")]
    Shape {
        /// Its name.
        tensor: String,
        /// Its dimensions.
        found: Vec<usize>,
        /// What they should be.
        expected: Vec<usize>,
    },
    /// A quantisation that we do not read.
    #[error("tensor {tensor:?} is stored as {}; supported: {}", ggml_name(*format), Quant::NAMES)]
    Format {
        /// Its name.
        tensor: String,
        /// ggml's number of the format.
        format: u32,
    },
}
