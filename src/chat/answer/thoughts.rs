//! The known reasoning formats, a row for each: the text before and after it.

/// How reasoning is separated from the rest of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Thoughts {
    /// Its name for people.
    pub(super) name: &'static str,
    /// Before reasoning.
    pub(super) open: String,
    /// After it.
    pub(super) close: String,
    /// The answer consists of channels, of which reasoning is one.
    pub(super) channels: Option<ChannelMarks>,
}

/// How channels are separated. A header, which may name the writer and the recipient, ends with a mark that opens the
/// channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChannelMarks {
    /// Before a header that is not the first one.
    pub(super) start: &'static str,
    /// The possible starts of a header.
    pub(super) heads: &'static [&'static str],
    /// The marks after a header, and their channels.
    pub(super) opens: &'static [(&'static str, Opens)],
    /// The ends of a channel.
    pub(super) ends: &'static [&'static str],
    /// The same; they belong to a call and stay in the text.
    pub(super) kept_ends: &'static [&'static str],
    /// A header with a recipient begins a call and stays in the text.
    pub(super) keeps_recipients: bool,
}

/// The channel of a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opens {
    /// As declared by the header.
    ByHeader,
    Reasoning,
    Content,
    /// Calls, to which the mark belongs.
    Calls,
}

impl Thoughts {
    pub(super) fn tags(name: &'static str, open: &str, close: &str) -> Self {
        Self { name, open: open.into(), close: close.into(), channels: None }
    }

    /// Marks whose tokens must not be omitted from the text.
    pub(super) fn marks(&self) -> Vec<&str> {
        let mut marks: Vec<&str> = vec![&self.open, &self.close];
        if let Some(channels) = &self.channels {
            marks.push(channels.start);
            marks.extend(channels.heads);
            marks.extend(channels.opens.iter().map(|(mark, _)| mark));
            marks.extend(channels.ends.iter().chain(channels.kept_ends));
        }
        marks
    }
}

/// `<think>…</think>`.
pub(super) fn think() -> Thoughts {
    Thoughts::tags("qwen3", "<think>", "</think>")
}

/// All of them; the last one is the most usual.
pub(super) fn known() -> Vec<Thoughts> {
    let channels = |name, open, close, channels| Thoughts {
        channels: Some(channels),
        ..Thoughts::tags(name, open, close)
    };
    vec![
        channels(
            "openai_gptoss",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            ChannelMarks {
                start: "<|start|>",
                heads: &["assistant", "to=", "<|channel|>"],
                opens: &[("<|message|>", Opens::ByHeader)],
                ends: &["<|end|>", "<|return|>"],
                kept_ends: &["<|call|>"],
                keeps_recipients: true,
            },
        ),
        channels(
            "muse",
            "to=self<|message|>",
            "<|eom|>",
            ChannelMarks {
                start: "<|start|>",
                heads: &["assistant", "to="],
                opens: &[("<|message|>", Opens::ByHeader)],
                ends: &["<|eom|>", "<|eot|>"],
                kept_ends: &[],
                keeps_recipients: false,
            },
        ),
        channels(
            "solar",
            "<|think|>",
            "<|end|>",
            ChannelMarks {
                start: "<|begin|>",
                heads: &["assistant"],
                opens: &[
                    ("<|think|>", Opens::Reasoning),
                    ("<|content|>", Opens::Content),
                    ("<|tool_calls|>", Opens::Calls),
                ],
                ends: &["<|end|>"],
                kept_ends: &["<|calls|>"],
                keeps_recipients: false,
            },
        ),
        channels(
            "kimi_k3",
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            ChannelMarks {
                start: "",
                heads: &[],
                opens: &[
                    ("<|open|>think<|sep|>", Opens::Reasoning),
                    ("<|open|>response<|sep|>", Opens::Content),
                    ("<|open|>tools<|sep|>", Opens::Calls),
                ],
                ends: &["<|close|>think<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"],
                kept_ends: &["<|close|>tools<|sep|>"],
                keeps_recipients: false,
            },
        ),
        Thoughts::tags("mistral", "[THINK]", "[/THINK]"),
        Thoughts::tags("seed_oss", "<seed:think>", "</seed:think>"),
        Thoughts::tags("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        Thoughts::tags("gemma4", "<|channel>thought", "<channel|>"),
        Thoughts::tags("minimax_m3", "<mm:think>", "</mm:think>"),
        Thoughts::tags("hunyuan", "<think:opensource>", "</think:opensource>"),
        Thoughts::tags("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        Thoughts::tags("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        think(),
    ]
}
