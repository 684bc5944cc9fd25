//! Log lines, on standard error: standard output belongs to what a command prints.

use tracing_subscriber::EnvFilter;

use crate::flags::LogFormat;

/// Installs the process-wide subscriber; `RUST_LOG` overrides the filter.
pub fn install(format: LogFormat, default_filter: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default_filter));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}
