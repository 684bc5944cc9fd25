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
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let (meaning, said) = said_default(&help);
    let mut meaning = meaning.replace('|', "\\|");
    let values: Vec<_> = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if arg.get_action().takes_values() && !values.is_empty() {
        let _ = write!(meaning, " ({})", values.join(", "));
    }
    let default = match said {
        Some(words) if words == "none" || words.contains(' ') => words.to_owned(),
        Some(value) => format!("`{value}`"),
        None => default(arg),
    };
    format!("| `{flag}` | {variable} | {default} | {meaning} |\n")
}

/// Splits off a default that only the help text can tell, as `[default: the router's own]`.
fn said_default(help: &str) -> (&str, Option<&str>) {
    match help.split_once("[default: ") {
        Some((meaning, rest)) => (meaning.trim_end(), rest.split(']').next()),
        None => (help, None),
    }
}

/// What happens without the flag.
fn default(arg: &clap::Arg) -> String {
    let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    match values.as_slice() {
        _ if arg.is_required_set() => "required".into(),
        // A switch has a value only where it was given.
        _ if !arg.get_action().takes_values() => "off".into(),
        [] => "none".into(),
        [value] if value.is_empty() => "empty".into(),
        values => values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        /// A switch
        #[arg(long)]
        switch: bool,
        /// Must be there
        #[arg(long, env = "NEEDED")]
        needed: String,
        /// May be missing
        #[arg(long)]
        free: Option<String>,
        /// Text
        #[arg(long, default_value = "")]
        text: String,
        /// Number | count
        #[arg(long, default_value_t = 3)]
        number: u8,
        /// Name of the host [default: the pod's]
        #[arg(long, default_value_t = format!("{}", std::process::id()), hide_default_value = true)]
        host: String,
    }

    #[test]
    fn every_flag_says_what_happens_without_it() {
        let command = Command::command();
        let rows: Vec<_> = command.get_arguments().map(row).collect();
        assert_eq!(
            rows,
            [
                "| `--switch` |  | off | A switch |\n",
                "| `--needed` | `NEEDED` | required | Must be there |\n",
                "| `--free` |  | none | May be missing |\n",
                "| `--text` |  | empty | Text |\n",
                "| `--number` |  | `3` | Number \\| count |\n",
                "| `--host` |  | the pod's | Name of the host |\n",
            ]
        );
        assert!(!flags().contains("``"), "no empty code");
    }
}
