//! Messages that a template leaves out of the prompt.
//!
//! A message whose text is in the prompt was written. One whose text is not may have been changed, so it is rendered once
//! more with another text: if the prompt stays the same, the message has no effect. So nothing is reported that has
//! one, but a short text that the prompt has elsewhere is not noticed.

use super::{Chat, ChatOptions, Message, jinja};

/// Most messages that are rendered once more.
const MAX_TRIES: usize = 2;
/// Most texts that are searched for from the beginning, because they are not where their turn would be.
const MAX_SEARCHES: usize = 16;
/// Appended to a text that is rendered once more.
const CHANGE: &str = " 4717";

impl Chat {
    /// The indices of messages whose text has no effect on this prompt. Text next to calls is not looked for, since
    /// templates write either of them.
    pub(super) fn left_out(&self, messages: &[Message], options: &ChatOptions, prompt: &str) -> Vec<usize> {
        let candidates = absent(messages, options, prompt);
        if candidates.is_empty() {
            return candidates;
        }
        let is_left_out = |before: &str, index: usize| {
            let mut changed = messages.to_vec();
            changed[index].content.text_mut().push_str(CHANGE);
            self.render(&changed, options).is_ok_and(|after| after == before)
        };
        // The copies are on no account. Without memory for them, or if rendering fails now, nothing is reported.
        let found = jinja::charged_for_text(2 * prompt.len(), || {
            let before = self.render(messages, options)?;
            Ok(candidates.into_iter().filter(|index| is_left_out(&before, *index)).collect())
        });
        found.unwrap_or_default()
    }
}

/// The messages whose text is not in the prompt.
fn absent(messages: &[Message], options: &ChatOptions, prompt: &str) -> Vec<usize> {
    let (mut from, mut num_searches, mut found) = (0, 0, Vec::new());
    let last = messages.len().saturating_sub(1);
    for (index, message) in messages.iter().enumerate() {
        let text = message.content.as_text().trim();
        let is_continued = options.continue_final_message && index == last;
        if text.is_empty() || is_continued || message.extra.contains_key("tool_calls") {
            continue;
        }
        if let Some(at) = prompt[from..].find(text) {
            from += at + text.len();
            continue;
        }
        num_searches += 1;
        // Some templates write results of tools as JSON.
        let quoted = serde_json::Value::from(text).to_string();
        let is_there = prompt.contains(text) || prompt.contains(&quoted[1..quoted.len() - 1]);
        if !is_there {
            found.push(index);
        }
        if found.len() == MAX_TRIES || num_searches == MAX_SEARCHES {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::tokenizer;
    use super::*;

    #[test]
    fn a_message_without_an_effect_on_the_prompt_is_found() {
        let check = |source: &str, messages: &[(&str, &str)], expected: &[usize]| {
            let tokenizer = tokenizer(Some(source), &["<s>", "</s>"], false);
            let chat = Chat::new(&tokenizer).unwrap();
            let messages: Vec<Message> =
                messages.iter().map(|(role, text)| Message::new(*role, *text)).collect();
            let encoded = chat.encode_reporting(&tokenizer, &messages, &ChatOptions::default()).unwrap();
            assert_eq!(encoded.left_out, expected, "{source} {messages:?}");
        };
        let system_first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}\
                            {% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}";
        let turns =
            [("system", "Be brief."), ("user", " Hi "), ("assistant", "Hello."), ("system", "In French.")];
        check(system_first, &turns, &[3]);
        check(system_first, &turns[..3], &[]);
        check(
            system_first,
            &[("user", "Hi"), ("system", "A <s>."), ("system", "B."), ("system", "C.")],
            &[1, 2],
        );
        // Text that is changed is not left out.
        let upper = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}";
        check(upper, &[("user", "Hi"), ("assistant", "Hello.")], &[]);
        let json = "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\n{% endfor %}";
        check(json, &[("user", "Hi"), ("tool", "a \"b\"\nc")], &[]);
        let reversed = "{% for m in messages | reverse %}{{ m.content }}\n{% endfor %}";
        check(reversed, &[("user", "A?"), ("assistant", "B!"), ("user", "C?")], &[]);
    }
}
