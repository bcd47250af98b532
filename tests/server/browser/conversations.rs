//! Conversations as things to keep: the list, branches, files, other tabs; and what is around them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::client::Server;
use super::scripted::start;
use super::{FRAME, Page, TIMEOUT};

const NAMES: &str = "[...document.querySelectorAll('#conversations .name')].map((each) => each.textContent)";
const TEXTS: &str = "[...document.querySelectorAll('.message .text')].map((each) => each.textContent)";
const VERSIONS: &str = "[...document.querySelectorAll('.versions')].map((each) => each.textContent)";

impl Page {
    /// Writes a message and waits until there are this many, the last of them complete and kept.
    #[track_caller]
    fn ask(&self, text: &str, num_messages: usize) {
        self.write(text);
        self.press("Enter");
        self.until_messages(num_messages);
        self.until_kept(num_messages);
    }

    /// Puts this text instead of what is in the field with the cursor.
    fn rewrite(&self, text: &str) {
        self.eval("document.activeElement.select()");
        self.write(text);
    }

    /// Clicks what saves a file, and reads it.
    #[track_caller]
    fn saved(&self, folder: &Path, selector: &str) -> (PathBuf, String) {
        let params = json!({"behavior": "allow", "downloadPath": folder});
        self.call("Browser.setDownloadBehavior", &params);
        self.click(selector);
        let start = std::time::Instant::now();
        loop {
            let found = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let whole = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "md");
            if let Some(path) = found.into_iter().find(whole) {
                let text = std::fs::read_to_string(&path).unwrap();
                std::fs::remove_file(&path).unwrap();
                return (path, text);
            }
            assert!(start.elapsed() < TIMEOUT, "{selector} saved no file");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

#[test]
fn conversations_are_kept_found_renamed_and_deleted() {
    let Some((page, server)) = start(&["It is a lighthouse.", "A page.", "Three."]) else { return };
    for (number, text) in ["What stands by the sea?\nTell me.", "What is paged?", "Count."].iter().enumerate()
    {
        if number > 0 {
            page.click("#new-chat");
        }
        page.ask(text, 2);
    }
    assert_eq!(page.eval(NAMES), json!(["Count.", "What is paged?", "What stands by the sea?"]));
    assert_eq!(page.text("document.title"), "Count. · tinyvllm");

    // The words are looked for in all texts, in any order, and need not be next to each other.
    for (words, found) in [
        ("LIGHTHOUSE sea", json!(["What stands by the sea?"])),
        ("page", json!(["What is paged?"])),
        ("lighthouse paged", json!([])),
    ] {
        page.click("#search");
        page.rewrite(words);
        assert_eq!(page.eval(NAMES), found, "{words}");
    }
    assert_eq!(page.text("document.querySelector('#no-conversations').textContent"), "Nothing was found.");
    page.rewrite("paged");
    page.click("#conversations .name");
    page.until_messages(2);
    assert_eq!(page.eval(TEXTS), json!(["What is paged?", "A page."]));
    page.click("#search");
    page.rewrite(" ");
    assert_eq!(page.eval(NAMES).as_array().unwrap().len(), 3);

    for (key, name) in [("Escape", "What is paged?"), ("Enter", "Pages")] {
        page.click("#conversations button[aria-label='Rename What is paged?']");
        assert_eq!(page.text("document.activeElement.value"), "What is paged?");
        page.rewrite("Pages");
        page.press(key);
        assert_eq!(page.text("document.activeElement.textContent"), name);
    }
    // A name that is being changed is changed, too, when something else is clicked, which is clicked anyway.
    page.click("#conversations button[aria-label^='Rename']");
    page.rewrite("Of pages");
    page.click("#conversations li:nth-child(1) .name");
    page.until(&format!("({TEXTS})[1] === 'Three.'"));
    assert_eq!(page.eval(NAMES), json!(["Count.", "Of pages", "What stands by the sea?"]));

    page.reload();
    page.until_ready();
    page.until(&format!("({NAMES}).length === 3"));
    assert_eq!(page.eval(NAMES), json!(["Count.", "Of pages", "What stands by the sea?"]));
    assert_eq!(page.eval(TEXTS), json!(["Count.", "Three."]));
    // The way back leads to what was open before.
    page.click("#conversations li:nth-child(3) .name");
    page.eval("history.back()");
    page.until(&format!("({TEXTS})[1] === 'Three.'"));

    page.click("#conversations button[aria-label='Delete Count.']");
    assert_eq!(page.eval(NAMES), json!(["Of pages", "What stands by the sea?"]));
    assert_eq!(page.eval(TEXTS), json!([]));
    page.click("#toast button");
    page.until(&format!("({TEXTS})[1] === 'Three.'"));
    page.click("#conversations button[aria-label='Delete Count.']");
    page.until_num_kept(2);
    page.open(&server.url());
    page.until_ready();
    page.until(&format!("({NAMES}).length === 2"));
    assert_eq!(page.eval(TEXTS), json!([]), "an address without a conversation begins a new one");

    page.click("#open-settings");
    page.click("#delete-all");
    page.until(&format!("({NAMES}).length === 0"));
    page.click("#toast button");
    page.until(&format!("({NAMES}).length === 2"));
    page.click("#open-settings");
    page.click("#delete-all");
    page.until_num_kept(0);
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn without_storing_nothing_is_stored() {
    let Some((page, _server)) = start(&["one", "two"]) else { return };
    page.ask("a", 2);
    page.click("#open-settings");
    page.click("#keep");
    page.press("Escape");
    page.click("#new-chat");
    page.write("b");
    page.press("Enter");
    page.until_messages(2);
    // It can be found as long as the tab is open.
    assert_eq!(page.eval(NAMES), json!(["b", "a"]));
    page.reload();
    page.until_ready();
    page.until(&format!("({NAMES}).length === 1"));
    assert_eq!(page.eval(NAMES), json!(["a"]));
}

#[test]
fn what_is_written_anew_is_another_branch() {
    let Some((page, _server)) = start(&["one", "two", "three", "four", "five"]) else { return };
    page.ask("a", 2);
    page.ask("b", 4);
    page.click(".message:last-child button[aria-label='Regenerate: answer']");
    page.until_messages(4);
    page.until(&format!("({TEXTS})[3] === 'three'"));
    assert_eq!(page.eval(VERSIONS), json!(["‹2 / 2›"]));
    // The first message in other words: a branch that knows nothing of the rest.
    page.click(".user:nth-child(1) button[aria-label='Edit message']");
    page.rewrite("A");
    page.press("Enter");
    page.until_messages(2);
    page.until_kept(7);
    assert_eq!(page.eval(TEXTS), json!(["A", "four"]));
    let turns = page.sent().last().unwrap()["messages"].clone();
    assert_eq!(turns, json!([{"role": "user", "content": "A"}]));
    // Back, to where that branch was left.
    page.click(".user:nth-child(1) button[aria-label='Previous version']");
    assert_eq!(page.eval(TEXTS), json!(["a", "one", "b", "three"]));
    assert_eq!(page.eval(VERSIONS), json!(["‹1 / 2›", "‹2 / 2›"]));
    page.click(".message:last-child button[aria-label='Previous version']");
    assert_eq!(page.eval(TEXTS), json!(["a", "one", "b", "two"]));
    page.write("c");
    page.press("Enter");
    page.until_messages(6);
    page.until_kept(9);
    let turns = page.sent().last().unwrap()["messages"].clone();
    let said: Vec<_> =
        turns.as_array().unwrap().iter().map(|turn| turn["content"].as_str().unwrap()).collect();
    assert_eq!(said, ["a", "one", "b", "two", "c"]);
    page.reload();
    page.until_messages(6);
    assert_eq!(page.eval(TEXTS), json!(["a", "one", "b", "two", "c", "five"]));
    assert_eq!(page.complaints(), Vec::<String>::new());
}

/// The conversation with all that there can be: `files`, branches, reasoning, calls, headings that look like ours.
fn rich_record() -> Value {
    json!({"id": "0123456789abcdef01234567", "title": "All *of* it", "updated": 1_000, "leaf": "5", "messages": [
        {"id": "1", "parent": null, "role": "user", "content": "Look:\n## You\n\\## Model\n", "files": [{"name": "a.md", "text": "```\n## Model\n```\n"}]},
        {"id": "2", "parent": "1", "role": "assistant", "content": "\n\n# No title\n## Reasoning", "reasoning": "First\n\nI think", "tools": "[]", "numbers": "3 tokens"},
        {"id": "3", "parent": "1", "role": "assistant", "content": "another"},
        {"id": "4", "parent": "2", "role": "user", "content": "", "files": [{"name": "b", "text": "x"}]},
        {"id": "5", "parent": "4", "role": "assistant", "content": "", "failure": "too long"},
    ]})
}

#[test]
fn conversations_are_saved_in_files_and_read_from_them() {
    let Some((page, server)) = start(&["one"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let record = rich_record();
    page.put_record(&record);
    page.open("about:blank");
    page.open(&format!("{}#{}", server.url(), record["id"].as_str().unwrap()));
    page.until("document.querySelectorAll('.message').length === 4");
    page.until_ready();
    let turns = page.eval("Library.list()[0].turns()");

    let (path, text) =
        page.saved(folder.path(), "#conversations button[aria-label='Save All *of* it as JSON']");
    assert_eq!(path.file_name().unwrap(), "All-of-it.json");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), record);
    let markdown =
        page.saved(folder.path(), "#conversations button[aria-label='Save All *of* it as Markdown']").1;
    assert!(markdown.starts_with("# All *of* it\n\n## You\n\nFile a.md:\n````\n```\n"), "{markdown}");
    let all = page.saved(folder.path(), "#export").1;
    assert_eq!(serde_json::from_str::<Value>(&all).unwrap()["conversations"], json!([record]));

    let import = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        page.eval("document.querySelector('#toast').hidden = true");
        page.choose_files("#import-file", &[&path]);
        page.until("!document.querySelector('#toast').hidden");
        page.text("document.querySelector('#toast').textContent")
    };
    // What is there already is not doubled; what has its name and is another one is.
    assert_eq!(import("a.json", &text), "0 conversations are new.");
    assert_eq!(import("b.json", &text.replace("another", "changed")), "1 conversation is new.");
    // Markdown has what was said in the branch that was shown, word for word.
    assert_eq!(import("c.md", &markdown), "1 conversation is new.");
    let read = page.eval("Library.list()[0].turns()");
    assert_eq!(read, turns);
    assert_eq!(
        page.eval(
            "[Library.list()[0].name, Library.list()[0].messages[1].reasoning, \
                          Library.list()[0].messages[1].tools]"
        ),
        json!(["All *of* it", "First\n\nI think", "[]"])
    );
    // The messages of a request.
    let request = json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "r"}]});
    assert_eq!(import("d.json", &request.to_string()), "1 conversation is new.");
    assert_eq!(page.eval("Library.list()[0].path().map((each) => each.content)"), json!(["q", "r"]));
    for (name, text, said) in [
        ("e.json", "{\"messages\"", "e.json is not valid JSON"),
        ("f.json", "[1, {}]", "f.json has no messages with a role and a text."),
        ("g.md", "# Notes\n\nNone.", "g.md is no conversation: no line of it is “## You” or “## Model”."),
    ] {
        let found = import(name, text);
        assert!(found.starts_with(said), "{found}");
    }
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn markdown_gives_back_any_conversation() {
    let Some((page, _server)) = start(&[]) else { return };
    let failed = page.eval(
        r###"(() => {
            const pieces = ["## You", "## Model", "## Reasoning", "## Tool calls", "\\", "\n", "\n\n", "# x", "```", "a", " ", "\u200b"];
            let state = 1;
            const random = (count) => (state = (state * 48271) % 2147483647) % count;
            const text = (least) => Array.from({ length: least + random(8) }, () => pieces[random(pieces.length)]).join("");
            for (let round = 0; round < 3000; round += 1) {
                const conversation = new Conversation();
                for (let count = 1 + random(4); count > 0; count -= 1) {
                    const role = random(2) ? "user" : "assistant";
                    const message = { role, content: `c${text(0)}` };
                    if (role === "user" && random(3) === 0) message.files = [{ name: "f", text: text(0) }];
                    if (role === "assistant" && random(2)) message.reasoning = text(1);
                    if (role === "assistant" && random(2)) message.tools = text(1);
                    conversation.add(message);
                }
                const markdown = conversation.toMarkdown();
                const read = Conversation.fromMarkdown(markdown);
                const told = (each) => JSON.stringify([each.turns(), each.path().map(({ reasoning, tools }) => [reasoning, tools])]);
                if (!read || told(read) !== told(conversation)) return [told(conversation), read && told(read), markdown];
            }
            return null;
        })()"###,
    );
    assert_eq!(failed, Value::Null);
}

#[test]
fn text_files_go_with_a_message() {
    let Some((page, _server)) = start(&["Read.", "Again."]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let wide: Vec<u8> = "\u{feff}größer\r\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let good = [write("a.md", b"```x\n1\n```\n"), write("wide.txt", &wide), write("<b>.txt", b"x")];
    let bad = [
        (write("photo.png", b"\x89PNG\r\n\x1a\n\0"), "photo.png is not a text in UTF-8 or UTF-16."),
        (
            write("large.txt", &vec![b'a'; (1 << 20) + 1]),
            "large.txt has 1,048,577 bytes; at most 1,048,576 can be taken.",
        ),
    ];
    for (path, said) in &bad {
        page.choose_files("#file", &[path]);
        page.until("!document.querySelector('#toast').hidden");
        assert_eq!(page.text("document.querySelector('#toast').textContent"), *said);
        page.eval("document.querySelector('#toast').hidden = true");
    }
    page.choose_files("#file", &good.each_ref().map(PathBuf::as_path));
    page.until("document.querySelectorAll('#files li').length === 3");
    page.click("#files button[aria-label='Remove <b>.txt']");
    // Pasted and dropped ones too; but a text that is pasted or dropped stays a text.
    let given = |kind: &str, field: &str, parts: &str| {
        page.eval(&format!(
            "(() => {{
                const data = new DataTransfer();
                for (const part of {parts}) part instanceof File ? data.items.add(part) : data.setData('text/plain', part);
                const event = new {kind} {{ {field}: data, bubbles: true, cancelable: true }});
                document.querySelector('#input').dispatchEvent(event);
                return event.defaultPrevented;
            }})()"
        ))
    };
    let ways = [("ClipboardEvent('paste',", "clipboardData"), ("DragEvent('drop',", "dataTransfer")];
    for (number, (kind, field)) in ways.into_iter().enumerate() {
        assert_eq!(given(kind, field, "['a text']"), json!(false));
        assert_eq!(given(kind, field, &format!("[new File(['x'], 'given{number}')]")), json!(true));
        page.until("document.querySelectorAll('#files li').length === 3");
        page.click(&format!("#files button[aria-label='Remove given{number}']"));
    }
    let picture = "['a table', new File(['x'], 'table.png')]";
    assert_eq!(given("ClipboardEvent('paste',", "clipboardData", picture), json!(false));
    // Files alone are a message too.
    page.press("Enter");
    page.until_messages(2);
    assert_eq!(page.eval("document.querySelectorAll('#files li').length"), json!(0));
    let content = "File a.md:\n````\n```x\n1\n```\n````\n\nFile wide.txt:\n```\ngrößer\n```";
    assert_eq!(page.sent()[0]["messages"], json!([{"role": "user", "content": content}]));
    assert_eq!(
        page.eval(
            "[...document.querySelectorAll('.file')].map((each) => [each.open, each.firstChild.textContent])"
        ),
        json!([[false, "a.md"], [false, "wide.txt"]])
    );
    // They stay with it when its text is changed.
    page.click("button[aria-label='Edit message']");
    page.write("What is this?");
    page.press("Enter");
    page.until_messages(2);
    assert_eq!(page.sent()[1]["messages"][0]["content"], json!(format!("{content}\n\nWhat is this?")));
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn an_answer_goes_on_while_another_conversation_is_open() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("");
    page.open_ready(&server);
    page.write("Tell me a long story about a dragon.");
    page.press("Enter");
    page.until("(document.querySelector('.assistant .text')?.textContent ?? '') !== ''");
    page.click("#new-chat");
    page.until("!document.querySelector('.message') && !document.querySelector('#send').hidden");
    page.ask("What is GGUF?", 2);
    page.click("#conversations li:nth-child(2) .name");
    page.until_messages(2);
    assert!(!page.text("document.querySelector('.assistant .numbers').textContent").contains("stopped"));
    let shown = page.text("document.querySelector('.assistant .text').innerText");
    page.reload();
    page.until_messages(2);
    assert_eq!(page.text("document.querySelector('.assistant .text').innerText"), shown);
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn tabs_know_of_each_other() {
    let Some((mut page, server)) = start(&["one", "two"]) else { return };
    page.ask("a", 2);
    let address = page.text("location.href");
    let first = page.session.clone();
    // The same conversation in another tab, which continues it.
    page.session = page.new_tab();
    page.open(&address);
    page.until_ready();
    page.until_messages(2);
    page.ask("b", 4);
    let second = std::mem::replace(&mut page.session, first);
    // A tab that is not seen has no frames.
    page.call("Page.bringToFront", &json!({}));
    page.until_messages(4);
    assert_eq!(page.eval(TEXTS), json!(["a", "one", "b", "two"]));
    // What one deletes is gone in the other.
    page.click("#conversations button[aria-label='Delete a']");
    page.session = second;
    page.until(&format!("({NAMES}).length === 0 && !document.querySelector('.message')"));
    drop(server);
}

#[test]
fn the_panel_shows_the_server() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("");
    page.open_ready(&server);
    // A name would be a request.
    page.eval("Settings.values.names = false");
    page.ask("What is GGUF?", 2);
    page.click("#open-panel");
    page.until("document.querySelectorAll('#facts dt').length > 5");
    let facts = page.eval(
        "Object.fromEntries([...document.querySelectorAll('#facts div')].map((each) => \
                           [...each.children].map((part) => part.textContent)))",
    );
    assert_eq!(facts["Model"], "demo");
    assert_eq!(facts["Architecture"], "LlamaForCausalLM");
    assert!(facts["Device"].as_str().unwrap().starts_with("cpu"), "{facts}");
    assert_eq!(facts["Context"], "1,024 tokens");
    assert!(facts["KV cache"].as_str().unwrap().ends_with("tokens in use"), "{facts}");
    assert!(facts["Requests"].as_str().unwrap().starts_with("0 running, 0 waiting"), "{facts}");
    // Speeds come with the second look.
    page.until("document.querySelector('#facts').textContent.includes('0 tokens/s')");
    page.press("Escape");
    page.until("!document.querySelector('#panel').open");
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn a_view_at_the_end_stays_there() {
    let paragraphs =
        "A paragraph of some words that takes more than a line on a narrow screen.\n\n".repeat(60);
    let Some((page, _server)) = start(&[&paragraphs, &paragraphs, "```\nx\n```\n| a |\n|---|\n| b |"]) else {
        return;
    };
    let gap = "(() => { const node = document.querySelector('#scroller'); return Math.abs(node.scrollHeight - \
               node.scrollTop - node.clientHeight) <= 1; })()";
    // The buttons below the last answer can be clicked, on a phone too.
    let is_seen = "(() => {
        const box = [...document.querySelectorAll('.message .tools')].at(-1).getBoundingClientRect();
        return box.height > 0 && box.bottom <= document.querySelector('#composer').getBoundingClientRect().top;
    })()";
    for (number, width) in [1_100, 390, 390].into_iter().enumerate() {
        page.resize(width, 640);
        page.ask("Go on", 2 * (number + 1));
        page.until(&format!("{gap} && {is_seen}"));
        assert_eq!(page.eval("document.querySelector('#to-end').hidden"), json!(true));
    }
    // Turning the phone, and a field that grows, change nothing about it.
    page.resize(640, 390);
    page.until(gap);
    page.write(&"a\n".repeat(10));
    page.until(gap);
    // A view that was scrolled up stays there.
    page.eval("document.querySelector('#scroller').scrollTop = 100");
    page.until("!document.querySelector('#to-end').hidden");
    page.resize(390, 640);
    page.eval(FRAME);
    assert_eq!(page.eval(gap), json!(false));
    page.click("#to-end");
    page.until(gap);
    // No text touches the edge.
    let margins = page.eval("[...document.querySelectorAll('.message .text')].map((each) => \
                             each.getBoundingClientRect()).filter((box) => box.left < 14 || box.right > innerWidth \
                             - 14).length");
    assert_eq!(margins, json!(0));
}

#[test]
fn the_list_lies_over_the_conversation_on_a_narrow_screen() {
    let Some((page, _server)) = start(&["one", "two"]) else { return };
    page.resize(390, 640);
    page.until("!document.querySelector('#sidebar').checkVisibility()");
    page.ask("a", 2);
    page.click("#new-chat");
    page.ask("b", 2);
    page.click("#toggle-list");
    assert_eq!(page.text("document.activeElement.id"), "search");
    assert_eq!(page.text("document.querySelector('#toggle-list').ariaExpanded"), "true");
    page.press("Escape");
    assert_eq!(page.text("document.activeElement.id"), "toggle-list");
    page.click("#toggle-list");
    page.click("#conversations li:nth-child(2) .name");
    page.until(&format!("({TEXTS})[1] === 'one' && document.querySelector('#sidebar').hidden"));
    // Next to it where there is space, unless it was closed.
    page.resize(1_100, 640);
    page.until("document.querySelector('#sidebar').checkVisibility()");
    page.click("#toggle-list");
    page.reload();
    page.until_messages(2);
    assert_eq!(page.eval("document.querySelector('#sidebar').checkVisibility()"), json!(false));
}
