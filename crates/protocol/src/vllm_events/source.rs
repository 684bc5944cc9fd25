//! Where an engine's events come from, as people write it: `tcp://HOST:PORT`, and `;replay=tcp://HOST:PORT` behind it.

use std::str::FromStr;

/// Where an engine publishes its KV events, over ZeroMQ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventSource {
    /// `tcp://HOST:PORT` of its publisher; with `*` for a host it is the engine that connects, to this port of ours.
    pub address: String,
    /// `tcp://HOST:PORT` at which it sends past events again.
    pub replay: Option<String>,
}

/// Text that is no source of events: what it should be.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct MalformedSource(pub &'static str);

impl EventSource {
    /// The port of ours that the engine connects to, if it is the one that connects.
    pub fn bound_port(&self) -> Option<u16> {
        self.address.strip_prefix("tcp://*:")?.parse().ok()
    }
}

impl FromStr for EventSource {
    type Err = MalformedSource;

    fn from_str(text: &str) -> Result<Self, MalformedSource> {
        let (address, replay) = match text.split_once(';') {
            None => (text, None),
            Some((address, more)) => {
                let replay =
                    more.strip_prefix("replay=").ok_or(MalformedSource("only ;replay=tcp://HOST:PORT may follow"))?;
                (address, Some(replay))
            }
        };
        let well_formed = |address: &str, wildcard: bool| {
            let host_and_port = address.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
            host_and_port.is_some_and(|(host, port)| {
                port.parse::<u16>().is_ok_and(|port| port > 0) && !host.is_empty() && (wildcard || host != "*")
            })
        };
        if !well_formed(address, true) || !replay.is_none_or(|replay| well_formed(replay, false)) {
            return Err(MalformedSource("addresses of events must be tcp://HOST:PORT"));
        }
        Ok(Self { address: address.to_owned(), replay: replay.map(str::to_owned) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_side_may_connect() {
        let source: EventSource = "tcp://a:5557;replay=tcp://a:5558".parse().expect("valid");
        assert_eq!((source.address.as_str(), source.replay.as_deref()), ("tcp://a:5557", Some("tcp://a:5558")));
        assert_eq!(source.bound_port(), None);
        let bound: EventSource = "tcp://*:5557".parse().expect("valid");
        assert_eq!((bound.bound_port(), bound.replay), (Some(5557), None));
        for text in ["", "udp://a:2", "tcp://a", "tcp://a:0", "tcp://a:2;x=y", "tcp://a:2;replay=tcp://*:3"] {
            assert!(text.parse::<EventSource>().is_err(), "{text}");
        }
    }
}
