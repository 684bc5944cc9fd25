//! Pieces of text in place of tokens, where a model's tokenizer is not at hand.
//!
//! Four bytes count as a token, about what one is in English. Two prompts share as many blocks of pieces as they share text,
//! and their lengths compare as their lengths in tokens do; nothing else may be read into the ids.

use super::tokenizer::{Tokenizer, TokenizerError};

/// Bytes of a piece: as many as an id has.
const PIECE: usize = size_of::<u32>();

/// A tokenizer without tokens.
pub(super) const TOKENIZER_JSON: &[u8] = br#"{"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}}"#;

/// What a conversation is as one text: everything that a server would show its model, in order, with nothing before it that
/// changes from turn to turn.
pub(super) const CHAT_TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}\n{% endif %}\
    {% for message in messages %}{{ message.role }}\n{{ message.content }}\n\
    {% if message.tool_calls %}{{ message.tool_calls | tojson }}\n{% endif %}{% endfor %}";

/// Cuts text into pieces.
pub(super) struct Pieces;

impl Tokenizer for Pieces {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let (pieces, rest) = text.as_bytes().as_chunks::<PIECE>();
        out.extend(pieces.iter().map(|piece| u32::from_le_bytes(*piece)));
        if !rest.is_empty() {
            let mut last = [0; PIECE];
            last[..rest.len()].copy_from_slice(rest);
            out.push(u32::from_le_bytes(last));
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        "none"
    }
}

#[cfg(test)]
mod tests {
    use crate::model::Model;
    use crate::model::chat_template::{Content, TemplateInput, TemplateMessage};

    fn ids(messages: &[(&str, &str)]) -> Vec<u32> {
        let contents: Vec<Content<'_>> = messages.iter().map(|(_, text)| Content::Text(text)).collect();
        let message = |((role, _), content)| TemplateMessage { role, content: Some(content), fields: Vec::new() };
        let messages = messages.iter().copied().zip(&contents).map(message).collect();
        let input = TemplateInput { messages, add_generation_prompt: true, ..TemplateInput::default() };
        Model::untokenized().encode_chat(&input).expect("renders")
    }

    #[test]
    fn a_text_is_as_many_pieces_as_it_has_fours_of_bytes() {
        let ids = |text: &str| Model::untokenized().encode_prompt(text).expect("encodes");
        assert_eq!(ids(""), [0; 0]);
        assert_eq!(ids("abcdef"), [u32::from_le_bytes(*b"abcd"), u32::from_le_bytes(*b"ef\0\0")]);
        assert_eq!(ids(&"é".repeat(100)).len(), 50);
    }

    #[test]
    fn a_conversation_that_goes_on_begins_as_it_did() {
        let first = [("system", "Answer in one word."), ("user", "What is the capital of France?")];
        let second = [&first[..], &[("assistant", "Paris"), ("user", "And of Spain?")]].concat();
        let (first, second) = (ids(&first), ids(&second));
        // The last piece may hold less than four bytes.
        assert!(second.starts_with(&first[..first.len() - 1]) && second.len() > first.len());
        assert!(!ids(&[("user", "Answer in one word.")]).starts_with(&first[..4]));
    }
}
