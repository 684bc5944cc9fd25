//! A fixed list of OpenAI servers, as the command line gives it: their URLs, and where their KV events come from.
//!
//! Pure: whether a server is there, and what it serves, is found out by `proxy`.

use std::fmt;
use std::str::FromStr;

use hyper::Uri;
use protocol::metadata::instance_id;
pub use protocol::vllm_events::EventSource;
use protocol::vllm_events::MalformedSource;

/// An OpenAI server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticServer {
    /// Where it answers.
    pub url: ServerUrl,
    /// Where its KV events come from.
    pub events: Option<EventSource>,
}

/// `http://HOST:PORT` or `https://HOST:PORT`, with a path before `/v1` where a server has one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerUrl {
    tls: bool,
    host: String,
    port: u16,
    /// Begins with a slash, or is empty.
    path: String,
}

/// `URL=EVENTS[;replay=ADDRESS]`: the events of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventsOf {
    /// Which server.
    pub server: ServerUrl,
    /// Where they come from.
    pub source: EventSource,
}

/// Text that is no such thing: what it should be.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct AddressError(&'static str);

impl ServerUrl {
    /// Host to connect to: a name or an address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether it is spoken to over TLS.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `HOST:PORT`, as the header `host` has it.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// A path of the API on this server.
    pub fn path(&self, path: &str) -> String {
        format!("{}{path}", self.path)
    }

    /// Identity of the worker: the same for every router and after every restart.
    pub fn instance_id(&self) -> u64 {
        instance_id(&self.to_string())
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.tls { "https" } else { "http" }, self.authority(), self.path)
    }
}

impl FromStr for ServerUrl {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = || AddressError("must be http://HOST:PORT or https://HOST:PORT");
        let with_scheme = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = with_scheme.parse().map_err(|_| wrong())?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        let authority = uri.authority().ok_or_else(wrong)?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(wrong());
        }
        let has_port = authority.as_str().len() > authority.host().len();
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        match authority.port_u16() {
            Some(0) => Err(wrong()),
            None if has_port => Err(wrong()),
            _ if host.is_empty() => Err(wrong()),
            port => Ok(Self { tls, host, port: port.unwrap_or(if tls { 443 } else { 80 }), path }),
        }
    }
}

impl FromStr for EventsOf {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (server, source) = text.split_once('=').ok_or(AddressError("must be URL=tcp://HOST:PORT"))?;
        let source = source.parse().map_err(|error: MalformedSource| AddressError(error.0))?;
        Ok(Self { server: server.parse()?, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Result<String, AddressError> {
        text.parse::<ServerUrl>().map(|url| url.to_string())
    }

    #[test]
    fn urls_are_read_in_the_forms_people_write() {
        for (text, expected) in [
            ("http://a:8000", "http://a:8000"),
            ("a:8000", "http://a:8000"),
            ("http://a:8000/", "http://a:8000"),
            ("http://a:8000/v1", "http://a:8000"),
            ("http://a:8000/v1/", "http://a:8000"),
            ("http://a/models/x/v1", "http://a:80/models/x"),
            ("http://[::1]:8000", "http://[::1]:8000"),
            ("https://a/v1", "https://a:443"),
            ("https://a:8000", "https://a:8000"),
        ] {
            assert_eq!(url(text).as_deref(), Ok(expected), "{text}");
        }
        let url: ServerUrl = "http://[::1]:8000/m/v1".parse().expect("valid");
        assert_eq!((url.host(), url.port(), url.path("/v1/models")), ("::1", 8000, "/m/v1/models".into()));
        assert!(url.instance_id() < 1 << 53);
    }

    #[test]
    fn what_is_no_url_of_a_server_is_refused() {
        for text in
            ["", "http://", "ftp://a:1", "http://a:0", "http://a:99999", "http://a:1/?x=1", "http://u:p@a:1", "a b"]
        {
            assert!(url(text).is_err(), "{text}");
        }
    }

    #[test]
    fn event_sources_belong_to_a_server() {
        let events: EventsOf = "http://a:8000=tcp://a:5557;replay=tcp://a:5558".parse().expect("valid");
        assert_eq!(events.server.to_string(), "http://a:8000");
        assert_eq!(events.source.address, "tcp://a:5557");
        for text in ["http://a:1", "http://a:1=", "http://a:1=udp://a:2", "=tcp://a:2"] {
            assert!(text.parse::<EventsOf>().is_err(), "{text}");
        }
    }
}
