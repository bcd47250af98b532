//! Calls in real models' templates: a template's output is parsed, whole and character by character.
//!
//! The templates come from the source of llama.cpp, which is not copied to this repository: `TINYVLLM_LLAMA_CPP` names
//! its folder.

use std::path::Path;

use serde_json::json;

use super::super::tests::tokenizer;
use super::super::{Chat, ChatConfig, ChatOptions, FormatChoice, Message};
use super::*;

/// The templates' texts after a turn.
const TURN_ENDS: [&str; 10] = [
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_msg|>",
    "<SPECIAL_12>",
    "<｜end▁of▁sentence｜>",
    "<|eom_id|>",
    "<|tool_response>",
    "<｜hy_eos:opensource｜>",
    "<|message_sep|>\n\n\n",
    "<|eot|>",
];
const QUESTION: &str = "How is the weather?";

/// Tools with arguments of every kind, or with those that every template can describe.
fn tools(is_rich: bool) -> Arc<[Tool]> {
    if !is_rich {
        let flat = json!({"type": "object", "properties": {
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "integer", "description": "A number."},
            "exact": {"type": "boolean", "description": "Whether."},
        }, "required": ["city"]});
        return ["get_weather", "search"]
            .map(|name| Tool { name: name.into(), parameters: Some(flat.clone()) })
            .into();
    }
    let weather = json!({"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "A number."},
        "more": {"type": "object", "description": "More.", "properties": {
            "tags": {"type": "array", "items": {"type": "string"}},
            "lang": {"type": ["string", "null"]},
            "deep": {"type": "object", "properties": {"ratio": {"type": "number"}}},
        }},
        "none": {"type": "null", "description": "Nothing."},
        "exact": {"type": "boolean", "description": "Whether."},
    }});
    let search = json!({"type": "object", "required": ["query"], "properties": {
        "query": {"type": "string", "description": "A text."},
        "limit": {"type": ["integer", "null"], "description": "A number."},
    }});
    Arc::new([
        Tool { name: "get_weather".into(), parameters: Some(weather) },
        Tool { name: "search".into(), parameters: Some(search) },
    ])
}

fn calls(is_rich: bool) -> Vec<(String, Value)> {
    if !is_rich {
        let weather = json!({"city": "Zürich 🦙\nnew line", "days": 3, "exact": true});
        return vec![("get_weather".to_owned(), weather), ("search".to_owned(), json!({"city": "é"}))];
    }
    let weather = json!({
        "city": "Zürich 🦙\nnew line", "days": 3,
        "more": {"tags": ["x", "y z"], "lang": null, "deep": {"ratio": 1.5}},
        "none": null, "exact": true,
    });
    vec![("get_weather".to_owned(), weather), ("search".to_owned(), json!({"query": "é", "limit": null}))]
}

/// The result for a template.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// Calls are read back: how many at once.
    Reads(usize),
    /// The template writes no calls.
    Silent,
    /// Reported at load.
    Refused,
    Wrong(String),
}

/// The text that the model writes where the template writes these calls.
fn answer(chat: &Chat, calls: &[(String, Value)], is_rich: bool) -> Option<(String, String)> {
    let tool = |tool: &Tool| {
        json!({"type": "function", "function": {
            "name": tool.name, "description": "Does it.", "parameters": tool.parameters,
        }})
    };
    let list: Value = tools(is_rich).iter().map(tool).collect();
    let options = |add_generation_prompt| ChatOptions {
        tools: Some(list.clone()),
        add_generation_prompt,
        ..ChatOptions::default()
    };
    let format = chat.answer_format().tool_calls.clone();
    let list = calls.iter().enumerate().map(|(index, (name, arguments))| {
        let id = format.as_ref().map_or("call12345".to_owned(), |syntax| {
            syntax.call_id(name, index, &format!("call1234{index}"))
        });
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    });
    let mut asked = Message::new("assistant", "");
    asked.extra.insert("tool_calls".to_owned(), list.collect());
    let question = Message::new("user", QUESTION);
    let all = chat.render(&[question.clone(), asked], &options(false)).ok()?;
    let prompt = chat.render(std::slice::from_ref(&question), &options(true)).ok()?;
    // The model does not write the end of a turn as text.
    let said =
        chat.render(&[question, Message::new("assistant", "SAID")], &options(false)).unwrap_or_default();
    let turn_end = said.rsplit_once("SAID").map_or("", |(_, end)| end);
    let all = all.strip_suffix(turn_end).unwrap_or(&all);
    let same = prompt.bytes().zip(all.bytes()).take_while(|(a, b)| a == b).count();
    let mut at = (0..=same).rev().find(|at| all.is_char_boundary(*at)).unwrap_or(0);
    // A mark that has the same beginning as one of the prompt is whole in the answer.
    if at < prompt.len()
        && let Some(mark) = all[..at].rfind('<')
        && !all[mark..at].contains(|c: char| c == '>' || c.is_whitespace())
    {
        at = mark;
    }
    // If the prompt for an answer has more text than a conversation with one, the answer follows the same mark.
    if prompt.len() > at + 60
        && let Some((start, _)) = prompt.char_indices().rev().nth(16)
        && let Some(found) = all.rfind(&prompt[start..])
    {
        at = found + prompt.len() - start;
    }
    let mut text = &all[at..];
    // The end of a turn is a separate token, without text.
    let after = text.rfind(&calls.last()?.0).unwrap_or(0);
    if let Some(end) = TURN_ENDS.iter().filter_map(|end| Some(after + text[after..].find(end)?)).min() {
        text = &text[..end];
    }
    Some((prompt, text.to_owned()))
}

fn read(
    chat: &Chat,
    prompt: &str,
    text: &str,
    by_character: bool,
    is_rich: bool,
) -> (String, Option<Vec<(String, Value)>>) {
    let format = chat.answer_format();
    let end = PromptEnd::of(prompt, format.reasoning.as_ref());
    let mut parser = AnswerParser::new(format, end, tools(is_rich));
    let mut events = Vec::new();
    match by_character {
        true => text.chars().for_each(|c| events.extend(parser.push(c.encode_utf8(&mut [0; 4])))),
        false => events.extend(parser.push(text)),
    }
    events.extend(parser.finish());
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for event in events {
        match event {
            AnswerEvent::Content(text) => content.push_str(&text),
            AnswerEvent::CallBegin { name, .. } => calls.push((name, String::new())),
            AnswerEvent::CallArguments { text, .. } => calls.last_mut().unwrap().1.push_str(&text),
            AnswerEvent::Reasoning(text) => content.push_str(&format!("(reasoning {text})")),
        }
    }
    let calls = calls.into_iter().map(|(name, text)| Some((name, serde_json::from_str(&text).ok()?)));
    (content, calls.collect())
}

fn without_null(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, field| !field.is_null());
        fields.values_mut().for_each(without_null);
    }
}

fn outcome(chat: &Chat) -> Outcome {
    [true, false]
        .into_iter()
        .map(|is_rich| outcome_with(chat, is_rich))
        .find(|found| *found != Outcome::Silent)
        .unwrap_or(Outcome::Silent)
}

fn outcome_with(chat: &Chat, is_rich: bool) -> Outcome {
    let expected = calls(is_rich);
    let try_calls = |number: usize| answer(chat, &expected[..number], is_rich).map(|found| (number, found));
    let Some((mut number, (prompt, mut text))) = [2, 1].into_iter().find_map(try_calls) else {
        return Outcome::Silent;
    };
    if !text.contains("search") && number == 2 {
        // Only the first call is written, or none.
        let Some((_, (_, one))) = try_calls(1) else { return Outcome::Silent };
        (number, text) = (1, one);
    }
    if !text.contains("get_weather") {
        return Outcome::Silent;
    }
    if chat.answer_format().tool_calls.is_none() {
        return Outcome::Refused;
    }
    let (content, whole) = read(chat, &prompt, &text, false, is_rich);
    let streamed = read(chat, &prompt, &text, true, is_rich);
    let mut expected = expected[..number].to_vec();
    let mut found = whole.clone();
    // Text that a template omits cannot be parsed.
    if !text.contains("none") {
        expected.iter_mut().for_each(|(_, arguments)| without_null(arguments));
        found.iter_mut().flatten().for_each(|(_, arguments)| without_null(arguments));
    }
    if streamed != (content.clone(), whole) {
        return Outcome::Wrong(format!("streamed: {streamed:?} of {text:?}"));
    }
    match found == Some(expected) && content.trim().is_empty() {
        true => Outcome::Reads(number),
        false => Outcome::Wrong(format!(
            "{found:?} and content {content:?} of {text:?} after {:?}",
            prompt.chars().rev().take(40).collect::<String>()
        )),
    }
}

#[test]
fn templates_of_real_models_are_read_back() {
    let Some(source) = std::env::var_os("TINYVLLM_LLAMA_CPP") else {
        let is_required = std::env::var_os("TINYVLLM_REQUIRE_LLAMA_CPP").is_some_and(|value| value == "1");
        assert!(!is_required, "TINYVLLM_LLAMA_CPP is not set");
        return;
    };
    let folder = Path::new(&source).join("models/templates");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".jinja"))
        .collect();
    names.sort();
    let tokenizer = tokenizer(None, &["<s>", "</s>"], false);
    let mut wrong = Vec::new();
    let mut table = String::from("| template | calls | at once | reasoning |\n|---|---|---|---|\n");
    let (mut num_read, mut num_refused) = (0, 0);
    for name in names {
        let template = std::fs::read_to_string(folder.join(&name)).unwrap();
        let config =
            ChatConfig { template: Some(template), tool_calls: FormatChoice::Auto, ..ChatConfig::default() };
        let chat = Chat::with_config(&tokenizer, &config).unwrap();
        let outcome = outcome(&chat);
        let at_once = match &outcome {
            Outcome::Reads(number) => {
                num_read += 1;
                if *number > 1 { "several" } else { "one" }
            }
            Outcome::Silent => "it writes none",
            Outcome::Refused => {
                num_refused += 1;
                "refused"
            }
            Outcome::Wrong(what) => {
                wrong.push(format!("{name}: {what}"));
                "wrong"
            }
        };
        let format = chat.answer_format();
        let cell = |text: String| {
            if text == "none" { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
        };
        let (calls, thoughts) = (cell(format.tool_calls_line()), cell(format.reasoning_line()));
        let name = name.trim_end_matches(".jinja");
        table.push_str(&format!("| {name} | {calls} | {at_once} | {thoughts} |\n"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(num_read >= 58 && num_refused <= 8, "{num_read} are read back, {num_refused} refused");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/chat/answer/forms.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (before, old) = document
        .split_once("| template |")
        .map_or((document.as_str(), ""), |(before, _)| (before, &document[before.len()..]));
    if std::env::var_os("TINYVLLM_UPDATE_FORMS").is_some_and(|value| value == "1") {
        std::fs::write(path, format!("{before}{table}")).unwrap();
    } else {
        assert_eq!(old, table, "TINYVLLM_UPDATE_FORMS=1 writes the table to {path}");
    }
}
