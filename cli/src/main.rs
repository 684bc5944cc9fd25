//! The one binary: `armature operator | router | worker | up | model | explain | crds`.
//!
//! Parses, wires, waits, drains. Settings that cannot work end it with exit code 2 and one line, before any port is bound.

mod commands;
mod explain;
mod flags;
mod logging;
mod open_files;
mod outcome;
mod reference;
mod signals;
mod up;

use std::process::ExitCode;

use clap::Parser;
use flags::{Armature, Command};
use outcome::Outcome;

fn main() -> ExitCode {
    let Armature { command, log_format } = Armature::parse();
    // The first handshake panics without a process-wide provider, and with two of them.
    let provider = rustls::crypto::ring::default_provider().install_default();
    debug_assert!(provider.is_ok(), "installed once");
    logging::install(log_format, command.default_log_filter());
    outcome::exit_code(run(command))
}

fn run(command: Command) -> Outcome {
    if matches!(command, Command::Router(_) | Command::Worker(_) | Command::Up(_)) {
        open_files::raise_limit();
    }
    if matches!(command, Command::Router(_) | Command::Up(_)) {
        router::memory::share_heaps();
    }
    match command {
        Command::Operator(args) => signals::serve(|shutdown| commands::operator::run(args, shutdown)),
        Command::Router(args) => signals::serve(|shutdown| commands::router::run(*args, shutdown)),
        Command::Worker(args) => {
            args.follow_parent();
            signals::serve(|shutdown| commands::worker::run(*args, shutdown))
        }
        Command::Up(args) => signals::serve(|shutdown| up::run(args, shutdown)),
        Command::Model { model } => signals::serve(|shutdown| commands::model::run(model, shutdown)),
        Command::Explain(args) => explain::run(&args),
        Command::Crds => reference::print(reference::crds()),
        Command::Reference { what } => reference::print(what.text()),
    }
}
