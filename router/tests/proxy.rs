//! The router in front of OpenAI servers, all over real sockets: a server in this process that does what it is told, a router
//! from its flags, an HTTP client.

#[path = "proxy/client.rs"]
mod client;
#[path = "proxy/engine.rs"]
mod engine;
#[path = "proxy/failures.rs"]
mod failures;
#[path = "proxy/harness.rs"]
mod harness;
#[path = "proxy/kv_events.rs"]
mod kv_events;
#[path = "proxy/placement.rs"]
mod placement;
#[path = "proxy/requests.rs"]
mod requests;
#[path = "proxy/server.rs"]
mod server;
#[path = "proxy/tls.rs"]
mod tls;
