//! Parses server-sent events from chunks of bytes.

/// Size limit of an event. No model server sends longer ones.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Joins lines to events. The events do not depend on how the bytes are split between calls of
/// [`push`](Self::push).
#[derive(Debug, Default)]
pub(super) struct SseParser {
    /// The incomplete line.
    line: Vec<u8>,
    /// The data of the incomplete event.
    data: Option<Vec<u8>>,
    /// Whether the last byte was a carriage return. A line feed right after it does not end another line.
    after_return: bool,
}

impl SseParser {
    /// Adds bytes and calls `on_event` with the data of each event that they complete.
    ///
    /// # Errors
    /// With a message, if an event is longer than 16 MiB.
    pub(super) fn push(&mut self, bytes: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), String> {
        for &byte in bytes {
            let follows_return = std::mem::replace(&mut self.after_return, byte == b'\r');
            match byte {
                b'\n' if follows_return => {}
                b'\n' | b'\r' => self.end_line(&mut on_event),
                _ => self.line.push(byte),
            }
        }
        match self.line.len() + self.data.as_ref().map_or(0, Vec::len) {
            0..=MAX_EVENT_BYTES => Ok(()),
            _ => Err(format!("an event of the stream is longer than {MAX_EVENT_BYTES} bytes")),
        }
    }

    /// Ends the stream. An event without the empty line at its end is still returned, because some servers
    /// end their last event so.
    pub(super) fn finish(mut self, mut on_event: impl FnMut(&[u8])) {
        if !self.line.is_empty() {
            self.end_line(&mut on_event);
        }
        self.end_line(&mut on_event);
    }

    fn end_line(&mut self, on_event: &mut impl FnMut(&[u8])) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            if let Some(data) = self.data.take() {
                on_event(&data);
            }
            return;
        }
        // Comments (which begin with a colon) and the fields event, id and retry are ignored.
        let Some(value) = line.strip_prefix(b"data") else { return };
        let value = match value {
            [] => value,
            [b':', b' ', rest @ ..] | [b':', rest @ ..] => rest,
            _ => return,
        };
        match &mut self.data {
            None => self.data = Some(value.to_vec()),
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(chunks: &[&[u8]]) -> Vec<String> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        let mut add = |data: &[u8]| events.push(String::from_utf8(data.to_vec()).unwrap());
        for chunk in chunks {
            parser.push(chunk, &mut add).unwrap();
        }
        parser.finish(&mut add);
        events
    }

    #[test]
    fn every_cut_gives_the_same_events() {
        let stream = ": ping\n\ndata: {\"a\":\"ü€😀\"}\n\nevent: x\r\ndata:two\r\ndata:  lines\r\n\r\ndata\n\ndatax: no\n\n\
                      id: 1\n\ndata: last\r\rdata: [DONE]\n\n"
            .as_bytes();
        let wanted = ["{\"a\":\"ü€😀\"}", "two\n lines", "", "last", "[DONE]"];
        assert_eq!(parse(&[stream]), wanted);
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let chunks = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(parse(&chunks), wanted, "cut at {first} and {second}");
            }
        }
        let bytes: Vec<&[u8]> = stream.chunks(1).collect();
        assert_eq!(parse(&bytes), wanted);
    }

    #[test]
    fn a_last_event_without_its_empty_line_counts() {
        assert_eq!(parse(&[b"data: [DONE]"]), ["[DONE]"]);
        assert_eq!(parse(&[b"data: [DONE]\n"]), ["[DONE]"]);
        assert_eq!(parse(&[b"data: a\n\n: bye"]), ["a"]);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut parser = SseParser::default();
        let chunk = vec![b'x'; 1 << 20];
        let result = (0..17).try_for_each(|_| parser.push(&chunk, |_| ()));
        assert!(result.unwrap_err().contains("16777216"));
    }
}
