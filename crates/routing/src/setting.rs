//! What is wrong with a setting: its name, what is allowed, what was given.

/// A setting outside its range.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[error("{name} must be {range}, not {value}")]
pub struct SettingError {
    /// The field.
    pub name: &'static str,
    /// What is allowed.
    pub range: &'static str,
    /// What was given.
    pub value: f64,
}

/// Refuses what is not from 0 to 1.
pub(crate) fn share(name: &'static str, value: f64) -> Result<(), SettingError> {
    if (0.0..=1.0).contains(&value) { Ok(()) } else { Err(SettingError { name, range: "from 0 to 1", value }) }
}

/// Refuses what is negative or no number.
pub(crate) fn not_negative(name: &'static str, value: f64) -> Result<(), SettingError> {
    if value.is_finite() && value >= 0.0 {
        Ok(())
    } else {
        Err(SettingError { name, range: "a number of at least 0", value })
    }
}
