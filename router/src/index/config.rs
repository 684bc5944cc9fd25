//! Flags of the KV index, and what they become once they are checked.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kv_index::predicted::Policy;
use kv_index::tree::Limits;

use crate::config::{ConfigError, seconds};

/// Event threads where nobody says, as Dynamo has it.
const THREADS: NonZeroUsize = NonZeroUsize::new(4).expect("not zero");

/// Time between two comparisons where nobody says.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Life of a guess where nobody says.
const TTL: Duration = Duration::from_secs(120);

/// Which guesses end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CachePolicy {
    /// Those older than --router-ttl-secs.
    Ttl,
    /// The least recently used, when a worker would hold more than it has room for.
    Lru,
}

/// Flags of the KV index.
#[derive(Clone, Debug, Args)]
pub struct IndexOptions {
    /// Threads that apply KV events; events of one worker always on the same one
    #[arg(long, env = "DYN_ROUTER_EVENT_THREADS", default_value_t = THREADS)]
    pub router_event_threads: NonZeroUsize,
    /// Most memory of the index, in bytes, and once more of guesses where there are any; past it the least recently used prefixes
    /// are forgotten
    #[arg(long, env = "ARMATURE_ROUTER_INDEX_BYTES", default_value_t = Limits::default().bytes)]
    pub router_index_bytes: usize,
    /// Life of a guess about a worker's cache, in seconds, where there are no KV events [default: 120]
    #[arg(long, env = "DYN_ROUTER_TTL_SECS", value_parser = seconds)]
    pub router_ttl_secs: Option<Duration>,
    /// Which guesses end, where there are no KV events [default: ttl]
    #[arg(long, env = "DYN_ROUTER_APPROXIMATE_CACHE_POLICY", value_enum)]
    pub router_approximate_cache_policy: Option<CachePolicy>,
    /// Beside KV events, take a worker to hold what was sent to it for so many seconds: bridges the time until its events come
    #[arg(long, env = "DYN_ROUTER_PREDICTED_TTL_SECS", value_parser = seconds)]
    pub router_predicted_ttl_secs: Option<Duration>,
    /// How often a few blocks of each worker are compared with what it says of itself, in seconds
    #[arg(long, env = "ARMATURE_ROUTER_INDEX_CHECK_SECS", default_value = "10", value_parser = seconds)]
    pub router_index_check_secs: Duration,
}

/// Who says what workers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Every worker, by its KV events.
    ByAll,
    /// Some workers; of the others it is guessed.
    BySome,
    /// Nobody, since KV events are off: it is guessed.
    ByNobody,
    /// Nobody, and nothing is guessed: load alone counts.
    LoadAlone,
}

impl Told {
    /// What it follows from, as a message names it.
    fn reason(self) -> &'static str {
        match self {
            Self::ByAll => "--router-kv-events",
            Self::BySome => "workers without KV events",
            Self::ByNobody => "--no-router-kv-events",
            Self::LoadAlone => "--load-aware",
        }
    }
}

/// Settings that have been checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexSettings {
    /// Event threads.
    pub threads: NonZeroUsize,
    /// Bounds of the index, and those of the guesses.
    pub limits: Limits,
    /// Follow KV events.
    pub events: bool,
    /// Guess from the router's own decisions, and when a guess ends.
    pub guesses: Option<Policy>,
    /// How often each worker is asked whether the index is right about it.
    pub check_every: Duration,
}

impl Default for IndexSettings {
    /// What the flags' defaults become.
    fn default() -> Self {
        Self { threads: THREADS, limits: Limits::default(), events: true, guesses: None, check_every: CHECK_EVERY }
    }
}

impl IndexOptions {
    /// Checks them.
    pub(crate) fn validate(&self, told: Told) -> Result<IndexSettings, ConfigError> {
        let contradict = |a: &str, b: &str| ConfigError::new(format!("{a} and {b} contradict each other; drop one"));
        let approximate = matches!(told, Told::BySome | Told::ByNobody);
        let beside = told == Told::ByAll;
        let of_no_use = [
            (!approximate && self.router_approximate_cache_policy.is_some(), "--router-approximate-cache-policy"),
            (!approximate && self.router_ttl_secs.is_some(), "--router-ttl-secs"),
            (!beside && self.router_predicted_ttl_secs.is_some(), "--router-predicted-ttl-secs"),
        ];
        if let Some((_, flag)) = of_no_use.into_iter().find(|(given, _)| *given) {
            return Err(contradict(flag, told.reason()));
        }
        let guesses = match (told, self.router_approximate_cache_policy, self.router_ttl_secs) {
            (Told::LoadAlone, ..) => None,
            (Told::ByAll, ..) => self.router_predicted_ttl_secs.map(Policy::Ttl),
            (_, Some(CachePolicy::Lru), Some(_)) => {
                return Err(contradict("--router-approximate-cache-policy lru", "--router-ttl-secs"));
            }
            (_, Some(CachePolicy::Lru), None) => Some(Policy::Lru),
            (_, _, ttl) => Some(Policy::Ttl(ttl.unwrap_or(TTL))),
        };
        let events = matches!(told, Told::ByAll | Told::BySome);
        let limits = Limits { bytes: self.router_index_bytes, ..Limits::default() };
        let (threads, check_every) = (self.router_event_threads, self.router_index_check_secs);
        Ok(IndexSettings { threads, limits, events, guesses, check_every })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: IndexOptions,
    }

    fn settings(flags: &[&str], told: Told) -> Result<IndexSettings, String> {
        let command = Command::try_parse_from([&["router"], flags].concat()).map_err(|e| e.to_string())?;
        command.options.validate(told).map_err(|e| e.to_string())
    }

    #[test]
    fn without_events_the_router_guesses() {
        let guesses = |flags: &[&str], told| settings(flags, told).map(|settings| settings.guesses);
        for told in [Told::BySome, Told::ByNobody] {
            assert_eq!(guesses(&[], told), Ok(Some(Policy::Ttl(TTL))));
            assert_eq!(guesses(&["--router-ttl-secs=1.5"], told), Ok(Some(Policy::Ttl(Duration::from_millis(1500)))));
            assert_eq!(guesses(&["--router-approximate-cache-policy=lru"], told), Ok(Some(Policy::Lru)));
        }
        for told in [Told::ByAll, Told::LoadAlone] {
            assert_eq!(guesses(&[], told), Ok(None));
        }
        let beside = guesses(&["--router-predicted-ttl-secs=2"], Told::ByAll);
        assert_eq!(beside, Ok(Some(Policy::Ttl(Duration::from_secs(2)))));
    }

    #[test]
    fn contradictions_name_both_flags() {
        let wrong = |flags: &[&str], told| settings(flags, told).expect_err("refused");
        let (ttl, policy, predicted) =
            ("--router-ttl-secs=5", "--router-approximate-cache-policy=ttl", "--router-predicted-ttl-secs=5");
        for (flag, told) in [
            (ttl, Told::ByAll),
            (policy, Told::ByAll),
            (predicted, Told::BySome),
            (predicted, Told::ByNobody),
            (ttl, Told::LoadAlone),
            (policy, Told::LoadAlone),
            (predicted, Told::LoadAlone),
        ] {
            let name = flag.split('=').next().unwrap_or(flag);
            let reason = told.reason();
            assert_eq!(wrong(&[flag], told), format!("{name} and {reason} contradict each other; drop one"));
        }
        let lru = wrong(&["--router-approximate-cache-policy=lru", "--router-ttl-secs=5"], Told::ByNobody);
        assert!(lru.contains("lru and --router-ttl-secs"), "{lru}");
        assert!(wrong(&["--router-event-threads=0"], Told::ByAll).contains("zero"));
    }
}
