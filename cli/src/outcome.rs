//! How a command ends: exit code 0, 1 for a failure, 2 for settings that cannot work; the last two with one line.

use std::process::ExitCode;

/// What a command returns.
pub type Outcome = Result<(), Failure>;

/// Why a command did not do what it was asked to.
#[derive(Debug)]
pub enum Failure {
    /// The person who started it has to change something. Nothing was served.
    Settings(String),
    /// Something broke.
    Broken(anyhow::Error),
    /// A worker process refused, and has said why itself.
    Said(u8),
}

impl Failure {
    /// Settings that cannot work.
    pub fn settings(error: impl std::fmt::Display) -> Self {
        Self::Settings(error.to_string())
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Broken(error.into())
    }
}

/// The address cannot be had: who else has it, or what is wrong with it.
pub fn cannot_listen(address: std::net::SocketAddr, flag: &str, error: &std::io::Error) -> Failure {
    let (port, ip) = (address.port(), address.ip());
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            Failure::Settings(format!("port {port} on {ip} is in use; choose another with {flag}"))
        }
        _ => Failure::Settings(format!("cannot listen on {address}: {error}")),
    }
}

/// Says what went wrong and returns the exit code.
pub fn exit_code(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Settings(line)) => {
            eprintln!("error: {line}");
            ExitCode::from(2)
        }
        Err(Failure::Broken(error)) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
        Err(Failure::Said(code)) => ExitCode::from(code),
    }
}
