//! A bounds-checked reader over the file's bytes.

use super::error::Problem;

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The next `n` bytes. `what` is for the error.
    pub(super) fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], Problem> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| Problem::Truncated { what: what.into(), len: self.bytes.len() })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, Problem> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length-prefixed string's bytes.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a [u8], Problem> {
        let len = self.u64(what)?;
        self.take(usize::try_from(len).unwrap_or(usize::MAX), what)
    }

    /// A string that names something, and therefore has to be UTF-8.
    pub(super) fn name(&mut self, what: &str) -> Result<String, Problem> {
        let bytes = self.string(what)?;
        let name = std::str::from_utf8(bytes).map_err(|_| Problem::Malformed(format!("{what} is not UTF-8")))?;
        Ok(name.to_owned())
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Problem> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }
}
