//! An HTTP answer as it arrives, in whatever pieces: when its first text is there, when it is complete, what it said.
//!
//! Knows both ways in which servers mark an end (length and chunks), and looks at each byte of a long answer once.

use std::ops::Range;

use anyhow::{Context, bail};
use memchr::memmem;

/// Longest head of an answer.
const HEAD_MAX: usize = 16 << 10;
/// Stands before every piece of text in an answer, streamed or whole.
const TEXT: &[u8] = b"\"content\":";
/// Ends a stream.
const DONE: &[u8] = b"data: [DONE]";

/// What has arrived.
#[derive(Default)]
pub struct Answer {
    head: Option<Head>,
    /// Not understood yet: a part of the head, or of a chunk's first line.
    raw: Vec<u8>,
    body: Vec<u8>,
    /// Bytes of the body in which no text was found.
    searched: usize,
    has_text: bool,
    complete: bool,
}

struct Head {
    status: u16,
    stream: bool,
    length: Length,
}

/// Where the body ends.
#[derive(Debug, PartialEq, Eq)]
enum Length {
    /// After so many bytes.
    Bytes(usize),
    /// After the chunk without data; so much of the present one is missing, with the line break after it.
    Chunks { missing: usize },
}

impl Answer {
    /// Takes the next bytes.
    pub fn take(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.raw.extend_from_slice(bytes);
        if self.head.is_none() {
            let Some(end) = memmem::find(&self.raw, b"\r\n\r\n") else {
                if self.raw.len() > HEAD_MAX {
                    bail!("no end of the head within {HEAD_MAX} bytes");
                }
                return Ok(());
            };
            self.head = Some(Head::parse(std::str::from_utf8(&self.raw[..end])?)?);
            self.raw.drain(..end + 4);
        }
        self.complete = match &mut self.head.as_mut().context("it was parsed")?.length {
            Length::Bytes(length) => {
                self.body.append(&mut self.raw);
                self.body.len() >= *length
            }
            Length::Chunks { missing } => unchunk(&mut self.raw, &mut self.body, missing)?,
        };
        if !self.has_text {
            self.has_text = self.text_from(self.searched).is_some();
            // What stands before the next text may have arrived in part.
            self.searched = self.body.len().saturating_sub(TEXT.len() + 8);
        }
        Ok(())
    }

    /// Whether text has arrived.
    pub fn has_text(&self) -> bool {
        self.has_text
    }

    /// Whether all has arrived.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Fails unless this is an answer with text, and a stream with its end.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(head) = &self.head else { bail!("no answer") };
        let end = || String::from_utf8_lossy(&self.body[self.body.len().saturating_sub(300)..]).trim().to_owned();
        match head.status {
            200 if !self.has_text => bail!("no text in the answer: {}", end()),
            200 if head.stream && memmem::rfind(&self.body, DONE).is_none() => {
                bail!("a stream without its end: {}", end())
            }
            200 => Ok(()),
            status => bail!("status {status}: {}", end()),
        }
    }

    /// All text, escaped as it came.
    pub fn said(&self) -> String {
        let (mut said, mut from) = (Vec::new(), 0);
        while let Some(text) = self.text_from(from) {
            from = text.end;
            said.extend_from_slice(&self.body[text]);
        }
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Where the first text at or after `from` stands, as far as it has arrived; empty ones are skipped.
    fn text_from(&self, mut from: usize) -> Option<Range<usize>> {
        loop {
            let after = from + memmem::find(self.body.get(from..)?, TEXT)? + TEXT.len();
            let blanks = self.body[after..].iter().take_while(|byte| **byte == b' ').count();
            let start = after + blanks + 1;
            if self.body.get(start - 1) == Some(&b'"') && self.body.get(start).is_some_and(|byte| *byte != b'"') {
                return Some(start..start + string_end(&self.body[start..]));
            }
            from = after;
        }
    }
}

/// Length of a JSON string's inside.
fn string_end(bytes: &[u8]) -> usize {
    let mut escaped = false;
    let end = bytes.iter().position(|byte| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    });
    end.unwrap_or(bytes.len())
}

impl Head {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut lines = text.lines();
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok());
        let (mut stream, mut length, mut chunked) = (false, None, false);
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-type" => stream = value.starts_with("text/event-stream"),
                "content-length" => length = Some(value.parse().context("content-length")?),
                "transfer-encoding" => chunked = value.eq_ignore_ascii_case("chunked"),
                _ => {}
            }
        }
        let length = match length {
            _ if chunked => Length::Chunks { missing: 0 },
            Some(length) => Length::Bytes(length),
            None => bail!("an answer with neither length nor chunks"),
        };
        Ok(Self { status: status.context("no HTTP/1.1 answer")?, stream, length })
    }
}

/// Moves what is whole in `raw` to `body`; whether the last chunk was there.
fn unchunk(raw: &mut Vec<u8>, body: &mut Vec<u8>, missing: &mut usize) -> anyhow::Result<bool> {
    let mut used = 0;
    let ended = loop {
        if *missing > 0 {
            let part = (raw.len() - used).min(*missing);
            // The last two are the line break.
            let data = part.min(missing.saturating_sub(2));
            body.extend_from_slice(&raw[used..used + data]);
            used += part;
            *missing -= part;
            if *missing > 0 {
                break false;
            }
        }
        let Some(line) = memmem::find(&raw[used..], b"\r\n") else { break false };
        let size = std::str::from_utf8(&raw[used..used + line])?;
        let size = size.split(';').next().unwrap_or_default().trim();
        match usize::from_str_radix(size, 16).with_context(|| format!("{size:?} is no size of a chunk"))? {
            // Trailers may follow, and an empty line does.
            0 => break memmem::find(&raw[used + line..], b"\r\n\r\n").is_some(),
            size => (used, *missing) = (used + line + 2, size + 2),
        }
    };
    raw.drain(..used);
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    const CHUNKS: [&str; 5] = [
        "data: {\"content\":\"\"}\n\nda",
        "ta: {\"content\":\"say \\\"a\\\"\"}\n\n",
        "data: {\"content\": \" and b\"}",
        "\n\n",
        "data: [DONE]\n\n",
    ];

    /// A stream whose events and chunks do not end together.
    fn stream() -> String {
        let chunk = |data: &&str| format!("{:X};name=value\r\n{data}\r\n", data.len());
        format!("{HEAD}{}0\r\ntrailer: x\r\n\r\n", CHUNKS.iter().map(chunk).collect::<String>())
    }

    /// Takes the text in pieces of this many bytes; where text and end were noticed.
    fn read(text: &str, piece: usize) -> anyhow::Result<(Answer, Option<usize>, Option<usize>)> {
        let (mut answer, mut first, mut end) = (Answer::default(), None, None);
        for (number, bytes) in text.as_bytes().chunks(piece).enumerate() {
            answer.take(bytes)?;
            let so_far = (number * piece + bytes.len()).min(text.len());
            first = first.or(answer.has_text().then_some(so_far));
            end = end.or(answer.is_complete().then_some(so_far));
        }
        Ok((answer, first, end))
    }

    #[test]
    fn a_stream_in_any_pieces_is_the_same() {
        let stream = stream();
        let text_at = stream.find("say").expect("there") + 1;
        for piece in 1..stream.len() {
            let (answer, first, end) = read(&stream, piece).expect("good");
            answer.check().expect("good");
            assert_eq!((answer.said().as_str(), end), (r#"say \"a\" and b"#, Some(stream.len())), "{piece}");
            assert_eq!(first, Some(text_at.next_multiple_of(piece).min(stream.len())), "{piece}");
        }
    }

    #[test]
    fn a_whole_answer_ends_by_its_length() {
        let body = r#"{"content":"yes"}"#;
        let text = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let (answer, first, end) = read(&text, 1).expect("good");
        answer.check().expect("good");
        assert_eq!((answer.said().as_str(), end), ("yes", Some(text.len())));
        assert_eq!(first, Some(text.find("yes").expect("there") + 1));
        assert_eq!(read(&text[..text.len() - 1], 7).expect("good").2, None);
    }

    #[test]
    fn what_is_no_answer_says_why() {
        let error = |text: &str| {
            let checked = read(text, 5).and_then(|(answer, ..)| answer.check());
            format!("{:#}", checked.expect_err("an error"))
        };
        assert!(error("HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull").contains("status 503: full"));
        assert!(error("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").contains("no text"));
        assert!(error(&stream().replace("[DONE]", "[DOWN]")).contains("without its end"));
        assert!(error(&stream().replace("2;name", "z;name")).contains("size of a chunk"));
        assert!(error("HTTP/1.1 200 OK\r\n\r\n").contains("neither length nor chunks"));
        assert!(error("SSH-2.0\r\n\r\n").contains("neither"));
        assert!(error(&"x".repeat(HEAD_MAX + 1)).contains("no end of the head"));
    }
}
