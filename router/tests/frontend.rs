//! The frontend over real sockets: `serve` on port 0, a scripted backend behind it, plain HTTP in front.
//!
//! Tokens are those of a small byte-level BPE tokenizer built here, so no model is needed.

#[path = "frontend/answers.rs"]
mod answers;
#[path = "frontend/bodies.rs"]
mod bodies;
#[path = "frontend/connections.rs"]
mod connections;
#[path = "frontend/harness.rs"]
mod harness;
#[path = "frontend/model.rs"]
mod model;
#[path = "frontend/overload.rs"]
mod overload;
#[path = "frontend/refusals.rs"]
mod refusals;
#[path = "frontend/scripted.rs"]
mod scripted;
