//! The components, and the model that they need: each checks its settings, binds its ports, and runs until the token says so.

pub mod model;
pub mod operator;
pub mod router;
pub mod worker;
