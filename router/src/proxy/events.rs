//! A server's events on their way to the client: as they are, whole ones only.
//!
//! Nothing is parsed that need not be: lines are counted, and a few are looked at for what the router must know (tokens, the
//! end, the usage). An event that has come in part is held back until the rest is there, so that an error can always be told
//! between two events.

use bytes::{Bytes, BytesMut};
use memchr::{memchr_iter, memmem, memrchr};
use serde::Deserialize;

use crate::stream::encode::Usage;

/// Largest part of an event that is held back; a longer one goes out in pieces.
const HELD: usize = 1 << 20;

/// Longest id of an answer that is taken note of, in bytes.
const MOST_ID: usize = 256;

const DATA: &[u8] = b"data:";

/// Looks at one stream of events.
pub(super) struct EventTap {
    /// The begin of an event whose end has not come.
    held: BytesMut,
    /// A part of an event has gone out: it was too long to hold back.
    torn: bool,
    /// Events that carry no token still to come: the roles of a chat's choices.
    silent: usize,
    expects_usage: bool,
    usage: Option<Usage>,
    /// An event with data has come.
    begun: bool,
    /// What it calls the answer, until somebody takes note.
    id: Option<String>,
    done: bool,
    finished: bool,
    failed: bool,
}

/// What a piece of the stream brought.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Passed {
    /// What may go out; may be empty.
    pub(super) out: Bytes,
    /// Events with tokens in it, about as many as tokens.
    pub(super) tokens: usize,
}

impl EventTap {
    /// `silent` is the number of first events without a token.
    pub(super) fn new(silent: usize, expects_usage: bool) -> Self {
        Self {
            held: BytesMut::new(),
            torn: false,
            silent,
            expects_usage,
            usage: None,
            begun: false,
            id: None,
            done: false,
            finished: false,
            failed: false,
        }
    }

    /// Takes a piece of the stream. Costs no copy when it ends where an event ends, as pieces mostly do.
    pub(super) fn pass(&mut self, mut piece: Bytes) -> Passed {
        if !self.held.is_empty() {
            self.held.extend_from_slice(&piece);
            piece = self.held.split().freeze();
        }
        let whole = match last_boundary(&piece) {
            Some(end) => {
                self.torn = false;
                end
            }
            None => 0,
        };
        let rest = piece.split_off(whole);
        if rest.len() > HELD || (self.torn && !rest.is_empty()) {
            // Whatever it is, it is no token.
            self.torn = true;
            let tokens = self.look_at(&piece);
            let out = if piece.is_empty() { rest } else { [&piece[..], &rest].concat().into() };
            return Passed { out, tokens };
        }
        self.held.extend_from_slice(&rest);
        let tokens = self.look_at(&piece);
        Passed { out: piece, tokens }
    }

    /// Counts the tokens of whole events, and notes what they tell.
    fn look_at(&mut self, events: &[u8]) -> usize {
        let (mut tokens, mut from) = (0_usize, 0);
        for end in memchr_iter(b'\n', events) {
            let line = &events[from..end];
            from = end + 1;
            let Some(data) = line.strip_prefix(DATA).map(<[u8]>::trim_ascii) else { continue };
            if !std::mem::replace(&mut self.begun, true) {
                self.id = answer_id(data);
            }
            match data {
                b"[DONE]" => self.done = true,
                _ if data.starts_with(b"{\"error\"") => self.failed = true,
                _ if self.silent > 0 => self.silent -= 1,
                _ => tokens += 1,
            }
        }
        if !self.finished {
            self.finished = memmem::find(events, b"\"finish_reason\":\"").is_some()
                || memmem::find(events, b"\"finish_reason\": \"").is_some();
        }
        if self.expects_usage
            && let Some(usage) = find_usage(events)
        {
            self.usage = Some(usage);
            // Its event carries no token.
            tokens = tokens.saturating_sub(1);
        }
        tokens
    }

    /// What the server calls the answer; once, when its first event has come.
    pub(super) fn take_id(&mut self) -> Option<String> {
        self.id.take()
    }

    /// What the server said of token counts, if it was asked to.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Whether the answer is complete: nothing is missing if the connection ends now.
    pub(super) fn is_complete(&self) -> bool {
        (self.done || self.finished) && self.held.is_empty()
    }

    /// Whether the server itself told of an error.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether the client has been told that the stream is over.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether something of our own can go out now.
    pub(super) fn is_between_events(&self) -> bool {
        !self.torn
    }
}

/// The end of the last event.
fn last_boundary(piece: &[u8]) -> Option<usize> {
    let mut before = piece.len();
    while let Some(at) = memrchr(b'\n', &piece[..before]) {
        if piece[..at].ends_with(b"\n") || piece[..at].ends_with(b"\n\r") {
            return Some(at + 1);
        }
        before = at;
    }
    None
}

#[derive(Deserialize)]
struct Identity {
    #[serde(default)]
    id: Option<String>,
}

/// What an answer, or an event of one, is called. Cost: a pass over it, unless it begins with that.
pub(super) fn answer_id(json: &[u8]) -> Option<String> {
    let id = match json.trim_ascii_start().strip_prefix(b"{\"id\":") {
        Some(rest) => serde_json::Deserializer::from_slice(rest).into_iter::<Option<String>>().next()?.ok()?,
        None => serde_json::from_slice::<Identity>(json).ok()?.id,
    };
    id.filter(|id| (1..=MOST_ID).contains(&id.len()))
}

#[derive(Deserialize)]
struct Counts {
    #[serde(default)]
    prompt_tokens: usize,
    #[serde(default)]
    completion_tokens: usize,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<usize>,
}

/// The last `usage` object in JSON text. Inside of a string its quotes would be escaped, so no answer can imitate one.
pub(super) fn find_usage(json: &[u8]) -> Option<Usage> {
    let at = memmem::rfind(json, b"\"usage\":")? + b"\"usage\":".len();
    let counts = serde_json::Deserializer::from_slice(&json[at..]).into_iter::<Option<Counts>>().next()?.ok()??;
    Some(Usage {
        prompt_tokens: counts.prompt_tokens,
        completion_tokens: counts.completion_tokens,
        cached_tokens: counts.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHAT: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        : comment\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"one\"},\"finish_reason\":null}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"two \\n\\n\"},\"finish_reason\":\"stop\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n\
        data: [DONE]\n\n";

    fn pass_all<'a>(tap: &mut EventTap, pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<u8>, usize) {
        let (mut out, mut tokens) = (Vec::new(), 0);
        for piece in pieces {
            let passed = tap.pass(Bytes::copy_from_slice(piece));
            assert!(passed.out.is_empty() || passed.out.ends_with(b"\n\n"), "only whole events go out");
            out.extend_from_slice(&passed.out);
            tokens += passed.tokens;
        }
        (out, tokens)
    }

    proptest! {
        #[test]
        fn however_a_stream_is_cut_it_is_the_same(cuts in proptest::collection::vec(0..CHAT.len(), 0..12)) {
            let mut cuts = [cuts, vec![0, CHAT.len()]].concat();
            cuts.sort_unstable();
            let mut tap = EventTap::new(1, true);
            let (out, tokens) = pass_all(&mut tap, cuts.windows(2).map(|ends| &CHAT.as_bytes()[ends[0]..ends[1]]));
            prop_assert_eq!((out.as_slice(), tokens), (CHAT.as_bytes(), 2));
            prop_assert!(tap.is_complete() && tap.is_done() && !tap.has_failed());
            prop_assert_eq!(tap.usage(), Some(Usage { prompt_tokens: 7, completion_tokens: 2, cached_tokens: 4 }));
        }
    }

    #[test]
    fn a_piece_that_ends_with_an_event_is_not_copied() {
        let piece = Bytes::copy_from_slice(CHAT.as_bytes());
        assert_eq!(EventTap::new(1, false).pass(piece.clone()).out.as_ptr(), piece.as_ptr());
    }

    #[test]
    fn half_an_event_never_goes_out() {
        let mut tap = EventTap::new(0, false);
        assert_eq!(tap.pass("data: {\"choices\":[{\"te".into()), Passed { out: Bytes::new(), tokens: 0 });
        assert!(!tap.is_complete() && tap.is_between_events());
        let passed = tap.pass("xt\":\"a\"}]}\n\ndata".into());
        assert_eq!((&passed.out[..], passed.tokens), (&b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n"[..], 1));
        assert!(!tap.is_complete(), "nothing says that this was all");
    }

    #[test]
    fn the_id_of_an_answer_is_read_wherever_it_stands() {
        for json in [
            r#"{"id":"chatcmpl-1","object":"chat.completion","choices":[]}"#,
            r#" {"id": "chatcmpl-1", "choices": [{"message": {"tool_calls": [{"id": "call-2"}]}}]}"#,
            r#"{"choices":[{"message":{"tool_calls":[{"id":"call-2"}]}}],"id":"chatcmpl-1"}"#,
        ] {
            assert_eq!(answer_id(json.as_bytes()).as_deref(), Some("chatcmpl-1"), "{json}");
        }
        let long = format!("{{\"id\":\"{}\"}}", "x".repeat(MOST_ID + 1));
        for json in ["", "{", "[DONE]", r#"{"id":""}"#, r#"{"id":7}"#, r#"{"id":null}"#, r#"{"object":"x"}"#, &long] {
            assert_eq!(answer_id(json.as_bytes()), None, "{json}");
        }
        let mut tap = EventTap::new(1, false);
        tap.pass(": comment\n\ndata: {\"id\":\"a\",\"choi".into());
        assert_eq!(tap.take_id(), None);
        tap.pass("ces\":[]}\n\ndata: {\"id\":\"b\"}\n\n".into());
        assert_eq!((tap.take_id().as_deref(), tap.take_id()), (Some("a"), None));
    }

    #[test]
    fn a_huge_event_goes_out_in_pieces() {
        let mut tap = EventTap::new(0, false);
        let long = format!("data: {}", "x".repeat(HELD));
        assert_eq!(tap.pass(long.clone().into()).out, long);
        assert!(!tap.is_between_events());
        assert_eq!(&tap.pass("x".into()).out[..], b"x");
        assert_eq!(&tap.pass("x\n\ndata: y".into()).out[..], b"x\n\n");
        assert!(tap.is_between_events());
    }

    #[test]
    fn line_ends_of_both_kinds_are_known() {
        let mut tap = EventTap::new(0, false);
        let passed = tap.pass("data: {\"a\": 1, \"finish_reason\": \"stop\"}\r\n\r\ndata: [DONE]\r\n\r\n".into());
        assert_eq!((passed.out.len(), passed.tokens), (59, 1));
        assert!(tap.is_done() && tap.is_complete());
        tap.pass("data: {\"error\": {\"message\": \"m\"}}\n\n".into());
        assert!(tap.has_failed());
    }

    #[test]
    fn usage_is_found_in_whole_answers_and_not_in_their_text() {
        let usage = |json: &str| find_usage(json.as_bytes()).map(|usage| usage.completion_tokens);
        assert_eq!(
            usage(r#"{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":16},"prompt_logprobs":null}"#),
            Some(16)
        );
        assert_eq!(usage(r#"{"choices":[{"text":"\"usage\":{\"completion_tokens\":9}"}]}"#), None);
        assert_eq!(usage(r#"{"usage":null}"#), None);
        assert_eq!(usage(r#"{"usage": {"completion_tokens": 3, "x": [1]}}"#), Some(3));
    }
}
