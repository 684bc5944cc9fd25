//! What clients ask: three sets that stand for three kinds of traffic. The same seed gives the same prompts.

use std::fmt::Write;

/// Kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Set {
    /// 8 shared system prompts and own words, about 250 tokens.
    Short,
    /// 220 KB, 95 % of it one of 8 shared documents.
    Long,
    /// Conversations of 6 turns that carry the answers along.
    MultiTurn,
}

impl Set {
    /// As results name it.
    pub fn name(self) -> &'static str {
        match self {
            Set::Short => "short",
            Set::Long => "long",
            Set::MultiTurn => "multi_turn",
        }
    }
}

/// Turns of a conversation.
const TURNS: usize = 6;
/// Shared system prompts or documents.
const SHARED: usize = 8;

const WORDS: &[&str] = &[
    "time", "river", "market", "light", "paper", "garden", "window", "morning", "letter", "mountain", "bread", "music",
    "winter", "road", "story", "water", "house", "table", "green", "small", "large", "quiet", "early", "strong",
    "open", "walk", "write", "carry", "build", "learn", "under", "between", "always", "never", "often", "because",
    "while", "after", "before", "with",
];

/// Numbers that look random: splitmix64.
pub struct Numbers(pub u64);

impl Numbers {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next number in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn words(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 16);
        while text.len() < bytes {
            text.push_str(WORDS[(self.next() % WORDS.len() as u64) as usize]);
            text.push(' ');
        }
        text
    }
}

/// The requests of one connection.
pub struct Prompts {
    set: Set,
    numbers: Numbers,
    shared: std::sync::Arc<Vec<String>>,
    /// Messages of the running conversation, as JSON without brackets.
    messages: String,
    turn: usize,
}

/// Text that all connections share.
pub fn shared(set: Set, seed: u64) -> std::sync::Arc<Vec<String>> {
    let bytes = if set == Set::Long { 209_000 } else { 700 };
    std::sync::Arc::new((0..SHARED as u64).map(|n| Numbers(seed.wrapping_add(n)).words(bytes)).collect())
}

impl Prompts {
    /// The requests of connection `number`.
    pub fn new(set: Set, shared: std::sync::Arc<Vec<String>>, seed: u64, number: u64) -> Self {
        let numbers = Numbers(seed ^ (number + 1).wrapping_mul(0x2545_f491_4f6c_dd1d));
        Self { set, numbers, shared, messages: String::new(), turn: 0 }
    }

    /// The next request's `messages`, as JSON. Words need no escapes.
    pub fn next(&mut self) -> &str {
        let own = if self.set == Set::Long { 11_000 } else { 300 };
        if self.set != Set::MultiTurn || self.turn.is_multiple_of(TURNS) {
            let system = self.numbers.next() as usize % self.shared.len();
            self.messages.clear();
            let _ = write!(self.messages, r#"{{"role":"system","content":"{}"}}"#, self.shared[system]);
        }
        let _ = write!(self.messages, r#",{{"role":"user","content":"{}"}}"#, self.numbers.words(own));
        self.turn += 1;
        &self.messages
    }

    /// What the assistant said, already escaped as JSON; asked for only where a next turn carries it along.
    pub fn answered(&mut self, escaped: impl FnOnce() -> String) {
        if self.set == Set::MultiTurn {
            let _ = write!(self.messages, r#",{{"role":"assistant","content":"{}"}}"#, escaped());
        }
    }

    /// There was no answer: the conversation is over.
    pub fn failed(&mut self) {
        self.turn = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_grows_for_six_turns_and_starts_anew() {
        let mut prompts = Prompts::new(Set::MultiTurn, shared(Set::MultiTurn, 1), 1, 0);
        let mut lengths = Vec::new();
        for _ in 0..=TURNS {
            let messages: serde_json::Value = serde_json::from_str(&format!("[{}]", prompts.next())).expect("JSON");
            lengths.push(messages.as_array().expect("a list").len());
            prompts.answered(|| "yes".to_owned());
        }
        assert_eq!(lengths, [2, 4, 6, 8, 10, 12, 2]);
        prompts.failed();
        assert_eq!(prompts.next().matches("role").count(), 2);
    }
}
