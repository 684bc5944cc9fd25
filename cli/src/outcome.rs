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
    /// The exit code says it all: a worker process has said why it refused, or a person wants the end at once.
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
            eprintln!("error: {}", line(&error));
            ExitCode::FAILURE
        }
        Err(Failure::Said(code)) => ExitCode::from(code),
    }
}

/// An error and its causes, without those that an error before them has quoted.
fn line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |line, cause| match line.as_str() {
        "" => cause,
        said if said.contains(&cause) => line,
        said => format!("{said}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let quoted = anyhow!("no such file").context("reading x: no such file").context("cannot start");
        assert_eq!(line(&quoted), "cannot start: reading x: no such file");
        assert_eq!(line(&anyhow!("alone")), "alone");
    }
}
