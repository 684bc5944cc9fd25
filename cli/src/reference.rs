//! What the binary says about itself: the Kubernetes definitions, and the pages of docs/reference.

mod metrics;

use std::fmt::Write;

use clap::{CommandFactory, ValueEnum};

use crate::flags::Armature;
use crate::outcome::Outcome;

/// A page of the reference.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Page {
    /// Every flag of every command.
    Flags,
    /// Every metric of every component.
    Metrics,
}

impl Page {
    /// The page, in Markdown.
    pub fn text(self) -> String {
        match self {
            Self::Flags => flags(),
            Self::Metrics => metrics::page(),
        }
    }
}

/// Prints to standard output; a reader that has gone is no failure.
pub fn print(text: String) -> Outcome {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// All definitions as one YAML stream.
pub fn crds() -> String {
    crds::yaml().into_iter().map(|(_, yaml)| yaml).collect::<Vec<_>>().join("---\n")
}

fn flags() -> String {
    let mut page = String::from("# Flags\n\n<!-- Written by `cargo xtask generate`. -->\n");
    let mut root = Armature::command();
    root.build();
    for command in root.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help") {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let _ = write!(page, "\n## armature {}\n\n{about}\n", command.get_name());
        let shown = |arg: &&clap::Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
        let rows: Vec<_> = command.get_arguments().filter(shown).map(row).collect();
        if !rows.is_empty() {
            let _ = write!(page, "\n| flag | environment | default | meaning |\n|---|---|---|---|\n{}", rows.concat());
        }
    }
    page
}

fn row(arg: &clap::Arg) -> String {
    let flag = arg.get_long().map_or_else(|| arg.get_id().to_string(), |long| format!("--{long}"));
    let variable = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
    let takes_value = arg.get_action().takes_values();
    // A default with our process id in it is another one at every start.
    let id = format!("-{}", std::process::id());
    let defaults = arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned());
    let default: Vec<_> =
        defaults.filter(|value| takes_value && !value.ends_with(&id)).map(|value| format!("`{value}`")).collect();
    let mut meaning = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let values: Vec<_> = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if takes_value && !values.is_empty() {
        let _ = write!(meaning, " ({})", values.join(", "));
    }
    format!("| `{flag}` | {variable} | {} | {} |\n", default.join(", "), meaning.replace('|', "\\|"))
}
