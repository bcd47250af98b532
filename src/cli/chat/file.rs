//! Conversations in files.

use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use tinyvllm::Error;
use tinyvllm::chat::{Content, Conversation, Message};

use super::super::text_file::read;

/// Writes a conversation. The name of the model is for people.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn save(path: &Path, model: &str, messages: &[Message]) -> anyhow::Result<()> {
    let text = |content: &Content| match content {
        Content::Text(text) => Value::from(text.as_str()),
        Content::Null | Content::Missing => Value::Null,
    };
    let messages: Vec<Value> = messages
        .iter()
        .map(|message| json!({"role": message.role, "content": text(&message.content)}))
        .collect();
    let text = serde_json::to_string_pretty(&json!({"model": model, "messages": messages}))?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write `{}`", path.display()))
}

/// Reads a conversation: an object with `messages`, or a list of them.
///
/// # Errors
/// If it cannot be read, or a message has no role or no text.
pub(super) fn load(path: &Path) -> anyhow::Result<Conversation> {
    let wrong = |what: &str| {
        Error::invalid_request(format!("`{}` has no conversation: {what}", path.display()))
            .with_hint("a conversation is what /save writes: {\"messages\": [{\"role\": …, \"content\": …}]}")
    };
    let value: Value = serde_json::from_str(&read(path)?).map_err(|error| wrong(&error.to_string()))?;
    let messages = value.get("messages").unwrap_or(&value);
    let list = messages.as_array().ok_or_else(|| wrong("the list of messages is missing"))?;
    let text = |message: &Value, name: &str| message.get(name).and_then(Value::as_str).map(str::to_owned);
    let mut conversation = Conversation::new(None);
    for (index, message) in list.iter().enumerate() {
        let (role, content) = (text(message, "role"), text(message, "content"));
        match (role.as_deref(), content) {
            (Some("system"), Some(content)) if index == 0 => conversation.set_system(Some(content)),
            (Some("user"), Some(content)) => conversation.push_user(content),
            (Some("assistant"), Some(content)) => conversation.push_assistant(content),
            _ => {
                let what = format!("message {} is not a text of user or assistant", index + 1);
                return Err(wrong(&what).into());
            }
        }
    }
    Ok(conversation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.json");
        let mut conversation = Conversation::new(Some("Be kind.".to_owned()));
        conversation.push_user("Why?\n\"ä\"");
        conversation.push_assistant("So.");
        save(&path, "demo", conversation.messages()).unwrap();
        assert_eq!(load(&path).unwrap(), conversation);
        for (text, words) in [
            ("[", "no conversation"),
            ("{}", "list of messages is missing"),
            (r#"[{"role": "user"}]"#, "message 1"),
            (r#"[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]"#, "message 2"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", load(&path).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
        std::fs::write(&path, [0xff]).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("not text in UTF-8"));
        assert!(read(&folder.path().join("none")).is_err());
    }
}
