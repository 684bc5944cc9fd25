//! The components: each checks its settings, binds its ports, and runs until the token says so.

pub mod operator;
pub mod router;
pub mod worker;
