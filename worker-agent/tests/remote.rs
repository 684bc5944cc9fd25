//! The adapters against servers that speak as vLLM, SGLang and TensorRT-LLM do: their API, their metrics, their KV events. What the real
//! vLLM says is tested with `cargo xtask test --stage vllm`; here is what it says only when things go wrong. The other ones are
//! played from their documented interfaces.

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
#[path = "remote/sglang.rs"]
mod sglang;
#[path = "remote/trtllm.rs"]
mod trtllm;
