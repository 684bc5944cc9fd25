//! Server-sent events, cut out of a stream of bytes: only their data is of interest.

use super::http::HttpError;

/// Most bytes of an event: 20 alternatives of each of 20,000 tokens of a prompt.
const MAX_EVENT: usize = 32 << 20;

/// Bytes that are no whole event yet.
#[derive(Debug, Default)]
pub(super) struct Events {
    buffer: Vec<u8>,
    /// Where the next event begins.
    start: usize,
    /// Up to here there is no line end.
    searched: usize,
    /// Data of the event so far.
    data: Vec<u8>,
}

impl Events {
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), HttpError> {
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        if self.buffer.len() + self.data.len() + bytes.len() > MAX_EVENT {
            return Err(HttpError::TooLarge(MAX_EVENT));
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// The data of the next event, if all of it is there.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let end = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n');
            let Some(end) = end.map(|at| at + self.searched) else {
                self.searched = self.buffer.len();
                return None;
            };
            let line = &self.buffer[self.start..end];
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if let Some(data) = line.strip_prefix(b"data:") {
                if !self.data.is_empty() {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
            }
            let ended = line.is_empty() && !self.data.is_empty();
            (self.start, self.searched) = (end + 1, end + 1);
            if ended {
                return Some(std::mem::take(&mut self.data));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_however_they_come() {
        let text = b": hello\n\ndata: {\"a\":1}\n\nevent: x\r\ndata:one\r\ndata: two\r\n\r\ndata: [DONE]\n\nrest";
        for chunk in 1..text.len() {
            let (mut events, mut found) = (Events::default(), Vec::new());
            for part in text.chunks(chunk) {
                events.push(part).expect("small");
                while let Some(data) = events.next() {
                    found.push(String::from_utf8(data).expect("text"));
                }
            }
            assert_eq!(found, ["{\"a\":1}", "one\ntwo", "[DONE]"], "in pieces of {chunk}");
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut events = Events::default();
        let piece = vec![b'x'; 1 << 20];
        let pushed = (0..40).map(|_| events.push(&piece)).find(Result::is_err);
        assert!(matches!(pushed, Some(Err(HttpError::TooLarge(_)))));
    }
}
