//! Placeholder.
/// Placeholder.
pub(super) const RANGES: [u32; 1] = [0];
