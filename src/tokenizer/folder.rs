//! A model folder's tokenizer: `tokenizer.json` and the small files next to it.

use std::io;
use std::path::Path;

use serde_json::{Map, Value};

use super::Tokenizer;
use super::json::MAX_FILE_BYTES;
use super::templates::{self, ChatTemplates};
use crate::{Error, ErrorKind, Result, files, shortened};

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
const PROCESSOR: &str = "chat_template.json";

impl Tokenizer {
    /// Reads the tokenizer of a model folder: `tokenizer.json`, and where they exist
    /// `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `chat_template.json` and
    /// `additional_chat_templates/*.jinja`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no `tokenizer.json`; otherwise as [`Self::from_file`].
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            let error =
                Error::new(ErrorKind::NotFound, format!("{} has no tokenizer.json", folder.display()));
            return Err(if folder.join("tokenizer.model").exists() {
                error.with_hint(
                    "a tokenizer.model alone is not read; convert it to tokenizer.json or use a GGUF file",
                )
            } else {
                error.with_hint("pass token ids instead of text")
            });
        }
        let mut tokenizer = Self::from_file(&path)?;
        let config = tokenizer.read_object(&folder.join(CONFIG))?;
        let special = tokenizer.read_if_possible(&folder.join(SPECIAL));
        tokenizer.check_tokens(&config, CONFIG);
        tokenizer.check_tokens(&special, SPECIAL);
        let named = |key: &str| token_content(&config[key]).or_else(|| token_content(&special[key]));
        if let Some(bos) = named("bos_token").and_then(|text| tokenizer.token_id(text)) {
            tokenizer.bos_token_id = Some(bos);
        }
        if let Some(eos) = named("eos_token").and_then(|text| tokenizer.token_id(text)) {
            tokenizer.eos_token_id = Some(eos);
            tokenizer.eos_token_ids = vec![eos];
        }
        for key in ["bos_token", "eos_token"] {
            if let Some(text) = named(key).filter(|text| !text.is_empty()) {
                tokenizer.set_control(text, key);
            }
        }
        match (tokenizer.switch(&config, "add_bos_token"), tokenizer.bos_token_id) {
            (Some(true), Some(bos)) if !tokenizer.prefix_token_ids.contains(&bos) => {
                tokenizer.prefix_token_ids.insert(0, bos);
            }
            (Some(false), Some(bos)) => tokenizer.prefix_token_ids.retain(|id| *id != bos),
            _ => {}
        }
        if tokenizer.switch(&config, "add_eos_token") == Some(true) && !config["eos_token"].is_null() {
            let eos = named("eos_token").unwrap_or_default();
            tokenizer
                .note_suffix("add_eos_token is true in tokenizer_config.json, which", &format!("{eos:?}"));
        }
        tokenizer.template_tokens = template_tokens(&[&special, &config]);
        let processor = tokenizer.read_if_possible(&folder.join(PROCESSOR));
        tokenizer.read_chat_templates(folder, &[(CONFIG, &config), (PROCESSOR, &processor)]);
        Ok(tokenizer)
    }
}

impl Tokenizer {
    /// The contents of a file that text can be read without. A damaged one is ignored, with a notice.
    fn read_if_possible(&mut self, path: &Path) -> Value {
        self.read_object(path).unwrap_or_else(|error| {
            self.notices.push(format!("{}; it is left out", error.message()));
            Value::Null
        })
    }

    /// The object in a file, or null if there is none. Other JSON is ignored, with a notice.
    fn read_object(&mut self, path: &Path) -> Result<Value> {
        let value = read_json(path)?;
        if value.is_object() || value.is_null() {
            return Ok(value);
        }
        self.leave_out(&path.display().to_string(), &value, "an object");
        Ok(Value::Null)
    }

    fn leave_out(&mut self, what: &str, value: &Value, expected: &str) {
        let value = value.to_string();
        self.notices.push(format!("{what} is {}, expected {expected}; it is left out", shortened(&value)));
    }

    /// The truth value under this key. Some files have it as a text or a number, which is taken with a notice.
    fn switch(&mut self, config: &Value, key: &str) -> Option<bool> {
        let value = &config[key];
        let meaning = match value {
            Value::Null => return None,
            Value::Bool(is_on) => return Some(*is_on),
            Value::String(text) => text.to_lowercase().parse().ok(),
            Value::Number(number) => number.as_u64().filter(|number| *number < 2).map(|number| number == 1),
            _ => None,
        };
        let what = format!("{key} in {CONFIG}");
        match meaning {
            Some(is_on) => {
                let value = value.to_string();
                self.notices.push(format!("{what} is {}, taken as {is_on}", shortened(&value)));
            }
            None => self.leave_out(&what, value, "true or false"),
        }
        meaning
    }

    /// Reports entries of tokens that are none, and first and last tokens that tokenizer.json does not have.
    fn check_tokens(&mut self, file: &Value, name: &str) {
        const EXPECTED: &str = "a text or an object with content";
        let is_token = |key: &str| key.ends_with("_token") && !key.starts_with("add_");
        for (key, entry) in file.as_object().into_iter().flatten() {
            let what = format!("{key} in {name}");
            match (token_content(entry), entry) {
                (_, Value::Null) => {}
                (None, _) if is_token(key) => self.leave_out(&what, entry, EXPECTED),
                (Some(text), _)
                    if ["bos_token", "eos_token"].contains(&key.as_str())
                        && !text.is_empty()
                        && self.token_id(text).is_none() =>
                {
                    let text = shortened(text).into_owned();
                    self.notices
                        .push(format!("{what} is {text:?}, which is no token of the model; it is left out"));
                }
                _ => {}
            }
        }
        for key in ["additional_special_tokens", "extra_special_tokens"] {
            let what = format!("{key} in {name}");
            match &file[key] {
                Value::Null => {}
                Value::Array(list) => {
                    if let Some(odd) = list.iter().find(|entry| token_content(entry).is_none()) {
                        self.leave_out(&format!("an entry of {what}"), odd, EXPECTED);
                    }
                }
                Value::Object(tokens) if key == "extra_special_tokens" => {
                    if let Some((token, odd)) =
                        tokens.iter().find(|(_, entry)| token_content(entry).is_none())
                    {
                        self.leave_out(&format!("{} of {what}", shortened(token)), odd, EXPECTED);
                    }
                }
                odd => self.leave_out(&what, odd, "a list of tokens"),
            }
        }
        self.check_added_tokens(&file["added_tokens_decoder"], name);
    }

    /// Tokens are those of tokenizer.json, so this list may only repeat them.
    fn check_added_tokens(&mut self, list: &Value, name: &str) {
        let what = format!("added_tokens_decoder in {name}");
        let entries = match list {
            Value::Null => return,
            Value::Object(entries) => entries,
            other => return self.leave_out(&what, other, "an object of ids and tokens"),
        };
        let is_known = |id: &str, entry: &Value| {
            token_content(entry)
                .is_some_and(|text| Some(id) == self.token_id(text).map(|id| id.to_string()).as_deref())
        };
        let mut others = entries.iter().filter(|(id, entry)| !is_known(id, entry));
        if let Some((id, entry)) = others.next() {
            let entry = token_content(entry).map_or_else(|| entry.to_string(), |text| format!("{text:?}"));
            let more = match others.count() {
                0 => String::new(),
                count => format!(" and {count} more"),
            };
            self.notices.push(format!(
                "{what} has {} as the token {}{more}, and tokenizer.json has not; it is left out",
                shortened(&entry),
                shortened(id)
            ));
        }
    }

    /// All chat templates by name. Files of their own take precedence over the entries in these.
    fn read_chat_templates(&mut self, folder: &Path, files: &[(&str, &Value)]) {
        let mut templates = ChatTemplates::default();
        for (name, file) in files {
            self.add_templates(&format!("chat_template in {name}"), &file["chat_template"], &mut templates);
        }
        self.add_template_files(folder, &mut templates);
        self.notices.extend(templates.notices());
        self.chat_templates = templates;
    }

    /// A template entry is the source, a list of names and sources, or an object of them.
    fn add_templates(&mut self, what: &str, entry: &Value, templates: &mut ChatTemplates) {
        let refused = |value: &Value, expected: &str| {
            format!("{what} is {}, expected {expected}", shortened(&value.to_string()))
        };
        match entry {
            Value::Null => {}
            Value::String(source) => templates.insert(templates::DEFAULT, source),
            Value::Array(items) => {
                for item in items {
                    match (item["name"].as_str(), item["template"].as_str()) {
                        (Some(name), Some(source)) => templates.insert(name, source),
                        (Some(name), None) => {
                            let template = shortened(&item["template"].to_string()).into_owned();
                            let name = name.to_owned();
                            let why = format!("{what} has {template} under {:?}", shortened(&name));
                            templates.refuse(name, format!("{why}, expected a template"));
                        }
                        _ => {
                            self.leave_out(&format!("an entry of {what}"), item, "a name and a template");
                            templates.refuse_default(refused(
                                entry,
                                "a template or a list of names and templates",
                            ));
                        }
                    }
                }
            }
            Value::Object(sources) => {
                for (name, source) in sources {
                    match source.as_str() {
                        Some(source) => templates.insert(name, source),
                        None => {
                            let source = shortened(&source.to_string()).into_owned();
                            let why = format!("{what} has {source} under {:?}", shortened(name));
                            templates.refuse(name, format!("{why}, expected a template"));
                        }
                    }
                }
            }
            other => templates.refuse(templates::DEFAULT, refused(other, "a template or a list of them")),
        }
    }

    /// Adds the chat templates that have files of their own.
    fn add_template_files(&mut self, folder: &Path, templates: &mut ChatTemplates) {
        let mut add = |name: &str, path: &Path| match read_text(path) {
            Ok(Some(source)) => templates.insert(name, source),
            Ok(None) => {}
            Err(error) => templates.refuse(name, error.message()),
        };
        add(templates::DEFAULT, &folder.join("chat_template.jinja"));
        let further = folder.join("additional_chat_templates");
        let entries = match std::fs::read_dir(&further) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                return self.notices.push(format!("{}: {error}; it is left out", further.display()));
            }
        };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if let Some(name) = path.file_stem().and_then(|name| name.to_str())
                && path.extension().is_some_and(|extension| extension == "jinja")
            {
                add(name, &path);
            }
        }
    }

    /// The config's BOS and EOS tokens are control tokens, for every setting in tokenizer.json.
    fn set_control(&mut self, text: &str, key: &str) {
        let Some(id) = self.token_id(text).filter(|id| !self.is_special(*id)) else { return };
        self.vocabulary.set_control(id);
        self.added.add_control(id, text);
        self.notices.push(format!(
            "{text:?}: in tokenizer.json the token is ordinary text, but it is the {key} of the model; taken as control"
        ));
    }
}

/// The special tokens that these files name, those of the last one first. Each is a variable of templates, also those that
/// a model has in addition to the usual ones, such as `image_token`.
fn template_tokens(files: &[&Value]) -> Map<String, Value> {
    let mut tokens = Map::new();
    for file in files {
        let named = file.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
        let further = file["extra_special_tokens"].as_object().into_iter().flatten();
        for (name, entry) in named.chain(further) {
            if let Some(text) = token_content(entry) {
                tokens.insert(name.clone(), text.into());
            }
        }
        if let Some(list) = file["additional_special_tokens"].as_array() {
            let texts = list.iter().filter_map(token_content).map(Value::from).collect();
            tokens.insert("additional_special_tokens".to_owned(), texts);
        }
    }
    tokens
}

/// A token entry is its text, or an object with the text under `content`.
fn token_content(entry: &Value) -> Option<&str> {
    entry.as_str().or_else(|| entry["content"].as_str())
}

fn read_text(path: &Path) -> Result<Option<String>> {
    match files::read(path, MAX_FILE_BYTES).and_then(files::text) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(Error::invalid_model(format!("{}: {error}", path.display())).with_source(error))
        }
        Err(error) => Err(Error::io(format!("reading {}", path.display()), error)),
    }
}

/// The contents of a file, or null if there is none.
fn read_json(path: &Path) -> Result<Value> {
    let Some(text) = read_text(path)? else { return Ok(Value::Null) };
    files::json(text.as_bytes())
        .map_err(|error| Error::invalid_model(format!("{}: {error}", path.display())).with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &str = r#"{"added_tokens": [
        {"id": 2, "content": "<s>", "special": true}, {"id": 3, "content": "</s>", "special": true}],
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}"#;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn open(files: &[(&str, &str)]) -> Result<Tokenizer> {
        Tokenizer::from_dir(folder(&[&[("tokenizer.json", TOKENIZER)], files].concat()).path())
    }

    #[test]
    fn the_post_processor_alone_gives_bos() {
        let tokenizer = open(&[]).unwrap();
        assert_eq!(tokenizer.encode_prompt("ab", tokenizer.add_bos()).unwrap(), [2, 0, 1]);
        assert_eq!(tokenizer.stop_token_ids(&[1]), [1, 3]);
        assert_eq!(tokenizer.chat_template(), None);
    }

    #[test]
    fn the_config_wins() {
        let config = r#"{"bos_token": {"content": "</s>"}, "eos_token": "<s>", "add_bos_token": true,
            "chat_template": [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]}"#;
        let tokenizer = open(&[("tokenizer_config.json", config)]).unwrap();
        assert_eq!((tokenizer.bos_token_id(), tokenizer.eos_token_ids()), (Some(3), [2].as_slice()));
        assert_eq!(tokenizer.chat_template(), Some("D"));
        assert_eq!(tokenizer.named_chat_template("rag"), Some("R"));
        let off = r#"{"bos_token": "<s>", "add_bos_token": false}"#;
        let tokenizer = open(&[("tokenizer_config.json", off)]).unwrap();
        assert_eq!((tokenizer.bos_token_id(), tokenizer.add_bos()), (Some(2), false));
        let special = r#"{"eos_token": {"content": "</s>"}, "bos_token": null}"#;
        assert_eq!(open(&[("special_tokens_map.json", special)]).unwrap().eos_token_ids(), [3]);
    }

    #[test]
    fn templates_know_all_special_tokens_that_are_named() {
        let map = r#"{"unk_token": "<map>", "cls_token": {"content": "[CLS]"}}"#;
        let config = r#"{"bos_token": "<s>", "unk_token": {"content": "<unk>"}, "pad_token": "<pad>", "sep_token": null,
            "image_token": "<image>", "add_bos_token": true, "add_eos_token": true, "eos_token": "</s>",
            "extra_special_tokens": {"audio": "<audio>"},
            "additional_special_tokens": ["<a>", {"content": "<b>"}]}"#;
        let tokenizer = open(&[("special_tokens_map.json", map), ("tokenizer_config.json", config)]).unwrap();
        let expected = serde_json::json!({
            "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "[CLS]",
            "image_token": "<image>", "audio": "<audio>", "additional_special_tokens": ["<a>", "<b>"],
        });
        assert_eq!(Value::from(tokenizer.template_tokens()), expected);
        let notices = tokenizer.notices();
        assert!(notices.len() == 1 && notices[0].contains("puts \"</s>\" after every text"), "{notices:?}");
    }

    #[test]
    fn the_end_of_a_sequence_is_a_control_token() {
        let text = TOKENIZER.replace(r#""</s>", "special": true"#, r#""</s>", "special": false"#);
        for (json, eos, num_notices) in
            [(text.as_str(), "</s>", 1), (TOKENIZER, "</s>", 0), (TOKENIZER, "b", 1)]
        {
            let config = format!(r#"{{"eos_token": "{eos}"}}"#);
            let files = [("tokenizer.json", json), ("tokenizer_config.json", config.as_str())];
            let tokenizer = Tokenizer::from_dir(folder(&files).path()).unwrap();
            assert_eq!(tokenizer.notices().len(), num_notices, "{:?}", tokenizer.notices());
            let id = tokenizer.eos_token_ids()[0];
            assert!(tokenizer.is_special(id));
            let prompt = format!("a{eos}");
            assert_eq!(tokenizer.encode_prompt(&prompt, false).unwrap(), [0, id]);
            assert_eq!(tokenizer.find_special(&prompt), vec![1..prompt.len(); 1]);
        }
    }

    #[test]
    fn template_files_win_over_the_config() {
        let tokenizer = open(&[
            ("tokenizer_config.json", r#"{"chat_template": "config"}"#),
            ("chat_template.json", r#"{"chat_template": "json"}"#),
        ]);
        assert_eq!(tokenizer.unwrap().chat_template(), Some("json"));
        let tokenizer = open(&[
            ("chat_template.json", r#"{"chat_template": "json"}"#),
            ("chat_template.jinja", "jinja"),
            ("additional_chat_templates/tool_use.jinja", "tools"),
        ])
        .unwrap();
        assert_eq!(tokenizer.chat_template(), Some("jinja"));
        assert_eq!(tokenizer.named_chat_template("tool_use"), Some("tools"));
    }

    #[test]
    fn what_is_no_setting_is_reported_and_what_is_clear_is_taken() {
        let check = |config: &str, notice: &str, add_bos: bool| {
            let tokenizer = open(&[("tokenizer_config.json", config)]).unwrap();
            let notices = tokenizer.notices();
            assert!(notices.len() == 1 && notices[0].contains(notice), "{config}: {notices:?}");
            assert_eq!(tokenizer.add_bos(), add_bos, "{config}");
            tokenizer
        };
        check("[1]", "tokenizer_config.json is [1], expected an object; it is left out", true);
        let key = "add_bos_token in tokenizer_config.json is";
        check(r#"{"add_bos_token": "False"}"#, &format!("{key} \"False\", taken as false"), false);
        check(r#"{"add_bos_token": 1}"#, &format!("{key} 1, taken as true"), true);
        check(r#"{"add_bos_token": 7}"#, &format!("{key} 7, expected true or false; it is left out"), true);
        check(r#"{"eos_token": [3]}"#, "eos_token in tokenizer_config.json is [3], expected a text", true);
        let check_token = |key: &str, value: &str, notice: &str| {
            check(
                &format!(r#"{{"{key}": {value}}}"#),
                &format!("{key} in tokenizer_config.json {notice}"),
                true,
            );
        };
        check_token("bos_token", r#""<nope>""#, r#"is "<nope>", which is no token of the model"#);
        check_token("pad_token", "7", "is 7, expected a text");
        check_token("extra_special_tokens", "7", "is 7, expected a list of tokens");
        check_token("additional_special_tokens", r#""<s>""#, r#"is "<s>", expected a list"#);
        check_token("added_tokens_decoder", "[1]", "is [1], expected an object");
        let added =
            r#"{"2": {"content": "<s>"}, "3": {"content": "</s>"}, "9": {"content": "<new>"}, "x": 4}"#;
        check_token(
            "added_tokens_decoder",
            added,
            r#"has "<new>" as the token 9 and 1 more, and tokenizer.json"#,
        );
        let odd = r#"{"extra_special_tokens": {"audio": 7}}"#;
        check(odd, "audio of extra_special_tokens in tokenizer_config.json is 7, expected", true);
        let odd = r#"{"extra_special_tokens": ["<s>", 7]}"#;
        check(odd, "an entry of extra_special_tokens in tokenizer_config.json is 7, expected", true);
        let list = r#"{"chat_template": [{"name": "default", "template": "D"}, "odd"]}"#;
        let tokenizer = check(list, "an entry of chat_template in tokenizer_config.json is \"odd\"", true);
        assert_eq!(tokenizer.chat_template(), Some("D"));
        let tokenizer = open(&[("tokenizer_config.json", r#"{"chat_template": {"default": "D"}}"#)]).unwrap();
        assert!(tokenizer.chat_template() == Some("D") && tokenizer.notices().is_empty());
        let tokenizer = open(&[("special_tokens_map.json", "[]")]).unwrap();
        assert!(tokenizer.notices()[0].contains("special_tokens_map.json is [], expected an object"));
    }

    #[test]
    fn a_template_that_is_none_keeps_nobody_from_encoding_text() {
        let check = |file: (&str, &str), name: &str, expected: &str| {
            let tokenizer = open(&[file]).unwrap();
            assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [2, 0, 1], "{file:?}");
            assert_eq!(tokenizer.named_chat_template(name), None, "{file:?}");
            let problem = tokenizer.chat_template_problem(name).unwrap();
            assert!(problem.contains(expected), "{file:?}: {problem}");
        };
        let config = |text| ("tokenizer_config.json", text);
        let expected = "chat_template in tokenizer_config.json is 7, expected a template";
        check(config(r#"{"chat_template": 7}"#), "default", expected);
        check(config(r#"{"chat_template": ["T"]}"#), "default", "is [\"T\"], expected a template or a list");
        let list =
            r#"{"chat_template": [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": 7}]}"#;
        check(
            config(list),
            "default",
            "no chat template of the model is named \"default\"; its names are rag",
        );
        check(config(list), "tool_use", "chat_template in tokenizer_config.json has 7 under \"tool_use\"");
        check(
            config(r#"{"chat_template": {"tool_use": 7}}"#),
            "tool_use",
            "has 7 under \"tool_use\", expected",
        );
        let bytes = folder(&[("tokenizer.json", TOKENIZER), config(r#"{"chat_template": "T"}"#)]);
        for (file, name) in
            [("chat_template.jinja", "default"), ("additional_chat_templates/tool_use.jinja", "tool_use")]
        {
            std::fs::write(bytes.path().join(file), b"\xFF").unwrap();
            let tokenizer = Tokenizer::from_dir(bytes.path()).unwrap();
            let problem = tokenizer.chat_template_problem(name).unwrap();
            assert!(problem.contains(&format!("{file}: it is not text in UTF-8")), "{problem}");
        }
        std::fs::write(bytes.path().join("additional_chat_templates/rag.jinja"), b"\xFF").unwrap();
        let tokenizer = Tokenizer::from_dir(bytes.path()).unwrap();
        assert!(tokenizer.notices()[0].contains("rag.jinja: it is not text"), "{:?}", tokenizer.notices());
    }

    #[test]
    fn missing_and_damaged_files_are_errors() {
        let error = Tokenizer::from_dir(folder(&[("tokenizer.model", "")]).path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.hint().unwrap().contains("tokenizer.model"));
        for name in ["special_tokens_map.json", "chat_template.json"] {
            let tokenizer = open(&[(name, "{")]).unwrap();
            assert!(tokenizer.notices()[0].contains(name), "{:?}", tokenizer.notices());
        }
        let error = open(&[("tokenizer_config.json", "{")]).unwrap_err();
        assert!(error.message().contains("tokenizer_config.json"), "{error:?}");
        let folder = folder(&[("tokenizer.json", TOKENIZER)]);
        std::fs::write(folder.path().join("tokenizer_config.json"), b"{\"a\": \"\xFF\"}").unwrap();
        let error = Tokenizer::from_dir(folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel);
        assert!(error.message().contains("tokenizer_config.json: it is not text in UTF-8"), "{error:?}");
    }
}
