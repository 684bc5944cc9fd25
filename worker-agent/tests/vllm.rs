//! The adapter for vLLM against a server that speaks as vLLM does: its API, its metrics, its KV events. What the real one says
//! is tested with `cargo xtask test --stage vllm`; here is what it says only when things go wrong.

#[path = "vllm/answers.rs"]
mod answers;
#[path = "vllm/events.rs"]
mod events;
#[path = "vllm/handover.rs"]
mod handover;
#[path = "vllm/loss.rs"]
mod loss;
#[path = "vllm/server.rs"]
mod server;
