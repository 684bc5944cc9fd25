//! Log lines, on standard error: standard output belongs to what a command prints.

use tracing_subscriber::EnvFilter;

use crate::flags::LogFormat;

/// Installs the process-wide subscriber; `RUST_LOG` overrides the filter. One that cannot be read is named and ignored.
pub fn install(format: LogFormat, default_filter: &str) {
    let given = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    let parsed = match given.trim() {
        "" => Ok(EnvFilter::new(default_filter)),
        given => EnvFilter::try_new(given),
    };
    let refused = parsed.as_ref().err().map(ToString::to_string);
    let filter = parsed.unwrap_or_else(|_| EnvFilter::new(default_filter));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    if let Some(reason) = refused {
        tracing::warn!(RUST_LOG = given, reason, used = default_filter, "RUST_LOG is no log filter and is ignored");
    }
}
